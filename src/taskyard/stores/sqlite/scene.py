"""What stands around some tasks, on SQLite: three queries, however many tasks they are, and two more for the devices
of pools."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

import apsw
import msgspec

from taskyard.model.blocker import Blocker, split_key
from taskyard.model.node import Node
from taskyard.model.queue import QueueControl, QueueSettings
from taskyard.model.state import TaskState
from taskyard.model.task import TaskRecord
from taskyard.model.why import Busy, First, Holder, Scene, Silence
from taskyard.stores.records import from_us
from taskyard.stores.scene import ClusterState, Found, Running, Wanted, find_pools, make_scene
from taskyard.stores.sqlite.devices import list_devices
from taskyard.stores.sqlite.statements import IN_LINE

_PLACES = (
    "SELECT 'rules', name, settings, NULL, NULL FROM queue UNION ALL "
    "SELECT 'said', queue, body, NULL, NULL FROM control UNION ALL "
    "SELECT * FROM (SELECT 'node', incarnation, info, boot_id, is_draining FROM node ORDER BY incarnation)"
)
# The uuid is that of the row with the smallest time: SQLite promises that of a bare column beside min().
_RUNNING = (
    "SELECT queue, consumer, node, count(*), uuid, min(started_at) FROM task INDEXED BY task_running "
    "WHERE state = 'running' GROUP BY queue, consumer, node"
)
# What the index is for is said word by word: the planner does not see that one state is one of three.
_WITH_KEY = (
    "(SELECT id FROM task INDEXED BY task_key WHERE queue = asked.value ->> 0 AND key = asked.value ->> 1 "
    "AND state IN ('queued', 'running', 'retrying') AND state = {} ORDER BY id LIMIT 1)"
)
_HOLDER = ", ".join(map(_WITH_KEY.format, ("'running'", "'retrying'", "'queued' AND is_parked = 0")))
_HEAD = (
    "SELECT id FROM task INDEXED BY task_fifo_bucket WHERE queue = asked.value ->> 0 "
    f"AND fifo_bucket = asked.value ->> 1 AND {IN_LINE} ORDER BY position LIMIT 1"
)
_BLOCKERS = (
    "SELECT 'key', asked.value ->> 0, asked.value ->> 1, task.uuid, task.state, task.started_at "
    f"FROM json_each(?1) AS asked JOIN task ON task.id = coalesce({_HOLDER}) "
    "UNION ALL SELECT * FROM (SELECT 'parent', child, min(parent), task.uuid, task.state, NULL FROM dependency "
    "JOIN task ON task.id = parent WHERE child IN (SELECT value FROM json_each(?2)) AND done = 0 GROUP BY child) "
    "UNION ALL SELECT 'head', asked.value ->> 0, asked.value ->> 1, task.uuid, task.state, task.updated_at "
    f"FROM json_each(?3) AS asked JOIN task ON task.id = ({_HEAD}) "
    "UNION ALL SELECT 'lane', asked.value ->> 0, asked.value ->> 1, task.blocked_by, task.state, task.blocked_at "
    "FROM json_each(?4) AS asked JOIN task ON task.id = (SELECT min(id) FROM task INDEXED BY task_blocked_lane "
    "WHERE queue = asked.value ->> 0 AND lane = asked.value ->> 1 AND blocked_by IS NOT NULL)"
)


def find_scene(
    records: Sequence[TaskRecord], conn: apsw.Connection, *, now: datetime, is_dead: Callable[[Node, str], bool]
) -> Scene:
    places = find_places(conn, is_dead, queues=[record.queue for record in records])
    found = find_blockers(conn, Wanted.of(records, places.rules))
    return make_scene(records, places, found, now=now)


def find_places(conn: apsw.Connection, is_dead: Callable[[Node, str], bool], *, queues: Sequence[str]) -> ClusterState:
    rules: dict[str, QueueSettings] = {}
    controls: dict[str, QueueControl] = {}
    nodes: list[tuple[Node, bool]] = []
    silent: dict[str, Silence] = {}
    rows: Any = conn.execute(_PLACES)
    for what, name, text, boot_id, draining in rows:
        if what == "rules":
            rules[name] = msgspec.json.decode(text, type=QueueSettings)
        elif what == "said":
            controls[name] = msgspec.json.decode(text, type=QueueControl)
        elif is_dead(node := msgspec.json.decode(text, type=Node), boot_id):
            silent[name] = Silence(node.label)
        else:
            nodes.append((node, bool(draining)))
    counted: Any = conn.execute(_RUNNING)
    running = [
        Running(queue, source, node, Busy(n, uuid, from_us(since))) for queue, source, node, n, uuid, since in counted
    ]
    pools = find_pools(queues, rules)
    devices = list_devices(conn, pools=pools) if pools else []
    return ClusterState(rules, controls, nodes, running, silent, devices)


def find_blockers(conn: apsw.Connection, wanted: Wanted) -> Found:
    found = Found({}, {}, {}, {})
    lists = wanted.keys, wanted.children, wanted.lines, wanted.lanes
    asked = tuple(msgspec.json.encode(names).decode() for names in lists)
    rows: Any = conn.execute(_BLOCKERS, asked)
    for what, where, name, uuid, state, since in rows:
        if what == "parent":
            found.parents[where] = uuid, TaskState(state)
        elif what == "lane":
            found.lane_blockers[where, name] = Blocker(*split_key(uuid), from_us(since))
        elif what == "head":
            found.heads[where, name] = First(uuid, TaskState(state), from_us(since))
        else:
            found.holders[where, name] = Holder(uuid, TaskState(state), None if since is None else from_us(since))
    return found
