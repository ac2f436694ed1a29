"""Runs the admission checks of a node, and keeps what one of them does wrong to the tasks that it was asked about."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from taskyard.errors import InvalidInput, quote
from taskyard.model.blocker import Blocker, BlockerKind, stored_detail
from taskyard.model.task import TaskRecord
from taskyard.ports.admission import Admission

log = logging.getLogger("taskyard")

CHECK_TIMEOUT_S = 2.0


class Answer(NamedTuple):
    """The blocker of a task, if it has one. `is_slow`: the check took so long that no other task of this lane should be
    checked for now."""

    blocker: Blocker | None
    is_slow: bool = False


class Checks:
    def __init__(self, checks: Sequence[Admission]) -> None:
        self._checks = checks
        self._disconnects: list[Callable[[], None]] = []
        self.kinds = frozenset(kind for check in checks for kind in check.kinds)

    def __bool__(self) -> bool:
        return bool(self._checks)

    def connect(self, freed: Callable[[str, str], None]) -> None:
        """Tell each check where to signal what is freed; `freed` is called on this event loop."""
        loop = asyncio.get_running_loop()

        def signal(kind: str, detail: str) -> None:
            with suppress(RuntimeError):  # the loop is closed: this node has ended
                loop.call_soon_threadsafe(freed, kind, detail)

        for check in self._checks:
            disconnect: Any = check.connect(signal)
            if not callable(disconnect):
                raise InvalidInput(
                    f"connect of the admission check {type(check).__name__} must return a function that disconnects, "
                    f"not {quote(disconnect)}"
                )
            self._disconnects.append(disconnect)

    def disconnect(self) -> None:
        """No check signals to this node any more."""
        while self._disconnects:
            try:
                self._disconnects.pop()()
            except Exception:
                log.exception("an admission check could not be disconnected")

    async def find_blocker(self, record: TaskRecord) -> Answer:
        """The first blocker that a check names. A check that fails blocks the task: it is not known to be fit."""
        for check in self._checks:
            name = type(check).__name__
            try:
                blocker = await _ask(check, record)
            except (Exception, SystemExit) as error:
                log.error("the admission check %s failed for task %s", name, record.uuid, exc_info=error)
                return Answer(Blocker(BlockerKind.CHECK, name), is_slow=isinstance(error, TimeoutError))
            if blocker is not None:
                return Answer(blocker)
        return Answer(None)

    async def find_blockers(self, records: Iterable[TaskRecord]) -> dict[int, Answer]:
        """The same for some tasks, by id. The lanes are checked at the same time. If an answer is slow, the rest of its
        lane is left out."""
        answers: dict[int, Answer] = {}

        async def check_lane(lane: Sequence[TaskRecord]) -> None:
            for record in lane:
                answers[record.id] = await self.find_blocker(record)
                if answers[record.id].is_slow:
                    break

        lanes: dict[str, list[TaskRecord]] = {}
        for record in records:
            lanes.setdefault(record.lane, []).append(record)
        await asyncio.gather(*map(check_lane, lanes.values()))
        return answers


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
        raise TypeError(f"an admission check returns a Blocker or None, not {quote(blocker)}")
    if blocker.kind not in check.kinds:
        raise InvalidInput(f"the check names the kind {quote(blocker.kind)}, which is not among its kinds")
    return Blocker(blocker.kind, stored_detail(blocker.detail))
