"""The room that nodes have for tasks, counted down and up while a forecast is played."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence

from taskyard.model.blocker import Labels, satisfies
from taskyard.model.limits import Demand
from taskyard.model.task import TaskRecord
from taskyard.model.why import NodeScene

UNLIMITED = sys.maxsize


class Host:
    """One node: its room in total, for each consumer, in each executor and at each place."""

    def __init__(self, node: NodeScene, running: Iterable[TaskRecord]) -> None:
        self._node = node
        self._left = dict(node.limits)
        self._executors = dict(node.capacities)
        self._places = {consumer: list(places) for consumer, places in node.places.items()}
        self._at: dict[int, Labels] = {}
        self.total = UNLIMITED if node.max_running is None else node.max_running
        others = {consumer: busy.count for consumer, busy in node.running.items()}
        for record in running:
            self.take(record)
            others[record.consumer] = others.get(record.consumer, 0) - 1
        for consumer, count in others.items():
            self._count(consumer, -max(0, count))

    def serves(self, consumer: str) -> bool:
        return consumer in self._node.consumers

    def room(self, record: TaskRecord) -> int:
        """How many tasks like this one may start here."""
        consumer = record.consumer
        if not self.serves(consumer):
            return 0
        room = min(self.total, self._left.get(consumer, UNLIMITED))
        if (executor := self._node.executors.get(consumer)) is not None:
            room = min(room, self._executors.get(executor, UNLIMITED))
        needs = self._needs(record)
        if consumer in self._places:
            room = min(room, sum(satisfies(labels, needs) for labels in self._places[consumer]))
        elif needs:
            room = 0
        return max(0, room)

    def take(self, record: TaskRecord) -> None:
        self._count(record.consumer, -1)
        needs = self._needs(record)
        fitting = [labels for labels in self._places.get(record.consumer, ()) if satisfies(labels, needs)]
        if fitting:
            self._at[record.id] = place = min(fitting, key=len)
            self._places[record.consumer].remove(place)

    def free(self, record: TaskRecord) -> None:
        self._count(record.consumer, 1)
        if (place := self._at.pop(record.id, None)) is not None:
            self._places[record.consumer].append(place)

    def _count(self, consumer: str, n: int) -> None:
        self.total += n
        if consumer in self._left:
            self._left[consumer] += n
        executor = self._node.executors.get(consumer)
        if executor in self._executors:
            self._executors[executor] += n

    def _needs(self, record: TaskRecord) -> Mapping[str, str]:
        if record.requires is None:
            return {}
        return {name: value for name, value in record.requirements.items() if name not in self._node.checks}


class Hosts:
    """All nodes that take tasks. `running` are the tasks of the queue that run; what runs of other queues keeps its
    room."""

    def __init__(self, nodes: Sequence[NodeScene], running: Iterable[TaskRecord]) -> None:
        by_node: dict[str | None, list[TaskRecord]] = {}
        for record in running:
            by_node.setdefault(record.node, []).append(record)
        self._hosts = {
            node.incarnation: Host(node, by_node.get(node.incarnation, ())) for node in nodes if node.takes_tasks
        }
        self._stopping = {node.incarnation for node in nodes if not node.takes_tasks}

    def knows(self, incarnation: str | None) -> bool:
        """Whether this node lives, so that what it runs will end."""
        return incarnation in self._hosts or incarnation in self._stopping

    def demand(self, lanes: Mapping[str, TaskRecord]) -> Demand:
        """What may start now, with one task of each lane that has some."""
        rooms = dict.fromkeys(lanes, 0)
        total = 0
        for host in self._hosts.values():
            of_host = {lane: host.room(record) for lane, record in lanes.items()}
            # What a node has left for other consumers is no room for these.
            total += min(max(0, host.total), sum(of_host.values()))
            for lane, room in of_host.items():
                rooms[lane] += room
        return Demand(min(total, UNLIMITED), {lane: min(room, UNLIMITED) for lane, room in rooms.items()})

    def take(self, record: TaskRecord) -> str | None:
        """Where it runs: on the node with most room. Consumers that share an executor may start more in one claim than
        that has room for, and wait there."""
        able = [name for name, host in self._hosts.items() if host.serves(record.consumer)]
        if not able:
            return None
        chosen = max(able, key=lambda name: (self._hosts[name].room(record) > 0, self._hosts[name].total))
        self._hosts[chosen].take(record)
        return chosen

    def free(self, record: TaskRecord, incarnation: str | None) -> None:
        if incarnation in self._hosts:
            self._hosts[incarnation].free(record)


def capacity_of(nodes: Sequence[NodeScene], consumers: Iterable[str]) -> int:
    """How many tasks of these consumers the nodes run at once, if they run nothing else; `UNLIMITED` at most."""
    names = set(consumers)
    total = 0
    for node in nodes:
        if not node.takes_tasks:
            continue
        served = names.intersection(node.consumers)
        by_executor: dict[str | None, int] = {}
        for consumer in served:
            executor = node.executors.get(consumer)
            by_executor[executor] = by_executor.get(executor, 0) + node.limits.get(consumer, UNLIMITED)
        rooms = (min(n, node.capacities.get(executor or "", UNLIMITED)) for executor, n in by_executor.items())
        total += min(sum(rooms), UNLIMITED if node.max_running is None else node.max_running)
    return min(total, UNLIMITED)
