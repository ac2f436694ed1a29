"""`python -m taskyard.cli` is the `taskyard` command."""

from taskyard.cli import main

if __name__ == "__main__":
    main()
