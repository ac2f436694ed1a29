"""Bringing the schema up to date."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import asyncpg

from taskyard.errors import StoreDenied, StoreForeign, StoreIncomplete, StoreTooNew, hide_password
from taskyard.stores.locks import Lock
from taskyard.stores.migrate import EVENTS_AT_MOST, migrations, newest, schema_at
from taskyard.stores.postgres.connection import Connection
from taskyard.stores.postgres.errors import describe, typed_errors

MIGRATE_S = 300.0
"""How long a migration may take, or wait for another process that migrates."""

ALTER_S = 1.0
"""How long a migration waits for those who use a table, while everybody else waits behind it."""

MAY_CREATE = (
    "a user who may create the schema and owns it must bring it up to date: `GRANT CREATE ON DATABASE … TO …`, or run "
    "`taskyard migrate` as that user"
)


SCHEMA = "the schema 'taskyard' of this database"


async def find_version(conn: Connection) -> int:
    """The number of the newest migration that was applied; 0 where there is none of our tables. `StoreForeign` if other
    tables stand in their places, `StoreIncomplete` if it is not known of ours what was applied to them."""
    numbers = await _list_numbers(conn)
    if not numbers:
        found = await _list_tables(conn)
        # Race: whoever has migrated since we looked has brought tables and numbers at once.
        numbers = await _list_numbers(conn)
        if not numbers:
            _refuse_tables(found)
            return 0
    version = max(numbers)
    known = [int(name[:4]) for name in schema_at(0, "postgres").pending]
    lacking = [str(number) for number in known if number < version and number not in numbers]
    if lacking:
        raise StoreIncomplete(SCHEMA, f"its table 'migration' lacks {', '.join(lacking)} below {version}")
    return version


async def _list_numbers(conn: Connection) -> set[int]:
    if await conn.fetchval("SELECT to_regclass('taskyard.migration')") is None:
        return set()
    with _ours():
        return {number for (number,) in await conn.fetch("SELECT number FROM taskyard.migration")}


def _our_tables() -> list[str]:
    (_, sql), *_ = migrations("postgres")
    return re.findall(r"^CREATE TABLE taskyard\.(\w+)", sql, re.MULTILINE)


async def _list_tables(conn: Connection) -> list[str]:
    """The names of ours that something has."""
    rows = await conn.fetch(
        "SELECT relname FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace "
        "WHERE n.nspname = 'taskyard' AND relname = ANY($1::text[]) ORDER BY relname",
        _our_tables(),
    )
    return [name for (name,) in rows]


def _refuse_tables(found: list[str]) -> None:
    """Those that are there although no migration was applied. Somebody else has a few of our names, never most."""
    if 2 * len(found) > len(_our_tables()):
        raise StoreIncomplete(SCHEMA, "its table 'migration' is missing or empty")
    if found:
        raise _foreign(f"it has a {found[0]!r} already")


def _foreign(why: object) -> StoreForeign:
    return StoreForeign(SCHEMA, "something else's", f"use another database, or rename that schema ({why})")


@contextmanager
def _ours() -> Iterator[None]:
    """Raise `StoreForeign` where somebody else's tables are in the way of ours."""
    try:
        yield
    except _IN_THE_WAY as exc:
        raise _foreign(exc) from exc


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
    if version > newest("postgres"):
        raise StoreTooNew(hide_password(url), version, newest("postgres"))


_OWNER = "SELECT pg_get_userbyid(nspowner) FROM pg_namespace WHERE nspname = 'taskyard'"


async def migrate(conn: Connection, url: str = "") -> int:
    """Bring the schema up to date; the version that was found. All of it is one transaction, and of several processes
    one migrates while the others wait and then find nothing to do. A schema that is newer than this version of Taskyard
    is left alone."""
    latest = newest("postgres")
    with typed_errors(url):
        version = await find_version(conn)
        if version < latest:
            try:
                version = await apply(conn, migrations("postgres"))
            except asyncpg.InsufficientPrivilegeError as exc:
                why, hint = describe(exc), MAY_CREATE
                if version:
                    why = f"its schema has version {version}, older than the {latest} of this Taskyard ({why})"
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
