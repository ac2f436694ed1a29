"""Getting at the database: connecting with limits on every wait, bringing the schema up to date, errors by name."""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any, TypeVar
from urllib.parse import urlsplit

import asyncpg

from taskyard.errors import (
    OutcomeUnknown,
    StoreBusy,
    StoreDenied,
    StoreForeign,
    StoreFull,
    StoreTooNew,
    StoreTooOld,
    StoreUnavailable,
    StoreUnreachable,
    StoreUrlInvalid,
    hide_password,
)
from taskyard.stores.locks import Lock
from taskyard.stores.migrate import EVENTS_AT_MOST, migrations

T = TypeVar("T")

CONNECT_S = 4.0
"""How long a connection may take to come about: TCP repeats its first word after 1 s, and again 2 s later."""

COMMAND_S = 8.0
"""How long an answer may take. A connection that died silently is given up then, and claims go on over another."""

MIGRATE_S = 300.0
"""How long a migration may take, or wait for another process that migrates."""

ALTER_S = 1.0
"""How long a migration waits for those who use a table, while everybody else waits behind it."""

MAY_CREATE = (
    "a user who may create the schema and owns it must bring it up to date: `GRANT CREATE ON DATABASE … TO …`, or run "
    "`taskyard migrate` as that user"
)

OLDEST_SERVER = 15

LOCK, STATEMENT = 5 / 8, 7 / 8
"""Of the time for an answer: how long the server waits for a lock, and works on a statement. Shorter than the client
waits, and in this order: a turn that gets no lock is then known to have changed nothing, and its connection is kept."""

