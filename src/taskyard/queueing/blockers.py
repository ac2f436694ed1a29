"""What blocks tasks on this node: how often it was met, and how tasks go on when it is freed.

`KnownBlockers` only counts. `BlockerLoop` queues the tasks of a blocker that was freed, and checks one task of each
blocker again every `RECHECK_S`, in case a signal was lost or its node died. Nothing is polled per task.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from taskyard.errors import InvalidInput
from taskyard.model.blocker import BlockerKind, Labels, blocker_key, split_key, stored_detail
from taskyard.model.command import Unblock
from taskyard.model.task import TaskRecord
from taskyard.model.task_filter import TaskFilter
from taskyard.ports.clock import Clock
from taskyard.ports.consumer import Consumer
from taskyard.ports.sink import NO_SINKS, BlockerFreed, Sinks
from taskyard.ports.store import BlockedGroup, Store
from taskyard.queueing.checks import Answer, Checks

log = logging.getLogger("taskyard")

LOOKS_AT_MOST = 10
"""Tasks of one lane that are looked at, and have the same blocker, before the lane is left alone."""
LOOKS_OF_A_SLOW_ANSWER = 4
"""A check that hangs counts as so many looks: after three of them the lane is left alone."""
RECHECK_S = 30.0
RECHECKS_AT_MOST = 100
"""Blockers whose tasks are checked again in one round. The next round goes on from there."""
RECHECKS_AT_ONCE = 10
"""Of these, so many at the same time: a check that hangs costs a round 2 s for each ten."""
UNBLOCK_AT_ONCE = 20
"""Tasks that are freed in one transaction, for which the claim of another may have to wait."""
PAUSE_FACTOR = 3
"""A pause after each of these, so many times as long. So unblocking takes a quarter of the store's time."""
LIST_AT_ONCE = 5_000


class KnownBlockers:
    """How many tasks of each lane were looked at and had which blocker, by its key, until it is freed."""

    def __init__(self) -> None:
        self._looks: dict[str, Counter[str]] = {}
        self._closed: Counter[str] = Counter()
        """By lane, how many blockers keep it from being looked at."""

    def __contains__(self, key: str) -> bool:
        return key in self._looks

    def keys(self) -> set[str]:
        return set(self._looks)

    def note(self, key: str, lane: str, looks: int = 1) -> None:
        """So many more tasks of the lane were looked at and have this blocker."""
        counted = self._looks.setdefault(key, Counter())
        was_closed = counted[lane] >= LOOKS_AT_MOST
        counted[lane] += looks
        if counted[lane] >= LOOKS_AT_MOST and not was_closed:
            self._closed[lane] += 1

    def forget(self, key: str) -> None:
        """It was freed: tasks that may have it are looked at again."""
        for lane, looks in self._looks.pop(key, Counter()).items():
            if looks >= LOOKS_AT_MOST:
                self._closed[lane] -= 1
                if not self._closed[lane]:
                    del self._closed[lane]

    def is_open(self, lane: str, requires: Labels) -> bool:
        """Whether tasks of this lane are looked at: not if they declare a blocker that is there, or enough were."""
        if lane in self._closed:
            return False
        return not any(blocker_key(kind, detail) in self._looks for kind, detail in requires.items())


class Round(NamedTuple):
    """What a round of rechecks has found."""

    gone: list[str]
    retried: list[str]
    """The keys of checks that had failed, and were tried again."""


