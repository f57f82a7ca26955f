"""The command `bruno`, also as `python -m bruno`."""

from __future__ import annotations

import os
import signal
import sys

from bruno.signals import handle_signals, leave, stop


def main() -> None:
    """Run the command line, or exit with the name of a missing package.

    At a signal the exit code is 128 + its number, at any time.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the caller
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    handle_signals(leave)  # nothing to clean up while modules are imported
    try:
        from bruno.cli.main import main as run
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        print(f"error: the command line needs {error.name}: pip install 'bruno[cli]'", file=sys.stderr)
        sys.exit(2)
    handle_signals(stop)
    try:
        run()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
