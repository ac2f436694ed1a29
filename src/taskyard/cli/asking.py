"""The actor of this shell, and the question before many tasks are changed."""

from __future__ import annotations

import getpass
import os
import sys

import typer

from taskyard.cli.errors import NotConfirmed

HANDFUL = 5
"""Tasks that are changed without a question: so few are soon put right again by hand."""


def asker() -> str:
    """`cli:ana`: kept with what is changed, for others to see."""
    try:
        return f"cli:{getpass.getuser()}"
    except (KeyError, OSError):  # a user without a name, as in many containers
        return f"cli:{os.getuid()}"


def confirm(what: str, count: int, *, yes: bool) -> None:
    """Go on, or raise `NotConfirmed`. `what` is said of `count` things: `cancel 12 tasks`. Where nobody can answer,
    nothing is asked, and the answer is no."""
    if yes or count <= HANDFUL:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise NotConfirmed(what, count, f"add --yes to {what} without a question, or --dry-run to count them")
    if not typer.confirm(f"{what[:1].upper()}{what[1:]}?", err=True):
        raise NotConfirmed(what, count)
