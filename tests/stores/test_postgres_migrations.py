"""The schema on PostgreSQL is brought up to date by whoever comes first, while others go on."""

import asyncio
import signal
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest

from taskyard import Dedupe, StoreError, TaskState, Yard
from taskyard.errors import StoreBusy, StoreDenied, StoreMigrationChanged, StoreTooNew, UnknownNode
from taskyard.model.command import Cancel
from taskyard.model.limits import Demand
from taskyard.model.move import Move
from taskyard.model.notes import Note
from taskyard.ports.clock import SystemClock
from taskyard.ports.store import MigratingStore, Report, Signals
from taskyard.stores.migrations import Bundle, Migration, list_migrations
from taskyard.stores.postgres import PostgresStore, schema
from taskyard.stores.postgres.constants import EVENTS_AT_MOST, Lock
from taskyard.stores.postgres.errors import typed_errors
from taskyard.stores.postgres.schema import apply, bundle, find_version
from taskyard.testing.postgres import Databases
from taskyard.testing.samples import a_node, a_record, an_add, an_error
from tests.scenario.processes import TOP, environment

STEPS = list_migrations("postgres")
NEWEST = STEPS[-1].number

PATIENCE_S = 20.0

GROWTH = (
    "ALTER TABLE taskyard.task ADD COLUMN colour text; ALTER TABLE taskyard.finished ADD COLUMN colour text;"
    "ALTER TABLE taskyard.event ADD COLUMN colour text; ALTER TABLE taskyard.node ADD COLUMN colour text;"
    "ALTER TABLE taskyard.attempt ADD COLUMN colour text; ALTER TABLE taskyard.queue ADD COLUMN colour text;"
    "ALTER TABLE taskyard.lane ADD COLUMN colour text; ALTER TABLE taskyard.state_count ADD COLUMN colour text;"
)
GROW = Migration(NEWEST + 1, f"{NEWEST + 1:04}_colour", GROWTH)
"""A migration as the next version may bring it: it only adds."""

CATALOG = {
    "relations": "SELECT relname, relkind::text, reloptions FROM pg_class WHERE relnamespace = {schema}",
    "columns": "SELECT attrelid::regclass::text, attname, attnum, format_type(atttypid, atttypmod), attnotnull, "
    "attcollation::regcollation::text, pg_get_expr(adbin, adrelid) FROM pg_attribute "
    "LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum JOIN pg_class ON pg_class.oid = attrelid "
    "WHERE attnum > 0 AND NOT attisdropped AND relnamespace = {schema}",
    "indexes": "SELECT pg_get_indexdef(indexrelid) FROM pg_index JOIN pg_class ON pg_class.oid = indexrelid "
    "WHERE relnamespace = {schema}",
    "constraints": "SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid) FROM pg_constraint "
    "WHERE connamespace = {schema}",
    "functions": "SELECT pg_get_functiondef(oid) FROM pg_proc WHERE pronamespace = {schema}",
    "triggers": "SELECT pg_get_triggerdef(pg_trigger.oid) FROM pg_trigger JOIN pg_class ON pg_class.oid = tgrelid "
    "WHERE relnamespace = {schema}",
    "sequences": "SELECT seqrelid::regclass::text, seqtypid::regtype::text, seqstart, seqincrement, seqcache "
    "FROM pg_sequence",
    "types": "SELECT typname, attname, attnum, format_type(atttypid, atttypmod) FROM pg_type "
    "JOIN pg_class ON pg_class.oid = typrelid JOIN pg_attribute ON attrelid = typrelid "
    "WHERE typnamespace = {schema} AND relkind = 'c'",
    "rows": "SELECT number, name, checksum FROM taskyard.migration",
    "bundle": "SELECT version, needs_program, checksum, objects FROM taskyard.bundle",
}


async def dump(conn: asyncpg.Connection) -> dict[str, list[Any]]:
    """Everything in our schema."""
    schema = "(SELECT oid FROM pg_namespace WHERE nspname = 'taskyard')"
    return {name: sorted(map(repr, await conn.fetch(sql.replace("{schema}", schema)))) for name, sql in CATALOG.items()}


@pytest.fixture
def new_url(databases: Databases) -> str:
    """An empty database."""
    return databases.make()


