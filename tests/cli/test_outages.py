"""Commands that go on for long, on a server that is away for a while or has no connection left."""

import asyncio
import logging
import signal
from collections.abc import Iterator
from contextlib import aclosing
from datetime import datetime, timedelta

import asyncpg
import pytest

from taskyard import Yard
from taskyard.engine.engine import FLUSH_S
from taskyard.ports.clock import SystemClock
from taskyard.stores.postgres import PostgresStore
from taskyard.stores.postgres.connection import connect
from taskyard.testing.postgres import FAST, Databases, Server, as_user, at_database
from tests.cli.shell import LONG_S, Shell

SECRET = "sesame"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """One that a test may halt, if it starts it again; on this thread, with which it ends."""
    server = Server(settings=FAST)
    try:
        server.start()
        Databases(server.url).execute(f"CREATE ROLE app LOGIN PASSWORD '{SECRET}'")
        yield server
    finally:
        server.stop()


@pytest.fixture
def url(server: Server) -> str:
    """The address of an empty database, for a user of no special rights."""
    databases = Databases(server.url)
    databases.execute("DROP DATABASE IF EXISTS app WITH (FORCE)")
    databases.execute("CREATE DATABASE app OWNER app")
    return as_user(at_database(server.url, "app"), "app", SECRET)


