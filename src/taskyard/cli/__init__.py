"""The command line. Nothing heavy is imported before a command runs: `import taskyard` never loads typer or rich."""

from __future__ import annotations

import sys


def main() -> None:
    """The `taskyard` command."""
    try:
        from taskyard.cli.app import run

        code = run(sys.argv[1:])
    except KeyboardInterrupt:  # before a command began, or after it ended
        code = 130
    sys.exit(code)