@pytest.fixture
def fresh(databases: Databases) -> dict[str, list[Any]]:
    """What the schema is when a store is made at once by this version."""
    url = databases.make()
    databases.run(schema.migrate, url)
    return databases.run(dump, url)


def make(url: str) -> PostgresStore:
    return PostgresStore(url, clock=SystemClock())


async def connected(url: str) -> asyncpg.Connection:
    return await asyncpg.connect(url, command_timeout=PATIENCE_S)


async def test_a_migrated_schema_is_that_of_a_new_store(new_url, postgres_grown, monkeypatch):
    """However it came about, one version has one schema."""
    monkeypatch.setattr(schema, "list_migrations", lambda _: [*STEPS, GROW])
    store = make(postgres_grown)
    assert isinstance(store, MigratingStore)
    before = await store.schema()
    assert (before.version, before.newest, before.pending) == (NEWEST, GROW.number, (GROW.name,))
    assert await store.migrate() == before
    assert (await store.schema()).pending == ()
    assert (await make(new_url).migrate()).version == 0
    old, new = await connected(postgres_grown), await connected(new_url)
    assert await dump(old) == await dump(new)
    await old.close()
    await new.close()


def test_the_dump_sees_everything(databases: Databases, fresh):
    """The comparison above can fail: each kind of thing is found, and one more column, index or function is seen."""
    assert all(fresh.values())
    url = databases.make()
    databases.run(schema.migrate, url)
    for change, seen in {
        "ALTER TABLE taskyard.attempt ADD COLUMN colour text": "columns",
        "CREATE INDEX more ON taskyard.attempt (node)": "indexes",
        "CREATE FUNCTION taskyard.more() RETURNS void LANGUAGE sql AS ''": "functions",
        "ALTER TABLE taskyard.task SET (fillfactor = 50)": "relations",
        "DROP TRIGGER task_moves ON taskyard.task": "triggers",
        "ALTER TABLE taskyard.queue ADD CHECK (per_key > 0)": "constraints",
    }.items():
        databases.execute(change, url)
        assert databases.run(dump, url)[seen] != fresh[seen]


async def test_our_tables_are_known(postgres_grown):
    """The names that tell a part of our store from a schema of another program are all tables that we have."""
    conn = await connected(postgres_grown)
    rows = await conn.fetch("SELECT tablename FROM pg_tables WHERE schemaname = 'taskyard' ORDER BY 1")
    assert tuple(name for (name,) in rows) == schema.TABLES
    await conn.close()


async def test_looking_changes_nothing(new_url):
    """On an empty database, `schema` tells what is to be done and makes nothing."""
    found = await make(new_url).schema()
    assert (found.version, found.pending[0]) == (0, "0001_baseline")
    conn = await connected(new_url)
    assert await conn.fetchval("SELECT to_regnamespace('taskyard')") is None
    await conn.close()


async def test_many_migrate_at_a_time(new_url, fresh):
    """Of several that migrate at once, one applies what is pending, and the others wait and find it done."""
    found = await asyncio.gather(*(make(new_url).migrate() for _ in range(6)))
    assert sorted(schema.version for schema in found) == [0, *[NEWEST] * 5]
    conn = await connected(new_url)
    assert await dump(conn) == fresh
    await conn.close()


MIGRATE_AND_STOP = """
import asyncio, sys, asyncpg
from taskyard.stores.migrations import Migration, list_migrations
from taskyard.stores.postgres.connection import connect
from taskyard.stores.postgres.schema import apply, bundle

async def main(url):
    steps = list_migrations("postgres")
    steps.append(Migration(steps[-1].number + 1, "wait", "SELECT pg_advisory_xact_lock(42)"))
    await apply(await connect(url), steps, bundle())

asyncio.run(main(sys.argv[1]))
"""


async def test_killed_in_the_middle_of_a_migration(new_url, fresh):
    """A process killed half way through leaves nothing of it, and keeps nobody from doing it all."""
    conn = await connected(new_url)
    await conn.execute("SELECT pg_advisory_lock(42)")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", MIGRATE_AND_STOP, new_url, env=environment(), cwd=TOP
    )
    async with asyncio.timeout(PATIENCE_S):
        while not await conn.fetchval("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"):
            assert process.returncode is None
    process.send_signal(signal.SIGKILL)
    await process.wait()
    assert await find_version(conn) == 0
    migrating = asyncio.create_task(make(new_url).migrate())
    await conn.execute("SELECT pg_advisory_unlock(42)")  # the server goes on, and finds that nobody is there
    assert (await migrating).version == 0
    assert await dump(conn) == fresh
    await conn.close()


