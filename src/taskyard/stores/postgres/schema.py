"""Brings the schema `taskyard` up to date: migrations, then the bundle of routines, types and triggers.

All of it is one transaction. If several processes migrate at once, one does it, and the others wait and find nothing to
do. Nodes go on meanwhile, also those of the version before: see `_install`.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import asyncpg
import msgspec

from taskyard.errors import StoreDenied, StoreForeign, StoreIncomplete, StoreTooNew, hide_password
from taskyard.ports.store import Schema
from taskyard.stores.migrations import (
    Applied,
    Bundle,
    Installed,
    Migration,
    check_applied,
    check_installed,
    is_outdated,
    list_migrations,
    load_bundle,
    pending,
    schema_at,
)
from taskyard.stores.postgres.connection import Connection
from taskyard.stores.postgres.constants import EVENTS_AT_MOST, Lock, bundle_values
from taskyard.stores.postgres.errors import describe, typed_errors

MIGRATE_S = 300.0
"""How long a migration may take, or wait for another process that migrates."""

ALTER_S = 1.0
"""How long a migration waits for a lock on a table. Meanwhile every other user of the table waits behind it."""

MAY_CREATE = (
    "a user who may create the schema and owns it must bring it up to date: `GRANT CREATE ON DATABASE … TO …`, or run "
    "`taskyard migrate` as that user"
)

TABLES = (
    "artifact", "attempt", "attempt_line", "audit", "bundle", "compaction", "consumer", "dedupe_window",
    "dependency", "device", "device_stamp", "event", "external_count", "fairness", "finished", "fire", "fire_task",
    "lane", "migration", "node", "pending_release", "quarantined_account", "queue", "schedule", "server_history",
    "state_count", "task", "task_label", "task_relation", "watermark",
)  # fmt: skip
"""Our tables. If several are there without the table `migration`, they are a part of a store."""

SCHEMA = "the schema 'taskyard' of this database"


def bundle() -> Bundle:
    """The bundle of this program."""
    return load_bundle("postgres", bundle_values())


class Found(msgspec.Struct, frozen=True):
    """What was applied to a database."""

    version: int
    applied: list[Applied]
    installed: Installed | None


# --- what there is ----------------------------------------------------------------------------------------------------


async def find_version(conn: Connection) -> int:
    """The number of the newest migration that was applied. 0 if none of our tables exists. `StoreForeign` if other
    tables have our names, `StoreIncomplete` if our tables exist and it is not known what was applied to them."""
    return (await _find(conn)).version


async def find_schema(conn: Connection, url: str) -> Schema:
    """What is to be applied. `StoreTooNew` or `StoreMigrationChanged` if this program does not fit the database."""
    known, ours = list_migrations("postgres"), bundle()
    found = await _find(conn)
    _check(found, known, ours, url)
    return schema_at(found.version, known, installed=found.installed, bundle=ours)


async def _find(conn: Connection) -> Found:
    applied = await _list_applied(conn)
    if not applied:
        tables = await _list_tables(conn)
        # Race: another process may migrate between the two reads. Its tables and its rows come with one commit.
        applied = await _list_applied(conn)
        if not applied:
            _refuse_tables(tables)
            return Found(0, [], None)
    numbers = {one.number for one in applied}
    version = max(numbers)
    known = [migration.number for migration in list_migrations("postgres")]
    lacking = [str(number) for number in known if number < version and number not in numbers]
    if lacking:
        raise StoreIncomplete(SCHEMA, f"its table 'migration' lacks {', '.join(lacking)} below {version}")
    row = await conn.fetchrow("SELECT version, needs_program, checksum, objects FROM taskyard.bundle")
    if row is None:
        raise StoreIncomplete(SCHEMA, "its table 'bundle' is empty")
    return Found(version, applied, Installed(*row))


async def _list_applied(conn: Connection) -> list[Applied]:
    if await conn.fetchval("SELECT to_regclass('taskyard.migration')") is None:
        return []
    with _ours():
        rows = await conn.fetch("SELECT number, name, checksum FROM taskyard.migration ORDER BY number")
    return [Applied(*row) for row in rows]


async def _list_tables(conn: Connection) -> list[str]:
    """Our names that are taken."""
    rows = await conn.fetch(
        "SELECT relname FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace "
        "WHERE n.nspname = 'taskyard' AND relname = ANY($1::text[]) ORDER BY relname",
        TABLES,
    )
    return [name for (name,) in rows]


def _refuse_tables(found: list[str]) -> None:
    """These exist although no migration was applied. Another program has a few of our names, never most."""
    if 2 * len(found) > len(TABLES):
        raise StoreIncomplete(SCHEMA, "its table 'migration' is missing or empty")
    if found:
        raise _foreign(f"it has a {found[0]!r} already")


def _foreign(why: object) -> StoreForeign:
    return StoreForeign(SCHEMA, "something else's", f"use another database, or rename that schema ({why})")


@contextmanager
def _ours() -> Iterator[None]:
    """Raise `StoreForeign` if tables of another program are in the way of ours."""
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


def _check(found: Found, known: Sequence[Migration], ours: Bundle, url: str) -> None:
    """Raise `StoreTooNew` or `StoreMigrationChanged` if this program does not fit the database."""
    if found.version > known[-1].number:
        raise StoreTooNew(hide_password(url), found.version, known[-1].number)
    check_applied(hide_password(url), found.applied, known)
    check_installed(hide_password(url), found.installed, ours)


# --- what is applied --------------------------------------------------------------------------------------------------

_OWNER = "SELECT pg_get_userbyid(nspowner) FROM pg_namespace WHERE nspname = 'taskyard'"


async def migrate(conn: Connection, url: str = "") -> Schema:
    """Bring the schema up to date; the answer says what was found before. A schema that is newer than this version of
    Taskyard is left alone, and so is a newer bundle."""
    known, ours = list_migrations("postgres"), bundle()
    with typed_errors(url):
        found = await _find(conn)
        _check(found, known, ours, url)
        if pending(known, found.version) or is_outdated(found.installed, ours):
            try:
                found = await apply(conn, known, ours, url=url)
            except asyncpg.InsufficientPrivilegeError as exc:
                why, hint = describe(exc), MAY_CREATE
                if found.version:
                    lacks = ", ".join(schema_at(found.version, known, installed=found.installed, bundle=ours).pending)
                    why = f"its schema has version {found.version} and lacks {lacks} of this Taskyard ({why})"
                    hint = f"let {await conn.fetchval(_OWNER)}, who owns the schema, run `taskyard migrate`"
                raise StoreDenied(hide_password(url), why, hint) from exc
        await _renumber(conn)
    return schema_at(found.version, known, installed=found.installed, bundle=ours)


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
        (SELECT greatest(trimmed / {EVENTS_AT_MOST}, state_count_from)
         FROM taskyard.compaction ORDER BY n DESC LIMIT 1),
        (SELECT max(xid) FROM taskyard.state_count), (SELECT max(xid) FROM taskyard.external_count)
    ) >= pg_snapshot_xmax(pg_current_snapshot())::text::bigint
"""
"""Whoever wrote what we see had a number below that."""

