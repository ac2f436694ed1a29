"""Looks at a PostgreSQL store from outside: the server, its settings and sessions, the schema, nodes and tasks. Changes
nothing.

The server may be away, the database locked, another user's or not a store yet. Each part is read as far as it can be,
and what went wrong is in the answer: `inspect` raises nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import asyncpg
import msgspec

from taskyard.errors import StoreBusy, StoreError, StoreMigrationChanged, StoreTooNew
from taskyard.model.node import NodeStatus
from taskyard.model.state import TaskState
from taskyard.model.task_filter import TaskFilter
from taskyard.ports.store import Schema
from taskyard.stores.inspection import RUNNING_AT_MOST, StoreActivity
from taskyard.stores.postgres import reader
from taskyard.stores.postgres.connection import connect
from taskyard.stores.postgres.errors import LOST, typed_errors
from taskyard.stores.postgres.schedules import read_schedules
from taskyard.stores.postgres.schema import find_schema

Connection = asyncpg.Connection

MIN_BLOCK_S = 1.0
"""Seconds: nodes wait for each other all the time, for milliseconds. A younger transaction blocks nobody for long."""

OPEN_S = 60.0
"""Seconds from which on an open transaction is listed."""

SETTINGS = ("fsync", "full_page_writes", "synchronous_commit", "autovacuum")

_BLOCKING = """
    WITH locks AS (
        SELECT l.pid, l.granted, l.mode
        FROM pg_locks AS l JOIN pg_class AS c ON c.oid = l.relation JOIN pg_namespace AS n ON n.oid = c.relnamespace
        WHERE l.locktype = 'relation' AND n.nspname = 'taskyard'
          AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
    ), waiting AS (
        SELECT pid FROM locks WHERE NOT granted
        UNION
        SELECT l.pid FROM pg_locks AS l JOIN pg_stat_activity AS a ON a.pid = l.pid
        WHERE NOT l.granted AND a.application_name = 'taskyard' AND a.datname = current_database()
    ), held_up AS (
        SELECT pid AS waiter, unnest(pg_blocking_pids(pid)) AS pid FROM waiting
    ), blocking AS (
        SELECT pid FROM held_up
        UNION
        SELECT pid FROM locks
        WHERE mode IN ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')
    )
    SELECT a.pid, coalesce(a.usename, '') AS user, coalesce(a.application_name, '') AS application,
        extract(epoch FROM clock_timestamp() - a.xact_start)::float8 AS open_s, coalesce(a.query, '') AS query,
        (SELECT count(DISTINCT waiter)::int FROM held_up AS h WHERE h.pid = a.pid) AS holds_up
    FROM pg_stat_activity AS a JOIN blocking AS b ON b.pid = a.pid
    WHERE a.pid <> pg_backend_pid() AND coalesce(a.xact_start <= clock_timestamp() - $1::interval, true)
    ORDER BY holds_up DESC, a.xact_start LIMIT 5
"""
"""Every user sees all locks. Of other users' sessions only a privileged user sees the age and the query."""

_OPEN = """
    SELECT pid, application_name AS application, extract(epoch FROM clock_timestamp() - xact_start)::float8 AS open_s
    FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'
      AND xact_start < clock_timestamp() - $1::interval AND pid <> ALL($2::int[])
    ORDER BY xact_start LIMIT 5
"""


class BlockingSession(msgspec.Struct, frozen=True):
    """A session that a Taskyard session waits for, or that holds a strong lock on our tables. `open_s` is None where
    this user may not see it; `holds_up` counts the sessions that wait for it."""

    pid: int
    user: str
    application: str
    open_s: float | None
    query: str
    holds_up: int


class OpenTransaction(msgspec.Struct, frozen=True):
    """A session that has had a transaction open for longer than `OPEN_S`."""

    pid: int
    application: str
    open_s: float


@dataclass(frozen=True, slots=True)
class Connections:
    """How many the server has, how many of them are of Taskyard, and how many it allows."""

    used: int
    ours: int
    most: int


