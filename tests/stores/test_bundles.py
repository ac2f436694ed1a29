"""What a store records of the SQL it was made with, and how a newer bundle replaces an older one."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import apsw
import asyncpg
import pytest

from taskyard import Yard
from taskyard.errors import OtherDatabase, StoreIncomplete, StoreMigrationChanged, StoreTooNew, StoreUnavailable
from taskyard.model import state
from taskyard.model.state import LEGAL, TaskState
from taskyard.ports.clock import SystemClock
from taskyard.stores.migrations import Bundle, list_migrations
from taskyard.stores.postgres import PostgresStore, schema
from taskyard.stores.postgres.errors import REPLACED_TRIES
from taskyard.stores.sqlite import SqliteStore, place
from taskyard.testing.postgres import Databases
from taskyard.testing.samples import a_record, an_add, room
from tests.scenario.processes import TOP
from tests.stores.test_postgres_migrations import a_day_of, dump

PATIENCE_S = 30.0

Store = PostgresStore | SqliteStore


class Site:
    """A store that was made by this program and is closed, and its database."""

    def __init__(self, make: Callable[[], Store], module: Any, execute: Callable[[str], Any], prefix: str) -> None:
        self.make, self.module, self._execute, self._prefix = make, module, execute, prefix

    async def execute(self, sql: str) -> list[Any]:
        """On the database itself, with `$` before the name of a table."""
        return list(await self._execute(sql.replace("$", self._prefix)))

    async def open(self) -> None:
        store = self.make()
        await store.open()
        await store.close()

    def upgrade(self, monkeypatch: pytest.MonkeyPatch, *, by: int = 1, added: str = "") -> Bundle:
        """From here on the program has another version of the bundle."""
        bundle: Bundle = self.module.bundle()
        newer = Bundle(bundle.version + by, bundle.sql + added)
        monkeypatch.setattr(self.module, "bundle", lambda: newer)
        return newer


@pytest.fixture
def new_url(databases: Databases) -> str:
    """An empty database."""
    return databases.make()


@pytest.fixture(params=["sqlite", "postgres"])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Site:
    if request.param == "sqlite":
        path = tmp_path / "work.db"

        async def on_file(sql: str) -> list[Any]:
            conn = apsw.Connection(str(path))
            try:
                return conn.execute(sql).fetchall()
            finally:
                conn.close()

        return Site(lambda: SqliteStore(path, clock=SystemClock()), place, on_file, "")
    url: str = request.getfixturevalue("new_url")

    async def on_server(sql: str) -> list[Any]:
        conn = await asyncpg.connect(url)
        try:
            return [tuple(row) for row in await conn.fetch(sql)]
        finally:
            await conn.close()

    return Site(lambda: PostgresStore(url, clock=SystemClock()), schema, on_server, "taskyard.")


@pytest.fixture
async def site(made: Site) -> Site:
    await made.open()
    return made


async def test_what_was_applied_is_recorded(site: Site) -> None:
    """A store knows each migration with its checksum, and the one bundle that it has."""
    database = "sqlite" if site.module is place else "postgres"
    known = [(one.number, one.name, one.checksum) for one in list_migrations(database)]
    assert await site.execute("SELECT number, name, checksum FROM $migration ORDER BY number") == known
    bundle = site.module.bundle()
    assert await site.execute("SELECT version, checksum FROM $bundle") == [(bundle.version, bundle.checksum)]


@pytest.mark.parametrize(
    ("sql", "what"),
    [
        pytest.param("UPDATE $migration SET checksum = 'other'", r"0001_baseline\.sql", id="migration"),
        pytest.param("UPDATE $bundle SET checksum = 'other'", r"bundle version \d+", id="bundle"),
    ],
)
async def test_other_sql_under_the_same_number_is_refused(site: Site, sql: str, what: str) -> None:
    """A store that was made with another text of a migration, or of this version of the bundle, is refused by open,
    schema and migrate. The error names the file and says what to do."""
    await site.execute(sql)
    store = site.make()
    for verb in (store.open, store.schema, store.migrate):
        with pytest.raises(StoreMigrationChanged, match=rf"another text of {what} .* install the version"):
            await verb()


async def test_a_newer_bundle_is_left_alone(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program with an older bundle uses the newer one as it is: two programs do not replace each other's in turn."""
    with monkeypatch.context() as patch:
        newer = site.upgrade(patch)
        await site.open()
    store = site.make()
    assert (await store.schema()).pending == ()
    await store.open()
    await store.turn("nobody", adds=[an_add(a_record())])
    await store.close()
    assert await site.execute("SELECT version, checksum FROM $bundle") == [(newer.version, newer.checksum)]