LIMITS = {
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
    # made then would read all of it ever after.
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


# --- errors -----------------------------------------------------------------------------------------------------------

LOST = (
    OSError,
    asyncpg.InterfaceError,
    asyncpg.PostgresConnectionError,
    asyncpg.OperatorInterventionError,  # the server was shut down, or a query canceled
    asyncpg.InternalServerError,
    asyncpg.InternalClientError,
)
"""After one of these it is not known what became of a statement that was sent. TimeoutError is an OSError."""


_OPTIONS_REFUSED = (
    asyncpg.UndefinedObjectError,
    asyncpg.InvalidParameterValueError,
    asyncpg.CantChangeRuntimeParamError,
)
"""What follows the ? and is not for the driver is a setting for the server, which does not know it."""


@contextmanager
def connecting(url: str) -> Iterator[None]:
    try:
        yield
    except (asyncpg.InvalidPasswordError, asyncpg.InvalidAuthorizationSpecificationError) as exc:
        raise StoreDenied(hide_password(url), str(exc), "correct the user and the password in the address") from exc
    except asyncpg.InvalidCatalogNameError as exc:
        name = urlsplit(url).path.lstrip("/") or urlsplit(url).username or ""
        hint = f"create it with `createdb {name}`, or correct the address"
        raise StoreDenied(hide_password(url), str(exc), hint) from exc
    except asyncpg.InsufficientPrivilegeError as exc:
        raise StoreDenied(hide_password(url), str(exc), "give this user the right to connect") from exc
    except asyncpg.ClientConfigurationError as exc:
        raise StoreUrlInvalid(url, f"correct its options: {hide_password(describe(exc))}") from exc
    except _OPTIONS_REFUSED as exc:
        raise StoreDenied(hide_password(url), str(exc), "correct the options after the ? in the address") from exc
    except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as exc:
        raise StoreUnreachable(hide_password(url), describe(exc), *_list_hints(url, exc)) from exc


def _list_hints(url: str, exc: Exception) -> list[str]:
    """What to correct, unless it is that the server is away."""
    parts = urlsplit(url)
    is_missing_file = isinstance(exc, FileNotFoundError) and "ssl" in parts.query
    if isinstance(exc, ssl.SSLError) or is_missing_file or "SSL upgrade" in str(exc):
        return ["correct sslmode and the certificates in the address, or set up TLS at the server"]
    if isinstance(exc, socket.gaierror):
        hint = "correct the host in the address"
        if "@" not in parts.netloc and "@" in url:
            hint += "; if it is a part of the password, write %2F for a / in that, %23 for a #, %3F for a ?"
        return [hint]
    return []


@contextmanager
def typed_errors(url: str, *, writes: bool = False) -> Iterator[None]:
    """What goes wrong in a statement, by our names. Of a statement that writes, the outcome may not be known."""
    try:
        yield
    except asyncpg.DiskFullError as exc:
        raise StoreFull(hide_password(url)) from exc
    except (asyncpg.LockNotAvailableError, asyncpg.TransactionRollbackError) as exc:
        raise StoreBusy(hide_password(url)) from exc
    except asyncpg.InsufficientPrivilegeError as exc:
        hint = "give this user all rights on the schema taskyard, or use the user that owns it"
        raise StoreDenied(hide_password(url), str(exc), hint) from exc
    except LOST as exc:
        if writes:
            raise OutcomeUnknown(describe(exc)) from exc
        raise StoreUnavailable(f"the store {hide_password(url)} did not answer: {describe(exc)}") from exc
    except asyncpg.PostgresError as exc:
        raise StoreUnavailable(f"the store {hide_password(url)} refused: {describe(exc)}") from exc


def describe(exc: BaseException) -> str:
    return str(exc) or ("no answer in time" if isinstance(exc, TimeoutError) else type(exc).__name__)


# --- migrations -------------------------------------------------------------------------------------------------------


async def find_version(conn: Connection) -> int:
    """The number of the newest migration that was applied; 0 where there is none of our tables."""
    if await conn.fetchval("SELECT to_regclass('taskyard.migration')") is None:
        return 0
    with _ours():
        version: int = await conn.fetchval("SELECT coalesce(max(number), 0) FROM taskyard.migration")
    return version


@contextmanager
def _ours() -> Iterator[None]:
    """Raise `StoreForeign` where somebody else's tables are in the way of ours."""
    try:
        yield
    except _IN_THE_WAY as exc:
        hint = f"use another database, or rename that schema ({exc})"
        raise StoreForeign("the schema 'taskyard' of this database", "something else's", hint) from exc


_IN_THE_WAY = (
    asyncpg.DuplicateTableError,
    asyncpg.DuplicateObjectError,
    asyncpg.DuplicateFunctionError,
    asyncpg.UndefinedColumnError,
    asyncpg.DatatypeMismatchError,
    asyncpg.WrongObjectTypeError,
)


def check_version(version: int, url: str) -> None:
    """Raise `StoreTooNew` if a newer Taskyard has been here."""
    newest = migrations("postgres")[-1][0]
    if version > newest:
        raise StoreTooNew(hide_password(url), version, newest)


_OWNER = "SELECT pg_get_userbyid(nspowner) FROM pg_namespace WHERE nspname = 'taskyard'"


async def migrate(conn: Connection, url: str = "") -> int:
    """Bring the schema up to date; the version that was found. All of it is one transaction, and of several processes
    one migrates while the others wait and then find nothing to do. A schema that is newer than this version of Taskyard
    is left alone."""
    known = migrations("postgres")
    with typed_errors(url):
        version = await find_version(conn)
        if version < known[-1][0]:
            try:
                version = await apply(conn, known)
            except asyncpg.InsufficientPrivilegeError as exc:
                why, hint = str(exc), MAY_CREATE
                if version:
                    why = f"its schema has version {version}, older than the {known[-1][0]} of this Taskyard ({exc})"
                    hint = f"let {await conn.fetchval(_OWNER)}, who owns the schema, run `taskyard migrate`"
                raise StoreDenied(hide_password(url), why, hint) from exc
    check_version(version, url)
    with typed_errors(url):
        await _renumber(conn)
    return version


async def _renumber(conn: Connection) -> None:
    """Events and counts are numbered by the server's transactions. After a restore on another server those may lie
    before it: readers would take what is old for new, and what is new for old. All events are forgotten then, which
    whoever reads on from one of them is told of; counts stand before all that will be counted."""
    if await conn.fetchval(_IS_AHEAD):
        async with conn.transaction():
            await conn.execute(f"SELECT pg_advisory_xact_lock({Lock.MIGRATING}, 0)")
            if await conn.fetchval(_IS_AHEAD):  # whoever had the lock before us has not seen to it
                await conn.execute(_FORGET_EVENTS)


_IS_AHEAD = f"""
    SELECT greatest(
        (SELECT max(xid) FROM taskyard.event),
        (SELECT greatest(trimmed / {EVENTS_AT_MOST}, tally_from) FROM taskyard.tidied ORDER BY n DESC LIMIT 1),
        (SELECT max(xid) FROM taskyard.tally), (SELECT max(xid) FROM taskyard.submitted)
    ) >= pg_snapshot_xmax(pg_current_snapshot())::text::bigint
"""
"""Whoever wrote what we see had a number below that."""

_FORGET_EVENTS = f"""
    DELETE FROM taskyard.event;
    UPDATE taskyard.tally SET xid = 0;
    UPDATE taskyard.submitted SET xid = 0;
    UPDATE taskyard.tidied SET tally_from = 0, submitted_from = 0,
        trimmed = pg_snapshot_xmin(pg_current_snapshot())::text::bigint * {EVENTS_AT_MOST} - 1
"""


async def apply(conn: Connection, known: Sequence[tuple[int, str]], *, wait_s: float = MIGRATE_S) -> int:
    """Apply those of the migrations that are missing; the version that was found.

    Whoever alters a table waits for all who use it, and everybody else then waits behind him. A transaction that
    somebody keeps open must not stop the nodes that way: it is tried again and again, never for long."""
    until = time.monotonic() + wait_s
    while True:
        try:
            with _ours():
                async with conn.transaction():
                    return await _apply(conn, known)
        except asyncpg.LockNotAvailableError:
            if time.monotonic() >= until:
                raise
        await asyncio.sleep(ALTER_S * (1 + random.random()))


async def _apply(conn: Connection, known: Sequence[tuple[int, str]]) -> int:
    await conn.execute(f"SET LOCAL statement_timeout = '{MIGRATE_S:.0f}s'", timeout=MIGRATE_S)
    await conn.execute(f"SET LOCAL lock_timeout = '{MIGRATE_S:.0f}s'", timeout=MIGRATE_S)
    await conn.execute(f"SELECT pg_advisory_xact_lock({Lock.MIGRATING}, 0)", timeout=MIGRATE_S)
    await conn.execute(f"SET LOCAL lock_timeout = '{ALTER_S * 1000:.0f}ms'")
    if await conn.fetchval("SELECT to_regnamespace('taskyard')") is None:
        await conn.execute("CREATE SCHEMA taskyard")
    await conn.execute(
        "CREATE TABLE IF NOT EXISTS taskyard.migration "
        "(number integer PRIMARY KEY, applied_at timestamptz NOT NULL DEFAULT now())"
    )
    version = await find_version(conn)
    for number, sql in known:
        if number > version:
            await conn.execute(sql, timeout=MIGRATE_S)
            await conn.execute("INSERT INTO taskyard.migration (number) VALUES ($1)", number)
    return version
