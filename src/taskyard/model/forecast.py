"""In which order a queue will start its tasks, and when: the rules of claiming, played forward from a snapshot.

Pure. Starts and ends are played one moment after the other; in each moment `model.picking` chooses, as it does for a
claim. A run takes the median time of its consumer, and completes. ADR 25 says what a forecast does not know.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping
from datetime import datetime, timedelta
from itertools import count
from statistics import median
from typing import NamedTuple

from taskyard.model.hosts import UNLIMITED, Hosts, capacity_of
from taskyard.model.limits import Demand, Quota, tighter
from taskyard.model.lineup import Keys, Waiting
from taskyard.model.order import Priority
from taskyard.model.picking import pick
from taskyard.model.queue import QueueSettings
from taskyard.model.queue_order import QueueEntry, QueueOrderView, QueueSnapshot, WhatIf
from taskyard.model.state import QUEUED, RUNNING, WAITING_FOR_TIME, TaskState
from taskyard.model.task import TaskRecord
from taskyard.model.why import QueueScene, Why, explain_wait

ASSUMED_S = 60.0
"""How long a run is taken to last where nothing is known of any consumer. Only the order depends on it."""

LAST_POSITION = 1 << 62
"""Behind all positions that a store hands out."""

Medians = Mapping[str, float]
"""Seconds that a run of a consumer takes; a consumer with too few runs is missing."""


class Start(NamedTuple):
    """A task starts. `is_sure` says that the time depends on known medians alone; `is_estimated` that a run may still
    go on which takes longer than its median."""

    at: datetime
    is_sure: bool
    is_estimated: bool


class Finish(NamedTuple):
    """When all that runs and waits will have ended; with `is_lower_bound`, not before `at`."""

    at: datetime
    is_lower_bound: bool


class Play:
    """One course of events, from a snapshot on. `starts` are those of tasks that were queued then, in their order;
    `ends` those of tasks that ran then, if they are known; `late` the tasks that have run longer than their median."""

    def __init__(self, snapshot: QueueSnapshot, medians: Medians, concurrency: int | None) -> None:
        scene = snapshot.scene
        queue = _queue_of(snapshot)
        self.queue, self.at, self.turns = snapshot.queue, scene.now, snapshot.fairness
        self._concurrency, self._is_open = concurrency, queue.control.is_open
        self._medians = medians
        self._assumed_s = median(medians.values()) if medians else ASSUMED_S
        # Records of a snapshot are the caller's: this play moves its own.
        records = [record.clone() for record in snapshot.records]
        self._running = [record for record in records if record.state is RUNNING]
        self._keys = Keys(records, queue.settings)
        self._waiting = Waiting(queue.settings, snapshot.line_ends)
        self._hosts: Hosts | None = Hosts(scene.nodes, self._running)
        self._queued = {record.id for record in records if record.state is QUEUED}
        self._keyed = [record for record in records if record.state is QUEUED and record.is_parked]
        self._lanes = {record.lane: record for record in records}
        self._due = [(record.due_at, record.id, record) for record in records if record.state in WAITING_FOR_TIME]
        heapq.heapify(self._due)
        for record in records:
            if record.state is QUEUED or record.stands_in_line:
                self._waiting.add(record)
        self._running_count = snapshot.counts.get(RUNNING, len(self._running))
        self._ends: list[tuple[datetime, int, TaskRecord, str | None]] = []
        self._tails = count(LAST_POSITION)
        self._unsure_from: datetime | None = None
        self._now = self.at
        self.late: set[str] = set()
        self.ends: dict[str, datetime] = {}
        self._relaxed = 0
        self._cuts, self._is_cut = snapshot.cuts, False
        self.starts: dict[str, Start] = {}
        self.order: list[TaskRecord] = []
        self._started: Counter[str] = Counter()
        self.last_end_at = self.at
        for record in self._running:
            self._go_on(record)

    # --- what a run takes -----------------------------------------------------------------------------------------

    def _go_on(self, record: TaskRecord) -> None:
        """It runs already. If its time is over, it is taken to run as long again: how long is not known."""
        started_at = record.started_at or self.at
        ends_at = started_at + self._run_time(record)
        is_lost = self._hosts is not None and not self._hosts.knows(record.node)
        is_known = record.consumer in self._medians and not is_lost
        is_late = ends_at < self.at
        if is_late or not is_known:
            ends_at = max(ends_at, self.at + max(self.at - started_at, timedelta.resolution))
        if not is_known:
            self._unsure_from = self.at
        elif is_late:
            self.late.add(record.uuid)
        else:
            self.ends[record.uuid] = ends_at
        self._end_at(ends_at, record, record.node)

    def _begin(self, record: TaskRecord, node: str | None) -> None:
        if record.consumer not in self._medians and self._unsure_from is None:
            self._unsure_from = self.at
        self._end_at(self.at + self._run_time(record), record, node)

    def _run_time(self, record: TaskRecord) -> timedelta:
        return timedelta(seconds=self._medians.get(record.consumer, self._assumed_s))

    def _end_at(self, ends_at: datetime, record: TaskRecord, node: str | None) -> None:
        if record.id in self._queued or record.state is RUNNING:
            self.last_end_at = max(self.last_end_at, ends_at)
        heapq.heappush(self._ends, (ends_at, record.id, record, node))

    def _start_now(self, record: TaskRecord) -> Start:
        is_sure = not self._relaxed and record.consumer in self._medians
        is_sure = is_sure and (self._unsure_from is None or self.at <= self._unsure_from)
        return Start(self.at, is_sure, is_estimated=bool(self.late) and self.at > self._now)

    @property
    def is_sure(self) -> bool:
        """Whether all that was played depends on known medians alone."""
        return not self._relaxed and self._unsure_from is None

    # --- moment after moment --------------------------------------------------------------------------------------

    def run(self, limit: int) -> None:
        """Play until `limit` of the tasks that were queued have started, or all that were read, or the last one of a
        part of which not all were read."""
        if not self._is_open:
            self._relax()
        while len(self.order) < min(limit, len(self._queued)) and not self._is_cut:
            self._settle()
            self._start(limit)
            # Where nobody has room, no task that becomes due changes that.
            is_stuck = not self._ends and self._demand().total == 0
            if (is_stuck or not self._advance()) and not self._relax():
                return

    def _advance(self) -> bool:
        """On to the moment in which something happens next."""
        nexts = [heap[0][0] for heap in (self._ends, self._due) if heap]
        if not nexts:
            return False
        self.at = max(self.at, min(nexts))
        return True

    def _settle(self) -> None:
        while self._ends and self._ends[0][0] <= self.at:
            _, _, record, node = heapq.heappop(self._ends)
            self._running_count -= 1
            if self._hosts is not None:
                self._hosts.free(record, node)
            for changed in self._keys.end(record):
                self._waiting.reparked(changed)
        while self._due and self._due[0][0] <= self.at:
            _, _, record = heapq.heappop(self._due)
            if record.state is TaskState.SCHEDULED:
                record.position = next(self._tails)  # only a task that was tried before comes back to its place
            changed_too = self._keys.add(record) if record.key is not None else []
            record.state = QUEUED
            self._waiting.add(record)
            for changed in changed_too:
                if changed is not record:
                    self._waiting.reparked(changed)

    def _start(self, limit: int) -> None:
        quota = Quota(self._demand(), self._rooms())
        offer = self._waiting.offer(self.turns, quota, self.at)
        picked = pick([offer], quota)
        self.turns = offer.turns
        self._waiting.remove(picked)
        for record in picked:
            self._keys.start(record)
            if record.id not in self._queued:
                continue
            self._started[record.consumer] += 1
            if len(self.order) < limit and not self._is_cut:
                self.starts[record.uuid] = self._start_now(record)
                self.order.append(record)
            self._is_cut = self._is_cut or record.id in self._cuts
        for record in picked:
            self._running_count += 1
            self._begin(record, None if self._hosts is None else self._hosts.take(record))

    def _demand(self) -> Demand:
        if self._hosts is None:
            return Demand(UNLIMITED, {}, UNLIMITED)
        return self._hosts.demand(self._lanes)

    def _rooms(self) -> dict[str, int]:
        if not self._is_open:
            return {self.queue: 0}
        return {} if self._concurrency is None else {self.queue: self._concurrency - self._running_count}

    def _relax(self) -> bool:
        """Nothing starts any more by itself. What is left follows in the order in which it would start if nothing held
        it: first as if the queue were running and nothing in line were held, then as if all nodes had room."""
        self._relaxed += 1
        self._is_open = True
        self._waiting.pass_obstacles()
        if self._relaxed == 2:
            self._hosts = None
        if self._relaxed == 3:
            self._waiting.unpark()
            for record in self._keyed:
                if record.uuid not in self.starts and not record.can_start:
                    record.is_parked = False
                    self._waiting.reparked(record)
        return self._relaxed <= 3

    def finish(self, snapshot: QueueSnapshot, slots: int | None) -> Finish | None:
        """When all that runs and waits will have ended; estimated where some of it was not played. Tasks with a key
        wait for each other. Keys of tasks that were not read are unknown: with keys the estimate is a lower bound."""
        if not self.is_sure:
            return None
        if snapshot.counts.get(QUEUED, 0) <= self._started.total():
            return Finish(self.last_end_at, is_lower_bound=False)
        rest = Counter(snapshot.consumers) - self._started
        if slots == 0 or any(consumer not in self._medians for consumer in rest):
            return None
        work_s = {consumer: count * self._medians[consumer] for consumer, count in rest.items()}
        needs_s = [self._medians[consumer] for consumer in rest]
        if slots is not None:
            going_s = sum((end[0] - self.at).total_seconds() for end in self._ends)
            needs_s.append((sum(work_s.values()) + going_s) / slots)
        for consumer, needed_s in work_s.items():
            own = capacity_of(snapshot.scene.nodes, [consumer])
            if not own:
                return None
            needs_s.append(needed_s / min(own, UNLIMITED if slots is None else slots))
        needs_s += self._keys.work_s(self._medians)
        at = max(self.last_end_at, self.at + timedelta(seconds=max(needs_s, default=0.0)))
        return Finish(at, is_lower_bound=snapshot.has_keys)


def _queue_of(snapshot: QueueSnapshot) -> QueueScene:
    found = snapshot.scene.queues.get(snapshot.queue)
    return found or QueueScene(settings=QueueSettings(name=snapshot.queue))


def _count_slots(snapshot: QueueSnapshot, concurrency: int | None) -> int | None:
    if not snapshot.all_consumers:
        return concurrency
    capacity = capacity_of(snapshot.scene.nodes, snapshot.all_consumers)
    slots = tighter(concurrency, None if capacity >= UNLIMITED else capacity)
    return None if slots is None else int(slots)


def forecast(
    snapshot: QueueSnapshot, medians: Medians, *, limit: int, concurrency: int | None = None
) -> QueueOrderView:
    """The queue in the order in which it will start, with at most `limit` entries of each part; and when all of it
    would be over if at most `concurrency` of its tasks ran at once."""
    queue = _queue_of(snapshot)
    play = Play(snapshot, medians, queue.concurrency)
    play.run(limit)
    other = None
    if concurrency is not None:
        other = Play(snapshot, medians, concurrency)
        other.run(limit)
    slots = _count_slots(snapshot, queue.concurrency)
    what_if = None
    if other is not None and concurrency is not None:
        other_slots = _count_slots(snapshot, concurrency)
        other_end = other.finish(snapshot, other_slots)
        what_if = WhatIf(
            concurrency=concurrency,
            slots=other_slots,
            finished_at=other_end and other_end.at,
            is_lower_bound=other_end is not None and other_end.is_lower_bound,
        )
    end = play.finish(snapshot, slots)
    entries = _Entries(snapshot, play, other)
    return QueueOrderView(
        queue=snapshot.queue,
        now=snapshot.scene.now,
        state=queue.control.state,
        order=queue.settings.order,
        concurrency=queue.concurrency,
        slots=slots,
        counts=snapshot.counts,
        running=entries.running()[:limit],
        waiting=entries.waiting(),
        apart=entries.apart()[:limit],
        finished_at=end and end.at,
        is_exact=snapshot.counts.get(QUEUED, 0) <= len(play.order) and not play.late,
        is_lower_bound=end is not None and end.is_lower_bound,
        without_median=sorted(snapshot.all_consumers - medians.keys()),
        what_if=what_if,
    )


class _Entries:
    """The tasks of a snapshot as people are shown them."""

    def __init__(self, snapshot: QueueSnapshot, play: Play, other: Play | None) -> None:
        self._scene, self._play, self._other = snapshot.scene, play, other
        self._records = {record.uuid: record for record in snapshot.records}

    def running(self) -> list[QueueEntry]:
        found = [record for record in self._records.values() if record.state is RUNNING]
        return [self._entry(record) for record in sorted(found, key=lambda r: (r.started_at or r.due_at, r.id))]

    def waiting(self) -> list[QueueEntry]:
        return [self._entry(self._records[record.uuid], n) for n, record in enumerate(self._play.order, 1)]

    def apart(self) -> list[QueueEntry]:
        order = (TaskState.PAUSED, TaskState.BLOCKED, TaskState.RETRYING, TaskState.SCHEDULED)
        found = [record for record in self._records.values() if record.state in order]
        by_time = [record for record in found if record.state in WAITING_FOR_TIME]
        by_place = [record for record in found if record.state not in WAITING_FOR_TIME]
        by_place.sort(key=lambda r: (order.index(r.state), r.priority, r.position, r.id))
        by_time.sort(key=lambda r: (r.due_at, r.id))
        return [self._entry(record) for record in (*by_place, *by_time)]

    def _entry(self, record: TaskRecord, place: int | None = None) -> QueueEntry:
        why: Why | None = explain_wait(record, self._scene)
        return QueueEntry(
            uuid=record.uuid,
            consumer=record.consumer,
            state=record.state,
            priority=Priority(record.priority),
            title=record.title,
            key=record.key,
            place=place,
            created_at=record.created_at,
            due_at=record.due_at,
            started_at=record.started_at if record.state is RUNNING else None,
            progress=record.progress if record.state is RUNNING else None,
            expected_start_at=_start_of(record, self._play),
            expected_end_at=self._play.ends.get(record.uuid),
            is_late=record.uuid in self._play.late,
            is_estimated=any(_is_estimated(record, play) for play in (self._play, self._other)),
            what_if_start_at=None if self._other is None else _start_of(record, self._other),
            why=why,
        )


def _start_of(record: TaskRecord, play: Play) -> datetime | None:
    start = play.starts.get(record.uuid)
    return start.at if start is not None and start.is_sure else None


def _is_estimated(record: TaskRecord, play: Play | None) -> bool:
    start = None if play is None else play.starts.get(record.uuid)
    return start is not None and start.is_sure and start.is_estimated
