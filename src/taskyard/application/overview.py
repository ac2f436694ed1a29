"""The overview: counts, running, waiting and finished tasks, and how fast they finish.

It is read from the store, so it covers every process on it. A refresh costs a handful of short reads, however many
tasks there are: it follows the events, and reads only the records that it will return.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from weakref import WeakKeyDictionary

import msgspec

from taskyard.application.calls import YardContext
from taskyard.application.documents import sum_states
from taskyard.application.overview_documents import NextTask, OverviewDocument
from taskyard.application.rates import recent_cursor
from taskyard.application.refs import resolve_tasks
from taskyard.application.task_documents import priority_name, task_document
from taskyard.errors import NotOpen
from taskyard.listening import AWAY, pause
from taskyard.model.event import Event, EventKind
from taskyard.model.state import ENDED, WAITING_FOR_TIME, TaskState
from taskyard.model.task import TaskRecord
from taskyard.model.task_filter import TaskFilter
from taskyard.ports.store import Store
from taskyard.queueing.order import find_order
from taskyard.yard import Yard

OVERVIEW_RATE_S = 10.0
"""Seconds over which the rate is taken."""

LOOK_BACK = 2_000
"""Events read at first, so that there are finished tasks to show at once."""

MAX_REFRESH_PAGES = 6
"""Pages of a thousand events read in one refresh: a very busy store may be written faster than it is read here."""

MAX_TASKS = 40
"""Tasks of each kind: a window seldom has room for more."""

NEXT_QUEUES, NEXT_TASKS = 4, 3
"""Queues whose next tasks are shown, and how many of each."""

WATCHED_PLACES = 100
"""Places in which tasks are looked for that are watched by their ids."""

MIN_INTERVAL_S = 0.1
"""Seconds from the beginning of a reading to the next, however many watch: people see no more."""

FORECAST_S, FORECAST_SHARE = 2.0, 0.05
"""Seconds between forecasts, and the part of the time that they may take: readings are more frequent."""

REFRESH_S, IDLE_REFRESH_S = 1.0, 5.0
"""Seconds between refreshes while nothing changes: until the rate has fallen to 0, and then, in case a change was not
noticed."""

_FINISHED = frozenset(EventKind(state) for state in ENDED)


class LocalOverview:
    """`OverviewCalls` on a yard."""

    def __init__(self, context: YardContext) -> None:
        self._context = context

    async def get(self, refs: Sequence[str] = ()) -> OverviewDocument:
        yard = self._context.yard
        return await OverviewReader(yard.store, only=await resolve_tasks(yard, refs)).refresh()

    async def watch(self, refs: Sequence[str] = (), *, min_interval_s: float = 0.1) -> AsyncIterator[OverviewDocument]:
        yard = self._context.yard
        only = tuple(await resolve_tasks(yard, refs))
        with sharing_overview(yard, only) as shared, yard._engine.changes() as changes, suppress(NotOpen):
            while True:
                changes.clear()
                last = await shared.read()
                yield last
                await asyncio.sleep(max(MIN_INTERVAL_S, min_interval_s))
                if last.away_since is not None:
                    await pause(changes)
                else:
                    await _wait(changes, REFRESH_S if last.rate else IDLE_REFRESH_S)


async def _wait(changes: asyncio.Event, timeout_s: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await changes.wait()


class SharedOverview:
    """One overview for all that watch the same tasks."""

    def __init__(self, store: Store, only: Sequence[str]) -> None:
        self.watchers = 0
        self._store, self._only = store, only
        self._reader = OverviewReader(store, only=only)
        self._last = OverviewDocument()
        self._began_mono = -math.inf
        self._turn = asyncio.Lock()

    async def read(self) -> OverviewDocument:
        """An overview whose reading began after this call, so that a change before the call is in it."""
        asked_mono = time.monotonic()
        async with self._turn:
            if self._began_mono <= asked_mono:
                await asyncio.sleep(self._began_mono + MIN_INTERVAL_S - time.monotonic())
                began_mono = time.monotonic()
                self._last = await self._refresh()
                self._began_mono = began_mono
            return self._last

    async def _refresh(self) -> OverviewDocument:
        try:
            return await self._reader.refresh()
        except BaseException as error:
            # It has gone past events whose tasks it has not read.
            self._reader = OverviewReader(self._store, only=self._only)
            if not isinstance(error, AWAY):
                raise
            since = self._last.away_since or datetime.now(UTC)
            return msgspec.structs.replace(self._last, away_since=since, away_reason=str(error))


_OVERVIEWS: WeakKeyDictionary[object, dict[tuple[str, ...], SharedOverview]] = WeakKeyDictionary()
"""By engine, because a yard that is opened again has another one; then by the tasks that are watched, none for all."""


@contextmanager
def sharing_overview(yard: Yard, only: tuple[str, ...]) -> Iterator[SharedOverview]:
    """The one of all applications on this open yard, until the last watcher leaves. Raises `NotOpen`."""
    overviews = _OVERVIEWS.setdefault(yard._engine, {})
    shared = overviews.setdefault(only, SharedOverview(yard.store, only))
    shared.watchers += 1
    try:
        yield shared
    finally:
        shared.watchers -= 1
        if not shared.watchers:
            del overviews[only]


class OverviewReader:
    """Reads the overview again and again. With `only`, it is about those tasks and no others."""

    def __init__(self, store: Store, *, only: Sequence[str] = ()) -> None:
        self._store, self._only = store, tuple(only)
        self._cursor: int | None = None
        self._samples: deque[tuple[float, int]] = deque()
        self._next: tuple[NextTask, ...] = ()
        self._forecast_mono = 0.0
        self._waiting: dict[str, TaskRecord] = {}
        self._finished: dict[str, TaskRecord] = {}  # the latest last

    async def refresh(self) -> OverviewDocument:
        recent = await self._follow()
        seen = await (self._read_selected() if self._only else self._read_all())
        self._add_rate_sample(sum(seen.counts.get(state, 0) for state in ENDED), recent)
        waiting = sorted(self._waiting.values(), key=lambda record: record.due_at)
        return msgspec.structs.replace(
            seen,
            rate=self._rate(),
            next=await self._find_next(seen),
            waiting=tuple(map(task_document, waiting)),
            finished=tuple(map(task_document, reversed(self._finished.values()))),
            seq=self._cursor or 0,
        )

    async def _read_all(self) -> OverviewDocument:
        counts = await self._store.count()
        running = await self._store.list_tasks(TaskFilter(states=(TaskState.RUNNING,)), limit=MAX_TASKS)
        running.sort(key=lambda record: (record.started_at or record.created_at, record.id))
        return OverviewDocument(
            counts=sum_states(counts),
            queues={queue: sum_states(counts, [queue]) for queue in sorted({queue for queue, _ in counts})},
            workers=len(await self._store.nodes()),
            running=tuple(map(task_document, running)),
        )

    async def _read_selected(self) -> OverviewDocument:
        found = [record for uuid in self._only if (record := await self._store.find(uuid)) is not None]
        counts: dict[TaskState, int] = {}
        for record in found:
            counts[record.state] = counts.get(record.state, 0) + 1
        self._waiting = {r.uuid: r for r in found if r.state not in ENDED and r.state is not TaskState.RUNNING}
        finished = sorted((r for r in found if r.state in ENDED), key=lambda r: r.finished_at or r.updated_at)
        self._finished = {record.uuid: record for record in finished}
        running = [task_document(record) for record in found if record.state is TaskState.RUNNING]
        return OverviewDocument(counts=counts, running=tuple(running))

    # --- what starts next -------------------------------------------------------------------------------------------

    async def _find_next(self, seen: OverviewDocument) -> tuple[NextTask, ...]:
        began = time.monotonic()
        if began >= self._forecast_mono:
            self._next = tuple([one async for one in self._forecast(seen.queues)])
            took_s = time.monotonic() - began
            self._forecast_mono = began + max(FORECAST_S, took_s / FORECAST_SHARE)
        begun = {*self._finished, *(task.uuid for task in seen.running)}
        return tuple(one for one in self._next if one.uuid not in begun)

    async def _forecast(self, queues: Mapping[str, Mapping[TaskState, int]]) -> AsyncIterator[NextTask]:
        """The first tasks of each queue; or those of the tasks that are watched, however far behind."""
        names = [name for name, counts in queues.items() if counts.get(TaskState.QUEUED)][:NEXT_QUEUES]
        if self._only:
            names = sorted({record.queue for record in self._waiting.values() if record.state is TaskState.QUEUED})
        for name in names:
            view = await find_order(self._store, name, limit=WATCHED_PLACES if self._only else NEXT_TASKS)
            for entry in view.waiting:
                if entry.uuid in self._waiting or not self._only:
                    yield NextTask(
                        uuid=entry.uuid,
                        queue=name,
                        consumer=entry.consumer,
                        priority=priority_name(entry.priority),
                        place=entry.place or 0,
                        waiting=view.waiting_count,
                        expected_start_at=entry.expected_start_at,
                    )

    # --- the rate -----------------------------------------------------------------------------------------------------

    def _add_rate_sample(self, finished: int, recent: int) -> None:
        """`recent` counts the tasks that finished within the window before the first refresh."""
        now = time.monotonic()
        if not self._samples:
            self._samples.append((now - OVERVIEW_RATE_S, finished - recent))
        self._samples.append((now, finished))
        while len(self._samples) > 2 and now - self._samples[1][0] >= OVERVIEW_RATE_S:
            self._samples.popleft()

    def _rate(self) -> float:
        (began, before), (now, after) = self._samples[0], self._samples[-1]
        return max(0.0, (after - before) / max(1.0, now - began))

    # --- following the events -----------------------------------------------------------------------------------------

    async def _follow(self) -> int:
        """Read the events since the last refresh; how many tasks finished within the window, by those events."""
        latest: dict[str, Event] = {}
        recent = 0
        since = datetime.now(UTC) - timedelta(seconds=OVERVIEW_RATE_S)
        for _ in range(MAX_REFRESH_PAGES):
            if self._cursor is None:
                self._cursor = await recent_cursor(self._store, LOOK_BACK)
            page = await self._store.events(after=self._cursor)
            self._cursor = page.last
            for event in page.events:
                if event.kind is not EventKind.PROGRESS:
                    latest.pop(event.uuid, None)
                    latest[event.uuid] = event  # moved to the end: in the order of the last changes
                recent += event.kind in _FINISHED and event.at >= since
            if not page.events:
                break
        else:
            self._cursor = await recent_cursor(self._store, LOOK_BACK)  # too far behind: go on near the end
        if not self._only:
            await self._read_changed(latest)
        return recent

    async def _read_changed(self, latest: Mapping[str, Event]) -> None:
        """The records of these events, as far as they will be returned."""
        for uuid in latest:
            self._waiting.pop(uuid, None)
            self._finished.pop(uuid, None)
        finished = [event.uuid for event in latest.values() if event.kind in _FINISHED]
        waiting = [event.uuid for event in latest.values() if event.kind not in _FINISHED]
        for uuid in [*waiting[-MAX_TASKS:], *finished[-MAX_TASKS:]]:
            record = await self._store.find(uuid)
            if record is None:
                continue
            if record.state in WAITING_FOR_TIME:
                self._waiting[uuid] = record
            elif record.state in ENDED:
                self._finished[uuid] = record
        while len(self._finished) > MAX_TASKS:
            del self._finished[next(iter(self._finished))]
