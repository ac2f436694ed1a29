"""Connections that cannot carry a task, each told what to do about it."""

import asyncio
import contextlib
import os
import sqlite3
import threading
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import asyncpg
import pytest
import sqlalchemy
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from taskyard import InvalidInput, Yard
from taskyard.errors import NotInTransaction, OtherDatabase, StoreDenied, UnusableConnection
from taskyard.ports.store import TransactionalStore
from taskyard.stores.postgres.schema import migrate
from taskyard.testing.postgres import Databases, as_user, at_database
from taskyard.testing.samples import a_record, an_add
from tests.scenario.gates import PATIENCE_S
from tests.scenario.jobs import build
from tests.scenario.processes import run_python
from tests.scenario.transactions import by_asyncpg, engine, undone

T = TypeVar("T")


async def submit(yard: Yard, connection: object, n: int = 1) -> int:
    handle = await yard.submit("add", {"a": n}, connection=connection)
    return int(await handle.result(timeout_s=PATIENCE_S))


@pytest.fixture
async def yard(postgres_url):
    async with build(postgres_url) as yard:
        yield yard
        assert await yard.store.list_tasks() == []


async def test_without_a_transaction(yard, postgres_url):
    """A connection on which no transaction is open is refused: the task would be there whatever happens next."""
    conn = await asyncpg.connect(postgres_url)
    with pytest.raises(
        NotInTransaction, match=r"no transaction is open.*as in `async with connection\.transaction\(\):`"
    ):
        await submit(yard, conn)
    await conn.close()


async def test_in_autocommit(yard, postgres_url):
    """At AUTOCOMMIT, SQLAlchemy's begin() opens no transaction, which is said; and how one is begun, in its words."""
    async with engine(postgres_url) as made:
        auto = made.execution_options(isolation_level="AUTOCOMMIT")
        async with auto.begin() as connection:
            with pytest.raises(NotInTransaction, match=r"AUTOCOMMIT.*as in `async with connection\.begin\(\):`"):
                await submit(yard, connection)
        async with AsyncSession(auto) as session, session.begin():
            with pytest.raises(NotInTransaction, match=r"AUTOCOMMIT.*as in `async with session\.begin\(\):`"):
                await submit(yard, session)


async def test_a_transaction_that_has_failed(yard, postgres_url):
    """After an error of the user's own, nothing can be part of his transaction any more, and he is told."""
    conn = await asyncpg.connect(postgres_url)
    await conn.execute("BEGIN")
    with pytest.raises(asyncpg.DivisionByZeroError):
        await conn.execute("SELECT 1 / 0")
    with pytest.raises(NotInTransaction, match="has failed"):
        await submit(yard, conn)
    await conn.close()
    async with engine(postgres_url) as made, AsyncSession(made) as session:
        with pytest.raises(SQLAlchemyError):
            await session.execute(sqlalchemy.text("SELECT 1 / 0"))
        with pytest.raises(NotInTransaction, match=r"has failed.*as in `async with session\.begin\(\):`"):
            await submit(yard, session)


async def test_a_transaction_that_may_not_write(yard, postgres_url):
    """A read-only transaction can carry no task."""
    conn = await asyncpg.connect(postgres_url)
    async with conn.transaction(readonly=True):
        with pytest.raises(UnusableConnection, match="read-only"):
            await submit(yard, conn)
        await conn.execute("ROLLBACK; BEGIN")
    await conn.close()


async def test_a_connection_that_is_closed(yard, postgres_url):
    """A connection that was closed, given back to its pool, or cut off by the server is refused in our words."""
    conn = await asyncpg.connect(postgres_url)
    await conn.execute("BEGIN")
    await conn.close()
    with pytest.raises(UnusableConnection, match="this connection is closed"):
        await submit(yard, conn)
    async with asyncpg.create_pool(postgres_url, min_size=1, max_size=1) as pool:
        async with pool.acquire() as pooled:
            pass
        with pytest.raises(UnusableConnection, match="cannot be used"):
            await submit(yard, pooled)
    async with engine(postgres_url) as made:
        async with made.begin() as connection:
            pass
        with pytest.raises(UnusableConnection, match="closed"):
            await submit(yard, connection)


async def test_a_connection_that_is_busy(yard, postgres_url):
    """One connection does one thing at a time: a second submit beside the first is refused, as asyncpg itself does."""
    async with undone(by_asyncpg(postgres_url)) as theirs:
        await yard.submit("add", {"a": 0}, connection=theirs.connection)  # the first one has more to ask
        both = [yard.submit("add", {"a": n}, connection=theirs.connection) for n in (1, 2)]
        [refused] = [one for one in await asyncio.gather(*both, return_exceptions=True) if isinstance(one, Exception)]
        assert isinstance(refused, UnusableConnection)
        assert "another operation is in progress" in str(refused)


