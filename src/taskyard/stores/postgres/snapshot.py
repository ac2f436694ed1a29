"""A queue for a forecast, on PostgreSQL: the first tasks of each part of it, in eleven queries."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from operator import attrgetter
from typing import Any

from taskyard.model.fairness import NO_FAIRNESS_STATE, FairnessState
from taskyard.model.queue import QueueSettings
from taskyard.model.queue_order import (
    COUNTED,
    DUE_READ,
    FEWEST_READ,
    LANES_READ,
    MORE_READ,
    PARTS_READ,
    RUNNING_READ,
    RUNS_COUNTED,
    RUNS_NEEDED,
    RUNS_READ,
    RUNS_SEARCHED,
    QueueSnapshot,
)
from taskyard.model.state import TaskState
from taskyard.model.task import Mark, TaskRecord
from taskyard.model.why import line_of
from taskyard.stores.postgres.connection import Connection
from taskyard.stores.postgres.reader import count
from taskyard.stores.postgres.scene import find_blockers, find_places
from taskyard.stores.records import LISTED, POSTGRES, TASK
from taskyard.stores.scene import Wanted, make_scene
from taskyard.stores.snapshot import Read, count_consumers

_NAMES = (*(name for name in TASK.select(without=Mark.RELATION | Mark.FINAL) if name in LISTED), "open_dependencies")
_COLUMNS = ", ".join(_NAMES[:-1]) + (
    ", coalesce((SELECT open_dependencies FROM taskyard.task_relation WHERE task_relation.id = task.id), 0) "
    "AS open_dependencies"
)
_to_record = TASK.reader(POSTGRES, _NAMES)

# An order by the columns of the index lets a plan that was made for an empty table use the index all the same.
_READ = f"SELECT {_COLUMNS} FROM taskyard.task WHERE"
_RUNNING = f"{_READ} queue = $1 AND state = 'running' ORDER BY queue, token LIMIT {RUNNING_READ}"
_LANES = f"(SELECT * FROM taskyard.lane WHERE queue = $1 ORDER BY lane LIMIT {LANES_READ}) AS l"
_OF_LANES = (
    f"SELECT t.* FROM {_LANES} CROSS JOIN LATERAL (VALUES (0, l.low_0), (1, l.low_1), (2, l.low_2)) AS p(level, was) "
    f"CROSS JOIN LATERAL ({_READ} queue = l.queue AND lane = l.lane AND state = 'queued' AND NOT is_parked "
    "AND priority = p.level::smallint ORDER BY position LIMIT $2) AS t WHERE p.was IS NOT NULL"
)
_IN_LINE = "fifo_bucket IS NOT NULL AND (state IN ('queued', 'paused') OR blocked_by IS NOT NULL)"
_OF_LINES = (
    "WITH RECURSIVE named (fifo_bucket) AS ("
    f"(SELECT fifo_bucket FROM taskyard.task WHERE queue = $1 AND {_IN_LINE} ORDER BY fifo_bucket LIMIT 1) UNION ALL "
    f"SELECT (SELECT t.fifo_bucket FROM taskyard.task AS t WHERE t.queue = $1 AND {_IN_LINE} "
    "AND t.fifo_bucket > named.fifo_bucket ORDER BY t.fifo_bucket LIMIT 1) "
    "FROM named WHERE named.fifo_bucket IS NOT NULL) "
    f"SELECT t.* FROM (SELECT fifo_bucket FROM named WHERE fifo_bucket IS NOT NULL LIMIT {LANES_READ}) AS b "
    f"CROSS JOIN LATERAL ({_READ} queue = $1 AND fifo_bucket = b.fifo_bucket AND {_IN_LINE} "
    f"ORDER BY position LIMIT least($2, greatest({FEWEST_READ}, {PARTS_READ} / (SELECT greatest(1, least({LANES_READ}, "
    "count(fifo_bucket))) FROM named)))) AS t"
)
_OF_KEYS = (
    "SELECT t.* FROM unnest($2::text[]) AS k(name) CROSS JOIN (VALUES (false), (true)) AS p(is_parked) "
    f"CROSS JOIN LATERAL ({_READ} queue = $1 AND key = k.name AND key IS NOT NULL AND state = 'queued' "
    "AND is_parked = p.is_parked ORDER BY priority, position LIMIT $3) AS t"
)
# Parked or not, in the order of the index, so that the plan does not depend on how many have a key.
_HAS_KEY = (
    "SELECT FROM taskyard.task WHERE queue = $1 AND key IS NOT NULL AND state = 'queued' "
    "ORDER BY queue, key, is_parked LIMIT 1"
)
_HELD = f"{_READ} queue = $1 AND queue <> '' AND state IN ('paused', 'blocked') ORDER BY queue, id LIMIT $2"
_DUE = (
    f"SELECT t.* FROM (SELECT id FROM (SELECT id, queue FROM taskyard.task WHERE state IN ('scheduled', 'retrying') "
    f"ORDER BY due_at, id LIMIT {DUE_READ}) AS first WHERE queue = $1 LIMIT $2) AS d "
    f"CROSS JOIN LATERAL ({_READ} task.id = ANY (ARRAY[d.id])) AS t"
)
_COUNTED = (
    "SELECT l.lane, (SELECT count(*) FROM (SELECT FROM taskyard.task WHERE queue = l.queue AND lane = l.lane "
    f"AND state = 'queued' AND NOT is_parked ORDER BY queue, lane, priority, position LIMIT {COUNTED}) AS counted), "
    "num_nonnulls(l.low_0, l.low_1, l.low_2) "
    f"FROM {_LANES}"
)
_TURNS = (
    "SELECT passed_over_1, passed_over_2, last_favored_1, last_favored_2, bucket FROM taskyard.fairness "
    "WHERE queue = $1"
)
# The number of rows is written out: for a number that it does not know, the planner might sort the whole table.
_MEDIANS = (
    "SELECT consumer, percentile_cont(0.5) WITHIN GROUP (ORDER BY run_s) FROM ("
    "SELECT consumer, extract(epoch FROM finished_at - started_at)::float AS run_s, "
    "row_number() OVER (PARTITION BY consumer ORDER BY finished_at DESC, id DESC) AS nth FROM ("
    "SELECT id, consumer, state, started_at, finished_at FROM taskyard.finished "
    "ORDER BY finished_at DESC, id DESC LIMIT {limit}) AS latest "
    "WHERE state = 'completed' AND started_at IS NOT NULL AND consumer = ANY ($1::text[])) AS runs "
    f"WHERE nth <= {RUNS_COUNTED} GROUP BY consumer HAVING count(*) >= {RUNS_NEEDED}"
)


async def find_snapshot(conn: Connection, queue: str, limit: int, now: datetime) -> QueueSnapshot:
    places = await find_places(conn, [queue])
    settings = places.rules.get(queue) or QueueSettings(name=queue)
    counts = {state: n for (name, state), n in (await count(conn)).items() if name == queue}
    lanes = await _count_lanes(conn, queue)
    # Race: a task may have started between two queries; what was read first counts.
    read = Read(limit)
    read.add(map(_to_record, await conn.fetch(_RUNNING, queue)))
    if settings.is_strict:
        lines: dict[str, list[TaskRecord]] = {}
        for record in map(_to_record, await conn.fetch(_OF_LINES, queue, limit + MORE_READ)):
            lines.setdefault(line_of(record, settings) or "", []).append(record)
        share = read.share(len(lines), limit + MORE_READ)
        for name, line in lines.items():
            read.add_line(name, sorted(line, key=attrgetter("position")), share)
    else:
        share = read.share(sum(levels for _, levels in lanes.values()))
        for level in _split(map(_to_record, await conn.fetch(_OF_LANES, queue, share)), attrgetter("lane", "priority")):
            read.add_part(level, share)
    read.add(map(_to_record, await conn.fetch(_HELD, queue, limit)))
    read.add(map(_to_record, await conn.fetch(_DUE, queue, limit + MORE_READ)))
    if keys := read.find_keys():
        share = read.share(len(keys))
        rows = await conn.fetch(_OF_KEYS, queue, keys, share)
        for part in _split(map(_to_record, rows), attrgetter("key", "is_parked")):
            if settings.is_strict:
                read.add(part)  # those of its key in a line that was read are known anyway
            else:
                read.add_part(sorted(part, key=attrgetter("priority", "position")), share)
    found = list(read.records.values())
    turns = await conn.fetchrow(_TURNS, queue)
    blockers = await find_blockers(conn, Wanted.of(found, places.rules))
    return QueueSnapshot(
        queue=queue,
        scene=make_scene(found, places, blockers, now=now, queues=[queue]),
        counts=counts,
        consumers=count_consumers({lane: n for lane, (n, _) in lanes.items()}, counts.get(TaskState.QUEUED, 0)),
        fairness=NO_FAIRNESS_STATE if turns is None else _to_turns(turns),
        records=found,
        line_ends=read.line_ends,
        cuts=read.cuts,
        has_keys=bool(await conn.fetch(_HAS_KEY, queue)),
    )


def _to_turns(row: Any) -> FairnessState:
    passed_1, passed_2, favored_1, favored_2, bucket = row
    return FairnessState((0, passed_1, passed_2), (None, favored_1, favored_2), bucket)


def _split(records: Iterable[TaskRecord], name: Callable[[TaskRecord], Any]) -> Iterable[list[TaskRecord]]:
    """The parts that have these names, each in the order of its places."""
    parts: dict[Any, list[TaskRecord]] = {}
    for record in records:
        parts.setdefault(name(record), []).append(record)
    return [sorted(part, key=attrgetter("position")) for part in parts.values()]


async def _count_lanes(conn: Connection, queue: str) -> dict[str, tuple[int, int]]:
    """How many tasks of each lane could start, and how many priorities they have."""
    return {lane: (n, levels) for lane, n, levels in await conn.fetch(_COUNTED, queue)}


async def find_medians(conn: Connection, consumers: Sequence[str]) -> dict[str, float]:
    """Consumers with too few of the latest runs are searched for further back."""
    found: dict[str, float] = {}
    for limit in (RUNS_READ, RUNS_SEARCHED):
        if missing := [consumer for consumer in consumers if consumer not in found]:
            found |= {name: run_s for name, run_s in await conn.fetch(_MEDIANS.format(limit=limit), missing)}  # noqa: C416
    return found
