"""`python -m bruno`: the command line where the command itself is not installed."""

from bruno.cli import main

if __name__ == "__main__":
    main()
