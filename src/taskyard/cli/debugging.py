"""`taskyard debug`: the code of a stored task, run once more in this terminal."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator

from taskyard.application.debugging import DebugRun, load_debug_run
from taskyard.cli.asking import asker
from taskyard.cli.console import complain, make_console, say
from taskyard.cli.errors import DONE, REFUSED
from taskyard.cli.logs import set_up_logging
from taskyard.cli.session import Target, note_if_slow
from taskyard.model.execution import ErrorKind


def debug(target: Target, ref: str, *, break_at_start: bool, post_mortem: bool) -> int:
    """Run the code of one task here; 1 if it failed."""
    run = asyncio.run(_load(target, ref))
    if run.running_on is not None:
        complain("note", f"it runs on node {run.running_on} now, and is run here a second time")
    complain("note", "nothing is written to the store; what the code does elsewhere, it does for real")
    with _logging():
        ended = run.run(say, break_at_start=break_at_start, post_mortem=post_mortem)
    if ended.error is None:
        say(f"completed in {ended.duration_s:.3g} s: {ended.result}")
        return DONE
    if ended.retry_in_s is not None:
        say(f"would be tried again in {ended.retry_in_s:g} s: {ended.error.message}")
        return DONE
    if ended.error.kind == ErrorKind.CANCELED:
        say(f"would be canceled: {ended.error.message}")
        return DONE
    if ended.error.traceback:
        say(ended.error.traceback.rstrip())
    say(f"failed as {ended.error.kind}: {ended.error.message}")
    return REFUSED


async def _load(target: Target, ref: str) -> DebugRun:
    code, store = target.find_yard(needs_app=True), target.find_yard()
    return await note_if_slow(store, load_debug_run(code, store, ref, actor=asker()))


@contextlib.contextmanager
def _logging() -> Iterator[None]:
    """Log lines go to the terminal; those of `current_run().log` are told apart, at every level."""
    root, own = logging.getLogger(), logging.getLogger("taskyard.run")
    handlers, level, own_level = root.handlers[:], root.level, logging.getLogger("taskyard").level
    set_up_logging(make_console(stderr=True), verbose=True)
    own.propagate = False
    try:
        yield
    finally:
        own.propagate = True
        root.handlers[:] = handlers
        root.setLevel(level)
        logging.getLogger("taskyard").setLevel(own_level)