@pytest.fixture
def postgres_grown(databases: Databases) -> str:
    """A database of its own with our schema, which a test may spoil."""
    url = databases.make()
    databases.run(schema.migrate, url)
    return url


async def a_day_of(store: PostgresStore) -> None:
    """A node does all that a node does."""
    node, now = a_node("old"), datetime.now(UTC)
    await store.join(node)
    first, second, third = a_record(), a_record(key="k"), a_record(dedupe_slot="slot")
    adds = [an_add(first, second), an_add(third, dedupe=Dedupe.MERGE)]
    turned = await store.turn(node.incarnation, adds=adds, demand=Demand(3, {"fetch": 3}))
    assert [claim.uuid for claim in turned.claims] == [first.uuid, second.uuid, third.uuid]
    moves = [Move.completed(at=now, result="1"), Move.retrying(at=now, due_at=now, error=an_error())]
    settles = list(zip(turned.claims[:2], moves, strict=True))
    reports = [Report(turned.claims[2], note=Note.remark("half"))]
    assert (await store.turn(node.incarnation, settles=settles, reports=reports)).settled == [None, None]
    await store.drain(node.incarnation)
    (canceled,) = await store.apply([third.uuid], Cancel("no"))
    assert canceled.refused is None
    assert await store.signals(node.incarnation) == Signals([third.uuid], is_draining=True)
    assert await store.rescue(node.incarnation) == [third.uuid]
    await store.apply([second.uuid], Cancel("no"))
    states = [TaskState.COMPLETED, TaskState.CANCELED, TaskState.CANCELED]
    assert [one.state for one in await store.outcomes([first.uuid, second.uuid, third.uuid]) if one] == states
    assert [record.state for record in await store.list_tasks()] == states[::-1]
    assert [event.kind for event in (await store.events(after=0)).events if event.uuid == first.uuid][-1] == "completed"
    assert [run.attempt for run in await store.list_attempts(first.uuid)] == [1]
    assert await store.prune(finished_before=now + timedelta(hours=1)) == 3
    assert await store.count() == {}
    assert await store.nodes() == []


async def test_a_node_of_the_version_before_goes_on(postgres_grown):
    """All that a node does works as before after a migration that only adds, on the connections it has and on new
    ones."""
    store = make(postgres_grown)
    await store.open()
    await a_day_of(store)
    conn = await connected(postgres_grown)
    await apply(conn, [*STEPS, GROW], bundle())
    await a_day_of(store)
    await conn.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE datname = current_database() AND application_name = 'taskyard'"
    )
    await conn.close()
    async with asyncio.timeout(PATIENCE_S):
        while await is_lost(store):
            pass
    await a_day_of(store)
    assert not await is_lost(store)
    await store.close()


async def is_lost(store: PostgresStore) -> bool:
    """Whether a connection was found dead; each of them is, once."""
    try:
        await store.turn("nobody")
        await store.count()
        await store.drain("nobody")
    except UnknownNode:
        return False
    except StoreError:
        return True
    return False


async def test_work_goes_on_while_a_migration_waits(postgres_grown):
    """A migration that waits for a transaction somebody keeps open does not hold up the nodes meanwhile."""
    yard = Yard(postgres_grown)

    @yard.consumer
    async def double(n: int) -> int:
        return 2 * n

    async with yard:
        theirs, ours = await connected(postgres_grown), await connected(postgres_grown)
        await theirs.execute("BEGIN")
        await yard.submit("double", {"n": 1}, connection=theirs)
        migrating = asyncio.create_task(apply(ours, [*STEPS, GROW], bundle()))
        for n in range(10):
            assert await (await yard.submit("double", {"n": n})).result(timeout_s=PATIENCE_S) == 2 * n
        await theirs.execute("COMMIT")
        assert (await asyncio.wait_for(migrating, PATIENCE_S)).version == NEWEST
        assert await (await yard.submit("double", {"n": 4})).result(timeout_s=PATIENCE_S) == 8
        await theirs.close()
        await ours.close()


