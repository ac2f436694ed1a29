"""What every store does alike to show the scene around some tasks: say whom to look for, and put it all together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Self, TypeVar

import msgspec

from taskyard.model.blocker import Blocker
from taskyard.model.device import DeviceStatus
from taskyard.model.node import Node
from taskyard.model.queue import UNTOUCHED, QueueControl, QueueSettings
from taskyard.model.state import TaskState
from taskyard.model.task import TaskRecord
from taskyard.model.why import Busy, First, Holder, NodeScene, QueueScene, Scene, Silence, line_of

K = TypeVar("K")

Held = tuple[str, str]
"""A queue, and a key or a line in it."""


class Wanted(msgspec.Struct, frozen=True):
    """What to look for: the tasks that hold these keys, those that these tasks (by id) wait for, the first of these
    lines, and the oldest task that is blocked in each of these lanes."""

    keys: list[Held]
    children: list[int]
    lines: list[Held]
    lanes: list[Held]

    @classmethod
    def of(cls, records: Sequence[TaskRecord], rules: Mapping[str, QueueSettings]) -> Self:
        keys = {(record.queue, record.key) for record in records if record.is_parked and record.key is not None}
        lines = {
            (record.queue, line)
            for record in records
            if record.state is TaskState.QUEUED
            and record.queue in rules
            and (line := line_of(record, rules[record.queue])) is not None
        }
        children = [record.id for record in records if record.state is TaskState.BLOCKED and record.blocked_by is None]
        lanes = {(record.queue, record.lane) for record in records if record.state is TaskState.QUEUED}
        return cls(sorted(keys), children, sorted(lines), sorted(lanes))


class Found(msgspec.Struct, frozen=True):
    """Who they are, where there is anybody."""

    holders: dict[Held, Holder] = {}
    parents: dict[int, tuple[str, TaskState]] = {}
    heads: dict[Held, First] = {}
    lane_blockers: dict[Held, Blocker] = {}


class Running(msgspec.Struct, frozen=True):
    """What runs of one source in one queue on one node."""

    queue: str
    source: str
    node: str
    busy: Busy


class ClusterState(msgspec.Struct, frozen=True):
    """The queues that have rules or of which something was said, the nodes that live and whether they are drained, what
    runs, by incarnation the nodes that are silent, and the devices of the pools that are looked at."""

    rules: Mapping[str, QueueSettings]
    controls: Mapping[str, QueueControl]
    nodes: Sequence[tuple[Node, bool]]
    running: Sequence[Running]
    silent: Mapping[str, Silence] = {}
    devices: Sequence[DeviceStatus] = ()


def find_pools(queues: Iterable[str], rules: Mapping[str, QueueSettings]) -> list[str]:
    """Those of these queues that may be device pools: a pool keeps to the order of arrival."""
    return sorted({queue for queue in queues if queue in rules and rules[queue].is_strict})


def make_scene(
    records: Sequence[TaskRecord], places: ClusterState, found: Found, *, now: datetime, queues: Sequence[str] = ()
) -> Scene:
    """`queues` are shown even if none of the records is in them."""
    in_queue = _sum((one.queue, one.busy) for one in places.running)
    on_node = _sum(((one.node, one.source), one.busy) for one in places.running)
    by_id = {record.id: record.uuid for record in records}
    shown = {
        name: QueueScene(
            settings=places.rules.get(name) or QueueSettings(name=name),
            control=places.controls.get(name, UNTOUCHED),
            running=in_queue.get(name),
        )
        for name in {*queues, *(record.queue for record in records)}
    }
    nodes = [
        NodeScene(
            label=node.label,
            incarnation=node.incarnation,
            consumers=node.consumers,
            limits=node.limits,
            max_running=node.max_running,
            executors=node.executors,
            capacities=node.capacities,
            places=node.places,
            checks=node.checks,
            is_draining=is_draining,
            is_stopping=node.is_stopping,
            running={source: busy for (name, source), busy in on_node.items() if name == node.incarnation},
        )
        for node, is_draining in places.nodes
    ]
    return Scene(
        now=now,
        queues=shown,
        nodes=nodes,
        silent=places.silent,
        holders=found.holders,
        parents={by_id[child]: parent for child, parent in found.parents.items()},
        heads=found.heads,
        lane_blockers=found.lane_blockers,
        devices=_by_pool(places.devices),
    )


def _by_pool(devices: Iterable[DeviceStatus]) -> dict[str, list[DeviceStatus]]:
    pools: dict[str, list[DeviceStatus]] = {}
    for device in devices:
        pools.setdefault(device.spec.pool, []).append(device)
    return pools


def _sum(counted: Iterable[tuple[K, Busy]]) -> dict[K, Busy]:
    total: dict[K, Busy] = {}
    for key, busy in counted:
        total[key] = total[key] + busy if key in total else busy
    return total
