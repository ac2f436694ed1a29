"""A store on PostgreSQL: the server, its settings, the schema, who is connected and who is in the way."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime, timedelta

import asyncpg

from taskyard.cli.doctor.blocking import LOCK, describe_blocker, list_blockers
from taskyard.cli.doctor.finding import Finding, problem, warning
from taskyard.cli.doctor.schema import describe_refusal, describe_schema
from taskyard.cli.doctor.traffic import RUNNING_AT_MOST
from taskyard.cli.doctor.work import Work, work
from taskyard.cli.documents import sum_states
from taskyard.cli.nodes import clock_text
from taskyard.cli.text import clean, counted, cut, duration, seconds_between
from taskyard.errors import StoreBusy, StoreError, StoreMigrationChanged, StoreTooNew
from taskyard.model.node import Node, NodeStatus
from taskyard.model.state import TaskState
from taskyard.model.task_filter import TaskFilter
from taskyard.resources.cpu import cpu_budget
from taskyard.resources.database import database_pool
from taskyard.stores.postgres import reader
from taskyard.stores.postgres.connection import connect
from taskyard.stores.postgres.errors import LOST, typed_errors
from taskyard.stores.postgres.schedules import read_schedules
from taskyard.stores.postgres.schema import find_schema

Conn = asyncpg.Connection

BESIDES = 7
"""Connections of a node besides its pool: two for turns, two for commands, one that listens, one that tells, one that
beats."""

CROWDED = 0.8
"""Of all connections the server allows; from there on a node that starts may find none."""

OPEN_S = 60.0
"""A transaction that is open for longer is worth a look."""

SKEW_S = 1.0
"""What a clock may be off. Tasks are due by the clock of the node that looks."""


async def server(url: str) -> AsyncIterator[Finding]:
    """As far as it can be reached; nothing is changed."""
    began = time.monotonic()
    try:
        conn = await connect(url)
    except StoreError as error:
        yield problem("server", str(error), "nothing else can be said of this store before that is solved")
        return
    named: set[int] = set()
    try:
        with typed_errors(url):
            yield await _greeting(conn, time.monotonic() - began)
            async for finding in _inside(conn, url):
                if finding.topic == LOCK:
                    named.add(finding.data["pid"])
                yield finding
    except StoreBusy:
        for finding in await _find_blockers(conn):
            if finding.data["pid"] not in named:
                yield finding
        text = "tables of Taskyard's are locked, and what is not listed here could not be looked at"
        yield problem("store", text, f"solve what is listed as `{LOCK}` first, then look again")
    except StoreError as error:
        yield problem("store", str(error), "what is not listed here could not be looked at")
    finally:
        conn.terminate()


async def _find_blockers(conn: Conn) -> list[Finding]:
    """Those in whose way the doctor himself has come."""
    try:
        return [describe_blocker(blocker) for blocker in await list_blockers(conn)]
    except (*LOST, asyncpg.PostgresError):
        return []


async def _greeting(conn: Conn, took_s: float) -> Finding:
    began = time.monotonic()
    version = await conn.fetchval("SELECT current_setting('server_version')")
    trip_s = time.monotonic() - began
    text = f"PostgreSQL {version}; connected in {duration(took_s)}, answers in {trip_s * 1000:.1f} ms"
    return Finding("server", text, data={"postgres": version, "connect_s": took_s, "answer_s": trip_s})


async def _inside(conn: Conn, url: str) -> AsyncIterator[Finding]:
    if await conn.fetchval("SELECT pg_is_in_recovery()"):
        advice = "give the address of the primary; nothing can be submitted or run over this one"
        yield problem("standby", "this server is a standby: it is read-only", advice)
    async for finding in _settings(conn):
        yield finding
    async for finding in _connections(conn):
        yield finding
    blockers = await list_blockers(conn)
    for blocker in blockers:
        yield describe_blocker(blocker)
    async for finding in _in_the_way(conn, besides=[blocker.pid for blocker in blockers]):
        yield finding
    try:
        found = await find_schema(conn, url)
    except (StoreTooNew, StoreMigrationChanged) as error:
        yield describe_refusal(error)
        return
    if found.version == 0:
        advice = "correct the address; `taskyard migrate`, or the first worker, makes it"
        yield problem("schema", "none yet: there are no tables of Taskyard's in this database", advice, schema=0)
        return
    yield describe_schema(found)
    if found.version != found.newest:
        return
    async for finding in _traffic(conn):
        yield finding


# --- the server -------------------------------------------------------------------------------------------------------


async def _settings(conn: Conn) -> AsyncIterator[Finding]:
    """What would break a promise of ours."""
    wrong = {
        ("fsync", "off"): "after a crash of the machine the whole database may be damaged",
        ("full_page_writes", "off"): "after a crash of the machine the whole database may be damaged",
        ("synchronous_commit", "off"): "after a crash of the server tasks that were accepted may be gone",
        ("autovacuum", "off"): "the tables grow without end, and everything becomes slow",
    }
    for (name, value), what in wrong.items():
        if await conn.fetchval("SELECT current_setting($1)", name) == value:
            yield warning("settings", f"{name} is {value}: {what}", f"turn {name} on", setting=name)
    skew_s = abs((await conn.fetchval("SELECT clock_timestamp()") - datetime.now(UTC)).total_seconds())
    if skew_s > SKEW_S:
        text = f"the server's clock and this machine's differ by {duration(skew_s)}"
        yield warning("clock", text, "keep all clocks right with NTP; see `timedatectl`", skew_s=skew_s)


async def _connections(conn: Conn) -> AsyncIterator[Finding]:
    complaints: list[str] = []
    pool = database_pool(os.environ, cores=cpu_budget().cores, warn=complaints.append)
    text = f"{pool.size} kept ({pool.size_source}), {pool.overflow} more when busy ({pool.overflow_source})"
    data = {
        "pool_size": pool.size, "pool_size_source": pool.size_source,
        "pool_overflow": pool.overflow, "pool_overflow_source": pool.overflow_source,
    }  # fmt: skip
    yield Finding("database pool", f"{text}, and {BESIDES} besides for each node", data=data)
    for complaint in complaints:
        yield warning("database pool", complaint, "correct the variable, or leave it out")
    row = await conn.fetchrow(
        "SELECT count(*), count(*) FILTER (WHERE application_name = 'taskyard'), "
        "current_setting('max_connections')::int FROM pg_stat_activity WHERE datid IS NOT NULL"
    )
    assert row is not None
    used, ours, most = row
    text, data = f"{used} of {most} in use, {ours} of them by Taskyard", {"used": used, "ours": ours, "most": most}
    if used >= CROWDED * most:
        advice = "raise max_connections, lower DB_POOL_SIZE and DB_MAX_OVERFLOW, or run fewer nodes"
        yield warning("connections", text, advice, **data)
    else:
        yield Finding("connections", text, data=data)


async def _in_the_way(conn: Conn, *, besides: Sequence[int]) -> AsyncIterator[Finding]:
    """Transactions that somebody keeps open: what was submitted in them is not there, and what is dead in the tables
    cannot be removed. Of other users' sessions only a privileged user sees them."""
    rows = await conn.fetch(
        "SELECT pid, application_name, extract(epoch FROM clock_timestamp() - xact_start)::float8 "
        "FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend' "
        "AND xact_start < clock_timestamp() - $1::interval AND pid <> ALL($2::int[]) ORDER BY xact_start LIMIT 5",
        timedelta(seconds=OPEN_S),
        besides,
    )
    for pid, name, open_s in rows:
        who = f"session {pid}" + (f" ({cut(clean(name), 40)})" if name else "")
        yield warning(
            "open transaction",
            f"{who} has had a transaction open for {duration(open_s)}; what was submitted in it is not there yet, and "
            f"the tables grow meanwhile",
            f"let it end, or end it with `SELECT pg_terminate_backend({pid})`",
            pid=pid, open_s=open_s,
        )  # fmt: skip