async def test_a_migration_gives_up_after_a_while(postgres_grown):
    """A migration that is never let through ends with a StoreBusy, and with nothing changed."""
    theirs, ours = await connected(postgres_grown), await connected(postgres_grown)
    await theirs.execute("BEGIN; LOCK TABLE taskyard.task IN ACCESS SHARE MODE")
    with pytest.raises(StoreBusy), typed_errors(postgres_grown):
        await apply(ours, [*STEPS, GROW], bundle(), wait_s=0.0)
    assert await find_version(ours) == NEWEST
    await theirs.close()
    await ours.close()


async def test_a_newer_schema_is_left_alone(postgres_grown):
    """A store that a newer version has migrated is refused by whoever opens, looks at or migrates it, with advice."""
    conn = await connected(postgres_grown)
    await apply(conn, [*STEPS, GROW], bundle())
    before = await dump(conn)
    store = make(postgres_grown)
    for verb in (store.open, store.schema, store.migrate):
        with pytest.raises(StoreTooNew, match="upgrade Taskyard"):
            await verb()
    assert await dump(conn) == before
    await conn.close()


@pytest.mark.parametrize(
    ("meanwhile", "error"),
    [
        pytest.param("INSERT INTO taskyard.migration VALUES (99, '0099_later', '')", StoreTooNew, id="migration"),
        pytest.param(
            "UPDATE taskyard.bundle SET version = version + 1, checksum = 'other'", StoreMigrationChanged, id="bundle"
        ),
    ],
)
async def test_a_program_looks_again_when_it_has_the_lock(postgres_grown, monkeypatch, meanwhile, error):
    """Of two programs that start together, one brings the schema up to date and the other waits. If the schema then
    does not fit the second program, its open is refused."""
    newer = Bundle(bundle().version + 1, bundle().sql)
    monkeypatch.setattr(schema, "bundle", lambda: newer)
    other = await connected(postgres_grown)
    await other.execute(f"SELECT pg_advisory_lock({Lock.MIGRATING}, 0)")
    opening = asyncio.create_task(make(postgres_grown).open())
    async with asyncio.timeout(PATIENCE_S):
        while not await other.fetchval("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"):
            assert not opening.done()
    await other.execute(meanwhile)
    await other.execute(f"SELECT pg_advisory_unlock({Lock.MIGRATING}, 0)")
    with pytest.raises(error):
        await opening
    await other.close()


@pytest.mark.parametrize("left", ["an event", "the mark of those that were trimmed"])
async def test_events_begin_anew_after_a_restore_on_another_server(postgres_grown, left):
    """Where stored events have numbers that this server is yet to reach, they are forgotten when a store is opened:
    what happens then is told, and whoever would read on is told that he has missed something."""
    conn = await connected(postgres_grown)
    far = await conn.fetchval("SELECT pg_current_xact_id()::text::bigint") + 1_000_000
    if left == "an event":
        await conn.execute(
            "INSERT INTO taskyard.event VALUES ($1, 0, 1, 'queued', 'q', 's', ARRAY[now()], ARRAY['old'])", far
        )
    else:
        await conn.execute(
            "UPDATE taskyard.compaction SET trimmed = $1, state_count_from = $2", far * EVENTS_AT_MOST, far
        )
        await conn.execute("INSERT INTO taskyard.state_count (queue, state, n, xid) VALUES ('q', 'failed', 3, $1)", far)
    await conn.close()
    store = make(postgres_grown)
    await store.open()
    after = (await store.events(after=-1)).last
    await store.turn("nobody", adds=[an_add(task := a_record())])
    page = await store.events(after=after)
    assert ([event.uuid for event in page.events], page.missed) == ([task.uuid], False)
    assert (await store.events(after=0)).missed
    counted = {(task.queue, TaskState.QUEUED): 1}
    if left != "an event":
        counted["q", TaskState.FAILED] = 3
    assert await store.count() == counted
    await store.close()
    await store.open()
    assert (await store.events(after=after)).events == page.events  # only once
    await store.close()


@pytest.fixture
def clerk(databases: Databases, new_url: str) -> Iterator[str]:
    """The address of an empty database for a user who may only connect."""
    with databases.guest(new_url) as url:
        yield url


async def test_who_may_not_create_the_schema_is_told(clerk):
    """A user without the right to make a schema is told which right that is."""
    with pytest.raises(StoreDenied, match="GRANT CREATE ON DATABASE"):
        await make(clerk).open()
