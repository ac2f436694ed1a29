"""`taskyard debug`: the code of a stored task, run once more in this terminal."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator

from taskyard.cli.console import complain, make_console, say
from taskyard.cli.errors import DONE, REFUSED
from taskyard.cli.logs import set_up_logging
from taskyard.cli.target import Target, opened, resolve
from taskyard.debugging import debug_task, load_task
from taskyard.errors import UnknownTask
from taskyard.model.state import TaskState
from taskyard.model.task import TaskRecord, to_json


def debug(target: Target, fragment: str, *, break_at_start: bool, post_mortem: bool) -> int:
    """Run the code of one task here; 1 if it failed."""
    yard = target.load()
    record = asyncio.run(_load(target, fragment))
    if record.state is TaskState.RUNNING:
        complain("note", f"it runs on node {record.node} now, and is run here a second time")
    complain("note", "nothing is written to the store; what the code does elsewhere, it does for real")
    with _logging():
        result = debug_task(yard, record, say=say, break_at_start=break_at_start, post_mortem=post_mortem)
    if result.error is None:
        say(f"completed in {result.ended_at - result.started_at:.3g} s: {to_json('the result', result.data)}")
        return DONE
    if result.error.traceback:
        say(result.error.traceback.rstrip())
    say(f"failed as {result.error.kind}: {result.error.text}")
    return REFUSED


async def _load(target: Target, fragment: str) -> TaskRecord:
    async with opened(target.bare()) as yard:
        record = await load_task(yard.store, await resolve(yard, fragment))
    if record is None:
        raise UnknownTask(fragment)
    return record


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
