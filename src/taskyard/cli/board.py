"""What a live view knows: counts, what runs, what waits for its time, what has just ended, and how fast it goes.

It is read from the store, so it shows the work of every process on it. A look costs a handful of short reads, however
many tasks there are: it follows the events, and reads only the records it will show.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from taskyard.cli.documents import sum_states
from taskyard.model.event import Event, EventKind
from taskyard.model.state import ENDED, WAITING_FOR_TIME, TaskState
from taskyard.model.task import TaskRecord
from taskyard.ports.store import Store, TaskFilter

RATE_OVER_S = 10.0
"""Throughput is of this many seconds."""

LOOK_BACK = 2_000
"""Events read at the start, so that a view has something to show at once."""

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
        self._ends: deque[float] = deque()
        self._waiting: dict[str, TaskRecord] = {}
        self._since = datetime.now(UTC).timestamp()
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

    def rate(self, now: datetime) -> float:
        """Tasks that ended per second, lately."""
        at = now.timestamp()
        over = min(RATE_OVER_S, max(1.0, at - self._since))
        return sum(1 for end in self._ends if at - end <= RATE_OVER_S) / over

    async def look(self) -> None:
        await self._follow()
        if self._only:
            await self._look_at_these()
            return
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

    async def _follow(self) -> None:
        latest: dict[str, Event] = {}
        while True:
            page = await self._store.events(after=await self._start())
            self._cursor = page.last
            if page.missed:
                self._waiting.clear()
            for event in page.events:
                if event.kind is not EventKind.PROGRESS:
                    latest.pop(event.uuid, None)
                    latest[event.uuid] = event  # moved to the end: the order of last changes
                if event.kind in _ENDS:
                    self._ends.append(event.at.timestamp())
            if not page.events:
                break
        self._forget_old_ends()
        if not self._only:
            await self._read(latest)

    async def _start(self) -> int:
        if self._cursor is None:
            newest = (await self._store.events(after=-1)).last
            self._cursor = max(0, newest - LOOK_BACK)
            self._since -= RATE_OVER_S  # what ended before the first look counts as well
        return self._cursor

    def _forget_old_ends(self) -> None:
        oldest = datetime.now(UTC).timestamp() - RATE_OVER_S
        while self._ends and self._ends[0] < oldest:
            self._ends.popleft()

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
