"""What a live view knows: counts, what runs, what waits for its time, what has just ended, and how fast it goes.

It is read from the store, so it shows the work of every process on it. A look costs a handful of short reads, however
many tasks there are: it follows the events, and reads only the records it will show.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta

from taskyard.cli.documents import sum_states
from taskyard.cli.story import look_back
from taskyard.model.event import Event, EventKind
from taskyard.model.state import ENDED, WAITING_FOR_TIME, TaskState
from taskyard.model.task import TaskRecord
from taskyard.model.task_filter import TaskFilter
from taskyard.ports.store import Store

RATE_OVER_S = 10.0
"""Throughput is of this many seconds."""

LOOK_BACK = 2_000
"""Events read at the start, so that a view has something to show at once."""

PAGES = 6
"""Of a thousand events each, read at one look: on a very busy store a view must not read for ever."""

SHOWN = 40
"""Records kept of each kind; a window seldom has room for more."""

BUSY = frozenset({TaskState.CREATED, TaskState.QUEUED, TaskState.RUNNING, TaskState.RETRYING, TaskState.INTERRUPTED})
"""What goes on by itself, and soon. A task that waits for its hour or for a person does not keep a yard busy."""

_ENDS = {str(state): state for state in ENDED}


class Board:
    """Call `look`, then read. With `only`, it is about those tasks and no others."""

    def __init__(self, store: Store, *, only: Sequence[str] = ()) -> None:
        self._store, self._only = store, tuple(only)
        self._cursor: int | None = None
        self._samples: deque[tuple[float, int]] = deque()
        self._waiting: dict[str, TaskRecord] = {}
        self.counts: Mapping[TaskState, int] = {}
        self.queues: Mapping[str, Mapping[TaskState, int]] = {}
        self.running: list[TaskRecord] = []
        self._ended: dict[str, TaskRecord] = {}
        self.nodes = 0

    @property
    def waiting(self) -> list[TaskRecord]:
        """What will start by itself at a known time, soonest first."""
        return sorted(self._waiting.values(), key=lambda record: record.due_at)

    @property
    def ended(self) -> list[TaskRecord]:
        """What has ended lately, the latest first."""
        return list(reversed(self._ended.values()))

    @property
    def is_idle(self) -> bool:
        return not any(n for state, n in self.counts.items() if state in BUSY)

    @property
    def rate(self) -> float:
        """Tasks that ended per second, lately."""
        if len(self._samples) < 2:
            return 0.0
        (began, before), (now, after) = self._samples[0], self._samples[-1]
        return max(0.0, (after - before) / max(1.0, now - began))

    async def look(self) -> None:
        recent = await self._follow()
        if self._only:
            await self._look_at_these()
        else:
            await self._look_at_all()
        self._sample(sum(self.counts.get(state, 0) for state in ENDED), recent)

    def _sample(self, ended: int, recent: int) -> None:
        """Note how many have ended by now. At the first look `recent` tells how many of them ended just before."""
        now = time.monotonic()
        if not self._samples:
            self._samples.append((now - RATE_OVER_S, ended - recent))
        self._samples.append((now, ended))
        while len(self._samples) > 2 and now - self._samples[1][0] >= RATE_OVER_S:
            self._samples.popleft()

    async def _look_at_all(self) -> None:
        counts = await self._store.count()
        self.counts = sum_states(counts)
        self.queues = {queue: sum_states(counts, [queue]) for queue in sorted({queue for queue, _ in counts})}
        self.running = await self._store.list_tasks(TaskFilter(states=(TaskState.RUNNING,)), limit=SHOWN)
        self.running.sort(key=lambda record: (record.started_at or record.created_at, record.id))
        self.nodes = len(await self._store.nodes())

    async def _look_at_these(self) -> None:
        found = [record for uuid in self._only if (record := await self._store.find(uuid)) is not None]
        by_state: dict[TaskState, int] = {}
        for record in found:
            by_state[record.state] = by_state.get(record.state, 0) + 1
        self.counts = by_state
        self.running = [record for record in found if record.state is TaskState.RUNNING]
        self._waiting = {r.uuid: r for r in found if r.state not in ENDED and r.state is not TaskState.RUNNING}
        ended = sorted((r for r in found if r.state in ENDED), key=lambda r: r.finished_at or r.updated_at)
        self._ended = {record.uuid: record for record in ended}

    # --- following the events -----------------------------------------------------------------------------------------

    async def _follow(self) -> int:
        """Read what has happened since the last look; how many tasks of these ended within the last seconds."""
        latest: dict[str, Event] = {}
        recent = 0
        since = datetime.now(UTC) - timedelta(seconds=RATE_OVER_S)
        for _ in range(PAGES):
            page = await self._store.events(after=await self._start())
            self._cursor = page.last
            for event in page.events:
                if event.kind is not EventKind.PROGRESS:
                    latest.pop(event.uuid, None)
                    latest[event.uuid] = event  # moved to the end: the order of last changes
                recent += event.kind in _ENDS and event.at >= since
            if not page.events:
                break
        else:
            self._cursor = None  # too far behind to catch up: go on near the end
        if not self._only:
            await self._read(latest)
        return recent

    async def _start(self) -> int:
        if self._cursor is None:
            self._cursor = await look_back(self._store, LOOK_BACK)
        return self._cursor

    async def _read(self, latest: Mapping[str, Event]) -> None:
        """The records that changed, as far as they will be shown."""
        for uuid in latest:
            self._waiting.pop(uuid, None)
            self._ended.pop(uuid, None)
        ended = [event.uuid for event in latest.values() if event.kind in _ENDS]
        waiting = [event.uuid for event in latest.values() if event.kind not in _ENDS]
        for uuid in [*waiting[-SHOWN:], *ended[-SHOWN:]]:
            record = await self._store.find(uuid)
            if record is None:
                continue
            if record.state in WAITING_FOR_TIME:
                self._waiting[uuid] = record
            elif record.state in ENDED:
                self._ended[uuid] = record  # at the end: the order of ends
        while len(self._ended) > SHOWN:
            del self._ended[next(iter(self._ended))]
