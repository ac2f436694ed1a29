"""The store in memory: the reference, the test oracle, and the engine of the standalone components.

`MemoryCore` is synchronous and single-threaded; `MemoryStore` is the thin asynchronous shell the port asks for. Nothing
here survives the process. Lanes, the due list and the list of the ended are heaps with lazy deletion: an entry counts
only while it still matches its record, so that a change of state, place or priority never searches a heap.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from itertools import islice
from types import MethodType
from weakref import WeakMethod

from taskyard.errors import ClaimLost, CommandRefused, DuplicateTask, InvalidInput, TaskyardError, UnknownTask
from taskyard.model.command import Command, Reprioritize, apply_decision, decide
from taskyard.model.event import TOLD_AS, Event, EventKind, EventPage
from taskyard.model.limits import Demand, QueueSettings, Quota
from taskyard.model.move import Move, apply_move
from taskyard.model.order import head_position, tail_position
from taskyard.model.settle import heed_cancel, rescue
from taskyard.model.state import ENDED, HOLDS_KEY, WAITING_FOR_TIME, TaskState, check_move
from taskyard.model.task import Claim, Dedupe, Outcome, Run, TaskRecord
from taskyard.ports.clock import Clock
from taskyard.ports.store import ANY, PROMOTE_AT_MOST, Add, Added, Applied, Node, Report, TaskFilter, Turned

RING = 10_000
"""Events kept for readers that fall behind."""

RUNS_KEPT = 100
"""Runs kept of one task, the latest: a task that postpones itself for ever must not grow for ever."""

Lane = tuple[str, str]
Entry = tuple[int, int, int]


class KeyLine:
    """The tasks of one queue with one key: which of them hold it, and which wait, first to start first. `offered` are
    those of the waiting that may start; the rest are parked. Entries of `waiting` may be stale, as those of lanes."""

    __slots__ = ("holding", "offered", "waiting")

    def __init__(self) -> None:
        self.holding: set[int] = set()
        self.waiting: list[Entry] = []
        self.offered: set[int] = set()


class MemoryCore:
    """`keep_ended` is how many ended tasks are kept, the latest; None keeps them until they are pruned."""

    def __init__(self, clock: Clock, *, keep_ended: int | None = None) -> None:
        self._clock, self._keep_ended = clock, keep_ended
        self._seq = 0
        self._tasks: dict[str, TaskRecord] = {}
        self._by_id: dict[int, TaskRecord] = {}
        self._queues: dict[str, QueueSettings] = {}
        self._lanes: dict[Lane, list[Entry]] = {}
        self._due: list[tuple[datetime, int]] = []
        self._ended: list[tuple[datetime, int]] = []
        self._keyed: defaultdict[tuple[str, str], KeyLine] = defaultdict(KeyLine)
        self._slots: dict[str, str] = {}
        self._running: defaultdict[str, set[int]] = defaultdict(set)
        self._running_in: Counter[str] = Counter()
        self._counts: Counter[tuple[str, TaskState]] = Counter()
        self._runs: dict[int, tuple[Run, ...]] = {}
        self._nodes: dict[str, Node] = {}
        self._events: deque[tuple[EventKind, TaskRecord, datetime]] = deque(maxlen=RING)
        self.event_seq = 0

    # --- the hot path ---------------------------------------------------------------------------------------------

    def turn(
        self,
        node: str,
        settles: Sequence[tuple[Claim, Move]],
        adds: Sequence[Add],
        reports: Sequence[Report],
        demand: Demand | None,
    ) -> Turned:
        now = self._clock.now()
        for _, move in settles:
            check_move(TaskState.RUNNING, move.state)  # before anything is written: a turn happens as a whole or not
        settled = [self._settle(claim, move) for claim, move in settles] if settles else []
        for report in reports:
            self._report(report, now)
        added = [self._add(add, now) for add in adds]
        self._promote(now)
        claims = self._claim(node, demand, now) if demand is not None and demand.total > 0 else []
        return Turned(settled, added, claims, self._next_due())

    def add(self, add: Add) -> list[Added] | TaskyardError:
        return self._add(add, self._clock.now())

    def _held(self, claim: Claim) -> TaskRecord | None:
        """The record the claim still holds, or None."""
        record = self._by_id.get(claim.record.id)
        if record is None or record.token != claim.token or record.attempt != claim.attempt:
            return None
        return record

    def _settle(self, claim: Claim, move: Move) -> ClaimLost | None:
        record = self._held(claim)
        if record is None:
            return ClaimLost(claim.uuid, claim.token)
        # Race: a cancel may be asked after the run has ended and before its node could know.
        self._move(record, move if record.cancel_asked_at is None else heed_cancel(move))
        return None

    def _report(self, report: Report, now: datetime) -> None:
        record = self._held(report.claim)
        if record is None:
            return
        if report.progress is not None:
            record.progress = report.progress
            self._tell(EventKind.PROGRESS, record, now)
        if report.note is not None:
            record.note = report.note
        record.updated_at = now

    def _add(self, add: Add, now: datetime) -> list[Added] | TaskyardError:
        if add.parent is not None and self._held(add.parent) is None:
            return ClaimLost(add.parent.uuid, add.parent.token)
        if add.dedupe is Dedupe.REFUSE:
            for record in add.records:
                holder = self._slots.get(record.dedupe_slot or "")
                if holder is not None:
                    return DuplicateTask(holder, record.dedupe_slot or "")
        if (taken := self._taken_uuid(add)) is not None:
            return InvalidInput(f"a task {taken} is in the store already; a task's uuid must be new")
        return [self._add_one(record, add.dedupe, now) for record in add.records]

    def _taken_uuid(self, add: Add) -> str | None:
        """The first uuid that stands for another task already, among those that would not be merged away."""
        if len(add.records) == 1 and add.dedupe is Dedupe.ALLOW:
            uuid = add.records[0].uuid
            return uuid if uuid in self._tasks else None
        batch: set[str] = set()
        slots: set[str] = set()
        for record in add.records:
            slot = record.dedupe_slot if add.dedupe is not Dedupe.ALLOW else None
            if slot is not None and (slot in slots or slot in self._slots):
                continue
            if record.uuid in self._tasks or record.uuid in batch:
                return record.uuid
            batch.add(record.uuid)
            if slot is not None:
                slots.add(slot)
        return None

    def _add_one(self, asked: TaskRecord, dedupe: Dedupe, now: datetime) -> Added:
        record = asked.clone()
        if dedupe is Dedupe.ALLOW:
            record.dedupe_slot = None
        elif record.dedupe_slot is not None:
            holder = self._slots.get(record.dedupe_slot)
            if holder is not None:
                return Added(holder, is_new=False)
            self._slots[record.dedupe_slot] = record.uuid
        self._seq += 1
        record.id = self._seq
        record.position = tail_position(self._seq)
        self._tasks[record.uuid] = self._by_id[record.id] = record
        record.updated_at = now
        if record.due_at > now:
            record.state = TaskState.SCHEDULED
            heapq.heappush(self._due, (record.due_at, record.id))
        else:
            record.state = TaskState.QUEUED
            if record.key is None:
                self._offer(record)
            else:
                self._track_key(record)
        self._counts[record.queue, record.state] += 1
        self._tell(EventKind.SUBMITTED, record, now)
        return Added(record.uuid)

    def _promote(self, now: datetime) -> None:
        due = self._due
        for _ in range(PROMOTE_AT_MOST):
            self._drop_stale_due()
            if not due or due[0][0] > now:
                return
            record = self._by_id[heapq.heappop(due)[1]]
            if record.state is TaskState.SCHEDULED:
                self._seq += 1
                record.position = tail_position(self._seq)
            self._move(record, Move.queued(at=now))

    def _drop_stale_due(self) -> None:
        due = self._due
        while due:
            at, task_id = due[0]
            record = self._by_id.get(task_id)
            if record is not None and record.state in WAITING_FOR_TIME and record.due_at == at:
                return
            heapq.heappop(due)

    def _next_due(self) -> datetime | None:
        self._drop_stale_due()
        return self._due[0][0] if self._due else None

    def _claim(self, node: str, demand: Demand, now: datetime) -> list[Claim]:
        room = {
            name: queue.concurrency - self._running_in[name]
            for name, queue in self._queues.items()
            if queue.concurrency is not None
        }
        quota = Quota(demand, room)
        lanes = [lane for lane in self._lanes if quota.room(*lane) > 0]
        return self._start(self._pick(lanes, quota), node, now)

    def _pick(self, lanes: list[Lane], quota: Quota) -> list[TaskRecord]:
        """What goes next over all lanes, by priority and place, for as long as the quota lasts."""
        picked: list[TaskRecord] = []
        heads = [(entry, lane) for lane in lanes if (entry := self._head(lane)) is not None]
        heapq.heapify(heads)
        while heads:
            entry, lane = heads[0]
            heap, room = self._lanes[lane], quota.room(*lane)
            # All that stands before the next lane's head is taken in one go: of a single lane, all there is room for.
            limit = min(heads[1:3])[0] if len(heads) > 1 else None
            taken = 0
            while entry is not None and taken < room and (limit is None or entry < limit):
                record = self._by_id[heapq.heappop(heap)[2]]
                record.state = TaskState.RUNNING  # now: the heap may hold the same entry twice
                picked.append(record)
                taken += 1
                entry = self._head(lane)
            quota.admit(*lane, taken)
            if entry is None or taken == room:
                heapq.heappop(heads)
            else:
                heapq.heapreplace(heads, (entry, lane))
        return picked

    def _head(self, lane: Lane) -> Entry | None:
        heap = self._lanes[lane]
        while heap:
            priority, position, task_id = heap[0]
            record = self._by_id.get(task_id)
            if (
                record is not None
                and record.state is TaskState.QUEUED
                and not record.parked
                and record.position == position
                and record.priority == priority
            ):
                return heap[0]
            heapq.heappop(heap)
        return None

    def _start(self, records: list[TaskRecord], node: str, now: datetime) -> list[Claim]:
        claims = []
        token = self._seq
        for record in records:
            token += 1
            record.attempt += 1
            record.token = token
            record.node = node
            record.started_at = record.updated_at = now
            if record.key is not None:
                self._hold_key(record)
            self._tell(EventKind.STARTED, record, now)
            claims.append(Claim(record.clone(), record.attempt, token))
        self._seq = token
        self._running[node].update(record.id for record in records)
        for queue, n in Counter(record.queue for record in records).items():
            self._counts[queue, TaskState.QUEUED] -= n
            self._counts[queue, TaskState.RUNNING] += n
            self._running_in[queue] += n
        return claims

    # --- one move -------------------------------------------------------------------------------------------------

    def _move(self, record: TaskRecord, move: Move) -> None:
        old = record.state
        slot, token, node = record.dedupe_slot, record.token, record.node
        attempt = record.attempt
        apply_move(record, move)
        new = record.state
        counts = self._counts
        counts[record.queue, old] -= 1
        counts[record.queue, new] += 1
        if old is TaskState.RUNNING:
            self._end_run(record, move, attempt, token or 0, node or "")
        if slot is not None and record.dedupe_slot is None:
            del self._slots[slot]
        if new is TaskState.QUEUED:
            if move.to_head:
                self._seq += 1
                record.position = head_position(self._seq)
            elif old is TaskState.FAILED:
                self._seq += 1
                record.position = tail_position(self._seq)
            if record.key is None:
                self._offer(record)
        elif new in WAITING_FOR_TIME:
            heapq.heappush(self._due, (record.due_at, record.id))
        if record.key is not None:
            self._track_key(record)
        self._tell(TOLD_AS[new], record, move.at)
        if new in ENDED:
            heapq.heappush(self._ended, (move.at, record.id))
            if self._keep_ended is not None and len(self._ended) > self._keep_ended:
                self._forget_oldest()

    def _end_run(self, record: TaskRecord, move: Move, attempt: int, token: int, node: str) -> None:
        self._running[node].discard(record.id)
        self._running_in[record.queue] -= 1
        assert record.started_at is not None
        run = Run(attempt, token, node, move.run or move.state, record.started_at, move.at, move.error)
        self._runs[record.id] = (*self._runs.get(record.id, ())[1 - RUNS_KEPT :], run)

    def _offer(self, record: TaskRecord) -> None:
        lane = self._lanes.setdefault((record.queue, record.source), [])
        heapq.heappush(lane, (record.priority, record.position, record.id))

    # --- keys -----------------------------------------------------------------------------------------------------

    def _track_key(self, record: TaskRecord) -> None:
        """A task with a key has come, has moved other than by being claimed, or has another priority."""
        assert record.key is not None
        line = self._keyed[record.queue, record.key]
        line.offered.discard(record.id)
        line.holding.discard(record.id)
        record.parked = record.state is TaskState.QUEUED
        if record.parked:
            heapq.heappush(line.waiting, (record.priority, record.position, record.id))
        elif record.state in HOLDS_KEY:
            line.holding.add(record.id)
        self._repark(line, record.queue)
        # At least one of a key may run: with nobody holding it and nobody offered, nobody waits.
        if not line.holding and not line.offered:
            del self._keyed[record.queue, record.key]

    def _hold_key(self, record: TaskRecord) -> None:
        """A task with a key was claimed. That leaves the room of the key, and who is parked, as they were."""
        assert record.key is not None
        line = self._keyed[record.queue, record.key]
        line.offered.discard(record.id)
        line.holding.add(record.id)

    def _repark(self, line: KeyLine, queue: str) -> None:
        """Of the tasks waiting with this key, exactly the first ones that fit under its limit may start."""
        free = self._settings(queue).per_key - len(line.holding)
        first: dict[int, Entry] = {}
        while line.waiting and len(first) < free:
            entry = priority, position, task_id = heapq.heappop(line.waiting)
            record = self._by_id.get(task_id)
            if (
                record is not None
                and record.state is TaskState.QUEUED
                and record.position == position
                and record.priority == priority
            ):
                first[task_id] = entry
        for entry in first.values():
            heapq.heappush(line.waiting, entry)
        for task_id in line.offered - first.keys():
            self._by_id[task_id].parked = True
        for task_id in first.keys() - line.offered:
            self._by_id[task_id].parked = False
            self._offer(self._by_id[task_id])
        line.offered = set(first)

    def _settings(self, queue: str) -> QueueSettings:
        return self._queues.get(queue) or QueueSettings(name=queue)

    # --- commands, rescue, retention --------------------------------------------------------------------------------

    def set_queue(self, settings: QueueSettings) -> None:
        self._queues[settings.name] = settings
        for (queue, _), line in self._keyed.items():
            if queue == settings.name:
                self._repark(line, queue)

    def apply(self, uuids: Sequence[str], command: Command) -> list[Applied]:
        now = self._clock.now()
        return [self._apply_one(uuid, command, now) for uuid in uuids]

    def _apply_one(self, uuid: str, command: Command, now: datetime) -> Applied:
        record = self._tasks.get(uuid)
        if record is None:
            return Applied(uuid, refused=UnknownTask(uuid))
        try:
            decision = decide(record, command, now=now)
        except CommandRefused as refused:
            return Applied(uuid, refused=refused)
        if isinstance(decision, Move):
            self._move(record, decision)
        else:
            apply_decision(record, decision)
            if isinstance(decision, Reprioritize):
                self._reordered(record)
                self._tell(EventKind.PRIORITY_CHANGED, record, now)
            else:
                self._tell(EventKind.CANCEL_ASKED, record, now)
        return Applied(uuid, record=record.clone())

    def _reordered(self, record: TaskRecord) -> None:
        if record.state is not TaskState.QUEUED:
            return
        if record.key is None:
            self._offer(record)
        else:
            self._track_key(record)

    def join(self, node: Node) -> None:
        self._nodes[node.incarnation] = node

    def leave(self, incarnation: str) -> None:
        self._nodes.pop(incarnation, None)
        if not self._running.get(incarnation):
            self._running.pop(incarnation, None)

    def rescue(self, incarnation: str) -> list[str]:
        now = self._clock.now()
        why = f"its node {incarnation} died"
        rescued = [self._by_id[task_id] for task_id in self._running.get(incarnation, ())]
        rescued.sort(key=lambda record: record.position, reverse=True)  # the last to be put at the head stands first
        for record in rescued:
            for move in rescue(record, auto_recover=self._settings(record.queue).auto_recover, now=now, why=why):
                self._move(record, move)
        self.leave(incarnation)
        return [record.uuid for record in rescued]

    def prune(self, finished_before: datetime, limit: int) -> int:
        pruned = 0
        while pruned < limit and self._ended and self._ended[0][0] < finished_before:
            pruned += self._forget_oldest()
        return pruned

    def _forget_oldest(self) -> bool:
        """Forget the task that ended first; False if it was sent again since, or is gone already."""
        at, task_id = heapq.heappop(self._ended)
        record = self._by_id.get(task_id)
        if record is None or record.state not in ENDED or record.finished_at != at:
            return False
        del self._tasks[record.uuid], self._by_id[task_id]
        self._runs.pop(task_id, None)
        self._counts[record.queue, record.state] -= 1
        return True

    # --- reading ----------------------------------------------------------------------------------------------------

    def signals(self, node: str) -> list[str]:
        running = (self._by_id[task_id] for task_id in sorted(self._running.get(node, ())))
        return [record.uuid for record in running if record.cancel_asked_at is not None]

    def outcomes(self, uuids: Iterable[str]) -> list[Outcome | None]:
        return [
            Outcome(uuid, record.state, record.result, record.error) if (record := self._tasks.get(uuid)) else None
            for uuid in uuids
        ]

    def events(self, after: int, limit: int) -> EventPage:
        if after < 0 or not self._events:
            return EventPage([], self.event_seq)
        first = self.event_seq - len(self._events) + 1
        start = max(first, after + 1)
        kept = islice(self._events, start - first, start - first + limit)
        page = [
            Event(seq, at, kind, record.uuid, record.source, record.queue)
            for seq, (kind, record, at) in enumerate(kept, start)
        ]
        return EventPage(page, page[-1].seq if page else self.event_seq, missed=after + 1 < first)

    def _tell(self, kind: EventKind, record: TaskRecord, at: datetime) -> None:
        self.event_seq += 1
        self._events.append((kind, record, at))

    def find(self, uuid: str) -> TaskRecord | None:
        record = self._tasks.get(uuid)
        return record.clone() if record is not None else None

    def list_uuids(self, fragment: str, limit: int) -> list[str]:
        return list(islice((u for u in self._tasks if u.startswith(fragment) or u.endswith(fragment)), limit))

    def list_tasks(self, where: TaskFilter, before_id: int | None, limit: int) -> list[TaskRecord]:
        found: list[TaskRecord] = []
        for record in self._newest_first():
            if len(found) == limit:
                break
            if (before_id is None or record.id < before_id) and _matches(record, where):
                found.append(record.clone())
        return found

    def _newest_first(self) -> Iterator[TaskRecord]:
        return reversed(self._by_id.values())

    def list_runs(self, uuid: str) -> list[Run]:
        record = self._tasks.get(uuid)
        return list(self._runs.get(record.id, ())) if record is not None else []

    def count(self) -> dict[tuple[str, TaskState], int]:
        return {where: n for where, n in self._counts.items() if n and where[1] is not TaskState.CREATED}

    def list_nodes(self) -> list[Node]:
        return list(self._nodes.values())


def _matches(record: TaskRecord, where: TaskFilter) -> bool:
    return (
        (where.states is None or record.state in where.states)
        and (where.queue is None or record.queue == where.queue)
        and (where.source is None or record.source == where.source)
    )


class MemoryStore:
    """The port over `MemoryCore`. It lives in one process and one event loop; other processes never see it, but several
    yards of this loop may share it and hear each other."""

    def __init__(self, clock: Clock, *, keep_ended: int | None = None) -> None:
        self._core = MemoryCore(clock, keep_ended=keep_ended)
        self._opened = 0
        self._listeners: list[Callable[[], Callable[[], None] | None]] = []
        self._told = 0
        self._is_telling = False

    async def open(self) -> None:
        self._opened += 1

    async def close(self) -> None:
        self._opened -= 1
        if self._opened <= 0:
            self._listeners.clear()
            self._is_telling = False  # the loop may end before it could tell; the next one starts anew

    async def set_queue(self, settings: QueueSettings) -> None:
        self._core.set_queue(settings)
        self._tell()

    async def join(self, node: Node) -> None:
        self._core.join(node)

    async def leave(self, incarnation: str) -> None:
        self._core.leave(incarnation)

    async def nodes(self) -> list[Node]:
        return self._core.list_nodes()

    async def dead_nodes(self) -> list[str]:
        return []  # every node is in this process, and it is alive

    async def rescue(self, incarnation: str) -> list[str]:
        answer = self._core.rescue(incarnation)
        self._tell_of_events()
        return answer

    async def turn(
        self,
        node: str,
        *,
        settles: Sequence[tuple[Claim, Move]] = (),
        adds: Sequence[Add] = (),
        reports: Sequence[Report] = (),
        demand: Demand | None = None,
    ) -> Turned:
        answer = self._core.turn(node, settles, adds, reports, demand)
        self._tell_of_events()
        return answer

    def add_now(self, add: Add) -> list[Added] | TaskyardError:
        answer = self._core.add(add)
        self._tell_of_events()
        return answer

    async def apply(self, uuids: Sequence[str], command: Command) -> list[Applied]:
        answer = self._core.apply(uuids, command)
        self._tell_of_events()
        return answer

    async def signals(self, node: str) -> list[str]:
        return self._core.signals(node)

    async def outcomes(self, uuids: Sequence[str]) -> list[Outcome | None]:
        return self._core.outcomes(uuids)

    async def events(self, *, after: int, limit: int = 1000) -> EventPage:
        return self._core.events(after, limit)

    async def find(self, uuid: str) -> TaskRecord | None:
        return self._core.find(uuid)

    async def list_uuids(self, fragment: str, *, limit: int = 10) -> list[str]:
        return self._core.list_uuids(fragment, limit)

    async def list_tasks(
        self, where: TaskFilter = ANY, *, before_id: int | None = None, limit: int = 100
    ) -> list[TaskRecord]:
        return self._core.list_tasks(where, before_id, limit)

    async def list_runs(self, uuid: str) -> list[Run]:
        return self._core.list_runs(uuid)

    async def count(self) -> dict[tuple[str, TaskState], int]:
        return self._core.count()

    async def prune(self, *, finished_before: datetime, limit: int = 500) -> int:
        return self._core.prune(finished_before, limit)

    # --- telling the other yards ------------------------------------------------------------------------------------

    def watch(self, changed: Callable[[], None], nodes_changed: Callable[[], None]) -> None:
        """Weakly: nobody says when an engine stops listening, and one that has stopped must not stay for us."""
        self._listeners.append(WeakMethod(changed) if isinstance(changed, MethodType) else lambda: changed)

    def _tell_of_events(self) -> None:
        """Only what leaves an event is told: the turn that a hint leads to writes nothing, so hints do not echo."""
        if self._core.event_seq != self._told:
            self._told = self._core.event_seq
            self._tell()

    def _tell(self) -> None:
        # Who wrote is not known here, so it is told as well; but a yard that is alone is spared its own echo.
        if len(self._listeners) > 1 and not self._is_telling:
            self._is_telling = True
            asyncio.get_running_loop().call_soon(self._tell_all)

    def _tell_all(self) -> None:
        self._is_telling = False
        alive = [(ref, changed) for ref in self._listeners if (changed := ref()) is not None]
        self._listeners = [ref for ref, _ in alive]
        for _, changed in alive:
            changed()
