"""What stands around some tasks, on PostgreSQL: three queries, however many tasks they are, and three more if there are
device pools."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import msgspec

from taskyard.model.blocker import Blocker, split_key
from taskyard.model.node import Node
from taskyard.model.queue import QueueControl, QueueSettings
from taskyard.model.state import TaskState
from taskyard.model.task import TaskRecord
from taskyard.model.why import Busy, First, Holder, Scene, Silence
from taskyard.ports.store import BEATS_PER_LEASE
from taskyard.stores.postgres.connection import Connection
from taskyard.stores.postgres.devices import list_devices
from taskyard.stores.scene import ClusterState, Found, Running, Wanted, find_pools, make_scene

_PLACES = (
    "SELECT name, settings, control, NULL AS info, NULL AS is_draining, NULL AS beat_at, NULL AS lease_s, "
    "NULL AS silent_s FROM taskyard.queue UNION ALL "
    "(SELECT NULL, NULL, NULL, info, is_draining, beat_at, lease_s, extract(epoch FROM now() - beat_at)::float "
    "FROM taskyard.node ORDER BY incarnation)"
)
BEATS_MISSED = 2
"""Beats that a node has missed when it is called silent: long before it is given up, and seldom for nothing."""

_RUNNING = (
    "SELECT queue, consumer, node, count(*), (array_agg(uuid ORDER BY started_at, id))[1], min(started_at) "
    "FROM taskyard.task WHERE state = 'running' GROUP BY queue, consumer, node"
)
_WITH_KEY = (
    "(SELECT id FROM taskyard.task WHERE queue = asked.queue AND key = asked.name AND key IS NOT NULL "
    "AND {} ORDER BY id LIMIT 1)"
)
_HOLDS = "state IN ('running', 'retrying') AND state = '{}'"
_WAYS = (_HOLDS.format("running"), _HOLDS.format("retrying"), "state = 'queued' AND is_parked < true")
_BLOCKERS = (
    "SELECT 'key', asked.queue, asked.name, holder.uuid, holder.state, holder.started_at "
    "FROM unnest($1::text[], $2::text[]) AS asked(queue, name) CROSS JOIN LATERAL ("
    "SELECT uuid, state, started_at FROM taskyard.task "
    f"WHERE id = coalesce({', '.join(map(_WITH_KEY.format, _WAYS))})) AS holder UNION ALL "
    "SELECT 'head', asked.queue, asked.name, head.uuid, head.state, head.updated_at "
    "FROM unnest($3::text[], $4::text[]) AS asked(queue, name) CROSS JOIN LATERAL ("
    "SELECT uuid, state, updated_at FROM taskyard.task WHERE queue = asked.queue AND fifo_bucket = asked.name "
    "AND fifo_bucket IS NOT NULL AND (state IN ('queued', 'paused') OR blocked_by IS NOT NULL) "
    "ORDER BY position LIMIT 1) AS head UNION ALL "
    "SELECT 'parent', waits.child::text, NULL, parent.uuid, parent.state, NULL "
    "FROM (SELECT child, min(parent) AS parent FROM taskyard.dependency "
    "WHERE child = ANY ($5::bigint[]) AND NOT done GROUP BY child) AS waits "
    "CROSS JOIN LATERAL (SELECT uuid, state FROM taskyard.task WHERE id = waits.parent UNION ALL "
    "SELECT uuid, state FROM taskyard.finished WHERE id = waits.parent LIMIT 1) AS parent UNION ALL "
    "SELECT 'lane', asked.queue, asked.name, oldest.blocked_by, oldest.state, oldest.blocked_at "
    "FROM unnest($6::text[], $7::text[]) AS asked(queue, name) CROSS JOIN LATERAL ("
    "SELECT blocked_by, state, blocked_at FROM taskyard.task WHERE queue = asked.queue AND lane = asked.name "
    "AND blocked_by IS NOT NULL ORDER BY id LIMIT 1) AS oldest"
)


async def find_scene(conn: Connection, records: Sequence[TaskRecord], *, now: datetime) -> Scene:
    places = await find_places(conn, [record.queue for record in records])
    found = await find_blockers(conn, Wanted.of(records, places.rules))
    return make_scene(records, places, found, now=now)


async def find_places(conn: Connection, queues: Sequence[str]) -> ClusterState:
    rules: dict[str, QueueSettings] = {}
    controls: dict[str, QueueControl] = {}
    nodes: list[tuple[Node, bool]] = []
    silent: dict[str, Silence] = {}
    for name, settings, control, info, is_draining, beat_at, lease_s, silent_s in await conn.fetch(_PLACES):
        if info is not None:
            node = msgspec.json.decode(info, type=Node)
            if silent_s <= lease_s:
                nodes.append((node, is_draining))
            if silent_s > lease_s * BEATS_MISSED / BEATS_PER_LEASE:
                silent[node.incarnation] = Silence(node.label, beat_at, lease_s)
            continue
        rules[name] = msgspec.json.decode(settings, type=QueueSettings)
        if control is not None:
            controls[name] = msgspec.json.decode(control, type=QueueControl)
    running = [
        Running(queue, source, node, Busy(n, uuid, since))
        for queue, source, node, n, uuid, since in await conn.fetch(_RUNNING)
    ]
    pools = find_pools(queues, rules)
    devices = await list_devices(conn, pools) if pools else []
    return ClusterState(rules, controls, nodes, running, silent, devices)


async def find_blockers(conn: Connection, wanted: Wanted) -> Found:
    found = Found({}, {}, {}, {})
    keys, lines, lanes = (
        [[pair[at] for pair in pairs] for at in (0, 1)] for pairs in (wanted.keys, wanted.lines, wanted.lanes)
    )
    rows = await conn.fetch(_BLOCKERS, *keys, *lines, wanted.children, *lanes)
    for what, where, name, uuid, state, since in rows:
        if what == "parent":
            found.parents[int(where)] = uuid, TaskState(state)
        elif what == "lane":
            found.lane_blockers[where, name] = Blocker(*split_key(uuid), since)
        elif what == "head":
            found.heads[where, name] = First(uuid, TaskState(state), since)
        else:
            found.holders[where, name] = Holder(uuid, TaskState(state), since)
    return found
