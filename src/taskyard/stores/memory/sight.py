"""What stands around some tasks, in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import islice

from taskyard.model.blocker import Blocker
from taskyard.model.fairness import FairnessState
from taskyard.model.queue_order import COUNTED, DUE_READ, MORE_READ, RUNNING_READ, QueueSnapshot
from taskyard.model.state import COMPLETED, QUEUED, RUNNING, WAITING_FOR_TIME, TaskState
from taskyard.model.task import TaskRecord
from taskyard.model.why import Busy, First, Holder, Scene
from taskyard.stores.memory.devices import DeviceBook, list_statuses
from taskyard.stores.memory.lines import Place, in_heap_order
from taskyard.stores.memory.tasks import Tasks
from taskyard.stores.scene import ClusterState, Found, Held, Running, Wanted, find_pools, make_scene
from taskyard.stores.snapshot import Read, count_consumers, search_run_medians

APART = frozenset({TaskState.PAUSED, TaskState.BLOCKED})


class Sight(Tasks):
    devices: DeviceBook

    def _find_scene(self, records: Sequence[TaskRecord], now: datetime, *, queues: Sequence[str] = ()) -> Scene:
        nodes = [(node, incarnation in self._draining) for incarnation, node in sorted(self._nodes.items())]
        pools = find_pools([*queues, *(record.queue for record in records)], self._queues)
        devices = list_statuses((one for one in self.devices.known.values() if one.spec.pool in pools), self)
        places = ClusterState(self._queues, self._controls, nodes, list(self._all_running()), devices=devices)
        wanted = Wanted.of(records, self._queues)
        holders = {key: holder for key in wanted.keys if (holder := self._key_holder(key)) is not None}
        parents = {child: parent for child in wanted.children if (parent := self._first_parent(child)) is not None}
        heads = {line: head for line in wanted.lines if (head := self._first_of(line)) is not None}
        lanes = self._find_lane_blockers(wanted.lanes)
        return make_scene(records, places, Found(holders, parents, heads, lanes), now=now, queues=queues)

    def _find_snapshot(self, queue: str, limit: int, turns: FairnessState, now: datetime) -> QueueSnapshot:
        counts = {state: n for state, n in self._counts[queue].items() if n} if queue in self._counts else {}
        running = [self._by_id[task_id] for ids in self._running.values() for task_id in sorted(ids)]
        read = Read(limit)
        read.add([record for record in running if record.queue == queue][:RUNNING_READ])
        self._read_waiting(queue, read)
        if any(counts.get(state) for state in APART):
            apart = (one for one in self._by_id.values() if one.queue == queue and one.state in APART)
            read.add(islice(apart, limit))
        read.add(self._first_due(queue, limit + MORE_READ))
        keys = read.find_keys()
        share = read.share(len(keys))
        for key in keys:
            found = list(self._first_with_key(queue, key, share))
            if queue in self._strict:
                read.add(found)  # those of its key in a line that was read are known anyway
            else:
                read.add_part(found, share)
        records = [record.clone() for record in read.records.values()]
        for record in records:
            record.args = "{}"
        return QueueSnapshot(
            queue=queue,
            scene=self._find_scene(records, now, queues=[queue]),
            counts=counts,
            consumers=count_consumers(self._count_lanes(queue), counts.get(QUEUED, 0)),
            fairness=turns,
            records=records,
            line_ends=read.line_ends,
            cuts=read.cuts,
            has_keys=any(name == queue for name, _ in self._keyed),
        )

    def _read_waiting(self, queue: str, read: Read) -> None:
        """Of each lane and priority, or of each line."""
        lines = self._strict.get(queue)
        if lines is None:
            levels = [line for (name, _), lane in self._lanes.items() if name == queue for line in lane.values()]
            levels = [line for line in levels if line.first(1)]
            share = read.share(len(levels))
            for level in levels:
                read.add_part(level.first(share), share)
            return
        share = read.share(len(lines), read.limit + MORE_READ)
        for name, places in sorted(lines.items()):
            read.add_line(name, list(islice(self._standing(places), share)), share)

    def _count_lanes(self, queue: str) -> dict[str, int]:
        """How many tasks could start in each lane, as far as they are counted."""
        counted = Counter[str]()
        for (name, lane), levels in self._lanes.items():
            if name == queue:
                counted[lane] = sum(len(line.first(COUNTED)) for line in levels.values())
        for places in self._strict.get(queue, {}).values():
            counted.update(one.lane for one in islice(self._standing(places), COUNTED) if one.state is QUEUED)
        return counted

    def _standing(self, line: list[Place]) -> Iterator[TaskRecord]:
        """Entries of those that have gone, or stand elsewhere by now, may still be there."""
        for position, task_id in in_heap_order(line):
            record = self._by_id.get(task_id)
            if record is not None and record.stands_in_line and record.position == position:
                yield record

    def _first_with_key(self, queue: str, key: str, limit: int) -> Iterator[TaskRecord]:
        line = self._keyed.get((queue, key))
        standing = (
            record
            for entry in (in_heap_order(line.waiting) if line is not None else ())
            if (record := self._by_id.get(entry[2])) is not None
            and record.state is QUEUED
            and self._turn_of(record) == entry
        )
        yield from islice(standing, limit)

    def _first_due(self, queue: str, limit: int) -> Iterator[TaskRecord]:
        due = (
            record
            for due_at, task_id in islice(in_heap_order(self._due), DUE_READ)
            if (record := self._by_id.get(task_id)) is not None
            and record.queue == queue
            and record.state in WAITING_FOR_TIME
            and record.due_at == due_at
        )
        yield from islice(due, limit)

    def median_run_s(self, consumers: Sequence[str]) -> dict[str, float]:
        return search_run_medians(self._read_runs, consumers)

    def _read_runs(self, consumers: Sequence[str], limit: int) -> Iterator[tuple[str, float]]:
        for task_id, run in islice(reversed(self._last_runs.items()), limit):
            consumer = self._by_id[task_id].consumer
            if consumer in consumers and run.state is COMPLETED and run.finished_at is not None:
                yield consumer, (run.finished_at - run.started_at).total_seconds()

    def _find_lane_blockers(self, lanes: Sequence[Held]) -> dict[Held, Blocker]:
        oldest: dict[Held, TaskRecord] = {}
        for task_id in (task_id for ids in self._blocked.values() for task_id in ids):
            record = self._by_id[task_id]
            lane = record.queue, record.lane
            if lane in lanes and (lane not in oldest or record.id < oldest[lane].id):
                oldest[lane] = record
        return {lane: record.blocker for lane, record in oldest.items() if record.blocker is not None}

    def _all_running(self) -> Iterator[Running]:
        for node, ids in self._running.items():
            for record in map(self._by_id.__getitem__, ids):
                assert record.started_at is not None
                yield Running(record.queue, record.consumer, node, Busy(1, record.uuid, record.started_at))

    def _key_holder(self, key: Held) -> Holder | None:
        """Who runs, else who is tried again, else who may start; the first added of them."""
        line = self._keyed.get(key)
        if line is None:
            return None
        self._note_claimed(line)
        holding = [self._by_id[task_id] for task_id in sorted(line.holding)]
        running = [record for record in holding if record.state is RUNNING]
        first = running or holding or [self._by_id[task_id] for task_id in sorted(line.offered)]
        return Holder(first[0].uuid, first[0].state, first[0].started_at) if first else None

    def _first_parent(self, child: int) -> tuple[str, TaskState] | None:
        for parent in self._edges.parents(child):
            if child in self._edges.open.get(parent, ()) and parent in self._by_id:
                record = self._by_id[parent]
                return record.uuid, record.state
        return None

    def _first_of(self, line: Held) -> First | None:
        queue, name = line
        lines = self._strict.get(queue)
        record = next(self._standing(lines.get(name, []) if lines is not None else []), None)
        return None if record is None else First(record.uuid, record.state, record.updated_at)
