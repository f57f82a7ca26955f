"""The command `bruno`, also as `python -m bruno`."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType


def main() -> None:
    """Run the command line, or exit with the name of a missing package.

    At a signal the exit code is 128 + its number, at any time.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the caller
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)  # nothing to clean up while modules are imported
    try:
        from bruno.cli.main import main as run
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f"error: the command line needs {error.name}. Install it with: pip install 'bruno[all]'")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    try:
        run()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)


def stop(number: int, frame: FrameType | None) -> None:
    """Handle a signal: raise KeyboardInterrupt or SystemExit, or leave at once while modules are imported.

    Commands import modules when they need them. Some are imported by C code that ignores exceptions, and
    would be used half imported.
    """
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            _leave(number, frame)
        frame = frame.f_back
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