async def test_a_bundle_may_need_a_newer_program(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program whose own bundle is older than the installed one needs is refused, and told to upgrade."""
    ours: Bundle = site.module.bundle()
    newer = Bundle(ours.version + 2, ours.sql, needs_program=ours.version + 1)
    with monkeypatch.context() as patch:
        patch.setattr(site.module, "bundle", lambda: newer)
        await site.open()
    store = site.make()
    for verb in (store.open, store.schema, store.migrate):
        with pytest.raises(StoreTooNew, match=rf"bundle version {newer.version}, .* up to {ours.version}; upgrade"):
            await verb()
    monkeypatch.setattr(site.module, "bundle", lambda: Bundle(newer.needs_program, ours.sql))
    await site.open()
    assert await site.execute("SELECT version FROM $bundle") == [(newer.version,)]


THEIRS = {
    place: ["CREATE TRIGGER audit AFTER INSERT ON task BEGIN SELECT 1; END"],
    schema: [
        "CREATE FUNCTION taskyard.audit() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'",
        "CREATE TRIGGER audit AFTER INSERT ON taskyard.task FOR EACH ROW EXECUTE FUNCTION taskyard.audit()",
        "CREATE FUNCTION taskyard.of_an_extension() RETURNS void LANGUAGE sql AS ''",
        "ALTER EXTENSION plpgsql ADD FUNCTION taskyard.of_an_extension()",
        "CREATE TYPE taskyard.of_theirs AS (n integer)",
    ],
}
OBJECTS = {
    place: "SELECT name FROM sqlite_schema WHERE type = 'trigger'",
    schema: "SELECT tgname::text FROM pg_trigger WHERE NOT tgisinternal UNION ALL "
    "SELECT proname::text FROM pg_proc WHERE pronamespace = 'taskyard'::regnamespace UNION ALL "
    "SELECT relname::text FROM pg_class WHERE relnamespace = 'taskyard'::regnamespace AND relkind = 'c'",
}


async def test_what_others_made_stays(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A newer bundle replaces what the older one brought. It leaves alone a trigger, a routine and a type of somebody
    else, and what belongs to an extension."""
    ours: Bundle = site.module.bundle()
    before = set(await site.execute(OBJECTS[site.module]))
    for sql in THEIRS[site.module]:
        await site.execute(sql)
    theirs = set(await site.execute(OBJECTS[site.module])) - before
    for n, name in enumerate(["task_goes_on", "task_moves"], 1):
        newer = Bundle(ours.version + n, ours.sql.replace("TRIGGER task_moves", f"TRIGGER {name}"))
        monkeypatch.setattr(site.module, "bundle", lambda newer=newer: newer)
        await site.open()
        assert set(await site.execute(OBJECTS[site.module])) == before - {("task_moves",)} | {(name,)} | theirs


async def test_an_older_bundle_is_pending(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look says that the bundle is to be replaced, and changes nothing; a migration replaces it once."""
    before = await site.execute("SELECT version FROM $bundle")
    newer = site.upgrade(monkeypatch)
    store = site.make()
    assert (await store.schema()).pending == (newer.name,)
    assert await site.execute("SELECT version FROM $bundle") == before
    assert (await store.migrate()).pending == (newer.name,)
    assert (await store.schema()).pending == ()
    assert await site.execute("SELECT version FROM $bundle") == [(newer.version,)]


@pytest.mark.spec("QUE-01")
async def test_another_table_of_legal_moves_reaches_an_existing_store(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a new version of the bundle a move is legal that was not, in a store that was made before."""
    store = site.make()
    await store.open()
    late = a_record(due_at=SystemClock().now().replace(year=9000))
    await store.turn("nobody", adds=[an_add(late)])
    await store.close()
    move = f"UPDATE $task SET state = 'failed' WHERE uuid = '{late.uuid}'"
    with pytest.raises((apsw.ConstraintError, asyncpg.CheckViolationError), match="illegal move"):
        await site.execute(move)
    monkeypatch.setitem(state.LEGAL, TaskState.SCHEDULED, LEGAL[TaskState.SCHEDULED] | {TaskState.FAILED})
    site.upgrade(monkeypatch)
    await site.open()
    await site.execute(move)
    assert await site.execute("SELECT state FROM $task") == [("failed",)]


# --- PostgreSQL: nodes go on meanwhile --------------------------------------------------------------------------------


def changed(bundle: Bundle, *, with_types: bool = True) -> Bundle:
    """One of each: a routine has another name, another argument, another name of an argument; a type has another field;
    a trigger is gone."""
    sql = bundle.sql
    for old, new in (
        ("taskyard.pick(", "taskyard.pick_next("),
        ("taskyard.is_needed(p_id bigint)", "taskyard.is_needed(p_id bigint, p_why text DEFAULT '')"),
        ("taskyard.has_open(VARIADIC p_what text[])", "taskyard.has_open(VARIADIC p_kinds text[])"),
        ("state = ANY (p_what)", "state = ANY (p_kinds)"),
        ("event_page_1 AS (\n    xid bigint,", "event_page_1 AS (\n    xid bigint, odd int,"),
        ("ROW(e.xid, e.first,", "ROW(e.xid, 1, e.first,"),
    ):
        assert old in sql, old
        if with_types or "xid" not in new:
            sql = sql.replace(old, new)
    gone = "CREATE OR REPLACE TRIGGER dependency_deleted AFTER DELETE"
    start = sql.index(gone)
    sql = sql[:start] + sql[sql.index(";", start) + 1 :]
    return Bundle(bundle.version + 1, sql)


def test_a_replaced_bundle_is_that_of_a_new_store(databases: Databases, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever changed from one bundle to the next, and back, nothing of the older one is left."""
    first = schema.bundle()
    second = changed(first)
    third = Bundle(second.version + 1, first.sql)
    old = databases.make()
    for bundle in (first, second, third):
        monkeypatch.setattr(schema, "bundle", lambda bundle=bundle: bundle)
        new = databases.make()
        for url in (old, new):
            databases.run(schema.migrate, url)
        one, other = databases.run(dump, old), databases.run(dump, new)
        for name, rows in one.items():
            assert rows == other[name], name


async def test_a_store_without_its_bundle_is_incomplete(new_url: str) -> None:
    """If nobody knows which routines are ours, none is replaced: the store is refused, and the error says why."""
    conn = await asyncpg.connect(new_url)
    await schema.migrate(conn)
    await conn.execute("DELETE FROM taskyard.bundle")
    with pytest.raises(StoreIncomplete, match="'bundle' is empty"):
        await schema.migrate(conn)
    await conn.close()


async def test_an_unchanged_signature_keeps_its_identity(new_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Routines are replaced in place and types left alone: drivers know both by their numbers, and grants stay."""
    conn = await asyncpg.connect(new_url)
    await schema.migrate(conn)
    known = (
        "SELECT oid, proname::text AS name, proacl::text FROM pg_proc WHERE pronamespace = 'taskyard'::regnamespace "
        "UNION ALL SELECT oid, typname::text, typacl::text FROM pg_type WHERE typnamespace = 'taskyard'::regnamespace "
        "ORDER BY name, oid"
    )
    await conn.execute("REVOKE EXECUTE ON ALL ROUTINES IN SCHEMA taskyard FROM PUBLIC")
    before = await conn.fetch(known)
    newer = Bundle(schema.bundle().version + 1, schema.bundle().sql.replace("illegal move", "an illegal move"))
    monkeypatch.setattr(schema, "bundle", lambda: newer)
    assert (await schema.migrate(conn)).pending == (newer.name,)
    assert await conn.fetch(known) == before
    await conn.close()


GRANTS = (TOP / "docs/POSTGRES.md").read_text().partition("GRANT USAGE ON SCHEMA taskyard TO worker;")


@pytest.fixture
def worker_url(databases: Databases, new_url: str) -> Iterator[str]:
    """The same database for a user with the rights that docs/POSTGRES.md gives to `worker`, and no others."""
    databases.run(schema.migrate, new_url)
    databases.execute("REVOKE EXECUTE ON ALL ROUTINES IN SCHEMA taskyard FROM PUBLIC", new_url)
    databases.execute("ALTER DEFAULT PRIVILEGES REVOKE EXECUTE ON ROUTINES FROM PUBLIC", new_url)
    grants = GRANTS[1] + GRANTS[2].partition("```")[0]
    with databases.guest(new_url) as url:
        databases.execute(grants.replace("worker", str(urlsplit(url).username)), new_url)
        yield url


async def test_the_rights_of_a_worker_are_kept(new_url: str, worker_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that does not own the schema goes on after the owner replaced the bundle, also with routines that are
    new."""
    store = PostgresStore(worker_url, clock=SystemClock())
    await store.open()
    await a_day_of(store)
    newer = changed(schema.bundle(), with_types=False)
    monkeypatch.setattr(schema, "bundle", lambda: newer)
    conn = await asyncpg.connect(new_url)
    await schema.migrate(conn)
    await conn.close()
    await a_day_of(store)
    await store.close()
    await store.open()
    await a_day_of(store)
    await store.close()


async def test_work_goes_on_while_the_bundle_is_replaced(new_url: str) -> None:
    """Nodes at work notice nothing of a bundle that is replaced again and again, although internal routines vanish and
    come back each time: no task is lost, and no submit, preview or look at events fails."""
    yards = [Yard(new_url), Yard(new_url)]
    for yard in yards:

        @yard.consumer(name="double")
        async def double(n: int) -> int:
            return 2 * n

    async def work(yard: Yard, number: int) -> None:
        handles = [await yard.submit("double", {"n": n}) for n in range(number)]
        assert [await handle.result(timeout_s=PATIENCE_S) for handle in handles] == [2 * n for n in range(number)]

    async def look() -> int:
        store = PostgresStore(new_url, clock=SystemClock())
        await store.open()
        n = 0
        while not stop.is_set():
            n += 1
            await store.preview(room(9))
            await store.events(after=-1)
        await store.close()
        return n

    async def replace() -> int:
        conn = await asyncpg.connect(new_url, command_timeout=PATIENCE_S)
        first = schema.bundle()
        other = first.sql
        names = ("pick", "start", "complete", "insert_tasks", "insert_running", "write_events", "free_room", "horizon")
        for name in names:
            other = other.replace(f"taskyard.{name}(", f"taskyard.{name}_again(")
        n = 0
        while not stop.is_set():
            n += 1
            newer = Bundle(first.version + n, other if n % 2 else first.sql)
            await schema.apply(conn, list_migrations("postgres"), newer)
            await asyncio.sleep(0.05)
        await conn.close()
        return n

    stop = asyncio.Event()
    async with yards[0], yards[1]:
        replacing, looking = asyncio.create_task(replace()), asyncio.create_task(look())
        await asyncio.gather(*(work(yard, 60) for yard in yards for _ in range(3)))
        stop.set()
        assert await replacing > 1
        assert await looking > 3


@pytest.mark.parametrize(("missing_for", "is_answered"), [(1, True), (REPLACED_TRIES, False)])
async def test_a_read_that_finds_a_routine_missing_is_sent_again(
    new_url: str, missing_for: int, is_answered: bool
) -> None:
    """While the bundle is replaced, a read may come to a routine that is there the next time. If the routine stays
    away, the read fails."""
    store = PostgresStore(new_url, clock=SystemClock())
    await store.open()
    tries = 0

    async def read(conn: asyncpg.Connection) -> None:
        nonlocal tries
        tries += 1
        await conn.execute("SELECT taskyard.gone()" if tries <= missing_for else "SELECT 1")

    if is_answered:
        await store._db.ask(read)
        assert tries == missing_for + 1
    else:
        with pytest.raises(StoreUnavailable, match=r"taskyard\.gone\(\) does not exist"):
            await store._db.ask(read)
        assert tries == missing_for
    await store.close()


async def test_a_submit_in_a_transaction_says_that_the_bundle_was_replaced(new_url: str) -> None:
    """A transaction of a user that comes to a routine which was just dropped has failed. The error says to run it
    again. Only if `submit_1` itself is missing, it is another database."""
    store = PostgresStore(new_url, clock=SystemClock())
    await store.open()
    conn = await asyncpg.connect(new_url)

    async def submit() -> None:
        async with conn.transaction():
            await store.add_within(conn, an_add(a_record()))

    await conn.execute("ALTER FUNCTION taskyard.insert_in_user_transaction RENAME TO gone")
    with pytest.raises(StoreUnavailable, match="Roll it back and run it again"):
        await submit()
    await conn.execute("ALTER FUNCTION taskyard.gone RENAME TO insert_in_user_transaction")
    await submit()
    assert len(await store.list_tasks()) == 1
    await conn.execute("ALTER FUNCTION taskyard.submit_1 RENAME TO gone")
    with pytest.raises(OtherDatabase):
        await submit()
    await conn.close()
    await store.close()
