"""Runs the admission checks of a node, and keeps what one of them does wrong to the tasks that it was asked about."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress

from taskyard.errors import InvalidInput, quote
from taskyard.model.blocker import Blocker, BlockerKind
from taskyard.model.given import check_name
from taskyard.model.task import TaskRecord
from taskyard.ports.admission import Admission

log = logging.getLogger("taskyard")

CHECK_TIMEOUT_S = 2.0


class Checks:
    def __init__(self, checks: Sequence[Admission]) -> None:
        self._checks = checks
        self.kinds = frozenset(kind for check in checks for kind in check.kinds)
        self.is_slow = False
        """Whether the last answer took so long that no other task of its lane should be asked about for now."""

    def __bool__(self) -> bool:
        return bool(self._checks)

    def connect(self, freed: Callable[[str, str], None]) -> None:
        """Tell each check where to signal what is freed, once; `freed` is called on this event loop."""
        loop = asyncio.get_running_loop()

        def signal(kind: str, detail: str) -> None:
            with suppress(RuntimeError):  # the loop is closed: this node has ended
                loop.call_soon_threadsafe(freed, kind, detail)

        for check in self._checks:
            check.connect(signal)

    async def find_blocker(self, record: TaskRecord) -> Blocker | None:
        """The first blocker that a check names. A check that fails blocks the task: it is not known to be fit."""
        self.is_slow = False
        for check in self._checks:
            name = type(check).__name__
            try:
                blocker = await _ask(check, record)
            except Exception as error:
                log.error("the admission check %s failed for task %s", name, record.uuid, exc_info=error)
                self.is_slow = isinstance(error, TimeoutError)
                return Blocker(BlockerKind.CHECK, name)
            if blocker is not None:
                return blocker
        return None


async def _ask(check: Admission, record: TaskRecord) -> Blocker | None:
    try:
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            blocker = await check.check(record)
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise  # this node stops
        raise RuntimeError("what the check waited for was cancelled") from error
    if blocker is None:
        return None
    if not isinstance(blocker, Blocker):
        raise TypeError(f"an admission check answers with a Blocker or None, not {quote(blocker)}")
    if blocker.kind not in check.kinds:
        raise InvalidInput(f"the check names the kind {quote(blocker.kind)}, which is not among its kinds")
    check_name("the detail of a blocker", blocker.detail)
    return blocker
