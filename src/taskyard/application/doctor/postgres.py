"""The rules for a store on PostgreSQL."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import datetime

import msgspec

from taskyard.application.doctor.findings import (
    Finding,
    check_activity,
    describe_refusal,
    describe_schema,
    ok,
    problem,
    warning,
)
from taskyard.application.formatting import counted, cut, duration, seconds_between
from taskyard.errors import StoreBusy, StoreError
from taskyard.model.node import NodeStatus
from taskyard.resources.cpu import cpu_budget
from taskyard.resources.database import database_pool
from taskyard.stores.inspection import StoreActivity
from taskyard.stores.postgres.inspection import BlockingSession, Connections, PostgresInspection, inspect

EXTRA_CONNECTIONS = 7
"""Connections of a node besides its pool: two for exchanges, two for commands, one that listens, one that notifies, one
for heartbeats."""

CONNECTIONS_WARN_RATIO = 0.8
"""Of all connections the server allows: above it, a node that starts may find none."""

CLOCK_WARN_S = 1.0
"""Seconds a clock may be off: tasks are due by the clock of the node that reads them."""

QUERY_CHARS, APPLICATION_CHARS = 80, 40

SETTINGS = {
    ("fsync", "off"): "after a crash of the machine the whole database may be damaged",
    ("full_page_writes", "off"): "after a crash of the machine the whole database may be damaged",
    ("synchronous_commit", "off"): "after a crash of the server, accepted tasks may be lost",
    ("autovacuum", "off"): "the tables grow without end, and everything becomes slow",
}
"""Settings that break a promise of Taskyard."""


async def check_server(url: str) -> list[Finding]:
    seen = await inspect(url)
    if seen.version is None and seen.error is not None:
        return [problem("server", str(seen.error), "solve this first: nothing else of this store could be checked")]
    return [*_server(seen), *map(_blocking, seen.blocking), *_open_transactions(seen), *_contents(seen), *_end(seen)]


# --- the server -------------------------------------------------------------------------------------------------------


def _server(seen: PostgresInspection) -> Iterator[Finding]:
    answer = f"connected in {duration(seen.connect_s)}, answers in {seen.answer_s * 1000:.1f} ms"
    text = f"PostgreSQL {seen.version}; {answer}"
    yield ok("server", text, postgres=seen.version, connect_s=seen.connect_s, answer_s=seen.answer_s)
    if seen.is_standby:
        hint = "give the address of the primary: a standby takes no tasks and runs none"
        yield problem("standby", "this server is a standby: it is read-only", hint)
    for (name, value), harm in SETTINGS.items():
        if seen.settings.get(name) == value:
            yield warning("settings", f"{name} is {value}: {harm}", f"turn {name} on", setting=name)
    if seen.clock_skew_s > CLOCK_WARN_S:
        text = f"the server's clock and this machine's differ by {duration(seen.clock_skew_s)}"
        yield warning("clock", text, "keep all clocks right with NTP; see `timedatectl`", skew_s=seen.clock_skew_s)
    yield from _pool()
    if seen.connections is not None:
        yield _connections(seen.connections)


def _pool() -> Iterator[Finding]:
    complaints: list[str] = []
    pool = database_pool(os.environ, cores=cpu_budget().cores, warn=complaints.append)
    text = f"{pool.size} kept ({pool.size_source}), {pool.overflow} more when busy ({pool.overflow_source})"
    yield ok(
        "database pool",
        f"{text}, and {EXTRA_CONNECTIONS} besides for each node",
        pool_size=pool.size, pool_size_source=pool.size_source,
        pool_overflow=pool.overflow, pool_overflow_source=pool.overflow_source,
    )  # fmt: skip
    for complaint in complaints:
        yield warning("database pool", complaint, "correct the variable, or leave it out")


def _connections(seen: Connections) -> Finding:
    text = f"{seen.used} of {seen.most} in use, {seen.ours} of them by Taskyard"
    if seen.used >= CONNECTIONS_WARN_RATIO * seen.most:
        hint = "raise max_connections, lower DB_POOL_SIZE and DB_MAX_OVERFLOW, or run fewer nodes"
        return warning("connections", text, hint, used=seen.used, ours=seen.ours, most=seen.most)
    return ok("connections", text, used=seen.used, ours=seen.ours, most=seen.most)


# --- sessions ---------------------------------------------------------------------------------------------------------


def _blocking(session: BlockingSession) -> Finding:
    action = f"holds up {counted(session.holds_up, 'session')}" if session.holds_up else "has locked Taskyard's tables"
    age = "" if session.open_s is None else f", in a transaction that is open for {duration(session.open_s)}"
    query = cut(" ".join(session.query.split()), QUERY_CHARS)
    last = f"; its last query: {query}" if query else ""
    return problem(
        "lock",
        f"{_session(session.pid, session.user, session.application)} {action}{age}{last}",
        f"let it end, or end it with `SELECT pg_terminate_backend({session.pid})`",
        **msgspec.structs.asdict(session) | {"query": query},
    )


def _session(pid: int, user: str, application: str) -> str:
    owner = f" of {user}" if user else ""
    return f"session {pid}{owner}" + (f" ({cut(application, APPLICATION_CHARS)})" if application else "")


def _open_transactions(seen: PostgresInspection) -> Iterator[Finding]:
    for one in seen.open_transactions:
        yield warning(
            "open transaction",
            f"{_session(one.pid, '', one.application)} has had a transaction open for {duration(one.open_s)}; tasks "
            f"submitted in it are not visible yet, and the tables grow meanwhile",
            f"let it end, or end it with `SELECT pg_terminate_backend({one.pid})`",
            pid=one.pid, open_s=one.open_s,
        )  # fmt: skip


# --- the store --------------------------------------------------------------------------------------------------------


def _contents(seen: PostgresInspection) -> Iterator[Finding]:
    if seen.refusal is not None:
        yield describe_refusal(seen.refusal)
    elif seen.schema is not None and seen.schema.version == 0:
        hint = "correct the address; `taskyard migrate`, or the first worker, makes them"
        yield problem("schema", "none yet: this database has no tables of Taskyard", hint, schema=0)
    elif seen.schema is not None:
        yield describe_schema(seen.schema)
    if seen.activity is not None:
        yield from _activity(seen, seen.activity)


def _activity(seen: PostgresInspection, activity: StoreActivity) -> Iterator[Finding]:
    if not seen.nodes:
        yield ok("workers", "none is running on this store", alive=[], dead=[])
    for status in seen.nodes:
        yield _node(status, activity.now)
        if status.ahead_s is not None and status.is_clock_off:
            side = "ahead" if status.ahead_s > 0 else "behind"
            text = (
                f"that of {status.node.label} was {duration(abs(status.ahead_s))} {side} of the server's at its start"
            )
            hint = (
                "keep all clocks right with NTP, and restart it: a task is due by the clock of the node that reads it"
            )
            yield warning("clock", text, hint, incarnation=status.node.incarnation, ahead_s=status.ahead_s)
    yield from check_activity(activity, [status.node for status in seen.nodes if not status.is_silent])


def _node(status: NodeStatus, now: datetime) -> Finding:
    node = status.node
    since = duration(seconds_between(node.started_at, now)) or "an unknown time"
    text = f"{node.label} on {node.host} (pid {node.pid}), since {since}"
    if not status.is_silent:
        state = "drains" if status.is_draining else f"runs {', '.join(node.consumers) or 'nothing'}"
        return ok("worker", f"{text}, {state}", incarnation=node.incarnation)
    silent = duration(seconds_between(status.beat_at, now))
    text += f", has said nothing for {silent} and holds {counted(status.running, 'task')}"
    hint = "any worker takes them back when it has been silent for the lease; start one if none is running"
    return warning("silent worker", text, hint, incarnation=node.incarnation, held=status.running)


def _end(seen: PostgresInspection) -> Iterator[Finding]:
    if isinstance(seen.error, StoreBusy):
        text = "Taskyard's tables are locked, so some checks were skipped"
        yield problem("store", text, "resolve the `lock` findings first, then run the doctor again")
    elif isinstance(seen.error, StoreError):
        yield problem("store", str(seen.error), "the other checks could not be made")