_FORGET_EVENTS = f"""
    DELETE FROM taskyard.event;
    UPDATE taskyard.state_count SET xid = 0;
    UPDATE taskyard.external_count SET xid = 0;
    UPDATE taskyard.compaction SET state_count_from = 0, external_count_from = 0,
        trimmed = pg_snapshot_xmin(pg_current_snapshot())::text::bigint * {EVENTS_AT_MOST} - 1
"""


async def apply(
    conn: Connection, known: Sequence[Migration], ours: Bundle, *, url: str = "", wait_s: float = MIGRATE_S
) -> Found:
    """Apply the migrations that are missing, then the bundle if the installed one is older; what was found before.

    A statement that alters a table waits for all transactions that use the table, and every later user of the table
    waits behind it. A transaction that somebody keeps open must not stop the nodes that way: each try waits a short
    time only."""
    until = time.monotonic() + wait_s
    while True:
        try:
            with _ours():
                async with conn.transaction():
                    return await _apply(conn, known, ours, url)
        except (asyncpg.LockNotAvailableError, asyncpg.DeadlockDetectedError):
            if time.monotonic() >= until:
                raise
        await asyncio.sleep(ALTER_S * (1 + random.random()))


async def _apply(conn: Connection, known: Sequence[Migration], ours: Bundle, url: str) -> Found:
    await conn.execute(f"SET LOCAL statement_timeout = '{MIGRATE_S:.0f}s'", timeout=MIGRATE_S)
    await conn.execute(f"SET LOCAL lock_timeout = '{MIGRATE_S:.0f}s'", timeout=MIGRATE_S)
    await conn.execute(f"SELECT pg_advisory_xact_lock({Lock.MIGRATING}, 0)", timeout=MIGRATE_S)
    await conn.execute(f"SET LOCAL lock_timeout = '{ALTER_S * 1000:.0f}ms'")
    await conn.execute("SET LOCAL search_path = pg_catalog, pg_temp")  # names of objects are recorded with their schema
    if await conn.fetchval("SELECT to_regnamespace('taskyard')") is None:
        await conn.execute("CREATE SCHEMA taskyard")
    found = await _find(conn)
    # Race: another program may have migrated, or replaced the bundle, while this one waited for the lock.
    _check(found, known, ours, url)
    for migration in pending(known, found.version):
        await conn.execute(migration.sql, timeout=MIGRATE_S)
        await conn.execute(
            "INSERT INTO taskyard.migration (number, name, checksum) VALUES ($1, $2, $3)",
            migration.number,
            migration.name,
            migration.checksum,
        )
    if is_outdated(found.installed, ours):
        await _install(conn, [] if found.installed is None else found.installed.objects, ours)
    return found


