"""What decides whether a task may start on this node now, apart from order and limits."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection
from typing import Any, Protocol

from taskyard.errors import InvalidInput, quote
from taskyard.model.blocker import Blocker, BlockerKind
from taskyard.model.task import TaskRecord

KIND = re.compile(r"[a-z][a-z0-9_]{0,39}")

Freed = Callable[[str, str], None]
"""A check calls this with the kind and the detail of a blocker that is gone."""


class Admission(Protocol):
    """A check that a node runs before it starts a task: room on a disk, a lock on a file. A task for which it names a
    blocker is stored as blocked. It does not run, uses no attempt, and is not looked at again before the blocker is
    freed. Of tasks of one lane that have the same blocker, at most ten are looked at; the others wait unchecked.

    `kinds` are the kinds of its blockers. A task that requires `{kind: detail}` declares which blocker it would have:
    while that one is there, no such task is looked at, and tasks that require something else go on.

    A check may be asked about several tasks at the same time. Several yards may share it: each connects to it."""

    @property
    def kinds(self) -> Collection[str]: ...

    async def check(self, record: TaskRecord) -> Blocker | None:
        """The blocker that keeps this task from starting now; None if there is none, or if the task is of no concern.
        It should answer within milliseconds. It must not block the event loop, on which the whole node runs: a call
        that may wait, such as `os.statvfs` on a network mount, belongs in `asyncio.to_thread`. An error, or no answer
        within two seconds, blocks the task; it is checked again after half a minute."""
        ...

    def connect(self, freed: Freed) -> Callable[[], None]:
        """Called each time a node starts, before its first check. From then on call `freed` when a blocker that `check`
        named is gone, from any thread. Return a function that ends this: it is called once, when the node has stopped
        or could not start. Stop there what was started for this node, such as a thread that watches files.
        A signal that is lost or missing costs half a minute: one task of each blocker is then checked again."""
        ...


def check_admission(given: Any) -> tuple[Admission, ...]:
    """Admission checks as a yard takes them."""
    try:
        checks = tuple(given)
    except TypeError:
        raise InvalidInput("must be a list of checks", field="admission", given=given) from None
    for check in checks:
        is_async = inspect.iscoroutinefunction(getattr(check, "check", None))
        if isinstance(check, type) or not is_async or not hasattr(check, "kinds") or not hasattr(check, "connect"):
            raise InvalidInput(
                f"{quote(check)} is no admission check: it needs kinds, `async def check(record)` and connect(freed)"
            )
        _check_kinds(check.kinds)
    return checks


def _check_kinds(kinds: Any) -> None:
    if isinstance(kinds, str) or not isinstance(kinds, Collection) or not kinds:
        raise InvalidInput("must be a tuple of words such as ('disk',)", field="kinds", given=kinds)
    for kind in kinds:
        if not isinstance(kind, str) or not KIND.fullmatch(kind):
            raise InvalidInput(f"the kind of a blocker is a lower-case word such as 'disk', not {quote(kind)}")
        if kind in (BlockerKind.DEPENDENCY, BlockerKind.CHECK):
            raise InvalidInput(f"the kind {kind!r} is Taskyard's own; name another")
