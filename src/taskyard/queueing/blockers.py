"""What blocks tasks on this node: how often it was met, and how tasks go on when it is freed.

`KnownBlockers` only counts. `BlockerLoop` queues the tasks of a blocker that was freed, and checks one task of each
blocker again every `RECHECK_S`, in case a signal was lost or its node died. Nothing is polled per task.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping

from taskyard.errors import InvalidInput
from taskyard.model.blocker import BlockerKind, Labels, blocker_key, split_key
from taskyard.model.command import Unblock
from taskyard.model.given import check_name
from taskyard.ports.clock import Clock
from taskyard.ports.consumer import Consumer
from taskyard.ports.probe import SILENT, Probes
from taskyard.ports.store import BlockedGroup, Store, TaskFilter
from taskyard.queueing.checks import Checks

log = logging.getLogger("taskyard")

LOOKS_AT_MOST = 10
"""Tasks of one lane that are looked at, and have the same blocker, before the lane is left alone."""
RECHECK_S = 30.0
RECHECKS_AT_MOST = 100
"""Blockers whose tasks are checked again in one round. The next round goes on from there."""
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
        probes: Probes = SILENT,
    ) -> None:
        self._store, self._checks, self._consumers = store, checks, consumers
        self.known = KnownBlockers()
        self._node, self._changed, self._clock, self._probes = node, changed, clock, probes
        self._freed: dict[str, None] = {}
        """The keys to unblock, in the order of their signals."""
        self._wake = asyncio.Event()
        self._recheck_at = 0.0
        self._last_checked = ""
        self.has_rechecked = asyncio.Event()
        """Set when the first round is over: what is blocked already need not be looked at again."""
        self.freed_meanwhile: set[str] = set()
        """What was freed since somebody cleared this."""

    def free(self, kind: str, detail: str) -> None:
        """A check says that this blocker is gone."""
        try:
            check_name("the detail of a freed blocker", detail)
            self.free_key(blocker_key(kind, detail))
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
            while self._freed:
                await self._unblock(next(iter(self._freed)))
            await self._clock.wait(self._wake, self._recheck_at if self._checks else None)

    async def _unblock(self, key: str) -> None:
        del self._freed[key]  # first: a signal that comes meanwhile counts again
        self.known.forget(key)
        self._changed()
        try:
            await unblock_all(self._store, key, by=self._node, clock=self._clock, unblocked=self._changed)
        except BaseException:
            self._freed[key] = None  # behind the others
            raise
        self._probes.freed(key)

    async def _recheck(self) -> None:
        """Check one task of each blocker and consumer. What turns out to be free is unblocked after the round."""
        groups = await self._store.list_blockers()
        for key in self.known.keys() - {group.key for group in groups}:
            self.known.forget(key)  # no task waits for it any more: the next one is looked at
        ours = [group for group in groups if self._is_ours(group)]
        ours.sort(key=lambda group: (group.key <= self._last_checked, group.key))
        for group in ours[:RECHECKS_AT_MOST]:
            self._last_checked = group.key
            await (self._retry(group) if _is_failure(group) else self._check_oldest(group))
        self._changed()

    async def _check_oldest(self, group: BlockedGroup) -> None:
        record = await self._store.find(group.first)
        if record is None or record.blocked_by != group.key:
            return
        blocker = await self._checks.find_blocker(record)
        if blocker is None or blocker.key != group.key:
            self.free_key(group.key)
        elif group.key not in self.known:  # another node, or an earlier one here, has looked at these
            self.known.note(group.key, record.lane, group.count)

    async def _retry(self, group: BlockedGroup) -> None:
        """A check failed for these. It may fail for some of them only: each is checked by itself, ten in a round."""
        self.known.forget(group.key)
        where = TaskFilter(blocker=group.key, consumer=group.consumer)
        records = await self._store.list_tasks(where, limit=LOOKS_AT_MOST)
        passed = [record.uuid for record in records if await self._checks.find_blocker(record) is None]
        if len(passed) == len(records):
            self.free_key(group.key)
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