@dataclass(slots=True)
class PostgresInspection:
    """Parts that were not read are None or empty: `refusal` or `error` says why. If `error` is `StoreBusy`, another
    session has locked what was to be read."""

    version: str | None = None
    connect_s: float = 0.0
    answer_s: float = 0.0
    is_standby: bool = False
    settings: Mapping[str, str] = field(default_factory=dict)
    clock_skew_s: float = 0.0
    connections: Connections | None = None
    blocking: Sequence[BlockingSession] = ()
    open_transactions: Sequence[OpenTransaction] = ()
    schema: Schema | None = None
    refusal: StoreTooNew | StoreMigrationChanged | None = None
    nodes: Sequence[NodeStatus] = ()
    activity: StoreActivity | None = None
    error: StoreError | None = None


async def inspect(url: str) -> PostgresInspection:
    """Look at the database at `url`, with one connection of its own."""
    found = PostgresInspection()
    began = time.monotonic()
    try:
        conn = await connect(url)
    except StoreError as error:
        found.error = error
        return found
    found.connect_s = time.monotonic() - began
    try:
        with typed_errors(url):
            await _read(conn, url, found)
    except StoreError as error:
        found.error = error
        if isinstance(error, StoreBusy):
            found.blocking = await _merge_blocking(conn, found.blocking)
    finally:
        conn.terminate()
    return found


async def _read(conn: Connection, url: str, found: PostgresInspection) -> None:
    began = time.monotonic()
    found.version = await conn.fetchval("SELECT current_setting('server_version')")
    found.answer_s = time.monotonic() - began
    found.is_standby = await conn.fetchval("SELECT pg_is_in_recovery()")
    found.settings = {name: await conn.fetchval("SELECT current_setting($1)", name) for name in SETTINGS}
    server_now: datetime = await conn.fetchval("SELECT clock_timestamp()")
    found.clock_skew_s = abs((server_now - datetime.now(UTC)).total_seconds())
    found.connections = await _count_connections(conn)
    found.blocking = await _list_blocking(conn)
    rows = await conn.fetch(_OPEN, timedelta(seconds=OPEN_S), [session.pid for session in found.blocking])
    found.open_transactions = [OpenTransaction(**dict(row)) for row in rows]
    try:
        found.schema = await find_schema(conn, url)
    except (StoreTooNew, StoreMigrationChanged) as error:
        found.refusal = error
        return
    if found.schema.version and found.schema.version == found.schema.newest:
        found.nodes = await reader.nodes(conn)
        found.activity = await _read_activity(conn)


async def _count_connections(conn: Connection) -> Connections:
    row = await conn.fetchrow(
        "SELECT count(*), count(*) FILTER (WHERE application_name = 'taskyard'), "
        "current_setting('max_connections')::int FROM pg_stat_activity WHERE datid IS NOT NULL"
    )
    assert row is not None
    return Connections(*row)


async def _list_blocking(conn: Connection) -> list[BlockingSession]:
    rows = await conn.fetch(_BLOCKING, timedelta(seconds=MIN_BLOCK_S))
    return [BlockingSession(**dict(row)) for row in rows]


async def _merge_blocking(conn: Connection, known: Sequence[BlockingSession]) -> list[BlockingSession]:
    """With the sessions that have blocked the inspection itself."""
    try:
        found = await _list_blocking(conn)
    except (*LOST, asyncpg.PostgresError):
        found = []
    pids = {session.pid for session in known}
    return [*known, *(session for session in found if session.pid not in pids)]


async def _read_activity(conn: Connection) -> StoreActivity:
    waiting = await conn.fetch(
        "SELECT DISTINCT w.consumer FROM taskyard.lane AS l "
        "CROSS JOIN LATERAL (SELECT t.consumer FROM taskyard.task AS t "
        "WHERE t.queue = l.queue AND t.lane = l.lane AND t.state = 'queued' AND NOT t.is_parked LIMIT 1) AS w"
    )
    return StoreActivity(
        counts=await reader.count(conn),
        running=await reader.list_tasks(conn, TaskFilter(states=(TaskState.RUNNING,)), None, RUNNING_AT_MOST),
        waiting_consumers=[consumer for (consumer,) in waiting],
        due_at=await conn.fetchval("SELECT min(due_at) FROM taskyard.task WHERE state IN ('scheduled', 'retrying')"),
        newest_at=await conn.fetchval("SELECT max(updated_at) FROM taskyard.task"),
        schedules=await read_schedules(conn),
        now=await conn.fetchval("SELECT clock_timestamp()"),
    )
