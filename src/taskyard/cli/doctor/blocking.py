"""Who holds up Taskyard on a PostgreSQL server: sessions that something of ours waits for, or that have locked our
tables for whoever comes next."""

from __future__ import annotations

from datetime import timedelta

import asyncpg
import msgspec

from taskyard.cli.doctor.finding import Finding, problem
from taskyard.cli.text import clean, counted, cut, duration

LOCK = "lock"

BLOCKS_S = 1.0
"""Nodes wait for each other all the time, for milliseconds: a transaction that is younger is in nobody's way."""

QUERY_AT_MOST = 80
"""Characters of what a session asked for last."""

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
"""Locks are for everybody to see; of other users' sessions, how long and what for only for a privileged user."""


class Blocker(msgspec.Struct, frozen=True):
    """One session. `open_s` is None where this user may not see it; `holds_up` counts who waits for it."""

    pid: int
    user: str
    application: str
    open_s: float | None
    query: str
    holds_up: int

    @property
    def who(self) -> str:
        application = f" ({cut(clean(self.application), 40)})" if self.application else ""
        return f"session {self.pid} of {clean(self.user)}{application}"


async def list_blockers(conn: asyncpg.Connection) -> list[Blocker]:
    rows = await conn.fetch(_BLOCKING, timedelta(seconds=BLOCKS_S))
    return [Blocker(**dict(row)) for row in rows]


def describe_blocker(blocker: Blocker) -> Finding:
    what = f"holds up {counted(blocker.holds_up, 'session')}" if blocker.holds_up else "has locked tables of Taskyard's"
    since = "" if blocker.open_s is None else f", in a transaction that is open for {duration(blocker.open_s)}"
    query = cut(clean(" ".join(blocker.query.split())), QUERY_AT_MOST)
    asked = f"; what it asked for last: {query}" if query else ""
    return problem(
        LOCK,
        f"{blocker.who} {what}{since}{asked}",
        f"let it end, or end it with `SELECT pg_terminate_backend({blocker.pid})`",
        **msgspec.structs.asdict(blocker) | {"query": query},
    )
