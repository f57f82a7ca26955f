"""The command `bruno`, also as `python -m bruno`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line, or exit with the name of a missing package."""
    try:
        from bruno.cli.main import main as run
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f"error: the command line needs {error.name}. Install it with: pip install 'bruno[all]'")
    run()


if __name__ == "__main__":
    main()
