"""On PostgreSQL, what happens beside each other: tasks are forgotten, events are trimmed and dead nodes are given up
while others add, and read."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import pytest

from taskyard.errors import UnknownTask
from taskyard.model.event import EventKind
from taskyard.model.move import Move
from taskyard.model.queue import QueueSettings
from taskyard.model.state import TaskState
from taskyard.model.task import OnFailure
from taskyard.ports.store import Add
from taskyard.stores.postgres import PostgresStore
from taskyard.stores.postgres.constants import Lock
from taskyard.testing.clock import ManualClock
from taskyard.testing.postgres import Databases
from taskyard.testing.samples import NOON, a_node, a_record, an_add, an_error, room, seconds

A, B = a_node("a"), a_node("b")
PATIENCE_S = 20.0

HERE = 4711
"""The first number of an advisory lock that nobody else has: who comes to where it is asked for stands still there."""

WAITING = "SELECT DISTINCT pid FROM pg_locks WHERE NOT granted AND $1 = ANY (pg_blocking_pids(pid))"

STAND_STILL = f"""
    CREATE FUNCTION public.stand_still() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        PERFORM pg_advisory_xact_lock_shared({HERE}, 0);
        RETURN NULL;
    END $$;
    CREATE TRIGGER stand_still AFTER INSERT ON taskyard.{{table}}
        FOR EACH STATEMENT EXECUTE FUNCTION public.stand_still()
"""

LOOK_SLOWLY = f"""
    CREATE FUNCTION public.stand_still() RETURNS boolean LANGUAGE plpgsql AS $$
    BEGIN
        PERFORM pg_advisory_xact_lock_shared({HERE}, 0);
        RETURN true;
    END $$;
    ALTER TABLE taskyard.compaction RENAME TO tidied_itself;
    CREATE VIEW taskyard.compaction AS SELECT * FROM taskyard.tidied_itself WHERE public.stand_still()
