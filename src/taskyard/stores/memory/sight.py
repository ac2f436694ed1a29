"""What stands around some tasks, in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime

from taskyard.model.blocker import Blocker
from taskyard.model.state import RUNNING, TaskState
from taskyard.model.task import TaskRecord
from taskyard.model.why import Busy, First, Holder, Scene
from taskyard.stores.memory.tasks import Tasks
from taskyard.stores.scene import ClusterState, Found, Held, Running, Wanted, make_scene


class Sight(Tasks):
    def _find_scene(self, records: Sequence[TaskRecord], now: datetime) -> Scene:
        nodes = [(node, incarnation in self._draining) for incarnation, node in sorted(self._nodes.items())]
        places = ClusterState(self._queues, self._controls, nodes, list(self._all_running()))
        wanted = Wanted.of(records, self._queues)
        holders = {key: holder for key in wanted.keys if (holder := self._key_holder(key)) is not None}
        parents = {child: parent for child in wanted.children if (parent := self._first_parent(child)) is not None}
        heads = {line: head for line in wanted.lines if (head := self._first_of(line)) is not None}
        lanes = self._find_lane_blockers(wanted.lanes)
        return make_scene(records, places, Found(holders, parents, heads, lanes), now=now)

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
        # Entries of those that have gone, or stand elsewhere by now, may still be there.
        standing = [
            (position, task_id)
            for position, task_id in (lines.get(name, ()) if lines is not None else ())
            if (record := self._by_id.get(task_id)) is not None
            and record.stands_in_line
            and record.position == position
        ]
        if not standing:
            return None
        record = self._by_id[min(standing)[1]]
        return First(record.uuid, record.state, record.updated_at)
