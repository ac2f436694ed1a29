"""The tasks in memory, and what one move of one of them brings about."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from functools import partial
from itertools import islice, takewhile

import msgspec

from taskyard.model.attempt import Artifact, AttemptArtifact, AttemptLine
from taskyard.model.dedupe import counts_as_done
from taskyard.model.event import TOLD_AS, Event, EventDetail, EventKind, EventPage
from taskyard.model.failures import FailureGroup, group_failures
from taskyard.model.move import Move, apply_completed, apply_move, event_detail
from taskyard.model.node import Node, NodeStatus
from taskyard.model.order import GAP, head_position, tail_position
from taskyard.model.places import Put
from taskyard.model.queue import QueueControl, QueueOrder, QueueSettings
from taskyard.model.state import COMPLETED, ENDED, FAILED, HOLDS_KEY, QUEUED, RUNNING, WAITING_FOR_TIME, TaskState
from taskyard.model.task import Attempt, Outcome, TaskRecord
from taskyard.model.task_filter import TaskFilter
from taskyard.ports.store import ATTEMPTS_KEPT, BlockedGroup, Signals
from taskyard.stores.memory.attempts import AttemptOutputs
from taskyard.stores.memory.edges import Edges
from taskyard.stores.memory.lines import Entry, HandPlaced, KeyLine, Lane, Line, Place
from taskyard.stores.memory.slots import Slots

RING = 10_000
"""Events kept for readers that fall behind."""

TOLD_PLAINLY = {state: kind.value for state, kind in TOLD_AS.items()}
"""Events are kept with their kind as plain text: a tuple of nothing but that, a record and a time is left alone by the
garbage collector."""

TOLD_COMPLETED = TOLD_PLAINLY[COMPLETED]


Ends = list[tuple[datetime, int]]
"""When tasks ended, and their ids: a heap, the first to end at its top."""


class Tasks:
    """`keep_ended` is how many ended tasks are kept, the latest, beside those that others still need; None keeps them
    until they are pruned."""

    def __init__(self, keep_ended: int | None) -> None:
        self._keep_ended = keep_ended
        self._seq = 0
        self._tasks: dict[str, TaskRecord] = {}
        self._by_id: dict[int, TaskRecord] = {}
        self._ids: list[int] = []
        self._queues: dict[str, QueueSettings] = {}
        self._controls: dict[str, QueueControl] = {}
        self._lanes: defaultdict[Lane, dict[int, Line]] = defaultdict(dict)
        self._strict: dict[str, defaultdict[str, list[Place]]] = {}
        self._placed: defaultdict[str, HandPlaced] = defaultdict(HandPlaced)
        self._due: list[tuple[datetime, int]] = []
        self._ended: tuple[Ends, Ends] = ([], [])
        """Those that did not fail, and those that did."""
        self._needed: defaultdict[int, Ends] = defaultdict(list)
        """By a task that has not ended: what would be forgotten, but for the one that waits, or has waited, for it."""
        self._keyed: defaultdict[tuple[str, str], KeyLine] = defaultdict(KeyLine)
        self._blocked: defaultdict[str, dict[int, None]] = defaultdict(dict)
        """The tasks that an admission check blocks, by the key of the blocker."""
        self._groups: defaultdict[str, dict[int, TaskRecord]] = defaultdict(dict)
        self._slots = Slots(lambda uuid: uuid not in self._tasks or counts_as_done(self._tasks[uuid].state))
        self._edges = Edges()
        self._releasing: deque[tuple[int, str, TaskState]] = deque()
        self._unrun: list[str] = []
        self._running: defaultdict[str, set[int]] = defaultdict(set)
        # A Counter, which has a `__delitem__` of its own, takes three times as long to count one more.
        self._running_in: defaultdict[str, int] = defaultdict(int)
        self._counts: defaultdict[str, defaultdict[TaskState, int]] = defaultdict(partial(defaultdict, int))
        self._last_runs: dict[int, Attempt] = {}
        self._earlier_runs: dict[int, tuple[Attempt, ...]] = {}
        """Of the few tasks that have run more than once: a tuple for each would be one more for the collector."""
        self._device_runs: defaultdict[str, dict[int, None]] = defaultdict(dict)
        """The tasks that have run on devices, by key: the runs of an account are looked for when one of them fails."""
        self._outputs = AttemptOutputs()
        self._nodes: dict[str, Node] = {}
        self._draining: set[str] = set()
        self._events: deque[tuple[str, TaskRecord, datetime, EventDetail | None]] = deque(maxlen=RING)
        self.event_seq = 0

    # --- one move -------------------------------------------------------------------------------------------------

    def _move(self, record: TaskRecord, move: Move) -> None:
        old = record.state
        slot, token, node = record.dedupe_slot, record.token, record.node
        attempt, worker_pid, device = record.attempt, record.worker_pid, record.device
        blocked_by = record.blocked_by
        if self._placed:
            self._leave_place(record, move)
        apply_move(record, move)
        new = record.state
        counts = self._counts[record.queue]
        counts[old] -= 1
        counts[new] += 1
        if old is RUNNING:
            run = Attempt(attempt, token or 0, node or "", move.run or move.state, record.started_at or move.at)
            self._end_run(record, move, run, worker_pid, device)
        if blocked_by != record.blocked_by:
            self._track_blocker(record, blocked_by)
        if slot != record.dedupe_slot:
            self._slots.swap(record.uuid, slot, record.dedupe_slot)
        if new is QUEUED:
            self._queue_up(record, old, move)
        elif new in WAITING_FOR_TIME:
            heapq.heappush(self._due, (record.due_at, record.id))
        if self._strict and record.stands_in_line:
            self._line_up(record)
        if record.key is not None:
            self._track_key(record)
        self._events.append((TOLD_PLAINLY[new], record, move.at, event_detail(old, move)))
        self.event_seq += 1
        if new in ENDED:
            self._rest(record, move.at)

    def _complete(self, record: TaskRecord, move: Move) -> None:
        """`_move` for the end of most tasks, which have no key, no slot and no place that was made by hand: the same,
        without looking for all that, in half the time."""
        assert record.started_at is not None
        task_id, queue, node, at = record.id, record.queue, record.node or "", move.at
        worker_pid, device = move.worker_pid or record.worker_pid, move.device or record.device
        token = record.token or 0
        run = Attempt(record.attempt, token, node, COMPLETED, record.started_at, at, None, worker_pid, device)
        apply_completed(record, move)
        self._running[node].discard(task_id)
        self._running_in[queue] -= 1
        counts = self._counts[queue]
        counts[RUNNING] -= 1
        counts[COMPLETED] += 1
        self._keep_run(task_id, run)
        self._events.append((TOLD_COMPLETED, record, at, None if move.note is None else event_detail(RUNNING, move)))
        self.event_seq += 1
        self._rest(record, at)

    def _rest(self, record: TaskRecord, at: datetime) -> None:
        """The task has ended; who waits for it is to hear of it."""
        if record.id in self._edges.open:
            self._releasing.append((record.id, record.uuid, record.state))
        heapq.heappush(self._ended[record.state is FAILED], (at, record.id))
        if self._needed:
            for ended in self._needed.pop(record.id, ()):
                kept = self._by_id[ended[1]]
                heapq.heappush(self._ended[kept.state is FAILED], ended)
        while self._keep_ended is not None and sum(map(len, self._ended)) > self._keep_ended:
            self._forget_first(self._find_oldest())

    def _queue_up(self, record: TaskRecord, old: TaskState, move: Move) -> None:
        if move.to_head:
            self._seq += 1
            record.position = head_position(self._seq)
        elif move.to_tail or old is FAILED:
            self._seq += 1
            record.position = tail_position(self._seq)
        if record.key is None:
            self._offer(record)

    def _leave_place(self, record: TaskRecord, move: Move) -> None:
        if move.to_head or move.to_tail or move.state in ENDED:
            self._unplace(record)

    def _unplace(self, record: TaskRecord) -> None:
        """It leaves the place it has, which may have been made by hand."""
        if record.position % GAP:
            self._placed[record.queue].discard(Put(record.position, record.id))

    def _track_blocker(self, record: TaskRecord, before: str | None) -> None:
        if before is not None:
            del self._blocked[before][record.id]
            if not self._blocked[before]:
                del self._blocked[before]
        if record.blocked_by is not None:
            self._blocked[record.blocked_by][record.id] = None

    def _end_run(
        self, record: TaskRecord, move: Move, run: Attempt, worker_pid: int | None, device: str | None
    ) -> None:
        self._running[run.node].discard(record.id)
        self._running_in[record.queue] -= 1
        ended = msgspec.structs.replace(
            run,
            finished_at=move.at,
            error=move.error,
            worker_pid=move.worker_pid or worker_pid,
            device=move.device or device,
        )
        self._keep_run(record.id, ended)
        if record.key is not None and ended.device is not None:
            self._device_runs[record.key][record.id] = None

    def _keep_run(self, task_id: int, run: Attempt) -> None:
        if (last := self._last_runs.get(task_id)) is not None:
            earlier = (*self._earlier_runs.get(task_id, ()), last)
            for old in earlier[: 1 - ATTEMPTS_KEPT]:
                self._outputs.forget_attempt(task_id, old.token)
            self._earlier_runs[task_id] = earlier[1 - ATTEMPTS_KEPT :]
        self._last_runs[task_id] = run

    def _offer(self, record: TaskRecord) -> None:
        """It may start. Where places alone count, it stands in line already."""
        if record.queue not in self._strict:
            lane = self._lanes[record.queue, record.lane]
            line = lane.get(record.priority)
            if line is None:
                lane[record.priority] = line = Line(self._by_id.get)
            line.push((record.priority, record.position, record.id))

    def _line_up(self, record: TaskRecord) -> None:
        """It has got a place in a queue that may be strict about places."""
        lines = self._strict.get(record.queue)
        if lines is not None:
            is_fifo = self._settings(record.queue).order is QueueOrder.FIFO
            heapq.heappush(lines["" if is_fifo else record.bucket or ""], (record.position, record.id))

    def _reorder(self, queue: str) -> None:
        """The queue's order is another one: everybody in it is put where he stands by that."""
        for lane in [lane for lane in self._lanes if lane[0] == queue]:
            del self._lanes[lane]
        self._strict.pop(queue, None)
        if self._settings(queue).is_strict:
            self._strict[queue] = defaultdict(list)
        for record in self._by_id.values():
            if record.queue == queue and record.stands_in_line:
                self._line_up(record)
                if record.state is QUEUED and not record.is_parked:
                    self._offer(record)

    # --- keys -----------------------------------------------------------------------------------------------------

    def _track_key(self, record: TaskRecord) -> None:
        """A task with a key has come, has moved other than by being claimed, or has another priority."""
        assert record.key is not None
        line = self._keyed[record.queue, record.key]
        line.offered.discard(record.id)
        line.holding.discard(record.id)
        if record.state is not TaskState.PAUSED:
            record.is_parked = record.state is QUEUED
        if record.state is QUEUED:
            heapq.heappush(line.waiting, self._turn_of(record))
        elif record.state in HOLDS_KEY:
            line.holding.add(record.id)
        self._repark(line, record.queue)
        # At least one of a key may run: with nobody holding it and nobody offered, nobody waits.
        if not line.holding and not line.offered:
            del self._keyed[record.queue, record.key]

    def _repark(self, line: KeyLine, queue: str) -> None:
        """Of the tasks waiting with this key, exactly the first ones that fit under its limit may start."""
        self._note_claimed(line)
        free = self._settings(queue).per_key - len(line.holding)
        first: dict[int, Entry] = {}
        while line.waiting and len(first) < free:
            entry = heapq.heappop(line.waiting)
            record = self._by_id.get(entry[2])
            if record is not None and record.state is QUEUED and self._turn_of(record) == entry:
                first[record.id] = entry
        for entry in first.values():
            heapq.heappush(line.waiting, entry)
        for task_id in line.offered - first.keys():
            self._by_id[task_id].is_parked = True
        for task_id in first.keys() - line.offered:
            self._by_id[task_id].is_parked = False
            self._offer(self._by_id[task_id])
        line.offered = set(first)

    def _note_claimed(self, line: KeyLine) -> None:
        """Who was offered and has been claimed since, holds the key. That leaves its room, and who is parked, as they
        were, so that claims need not look it up."""
        claimed = {task_id for task_id in line.offered if self._by_id[task_id].state is RUNNING}
        line.offered -= claimed
        line.holding |= claimed

    def _turn_of(self, record: TaskRecord) -> Entry:
        """Its place among those with its key, as among all: where places alone count, priorities do not."""
        return 0 if record.queue in self._strict else record.priority, record.position, record.id

    def _settings(self, queue: str) -> QueueSettings:
        return self._queues.get(queue) or QueueSettings(name=queue)

    def _find_oldest(self, failed: bool | None = None) -> Ends:
        """Those among whom is the one that ended first, of all, of the failed, or of the others."""
        if failed is not None:
            return self._ended[failed]
        return min(filter(None, self._ended), default=[])

    def _forget_first(self, ended: Ends) -> bool:
        """Forget the first of these; False if it was sent again since, is gone already, or is needed."""
        at, task_id = heapq.heappop(ended)
        record = self._by_id.get(task_id)
        if record is None or record.state not in ENDED or record.finished_at != at:
            return False
        if ended is not self._ended[record.state is FAILED]:
            return False  # sent again, and ended otherwise in the same instant
        if self._edges.children and (child := self._find_in_need(task_id)) is not None:
            self._needed[child].append((at, task_id))
            return False
        del self._tasks[record.uuid], self._by_id[task_id]
        self._last_runs.pop(task_id, None)
        self._earlier_runs.pop(task_id, None)
        self._outputs.forget(task_id)
        if record.key is not None and (ran := self._device_runs.get(record.key)) is not None:
            ran.pop(task_id, None)
            if not ran:
                del self._device_runs[record.key]
        self._edges.forget(task_id)
        if record.group_id is not None:
            del self._groups[record.group_id][task_id]
            if not self._groups[record.group_id]:
                del self._groups[record.group_id]
        self._counts[record.queue][record.state] -= 1
        return True

    def _find_in_need(self, task_id: int) -> int | None:
        """One that waits, or has waited, for this task, and has not ended: the newest, which mostly ends last."""
        children = self._edges.children.get(task_id, ())
        return max((child for child in children if self._by_id[child].state not in ENDED), default=None)

    # --- reading ----------------------------------------------------------------------------------------------------

    def signals(self, node: str) -> Signals:
        running = (self._by_id[task_id] for task_id in sorted(self._running.get(node, ())))
        asked = [record for record in running if record.cancel is not None]
        forced = tuple(record.uuid for record in asked if record.cancel is not None and record.cancel.is_forced)
        return Signals([record.uuid for record in asked], is_draining=node in self._draining, forced=forced)

    def outcomes(self, uuids: Iterable[str]) -> list[Outcome | None]:
        return [self.outcome(uuid) for uuid in uuids]

    def outcome(self, uuid: str) -> Outcome | None:
        record = self._tasks.get(uuid)
        return None if record is None else Outcome(uuid, record.state, record.result, record.error, record.cancel)

    def events(self, after: int, limit: int) -> EventPage:
        if after < 0 or not self._events or after > self.event_seq:
            return EventPage([], self.event_seq, missed=after > self.event_seq)
        first = self.event_seq - len(self._events) + 1
        start = max(first, after + 1)
        kept = islice(self._events, start - first, start - first + limit)
        page = [
            Event.of(seq, at, EventKind(kind), record.uuid, record.consumer, record.queue, detail)
            for seq, (kind, record, at, detail) in enumerate(kept, start)
        ]
        return EventPage(page, page[-1].seq if page else self.event_seq, missed=after + 1 < first)

    def _tell(self, kind: EventKind, record: TaskRecord, at: datetime, detail: EventDetail | None) -> None:
        self.event_seq += 1
        self._events.append((kind.value, record, at, detail))

    def _tell_plainly(
        self, kind: EventKind, queue: str, consumer: str, at: datetime, detail: EventDetail | None
    ) -> None:
        """Of what is no task: a queue, a device or an account."""
        self._tell(kind, TaskRecord("", consumer, at, at, at, queue=queue), at, detail)

    def find(self, uuid: str) -> TaskRecord | None:
        record = self._tasks.get(uuid)
        return record.clone() if record is not None else None

    def find_tasks(self, uuids: Sequence[str]) -> dict[str, TaskRecord]:
        return {uuid: record.clone() for uuid in uuids if (record := self._tasks.get(uuid)) is not None}

    def list_uuids(self, fragment: str, limit: int) -> list[str]:
        return list(islice((u for u in self._tasks if u.startswith(fragment) or u.endswith(fragment)), limit))

    def list_tasks(self, where: TaskFilter, before_id: int | None, limit: int) -> list[TaskRecord]:
        return [record.clone() for record in self._page(where, before_id, limit)]

    def list_ids(self, where: TaskFilter, before_id: int | None, limit: int) -> list[tuple[int, str]]:
        return [(record.id, record.uuid) for record in self._page(where, before_id, limit)]

    def _page(self, where: TaskFilter, before_id: int | None, limit: int) -> Iterator[TaskRecord]:
        if where.blocker is not None and ":" in where.blocker:
            found = sorted(self._blocked.get(where.blocker, ()), reverse=True)
            blocked = (self._by_id[task_id] for task_id in found if before_id is None or task_id < before_id)
            return islice(filter(where.matches, blocked), limit)
        if where.group is None:
            return islice(filter(where.matches, self._newest_first(before_id)), limit)
        members = reversed(self._groups.get(where.group, {}).values())
        older = (record for record in members if before_id is None or record.id < before_id)
        return islice(filter(where.matches, older), limit)

    def _newest_first(self, before_id: int | None) -> Iterator[TaskRecord]:
        if before_id is None:
            yield from reversed(self._by_id.values())
            return
        # Who turns pages must not walk through all that is newer each time. Ids only grow, and are kept in order here
        # once somebody does; those of tasks that were forgotten stay for a while.
        newest = self._ids[-1] if self._ids else 0
        self._ids += reversed(list(takewhile(lambda task_id: task_id > newest, reversed(self._by_id))))
        if len(self._ids) > 2 * len(self._by_id):
            self._ids = list(self._by_id)
        for at in range(bisect_left(self._ids, before_id) - 1, -1, -1):
            if (record := self._by_id.get(self._ids[at])) is not None:
                yield record

    def list_blockers(self) -> list[BlockedGroup]:
        groups: dict[tuple[str, str], list[int]] = {}
        for key, ids in self._blocked.items():
            for task_id in ids:
                groups.setdefault((key, self._by_id[task_id].consumer), []).append(task_id)
        return [BlockedGroup(*group, len(ids), self._by_id[min(ids)].uuid) for group, ids in sorted(groups.items())]

    def list_origins(self, uuids: Sequence[str]) -> set[str]:
        return {record.origin for record in self._by_id.values() if record.origin is not None}.intersection(uuids)

    def list_known(self, uuids: Sequence[str]) -> set[str]:
        return {uuid for uuid in uuids if uuid in self._tasks}

    def list_attempts(self, uuid: str) -> list[Attempt]:
        record = self._tasks.get(uuid)
        if record is None:
            return []
        attempts = list(self._earlier_runs.get(record.id, ()))
        if record.id in self._last_runs:
            attempts.append(self._last_runs[record.id])
        if record.state is RUNNING:
            attempts.append(_running_attempt(record))
        return attempts[-ATTEMPTS_KEPT:]

    def list_lines(self, uuid: str, token: int | None, limit: int) -> list[AttemptLine]:
        record = self._tasks.get(uuid)
        return [] if record is None else self._outputs.list_lines(record.id, token, limit)

    def list_artifacts(self, uuid: str) -> list[AttemptArtifact]:
        record = self._tasks.get(uuid)
        return [] if record is None else self._outputs.list_artifacts(record.id)

    def find_artifact(self, uuid: str, token: int, name: str) -> Artifact | None:
        record = self._tasks.get(uuid)
        return None if record is None else self._outputs.find_artifact(record.id, token, name)

    def find_end(self, n: int, failed: bool | None = None) -> datetime | None:
        ends = (
            record.finished_at
            for record in self._by_id.values()
            if record.finished_at is not None and failed in (None, record.state is FAILED)
        )
        latest = heapq.nlargest(n, ends)
        return latest[-1] if len(latest) == n else None

    def failures(self, where: TaskFilter, limit: int) -> list[FailureGroup]:
        return group_failures(filter(where.matches, self._by_id.values()), limit)

    def count(self) -> dict[tuple[str, TaskState], int]:
        return {(queue, state): n for queue, states in self._counts.items() for state, n in states.items() if n}

    def count_group(self, group: str) -> dict[TaskState, int]:
        members = self._groups.get(group, {}).values()
        return dict(Counter(record.state for record in members if record.uuid != group))

    def running_records(self) -> Iterator[TaskRecord]:
        return (self._by_id[task_id] for ids in self._running.values() for task_id in ids)

    def all_runs(self) -> Iterator[tuple[TaskRecord, Attempt]]:
        """The attempts of all tasks that are kept, each with its task, those that run included."""
        yield from self._runs_of(self._last_runs)
        for record in self.running_records():
            yield record, _running_attempt(record)

    def device_runs(self, key: str) -> Iterator[tuple[TaskRecord, Attempt]]:
        """Those of the tasks with this key that have run on a device, or run now."""
        yield from self._runs_of(self._device_runs.get(key, ()))
        for record in self.running_records():
            if record.key == key:
                yield record, _running_attempt(record)

    def _runs_of(self, task_ids: Iterable[int]) -> Iterator[tuple[TaskRecord, Attempt]]:
        for task_id in task_ids:
            record = self._by_id[task_id]
            yield record, self._last_runs[task_id]
            for earlier in self._earlier_runs.get(task_id, ()):
                yield record, earlier

    def find_node(self, incarnation: str) -> Node | None:
        return self._nodes.get(incarnation)

    def list_nodes(self) -> list[NodeStatus]:
        return [
            NodeStatus(
                node=node,
                running=len(self._running.get(incarnation, ())),
                is_draining=incarnation in self._draining,
            )
            for incarnation, node in self._nodes.items()
        ]


def _running_attempt(record: TaskRecord) -> Attempt:
    assert record.started_at is not None
    return Attempt(
        record.attempt,
        record.token or 0,
        record.node or "",
        RUNNING,
        record.started_at,
        worker_pid=record.worker_pid,
        device=record.device,
    )