@pytest.fixture(params=["empty", "ours"])
def other_url(request: pytest.FixtureRequest, databases: Databases) -> str:
    """Another database, with or without a schema of ours."""
    url = databases.make()
    if request.param == "ours":
        databases.run(migrate, url)
    return url


class OtherLoop:
    """The event loop of another thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    async def do(self, doing: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(doing, self._loop))

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture
def elsewhere() -> Iterator[OtherLoop]:
    loop = OtherLoop()
    yield loop
    loop.close()


async def test_a_connection_of_another_event_loop(yard, postgres_url, elsewhere):
    """A connection with an open transaction on the loop of another thread is refused in our words, and that thread goes
    on with it."""

    async def connect() -> asyncpg.Connection:
        return await asyncpg.connect(postgres_url)

    conn = await elsewhere.do(connect())
    await elsewhere.do(conn.execute("BEGIN"))
    with pytest.raises(UnusableConnection, match="belongs to the event loop it was made on"):
        await submit(yard, conn)
    assert await elsewhere.do(conn.fetchval("SELECT 1")) == 1
    await elsewhere.do(conn.close())


@pytest.mark.parametrize("has_begun", [True, False])
async def test_a_connection_of_sqlalchemys_of_another_event_loop(yard, postgres_url, elsewhere, has_begun):
    """The same of one of SQLAlchemy's, whether its transaction has begun or would begin with the submit."""

    async def connect() -> AsyncConnection:
        connection = await made.connect()
        if has_begun:
            await connection.exec_driver_sql("SELECT 1")
        return connection

    async with engine(postgres_url) as made:
        connection = await elsewhere.do(connect())
        with pytest.raises(UnusableConnection, match="belongs to the event loop it was made on"):
            await submit(yard, connection)
        await elsewhere.do(connection.exec_driver_sql("SELECT 1"))
        await elsewhere.do(connection.close())


async def test_a_connection_to_another_database(yard, other_url):
    """Another database is told from the yard's own, also if it has the same tables."""
    conn = await asyncpg.connect(other_url)
    await conn.execute("BEGIN")
    with pytest.raises(OtherDatabase, match="another database"):
        await submit(yard, conn)
    await conn.close()


@pytest.mark.parametrize("kind", ["nothing-of-ours", "sqlite3", "sqlalchemy-sync", "sqlalchemy-session-sync", "engine"])
async def test_what_is_no_connection_of_a_kind_we_know(yard, postgres_url, kind):
    """Anything else than a connection we know is refused by its name, and left as it is."""
    sync = sqlalchemy.create_engine("sqlite://")
    lite = sqlite3.connect(":memory:")
    with sync.connect() as connection, Session(sync) as session:
        given = {
            "nothing-of-ours": "postgresql://db/app",
            "sqlite3": lite,
            "sqlalchemy-sync": connection,
            "sqlalchemy-session-sync": session,
            "engine": sync,
        }[kind]
        with pytest.raises(UnusableConnection, match=f"{type(given).__name__} cannot carry a task"):
            await submit(yard, given)
        assert not session.in_transaction()
    sync.dispose()
    lite.close()


async def test_a_pool_is_no_connection(yard, postgres_url):
    """Who gives the pool itself is shown how to get a connection of it."""
    async with asyncpg.create_pool(postgres_url, min_size=1, max_size=1) as pool:
        with pytest.raises(UnusableConnection, match=r"^asyncpg\.pool\.Pool cannot carry a task.*pool\.acquire\(\)"):
            await submit(yard, pool)


@pytest.mark.parametrize("url", ["memory://", "sqlite"])
async def test_a_store_that_is_no_postgres(tmp_path, postgres_url, url):
    """On a store that takes no part in transactions, a connection is refused rather than left out of account."""
    async with build(f"sqlite:///{tmp_path / 'work.db'}" if url == "sqlite" else url) as yard:
        async with by_asyncpg(postgres_url) as theirs:
            with pytest.raises(UnusableConnection, match="use PostgreSQL"):
                await submit(yard, theirs.connection)
            with pytest.raises(UnusableConnection, match="use PostgreSQL"):
                await yard.submit_many("add", [{"a": 1}], connection=theirs.connection)
        assert await yard.store.list_tasks() == []


def test_the_blocking_face_takes_none(postgres_url):
    """A connection lives on a loop, which the blocking face has not: it says so."""
    with build(postgres_url).blocking(serve=False) as sync:
        with pytest.raises(UnusableConnection, match="event loop"):
            sync.submit("add", {"a": 1}, connection=object())
        with pytest.raises(UnusableConnection, match="event loop"):
            sync.submit_many("add", [{"a": 1}], connection=object())


