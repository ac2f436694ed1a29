"""The command line. Nothing heavy is imported before a command runs: `import taskyard` never loads typer or rich."""

from __future__ import annotations

import sys


def main() -> None:
    """The `taskyard` command."""
    from taskyard.cli.app import run

    sys.exit(run(sys.argv[1:]))
