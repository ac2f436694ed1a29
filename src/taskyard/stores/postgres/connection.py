"""Getting at the database: connections on which every wait has an end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import datetime
from typing import Any, TypeVar

import asyncpg

from taskyard.errors import StoreNotUtf8, StoreTooOld, hide_password
from taskyard.stores.postgres.errors import LOST, connecting, typed_errors

T = TypeVar("T")

CONNECT_S = 4.0
"""How long a connection may take to come about: TCP repeats its first word after 1 s, and again 2 s later."""

COMMAND_S = 8.0
"""How long an answer may take. A connection that died silently is given up then, and claims go on over another."""

OLDEST_SERVER = 15

ENCODINGS = frozenset({"UTF8", "SQL_ASCII"})
"""Of a database that takes every text. In the second it is bytes, which are ours."""

LOCK, STATEMENT = 5 / 8, 7 / 8
"""Of the time for an answer: how long the server waits for a lock, and works on a statement. Shorter than the client
waits, and in this order: a turn that gets no lock is then known to have changed nothing, and its connection is kept."""

COMMIT = 9 / 8
"""The same of a statement that commits by itself: longer than the client waits. A server that has to wait for its
standbys, and is told to wait no longer, warns and answers as if all had gone well."""

LIMITS = {
    "idle_session_timeout": "0",  # who listens is idle for long
    "idle_in_transaction_session_timeout": "30s",
    # Who counts what runs after it has got a queue's lock must see what was committed meanwhile, whatever a database
    # that is an application's as well has by default.
    "default_transaction_isolation": "read committed",
    "default_transaction_read_only": "off",
    "default_transaction_deferrable": "off",
    # A client that is gone without a word must not keep its session: asked after 10 s, given up after 10 s more.
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "2",
    "tcp_user_timeout": "20000",
}

PLANS = {
    # The statements of a turn know their indexes. Left to the statistics of a table that was empty a moment ago, a plan
    # made then would read all of it ever after. None of this keeps an EXISTS below an OR or a CASE from being hashed,
    # which reads all as well: there it is written as (SELECT id …) IS NOT NULL.
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "enable_bitmapscan": "off",
    "plan_cache_mode": "force_generic_plan",
    "jit": "off",
}

READS = {
    # The same of what is asked again and again. The rest is left to the statistics: it is asked for by people.
    "enable_seqscan": "off",
    "jit": "off",
}

Connection = asyncpg.Connection

Session = tuple[int, datetime]
"""The server's process behind a connection, and when it began: the number alone may stand for another one later."""


def committing(settings: dict[str, str], *, command_s: float) -> dict[str, str]:
    """These settings, for a connection whose statements commit by themselves."""
    return settings | {"statement_timeout": f"{command_s * COMMIT:.3f}s"}


async def connect(url: str, *, settings: dict[str, str] | None = None, command_s: float = COMMAND_S) -> Connection:
    """A connection on which every wait has an end."""
    timeouts = {"lock_timeout": f"{command_s * LOCK:.3f}s", "statement_timeout": f"{command_s * STATEMENT:.3f}s"}
    opening: asyncio.Task[Connection] = asyncio.get_running_loop().create_task(
        _open(url, timeouts | LIMITS | (settings or {}), command_s)
    )
    with connecting(url):
        try:
            conn = await asyncio.shield(opening)
        except asyncio.CancelledError:
            # asyncpg, cancelled half way, leaves an error behind that nobody hears: it is let come to its end.
            with suppress(Exception):
                (await opening).terminate()
            raise
    version = conn.get_server_version().major
    if version < OLDEST_SERVER:
        conn.terminate()
        raise StoreTooOld(hide_password(url), version, OLDEST_SERVER)
    encoding = getattr(conn.get_settings(), "server_encoding", "UTF8")  # a pooler need not say it
    if encoding not in ENCODINGS:
        conn.terminate()
        raise StoreNotUtf8(hide_password(url), encoding)
    _limit_socket(conn)
    return conn


async def _open(url: str, settings: dict[str, str], command_s: float) -> Connection:
    conn: Connection = await asyncpg.connect(
        url, timeout=CONNECT_S, command_timeout=command_s, server_settings={"application_name": "taskyard"}
    )
    try:
        # Not with the connection: PgBouncer refuses it then, or is told to ignore what it does not know.
        await conn.execute("; ".join(f"SET {name} = '{value}'" for name, value in settings.items()))
    except BaseException:
        conn.terminate()
        raise
    return conn


async def once(url: str, do: Callable[[Connection], Awaitable[T]]) -> T:
    """Do something on a connection that is needed for nothing else."""
    conn = await connect(url)
    try:
        with typed_errors(url):
            return await do(conn)
    finally:
        with suppress(*LOST):
            await conn.close(timeout=1.0)


async def find_session(conn: Connection) -> Session:
    """The one behind this connection."""
    row = await conn.fetchrow("SELECT pid, backend_start FROM pg_stat_activity WHERE pid = pg_backend_pid()")
    assert row is not None
    return row["pid"], row["backend_start"]


def _limit_socket(conn: Connection) -> None:
    """What we send must be taken within the time as well: the kernel alone would try for a quarter of an hour."""
    transport: Any = conn._transport  # type: ignore[attr-defined]
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6) and hasattr(socket, "TCP_USER_TIMEOUT"):
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(COMMAND_S * 1000))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
