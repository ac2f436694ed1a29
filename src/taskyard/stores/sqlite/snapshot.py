"""A queue for a forecast, on SQLite: the first tasks of each part of it, in one read transaction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

import apsw
import msgspec

from taskyard.model.fairness import NO_FAIRNESS_STATE, FairnessState
from taskyard.model.node import Node
from taskyard.model.queue import QueueSettings
from taskyard.model.queue_order import DUE_READ, LANES_READ, MORE_READ, RUNNING_READ, QueueSnapshot
from taskyard.model.state import TaskState
from taskyard.model.task import TaskRecord
from taskyard.stores.records import LISTED, SQLITE, TASK
from taskyard.stores.scene import Wanted, make_scene
from taskyard.stores.snapshot import Read, count_consumers, search_run_medians
from taskyard.stores.sqlite.claims import LINES
from taskyard.stores.sqlite.scene import find_blockers, find_places
from taskyard.stores.sqlite.statements import IN_LINE

_READ = f"SELECT {', '.join(LISTED)} FROM task"
_to_record = TASK.reader(SQLITE, LISTED)

_COUNTS = (
    f"SELECT state, lane, priority, n FROM state_count WHERE state IN ({', '.join(repr(str(s)) for s in TaskState)}) "
    "AND queue = ?"
)
_RUNNING = f"{_READ} INDEXED BY task_running WHERE state = 'running' AND queue = ? ORDER BY token LIMIT {RUNNING_READ}"
_OF_LANE = (
    f"{_READ} WHERE queue = ? AND lane = ? AND state = 'queued' AND is_parked = 0 AND priority = ? "
    "ORDER BY position LIMIT ?"
)
_OF_LINE = (
    f"{_READ} INDEXED BY task_fifo_bucket WHERE queue = ? AND fifo_bucket = ? AND {IN_LINE} ORDER BY position LIMIT ?"
)
# What the index is for is said word by word: the planner does not see that one state is one of three.
_OF_KEY = (
    f"{_READ} INDEXED BY task_key WHERE queue = ? AND key = ? AND state IN ('queued', 'running', 'retrying') "
    "AND state = 'queued' AND is_parked = ? ORDER BY priority, position LIMIT ?"
)
_HAS_KEYS = (
    "SELECT EXISTS (SELECT 1 FROM task INDEXED BY task_key WHERE queue = ? AND key IS NOT NULL "
    "AND state IN ('queued', 'running', 'retrying'))"
)
_HELD = f"{_READ} INDEXED BY task_held WHERE queue = ? AND state IN ('paused', 'blocked') ORDER BY id LIMIT ?"
_DUE = (
    f"{_READ} WHERE id IN (SELECT id FROM (SELECT id, queue FROM task INDEXED BY task_due "
    f"WHERE state IN ('scheduled', 'retrying') ORDER BY due_at, id LIMIT {DUE_READ}) WHERE queue = ? LIMIT ?)"
)
_RUNS = (
    "SELECT consumer, (finished_at - started_at) / 1e6 FROM (SELECT consumer, state, started_at, finished_at "
    "FROM task INDEXED BY task_finished WHERE finished_at IS NOT NULL ORDER BY finished_at DESC LIMIT ?) "
    "WHERE state = 'completed' AND started_at IS NOT NULL AND consumer IN (SELECT value FROM json_each(?))"
)


def find_snapshot(
    queue: str, limit: int, conn: apsw.Connection, *, now: datetime, is_dead: Callable[[Node, str], bool]
) -> QueueSnapshot:
    with conn:  # all of it from one moment
        places = find_places(conn, is_dead, queues=[queue])
        settings = places.rules.get(queue) or QueueSettings(name=queue)
        counts, lanes = _count(conn, queue)
        read = Read(limit)
        _read_all(conn, settings, sorted(lanes), read)
        _read_keys(conn, settings, read)
        found = list(read.records.values())
        has_keys: Any = conn.execute(_HAS_KEYS, (queue,)).get
        turns: Any = conn.execute("SELECT body FROM fairness WHERE queue = ?", (queue,)).get
        scene = make_scene(found, places, find_blockers(conn, Wanted.of(found, places.rules)), now=now, queues=[queue])
    by_lane: dict[str, int] = {}
    for (lane, _), n in lanes.items():
        by_lane[lane] = by_lane.get(lane, 0) + n
    return QueueSnapshot(
        queue=queue,
        scene=scene,
        counts=counts,
        consumers=count_consumers(by_lane, counts.get(TaskState.QUEUED, 0)),
        fairness=NO_FAIRNESS_STATE if turns is None else msgspec.json.decode(turns, type=FairnessState),
        records=found,
        line_ends=read.line_ends,
        cuts=read.cuts,
        has_keys=bool(has_keys),
    )


def _count(conn: apsw.Connection, queue: str) -> tuple[dict[TaskState, int], dict[tuple[str, int], int]]:
    """How many tasks are in each state; and of those that are queued, in each lane and priority."""
    counts: dict[TaskState, int] = {}
    lanes: dict[tuple[str, int], int] = {}
    rows: Any = conn.execute(_COUNTS, (queue,))
    for text, lane, priority, n in rows:
        state = TaskState(text)
        if n:
            counts[state] = counts.get(state, 0) + n
        if n > 0 and state is TaskState.QUEUED:
            lanes[lane, priority] = n
    return counts, lanes


def _read_all(conn: apsw.Connection, settings: QueueSettings, lanes: Sequence[tuple[str, int]], read: Read) -> None:
    queue = settings.name
    read.add(_records(conn, _RUNNING, (queue,)))
    if settings.is_strict:
        names: Any = conn.execute(LINES, (queue,)).get
        lines = msgspec.json.decode(names)[:LANES_READ]
        share = read.share(len(lines), read.limit + MORE_READ)
        for name in lines:
            read.add_line(name, _records(conn, _OF_LINE, (queue, name, share)), share)
    else:
        share = read.share(len(lanes[:LANES_READ]))
        for lane, priority in lanes[:LANES_READ]:
            read.add_part(_records(conn, _OF_LANE, (queue, lane, priority, share)), share)
    read.add(_records(conn, _HELD, (queue, read.limit)))
    read.add(_records(conn, _DUE, (queue, read.limit + MORE_READ)))


def _read_keys(conn: apsw.Connection, settings: QueueSettings, read: Read) -> None:
    keys = read.find_keys()
    share = read.share(len(keys))
    for key in keys:
        for is_parked in (0, 1):
            found = _records(conn, _OF_KEY, (settings.name, key, is_parked, share))
            if settings.is_strict:
                read.add(found)  # those of its key in a line that was read are known anyway
            else:
                read.add_part(found, share)


def _records(conn: apsw.Connection, sql: str, given: tuple[Any, ...]) -> list[TaskRecord]:
    return [_to_record(row) for row in conn.execute(sql, given)]


def find_medians(consumers: Sequence[str], conn: apsw.Connection) -> dict[str, float]:
    def read(names: Sequence[str], limit: int) -> Any:
        return conn.execute(_RUNS, (limit, msgspec.json.encode(list(names)).decode()))

    return search_run_medians(read, consumers)