class BlockerLoop:
    """`known` is read by the admission of this node, which `node` names in events. `changed` is called after tasks
    were queued again. `run` is the loop; all other calls are made on its event loop."""

    def __init__(
        self,
        store: Store,
        checks: Checks,
        *,
        consumers: Mapping[str, Consumer],
        node: str,
        changed: Callable[[], None],
        clock: Clock,
        sinks: Sinks = NO_SINKS,
    ) -> None:
        self._store, self._checks, self._consumers = store, checks, consumers
        self.known = KnownBlockers()
        self._node, self._changed, self._clock, self._sinks = node, changed, clock, sinks
        self._freed: dict[str, None] = {}
        """The keys to unblock, in the order of their signals."""
        self._wake = asyncio.Event()
        self._recheck_at = 0.0
        self._last_checked = ""
        self._retry_before: dict[tuple[str, str], int] = {}
        """By key of a failed check and consumer, the id of the task before which the next round goes on."""
        self.has_rechecked = asyncio.Event()
        """Set when the first round is over: what is blocked already need not be looked at again."""
        self.freed_meanwhile: set[str] = set()
        """What was freed since somebody cleared this."""

    def free(self, kind: str, detail: str) -> None:
        """A check says that this blocker is gone."""
        try:
            self.free_key(blocker_key(kind, stored_detail(detail)))
        except (InvalidInput, TypeError) as error:
            log.error("an admission check freed what no task can wait for: %s", error)

    def free_key(self, key: str) -> None:
        self._freed[key] = None
        self.freed_meanwhile.add(key)
        self._wake.set()

    async def run(self) -> None:
        """Unblock what is freed until cancelled."""
        if not self._checks:
            self.has_rechecked.set()
        while True:
            self._wake.clear()
            if self._checks and self._clock.monotonic() >= self._recheck_at:
                await self._recheck()
                self._recheck_at = self._clock.monotonic() + RECHECK_S
            self.has_rechecked.set()
            await self._unblock_freed()
            await self._clock.wait(self._wake, self._recheck_at if self._checks else None)

    async def _unblock_freed(self) -> None:
        while self._freed:
            await self._unblock(next(iter(self._freed)))

    async def _unblock(self, key: str) -> None:
        del self._freed[key]  # first: a signal that comes meanwhile counts again
        self.known.forget(key)
        self._changed()
        try:
            await unblock_all(self._store, key, by=self._node, clock=self._clock, unblocked=self._changed)
        except BaseException:
            self._freed[key] = None  # behind the others
            raise
        self._sinks.tell(BlockerFreed(key))

    async def _recheck(self) -> None:
        """Check one task of each blocker and consumer, those of some blockers at the same time. Between these, what was
        freed by a signal is unblocked. What turns out to be free is unblocked after the round."""
        groups = await self._store.list_blockers()
        for key in self.known.keys() - {group.key for group in groups}:
            self.known.forget(key)  # no task waits for it any more: the next one is looked at
        ours = [group for group in groups if self._is_ours(group)]
        ours.sort(key=lambda group: (group.key <= self._last_checked, group.key))
        found = Round([], [])
        try:
            for start in range(0, min(len(ours), RECHECKS_AT_MOST), RECHECKS_AT_ONCE):
                await self._recheck_some(ours[start : start + RECHECKS_AT_ONCE], found)
                await self._unblock_freed()
        finally:
            self._end_round(found)

    def _end_round(self, found: Round) -> None:
        for key in found.retried:
            self.known.forget(key)  # the check may fail for some tasks only: of each lane, ten more are looked at
        for key in found.gone:
            self.free_key(key)
        self._changed()

    async def _recheck_some(self, groups: Sequence[BlockedGroup], found: Round) -> None:
        tasks = [await (self._list_next(group) if _is_failure(group) else self._list_oldest(group)) for group in groups]
        answers = await asyncio.gather(*map(self._checks.find_blockers, tasks))
        for group, records, theirs in zip(groups, tasks, answers, strict=True):
            if _is_failure(group):
                await self._retried(group, records, theirs, found)
            elif records:
                self._rechecked(group, records[0], theirs[records[0].id], found)
            self._last_checked = group.key

    async def _list_oldest(self, group: BlockedGroup) -> list[TaskRecord]:
        record = await self._store.find(group.first)
        return [] if record is None or record.blocked_by != group.key else [record]

    def _rechecked(self, group: BlockedGroup, record: TaskRecord, answer: Answer, found: Round) -> None:
        if answer.blocker is None or answer.blocker.key != group.key:
            found.gone.append(group.key)
        elif group.key not in self.known:  # another node, or an earlier one here, has looked at these
            self.known.note(group.key, record.lane, group.count)

    async def _list_next(self, group: BlockedGroup) -> list[TaskRecord]:
        """A check failed for these, and may fail for some of them only: each is checked by itself, ten in a round, from
        the newest to the oldest, and then from the newest again."""
        where = TaskFilter(blocker=group.key, consumer=group.consumer)
        place = (group.key, group.consumer)
        records: list[TaskRecord] = []
        for before_id in (self._retry_before.pop(place, None), None):
            records = records or await self._store.list_tasks(where, before_id=before_id, limit=LOOKS_AT_MOST)
        return records

    async def _retried(
        self, group: BlockedGroup, records: Sequence[TaskRecord], answers: Mapping[int, Answer], found: Round
    ) -> None:
        found.retried.append(group.key)
        unasked = [record for record in records if record.id not in answers]
        if records:
            self._retry_before[group.key, group.consumer] = unasked[0].id + 1 if unasked else records[-1].id
        passed = [record.uuid for record in records if record.id in answers and answers[record.id].blocker is None]
        if passed and len(passed) == len(records):
            found.gone.append(group.key)
        elif passed:
            await self._store.apply(passed, Unblock(*split_key(group.key)), by=self._node)

    def _is_ours(self, group: BlockedGroup) -> bool:
        kind, _ = split_key(group.key)
        return (kind in self._checks.kinds or _is_failure(group)) and group.consumer in self._consumers


def _is_failure(group: BlockedGroup) -> bool:
    return split_key(group.key)[0] == BlockerKind.CHECK


async def unblock_all(store: Store, key: str, *, by: str, clock: Clock, unblocked: Callable[[], None]) -> None:
    """Queue all tasks that wait for this blocker, the oldest first, a few at a time. There is a pause after each part,
    so that the claims of others hardly wait. `unblocked` is called after each part."""
    uuids: list[str] = []
    before_id: int | None = None
    while page := await store.list_ids(TaskFilter(blocker=key), before_id=before_id, limit=LIST_AT_ONCE):
        uuids += (uuid for _, uuid in page)
        before_id = page[-1][0]
    uuids.reverse()
    command = Unblock(*split_key(key))
    for start in range(0, len(uuids), UNBLOCK_AT_ONCE):
        began = clock.monotonic()
        await store.apply(uuids[start : start + UNBLOCK_AT_ONCE], command, by=by)
        unblocked()
        pause_s = PAUSE_FACTOR * (clock.monotonic() - began)
        await clock.wait(asyncio.Event(), clock.monotonic() + pause_s)
