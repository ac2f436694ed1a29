"""The overview of devices: what each does, how their pools go, and what happened last.

It is read from the store, so it covers every node. A refresh costs a handful of short reads, however many devices there
are; what is read of the history is read seldom.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta

import msgspec

from taskyard.application.device_documents import DeviceDocument, DeviceOverview, PoolDocument
from taskyard.application.device_reading import describe_devices, find_last_ends
from taskyard.application.event_documents import EventDocument
from taskyard.application.events import describe_events
from taskyard.application.rates import read_rates, recent_cursor
from taskyard.errors import NotOpen
from taskyard.listening import AWAY, pause
from taskyard.model.device import DeviceState, DeviceStatus
from taskyard.model.event import DEVICE_KINDS, Event, EventKind
from taskyard.model.queue_order import QueueEntry
from taskyard.model.state import ENDED, TaskState
from taskyard.model.why import Reason
from taskyard.yard import Yard

RATE_S = 60.0
"""Seconds over which the rate of a pool is taken."""

SUCCESS_S = 3600.0
"""Seconds of the runs whose share of completed ones is shown."""

SUCCESS_EVERY_S, SUCCESS_SHARE = 5.0, 0.05
"""Seconds between two looks at the history and at the first tasks, and the part of the time that they may take."""

LOOK_BACK = 1_000
"""Events read at first, so that there is something to show at once."""

MAX_PAGES = 6
"""Pages of a thousand events read in one refresh: a very busy store may be written faster than it is read here."""

NOTABLE_EVENTS, COMPLETED_EVENTS = 20, 10
"""Events that are kept: completed runs must not push the others out."""

MIN_INTERVAL_S, REFRESH_S = 0.1, 1.0
"""Seconds from one reading to the next: at least, and at most, since heartbeats and clocks leave no events."""

_NOTABLE = DEVICE_KINDS | {EventKind.FAILED, EventKind.INTERRUPTED, EventKind.RETRYING}


async def watch_devices(yard: Yard, pool: str | None, *, min_interval_s: float) -> AsyncIterator[DeviceOverview]:
    """The overview now, and again after each change and each second. While the store is away, the last one is repeated
    with `away_since`."""
    reader, last = DeviceOverviewReader(yard, pool), DeviceOverview(at=yard.now())
    with yard._engine.changes() as changes, suppress(NotOpen):
        while True:
            changes.clear()
            try:
                last = await reader.read()
            except AWAY as away:
                reader = DeviceOverviewReader(yard, pool)
                since = last.away_since or datetime.now(UTC)
                last = msgspec.structs.replace(last, away_since=since, away_reason=str(away))
            yield last
            await asyncio.sleep(max(MIN_INTERVAL_S, min_interval_s))
            if last.away_since is not None:
                await pause(changes)
            else:
                with suppress(TimeoutError):
                    async with asyncio.timeout(REFRESH_S):
                        await changes.wait()


class DeviceOverviewReader:
    """Reads the overview again and again, of all pools or of one."""

    def __init__(self, yard: Yard, pool: str | None) -> None:
        self._yard, self._pool = yard, pool
        self._cursor: int | None = None
        self._ends: dict[str, datetime] = {}
        self._rates: dict[str, PoolRate] = {}
        self._success: dict[str, float | None] = {}
        self._success_since: datetime | None = None
        self._misfits: dict[str, str | None] = {}
        self._success_mono = 0.0
        self._notable: deque[Event] = deque(maxlen=NOTABLE_EVENTS)
        self._completed: deque[Event] = deque(maxlen=COMPLETED_EVENTS)
        self._described: OrderedDict[int, EventDocument] = OrderedDict()

    async def read(self) -> DeviceOverview:
        yard, store, now = self._yard, self._yard.store, self._yard.now()
        statuses = await yard.devices.list_all(self._pool)
        pools = sorted({status.spec.pool for status in statuses} | ({self._pool} if self._pool else set()))
        await self._follow(pools)
        await self._look_back(statuses)
        devices = await describe_devices(store, statuses, self._ends, now=now)
        await self._read_success(pools, now)
        return DeviceOverview(
            at=now,
            pools=await self._describe_pools(pools, devices, now),
            devices=devices,
            events=tuple(await self._describe_events()),
        )

    async def _look_back(self, statuses: Sequence[DeviceStatus]) -> None:
        """Of the devices without an idle time among the last runs, what was read before stays."""
        count = len(statuses) if self._ends else 2 * len(statuses)
        if any(not status.task for status in statuses):
            self._ends.update(await find_last_ends(self._yard.devices, self._pool, count))

    # --- pools --------------------------------------------------------------------------------------------------------

    async def _describe_pools(
        self, pools: Sequence[str], devices: Sequence[DeviceDocument], now: datetime
    ) -> tuple[PoolDocument, ...]:
        counts = await self._yard.store.count()
        if any(pool not in self._rates for pool in pools):
            rates = await read_rates(self._yard.store, now)
            for pool in pools:
                self._rates.setdefault(pool, PoolRate(rates.get(pool, 0.0)))
        states = {pool: Counter(one.state for one in devices if one.pool == pool) for pool in pools}
        return tuple(self._describe_pool(pool, states[pool], counts) for pool in pools)

    def _describe_pool(
        self, pool: str, states: Counter[DeviceState], counts: Mapping[tuple[str, TaskState], int]
    ) -> PoolDocument:
        tasks = {state: counts.get((pool, state), 0) for state in TaskState}
        finished = sum(tasks[state] for state in ENDED)
        open_tasks = sum(n for state, n in tasks.items() if state not in ENDED)
        return PoolDocument(
            name=pool,
            devices=states.total(),
            states={state: states[state] for state in DeviceState if states[state]},
            queued=tasks[TaskState.QUEUED],
            waiting=open_tasks - tasks[TaskState.QUEUED] - tasks[TaskState.RUNNING],
            running=tasks[TaskState.RUNNING],
            rate=self._rates[pool].after(finished, time.monotonic()),
            success_rate=self._success.get(pool),
            success_since=self._success_since,
            misfit=self._misfits.get(pool),
        )

    async def _read_success(self, pools: Sequence[str], now: datetime) -> None:
        began = time.monotonic()
        if began < self._success_mono and self._success.keys() >= set(pools):
            return
        since = now - timedelta(seconds=SUCCESS_S)
        for pool in pools:
            tallies = await self._yard.devices.success_rates(pool=pool, since=since)
            completed = sum(one.completed for one in tallies)
            total = completed + sum(one.failed + one.interrupted for one in tallies)
            self._success[pool] = completed / total if total else None
            self._misfits[pool] = misfit_of((await self._yard.queue(pool).order(limit=1)).waiting)
        self._success_since = since
        took_s = time.monotonic() - began
        self._success_mono = began + max(SUCCESS_EVERY_S, took_s / SUCCESS_SHARE)

    # --- events -------------------------------------------------------------------------------------------------------

    async def _follow(self, pools: Sequence[str]) -> None:
        """Keep the events since the last reading that are about these pools."""
        store = self._yard.store
        for _ in range(MAX_PAGES):
            if self._cursor is None:
                self._cursor = await recent_cursor(store, LOOK_BACK)
            page = await store.events(after=self._cursor)
            self._cursor = page.last
            for event in page.events:
                if event.queue in pools and event.kind in _NOTABLE:
                    self._notable.append(event)
                elif event.queue in pools and event.kind is EventKind.COMPLETED:
                    self._completed.append(event)
            if not page.events:
                return
        self._cursor = await recent_cursor(store, LOOK_BACK)  # too far behind: go on near the end

    async def _describe_events(self) -> list[EventDocument]:
        """Newest first. Each is described once, with what its task was then."""
        kept = sorted([*self._notable, *self._completed], key=lambda event: event.seq, reverse=True)
        new = [event for event in kept if event.seq not in self._described]
        self._described.update((one.seq, one) for one in await describe_events(self._yard.store, new))
        seqs = {event.seq for event in kept}
        for seq in [seq for seq in self._described if seq not in seqs]:
            del self._described[seq]
        return [self._described[event.seq] for event in kept]


def misfit_of(waiting: Sequence[QueueEntry]) -> str | None:
    """The id of the first task that waits, if no device of its pool has the labels that it requires."""
    why = waiting[0].why if waiting else None
    return waiting[0].uuid if why is not None and why.reason is Reason.NO_DEVICE else None


class PoolRate:
    """How many tasks of a pool finish per second, over the last minute. `before` is the rate at the beginning, which
    counts for the part of the minute that lies before that."""

    def __init__(self, before: float) -> None:
        self._before = before
        self._samples: deque[tuple[float, int]] = deque()

    def after(self, finished: int, now_mono: float) -> float:
        """The rate, now that so many tasks have finished."""
        self._samples.append((now_mono, finished))
        while len(self._samples) > 2 and now_mono - self._samples[1][0] >= RATE_S:
            self._samples.popleft()
        began, least = self._samples[0]
        over_s = min(RATE_S, now_mono - began)
        # Tasks that are pruned meanwhile make the count smaller.
        seen = max(0, finished - least)
        return (seen + self._before * (RATE_S - over_s)) / RATE_S