# --- the store --------------------------------------------------------------------------------------------------------


async def _traffic(conn: Conn) -> AsyncIterator[Finding]:
    now: datetime = await conn.fetchval("SELECT clock_timestamp()")
    running = await reader.list_tasks(conn, TaskFilter(states=(TaskState.RUNNING,)), None, RUNNING_AT_MOST)
    alive: list[Node] = []
    nodes = await reader.nodes(conn)
    if not nodes:
        yield Finding("workers", "none runs on this store", data={"alive": [], "dead": []})
    for status in nodes:
        finding = _node(status, now)
        if finding.topic == "worker":
            alive.append(status.node)
        yield finding
        if status.is_clock_off:
            text = f"that of {clean(status.node.label)} was {clock_text(status)}, by the server's, when it came"
            advice = "keep all clocks right with NTP, and restart it: a task is due by the clock of the node that looks"
            yield warning("clock", text, advice, incarnation=status.node.incarnation, ahead_s=status.ahead_s)
    waiting = await conn.fetch(
        "SELECT DISTINCT w.consumer FROM taskyard.lane AS l "
        "CROSS JOIN LATERAL (SELECT t.consumer FROM taskyard.task AS t "
        "WHERE t.queue = l.queue AND t.lane = l.lane AND t.state = 'queued' AND NOT t.is_parked LIMIT 1) AS w"
    )
    seen = Work(
        counts=sum_states(await reader.count(conn)),
        running=running,
        waiting=[source for (source,) in waiting],
        workers=alive,
        due_at=await conn.fetchval("SELECT min(due_at) FROM taskyard.task WHERE state IN ('scheduled', 'retrying')"),
        newest_at=await conn.fetchval("SELECT max(updated_at) FROM taskyard.task"),
        now=now,
        schedules=await read_schedules(conn),
    )
    for finding in work(seen):
        yield finding


def _node(status: NodeStatus, now: datetime) -> Finding:
    node = status.node
    since = duration(seconds_between(node.started_at, now)) or "an unknown time"
    who = f"{clean(node.label)} on {clean(node.host)} (pid {node.pid}), since {since}"
    if not status.is_silent:
        state = "drains" if status.is_draining else f"runs {', '.join(map(clean, node.consumers)) or 'nothing'}"
        return Finding("worker", f"{who}, {state}", data={"incarnation": node.incarnation})
    silent = duration(seconds_between(status.beat_at, now))
    text = f"{who}, has said nothing for {silent} and holds {counted(status.running, 'task')}"
    advice = "any worker takes them back when it has been silent for the lease; start one if none runs"
    return warning("silent worker", text, advice, incarnation=node.incarnation, held=status.running)
