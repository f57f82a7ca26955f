"""Fuzz all readers for some minutes: `make fuzz MINUTES=10`. Prints the seed of every file that fails."""

import argparse
import itertools
import os
import resource
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).parents[1]))
from fuzz.readers import READERS, failures

_BATCH = 50  # files of one reader before the next one has its turn
_SECONDS = 60  # after which a batch counts as stuck
_MEMORY = 12 * 2**30  # bytes; a reader that needs more fails


class StuckError(Exception):
    """A reader takes too long."""


def _stuck(number: int, frame: FrameType | None) -> None:
    raise StuckError(f"a batch of {_BATCH} files takes more than {_SECONDS} s")


def main() -> None:
    """Run for some minutes, or read the file of one seed and show the traceback."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--reader", choices=READERS)
    parser.add_argument("--seed", type=int)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    signal.signal(signal.SIGALRM, _stuck)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["BRUNO_CACHE"] = str(Path(folder) / "cache")
        if options.seed is not None:
            list(failures(options.reader, [options.seed], Path(folder), debug=True))
            return
        sys.exit(_run(options.minutes, [options.reader] if options.reader else list(READERS), Path(folder)))


def _run(minutes: float, readers: list[str], folder: Path) -> int:
    """Fuzz in turns until the time is over; returns 1 if any file failed."""
    end, files, failed = time.monotonic() + 60 * minutes, 0, 0
    start = time.time_ns() // 10**9 * 1000  # other files each time
    for batch, name in ((batch, name) for batch in itertools.count() for name in readers):
        if time.monotonic() > end:
            break
        signal.alarm(_SECONDS)
        seeds = range(start + batch * _BATCH, start + (batch + 1) * _BATCH)
        for seed, error in failures(name, seeds, folder):
            failed += 1
            print(f"--reader {name!r} --seed {seed}: {type(error).__name__}: {error}", flush=True)
        signal.alarm(0)
        files += _BATCH
    print(f"{files:,} files, {failed} failures")
    return int(failed > 0)


if __name__ == "__main__":
    main()