async def test_what_cannot_be_stored_costs_no_transaction(yard, postgres_url):
    """What PostgreSQL cannot hold is refused before anything is sent, and the transaction goes on."""
    assert isinstance(yard.store, TransactionalStore)
    async with undone(by_asyncpg(postgres_url)) as theirs:
        with pytest.raises(InvalidInput, match="cannot be stored"):
            await yard.store.add_within(theirs.connection, an_add(a_record(key="a\0b")))
        await theirs.write("SELECT 1")


@pytest.fixture
def clerk(databases: Databases, postgres_url: str) -> Iterator[str]:
    """A user of the database without any right."""
    name = f"taskyard_clerk_{os.getpid()}"
    databases.execute(f"CREATE ROLE {name}", postgres_url)
    yield name
    databases.execute(f"DROP OWNED BY {name}; DROP ROLE {name}", postgres_url)


async def test_whoever_may_use_the_schema_may_submit(postgres_url, clerk):
    """A user without any right is told which one he needs; with that one he submits, and sees nothing of the tables."""
    conn = await asyncpg.connect(postgres_url)
    async with build(postgres_url) as yard:
        async with undone(conn.transaction()):
            await conn.execute(f"SET LOCAL ROLE {clerk}")
            with pytest.raises(StoreDenied, match="GRANT USAGE ON SCHEMA taskyard"):
                await submit(yard, conn)
        await conn.execute(f"GRANT USAGE ON SCHEMA taskyard TO {clerk}")
        async with conn.transaction():
            await conn.execute(f"SET LOCAL ROLE {clerk}")
            handle = await yard.submit("add", {"a": 1}, connection=conn)
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                async with conn.transaction():
                    await conn.execute("SELECT * FROM taskyard.task")
        assert await handle.result(timeout_s=PATIENCE_S) == 2
    await conn.close()


def test_the_package_does_without_sqlalchemy():
    """A session is known by what it can do: the store that takes one never imports SQLAlchemy."""
    code = "import sys, taskyard.stores.postgres; print('sqlalchemy' in sys.modules)"
    assert run_python(code) == "False\n"


async def test_a_session_that_is_busy(yard, postgres_url):
    """Two submits at once over one session of SQLAlchemy's: one of them is told that the connection is in use, in our
    words."""
    async with engine(postgres_url) as made, AsyncSession(made) as session:
        given = await asyncio.gather(
            *(yard.submit("add", {"a": n}, connection=session) for n in range(3)), return_exceptions=True
        )
        refused = [one for one in given if isinstance(one, Exception)]
        assert refused
        assert {type(one) for one in refused} == {UnusableConnection}
        with contextlib.suppress(SQLAlchemyError):
            await session.rollback()


@pytest.mark.parametrize(
    ("where", "why"),
    [
        pytest.param(lambda url: "postgresql://me:pass@127.0.0.1:1/db", "Connect call failed", id="away"),
        pytest.param(lambda url: at_database(url, "nowhere"), '"nowhere" does not exist', id="no-database"),
        pytest.param(lambda url: as_user(url, "nobody", "x"), "authentication failed", id="password"),
    ],
)
async def test_a_session_that_cannot_connect(yard, postgres_url, where, why):
    """Where the engine of a session gets no connection, it is that engine that is named, and not the yard's store."""
    async with engine(where(postgres_url)) as made, AsyncSession(made) as session:
        with pytest.raises(UnusableConnection, match=rf"^your own engine gives no connection \(.*{why}") as raised:
            await submit(yard, session)
    assert postgres_url.rpartition("@")[2] not in str(raised.value)
    assert raised.value.__cause__ is not None


async def test_a_session_that_waits_for_its_pool_in_vain(yard, postgres_url):
    """The same where all connections of the engine are in use."""
    url = postgres_url.replace("postgresql://", "postgresql+asyncpg://")
    made = create_async_engine(url, pool_size=1, max_overflow=0, pool_timeout=0.1)
    async with made.connect(), AsyncSession(made) as session:
        with pytest.raises(UnusableConnection, match=r"^your own engine gives no connection \(QueuePool limit"):
            await submit(yard, session)
    await made.dispose()


async def test_a_group(yard, postgres_url):
    """A group in a transaction of the user's own is refused with what to do instead."""
    conn = await asyncpg.connect(postgres_url)
    async with conn.transaction():
        with pytest.raises(InvalidInput, match="when you have committed"):
            await yard.submit_group([yard.bind("add", {"a": 1})], connection=conn)
    await conn.close()