class Lines(logging.Handler):
    """What is logged, to be waited for, on one loop."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []
        self._new: asyncio.Queue[str] = asyncio.Queue()

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())
        self._new.put_nowait(record.getMessage())

    async def hear(self, text: str) -> None:
        async with asyncio.timeout(LONG_S):
            while text not in await self._new.get():
                pass


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler, log = Lines(), logging.getLogger("taskyard")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield handler
    log.removeHandler(handler)
    log.setLevel(logging.NOTSET)


async def let_connect(server: Server, number: int) -> None:
    """How many connections the user may have; -1 for any number. Those that are open stay."""
    conn = await asyncpg.connect(server.url)
    await conn.execute(f"ALTER ROLE app CONNECTION LIMIT {number}")
    await conn.close()


def test_a_verbose_worker_is_stopped_while_the_server_is_away(shell: Shell, server: Server, url: str) -> None:
    """An idle verbose worker that is stopped while the database is away ends with 0, as one that is not verbose."""
    worker = shell.start("worker", "app:yard", "-v", TASKYARD_STORE=url)
    worker.hear("is running")
    shell.ok("submit", "add", "a=1", "--app", "app:yard", "--wait", TASKYARD_STORE=url)
    worker.hear("completed add")
    server.halt()
    try:
        worker.signal(signal.SIGTERM)
        assert worker.end() == 0, worker.said
    finally:
        server.start()
    assert "error: " not in worker.said


def test_a_database_that_lacks_letters_is_named(shell: Shell, server: Server) -> None:
    """A database in another encoding than UTF8 is refused by every command, and a problem for `doctor`, with what to
    do."""
    databases = Databases(server.url)
    databases.execute("CREATE DATABASE latin ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
    url = at_database(server.url, "latin")
    for command in ("migrate", "migrate --check", "submit add a=1 --app app:yard", "ls"):
        done = shell.here(*command.split(), TASKYARD_STORE=url)
        assert (done.code, "ENCODING 'UTF8' TEMPLATE template0" in done.err) == (3, True), done
    examined = shell.here("doctor", TASKYARD_STORE=url)
    assert (examined.code, "has the encoding LATIN1" in examined.out) == (1, True), examined
    databases.execute("DROP DATABASE latin")


def test_watching_goes_on_after_an_outage(shell: Shell, server: Server, url: str) -> None:
    """`taskyard watch` waits for a database that is away, says so once, and tells what happens afterwards."""
    shell.ok("migrate", TASKYARD_STORE=url)
    watching = shell.start("watch", TASKYARD_STORE=url)
    watching.hear("watching: ")
    server.halt(signal.SIGQUIT)
    server.start()
    submitted = shell.ok("submit", "add", "a=1", "--app", "app:yard", "--json", TASKYARD_STORE=url).json["uuid"]
    watching.hear(f"submitted   add {submitted}")
    watching.signal(signal.SIGTERM)
    assert watching.end() == 0
    assert watching.said.count("the store is away since") <= 1


@pytest.mark.anyio
async def test_a_listener_waits_for_a_store_that_is_away(server: Server, url: str, lines: Lines) -> None:
    """Events are read on where a reader was when the database went away, without a gap, and that is logged once."""
    async with Yard(url) as yard, Yard(url).client() as reader:

        @yard.consumer
        async def add(a: int) -> int:
            return a + 1

        first = await add.submit(1)
        await first.result(timeout_s=LONG_S)
        seen = (await anext(reader.events(after=0, task=first.uuid))).seq
        server.halt()
        try:
            async with aclosing(reader.events(after=seen, kinds=["running", "completed"])) as events:
                following = asyncio.ensure_future(anext(events))
                await lines.hear("events are read on when the store answers")
                server.start()
                async with asyncio.timeout(LONG_S):
                    told = [(await following).kind, (await anext(events)).kind]
        finally:
            if not server.is_running:
                server.start()
    assert told == ["running", "completed"]
    assert len([line for line in lines.said if "events are read on" in line]) == 1


def test_a_standby_is_named(shell: Shell, server: Server, url: str) -> None:
    """On a server that is read-only, what writes says so and where to go, `doctor` calls it a problem, and one may
    look."""
    shell.ok("migrate", TASKYARD_STORE=url)
    standby = server.folder / "data" / "standby.signal"
    server.halt()
    standby.touch()
    server.start()
    try:
        for command in ("migrate", "submit add a=1 --app app:yard"):
            done = shell.here(*command.split(), TASKYARD_STORE=url)
            assert done.code == 3, done
            assert "it is read-only, as a standby is; give the address of the primary" in done.err
        assert shell.here("ls", TASKYARD_STORE=url).code == 0
        examined = shell.here("doctor", TASKYARD_STORE=url)
        assert (examined.code, "this server is a standby" in examined.out) == (1, True), examined
    finally:
        server.halt()
        standby.unlink()
        server.start()


@pytest.mark.anyio
async def test_a_stop_waits_its_whole_grace_for_the_store(server: Server, url: str) -> None:
    """What ends while the database is away is recorded when that comes back within the grace of the stop, later than
    after the few seconds that every stop has."""
    yard = Yard(url, grace_s=60.0)
    begun, may_end = asyncio.Event(), asyncio.Event()

    @yard.consumer
    async def work() -> str:
        begun.set()
        await may_end.wait()
        return "done"

    await yard.start()
    handle = await work.submit()
    await begun.wait()
    server.halt()
    try:
        stopping = asyncio.ensure_future(yard.stop())
        may_end.set()
        done, _ = await asyncio.wait({stopping}, timeout=FLUSH_S + 1.0)
        assert not done
    finally:
        server.start()
    await stopping
    async with Yard(url).client() as other:
        assert await other.handle(handle.uuid).result(timeout_s=LONG_S) == "done"


@pytest.mark.anyio
async def test_a_session_that_only_listens_is_not_ended(url: str) -> None:
    """Where the server ends idle sessions, ours stay: who listens is idle for long."""
    conn = await asyncpg.connect(url)
    await conn.execute("ALTER ROLE app IN DATABASE app SET idle_session_timeout = '50ms'")
    await conn.close()
    async with Yard(url).client() as yard:
        assert await yard.store.nodes() == []
    ours = await connect(url)
    assert await ours.fetchval("SHOW idle_session_timeout") == "0"
    await ours.close()


class Ahead(SystemClock):
    """A clock that was set wrong by an hour."""

    def now(self) -> datetime:
        return super().now() + timedelta(hours=1)


@pytest.mark.anyio
async def test_a_node_whose_clock_is_wrong_is_seen(shell: Shell, url: str, lines: Lines) -> None:
    """A node whose clock differs from the database's says so when it starts, and others see it in `node ls` and
    `doctor`; one whose clock is right is not mentioned."""
    for clock, is_off in ((SystemClock(), False), (Ahead(), True)):
        async with Yard(PostgresStore(url, clock=clock)):
            for command in ("node ls", "doctor"):
                done = await asyncio.to_thread(shell.run, *command.split(), TASKYARD_STORE=url)
                assert ("1 h ahead" in done.out) is is_off, done
        assert any("the clock of this node is 3600 s ahead" in line for line in lines.said) is is_off