"""

EDGES_TO_NOBODY = (
    "SELECT count(*) FROM taskyard.dependency AS d WHERE NOT d.done "
    "AND NOT EXISTS (SELECT FROM taskyard.task AS t WHERE t.id = d.parent) "
    "AND NOT EXISTS (SELECT FROM taskyard.finished AS e WHERE e.id = d.parent)"
)


async def who_waits(conn: asyncpg.Connection, n: int = 1) -> list[int]:
    """The sessions that wait for this one, as soon as there are so many."""
    async with asyncio.timeout(PATIENCE_S):
        while len(found := await conn.fetch(WAITING, conn.get_server_pid())) < n:  # noqa: ASYNC110 -- nothing tells what happens in a server
            await asyncio.sleep(0.002)
    return [row["pid"] for row in found]


async def done_or_waiting(doing: asyncio.Future[Any], conn: asyncpg.Connection, whom: int) -> None:
    """Until it is over, or has to wait for what that session does."""
    async with asyncio.timeout(PATIENCE_S):
        while not doing.done() and not await conn.fetch(WAITING, whom):  # noqa: ASYNC110
            await asyncio.sleep(0.002)


@asynccontextmanager
async def standing_still(conn: asyncpg.Connection, table: str) -> AsyncIterator[None]:
    """Who has just put rows into this table stands still until the block is left."""
    await conn.execute(STAND_STILL.format(table=table))
    try:
        await conn.execute(f"SELECT pg_advisory_lock({HERE}, 0)")
        try:
            yield
        finally:
            await conn.execute(f"SELECT pg_advisory_unlock({HERE}, 0)")
    finally:
        await conn.execute("DROP FUNCTION public.stand_still CASCADE")


# --- forgetting -------------------------------------------------------------------------------------------------------


@pytest.mark.spec("QUE-27")
@pytest.mark.parametrize("on_failure", [OnFailure.FAIL, OnFailure.SKIP])
@pytest.mark.parametrize("table", ["task_relation", "dependency"], ids=["not-yet-tied", "tied"])
async def test_who_comes_to_wait_for_a_task_that_is_just_forgotten_does_not_wait_for_ever(
    store, conn, table: str, on_failure: OnFailure
):
    """A task after one that failed, and is forgotten in that moment, ends as it was told to, or is refused because
    there is none."""
    parent, child = a_record(), a_record(on_failure=on_failure)
    (claim,) = (await store.turn(A.incarnation, adds=[an_add(parent)], demand=room(1))).claims
    await store.turn(A.incarnation, settles=[(claim, Move.failed(at=NOON, error=an_error()))])
    async with standing_still(conn, table):
        add = Add([child], after={child.uuid: [parent.uuid]})
        adding = asyncio.ensure_future(store.turn(B.incarnation, adds=[add]))
        (adds,) = await who_waits(conn)
        pruning = asyncio.ensure_future(store.prune(finished_before=NOON + seconds(1)))
        await done_or_waiting(pruning, conn, adds)
    (answer,) = (await adding).added
    await pruning
    await store.turn(B.incarnation)
    assert await conn.fetchval(EDGES_TO_NOBODY) == 0
    if isinstance(answer, UnknownTask):
        assert await store.find(child.uuid) is None
    else:
        assert isinstance(answer, list)
        ends = {OnFailure.FAIL: TaskState.FAILED, OnFailure.SKIP: TaskState.SKIPPED}
        assert (await store.find(child.uuid)).state is ends[on_failure]


# --- events -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def empty_url(databases: Databases) -> str:
    return databases.make()


@pytest.fixture
async def slow(empty_url: str) -> AsyncIterator[tuple[PostgresStore, asyncpg.Connection]]:
    """A store that stands still where it looks how far events were trimmed, for as long as the connection has a lock;
    with a database of its own, since that takes another schema."""
    store = PostgresStore(empty_url, clock=ManualClock())
    await store.open()
    await store.join(A)
    conn = await asyncpg.connect(empty_url)
    await conn.execute(LOOK_SLOWLY)
    yield store, conn
    await conn.close()
    await store.close()


@pytest.mark.spec("QUE-29")
async def test_events_that_are_trimmed_while_they_are_read_are_missed_aloud(slow):
    """A page has all events after a number, or says that it has not, however far others trim them meanwhile."""
    store, conn = slow
    for _ in range(5):
        await store.turn(A.incarnation, adds=[an_add(a_record())])
    there = [event.seq for event in (await store.events(after=0)).events]
    await conn.execute(f"SELECT pg_advisory_lock({HERE}, 0)")
    reading = asyncio.ensure_future(store.events(after=there[0]))
    await who_waits(conn)
    assert await conn.fetchval("SELECT taskyard.compact_1(1)")
    await conn.execute(f"SELECT pg_advisory_unlock({HERE}, 0)")
    page = await reading
    assert page.missed or [event.seq for event in page.events] == there[1:]
    assert page.last == there[-1]
    assert (await store.events(after=there[0])).missed


@pytest.mark.spec("QUE-29")
async def test_a_rescue_is_told_after_what_came_before_it(store, conn):
    """Who came to wait for a run just before its node was given up is told of as submitted first, and then as
    failed."""
    await store.set_queue(QueueSettings(name="default", auto_recover=0))
    parent, child = a_record(), a_record(on_failure=OnFailure.FAIL)
    await store.turn(A.incarnation, adds=[an_add(parent)], demand=room(1))
    async with conn.transaction():
        await conn.execute(f"SELECT pg_advisory_xact_lock({Lock.QUEUE}, hashtext('default'))")
        add = Add([child], after={child.uuid: [parent.uuid]})
        adding = asyncio.ensure_future(store.turn(B.incarnation, adds=[add]))
        await who_waits(conn)
        rescuing = asyncio.ensure_future(store.rescue(A.incarnation))
        await who_waits(conn, 2)
    assert isinstance((await adding).added[0], list)
    assert await rescuing == [parent.uuid]
    await store.turn(B.incarnation)
    assert (await store.find(child.uuid)).state is TaskState.FAILED
    told = [event.kind for event in (await store.events(after=0)).events if event.uuid == child.uuid]
    assert told[0] is EventKind.SUBMITTED
    assert told[-1] is EventKind.FAILED
    both = [event.uuid for event in (await store.events(after=0)).events if event.kind is EventKind.FAILED]
    assert both == [parent.uuid, child.uuid]