# --- the bundle -------------------------------------------------------------------------------------------------------

_OBJECTS = """
    SELECT format('ROUTINE taskyard.%I(%s)', proname, pg_get_function_identity_arguments(oid)) AS object,
        oid::text || ' ' || xmin::text AS written
    FROM pg_proc WHERE pronamespace = 'taskyard'::regnamespace
    UNION ALL
    SELECT format('TRIGGER %I ON %s', tgname, tgrelid::regclass), t.oid::text || ' ' || t.xmin::text
    FROM pg_trigger AS t JOIN pg_class AS c ON c.oid = tgrelid
    WHERE c.relnamespace = 'taskyard'::regnamespace AND NOT tgisinternal
    UNION ALL
    SELECT format('TYPE taskyard.%I', relname), oid::text
    FROM pg_class WHERE relnamespace = 'taskyard'::regnamespace AND relkind = 'c'
"""
"""All routines, triggers and types of the schema, also those of others. `object` is how DROP names it. `written`
changes if it is replaced."""

_IS_SAME_TYPE = """
    SELECT count(DISTINCT fields) = 1 FROM (
        SELECT attrelid, array_agg((attname, atttypid, attcollation) ORDER BY attnum) AS fields FROM pg_attribute
        WHERE attrelid IN ($1::text::regclass, $2::text::regclass) GROUP BY attrelid) AS types
"""

_RECORD = "INSERT INTO taskyard.bundle (version, needs_program, checksum, objects) VALUES ($1, $2, $3, $4)"

_STATEMENT = re.compile(r"^(?=CREATE )", re.MULTILINE)
_NAMED = re.compile(r"CREATE (?:OR REPLACE )?(FUNCTION|PROCEDURE|TRIGGER|TYPE) (?:taskyard\.)?(\w+)")


async def _install(conn: Connection, recorded: Sequence[str], ours: Bundle) -> None:
    """Replace the routines, types and triggers as a whole. `recorded` are those of the installed bundle.

    Nodes go on meanwhile. A routine with an unchanged signature is replaced in place: it keeps its identity and its
    grants, prepared statements of the nodes stay valid, and a call in flight ends with the text that it began with. A
    type that is unchanged is left alone, because a driver knows it by its number. What the installed bundle brought and
    this one does not have is dropped. What others put into the schema stays. Race: a call in flight may come to a
    routine that was just dropped. It fails as a whole with `undefined_function`, and the node sends it again."""
    before = await _list_objects(conn)
    if recorded:
        for statement in _STATEMENT.split(ours.sql)[1:]:
            await _replace(conn, statement, recorded)
    else:
        await conn.execute(ours.sql, timeout=MIGRATE_S)
    after = await _list_objects(conn)
    types = {f"TYPE taskyard.{name}" for kind, name in _NAMED.findall(ours.sql) if kind == "TYPE"}
    brought = {one for one, written in after.items() if one in types or written != before.get(one)}
    rest = [one for one in recorded if one in after and one not in brought]
    for kind in ("TRIGGER", "ROUTINE", "TYPE"):  # in the order in which they need each other
        for one in rest:
            if one.startswith(kind):
                await conn.execute(f"DROP {one}")
    await conn.execute("DELETE FROM taskyard.bundle")
    await conn.execute(_RECORD, ours.version, ours.needs_program, ours.checksum, sorted(brought))


async def _list_objects(conn: Connection) -> dict[str, str]:
    return dict(await conn.fetch(_OBJECTS))  # type: ignore[arg-type]


async def _replace(conn: Connection, statement: str, recorded: Sequence[str]) -> None:
    found = _NAMED.match(statement)
    assert found is not None, statement
    kind, name = found.groups()
    if kind == "TYPE" and f"TYPE taskyard.{name}" in recorded:
        if await _is_same_type(conn, statement, name):
            return
        await conn.execute(f"DROP TYPE taskyard.{name} CASCADE")  # with the routines that use it, which come again
    try:
        async with conn.transaction():
            await conn.execute(statement, timeout=MIGRATE_S)
    except (asyncpg.InvalidFunctionDefinitionError, asyncpg.WrongObjectTypeError):
        # Its arguments have other names, or its answer or its kind is another.
        for one in recorded:
            if one.startswith(f"ROUTINE taskyard.{name}("):
                await conn.execute(f"DROP ROUTINE IF EXISTS {one.removeprefix('ROUTINE ')}")
        await conn.execute(statement, timeout=MIGRATE_S)


async def _is_same_type(conn: Connection, statement: str, name: str) -> bool:
    await conn.execute(statement.replace(f"taskyard.{name} ", f"taskyard.{name}_new ", 1))
    is_same = await conn.fetchval(_IS_SAME_TYPE, f"taskyard.{name}", f"taskyard.{name}_new")
    await conn.execute(f"DROP TYPE taskyard.{name}_new")
    return bool(is_same)
