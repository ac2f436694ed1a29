"""On PostgreSQL: rules that change while much waits, and a close that is cancelled."""

import asyncio
from collections.abc import Callable

import asyncpg
import pytest

from taskyard.model.queue import QueueSettings
from taskyard.ports.store import News
from taskyard.stores.postgres import PostgresStore
from taskyard.stores.postgres.constants import Lock
from taskyard.testing.clock import ManualClock
from taskyard.testing.samples import a_node, a_record, an_add, room
from tests.stores.reads import list_ours, read_since

A = a_node("a")
PATIENCE_S = 20.0
MANY = 2000
STEPS = 40
"""Of the loop, from where a close begins."""

VERSIONS = "SELECT id, xmin::text, ctid::text, is_parked, fifo_bucket FROM taskyard.task ORDER BY id"
WAITING = "SELECT count(*) FROM pg_locks WHERE NOT granted AND pg_backend_pid() = ANY (pg_blocking_pids(pid))"


async def opened(url: str, heard: Callable[[News], None] | None = None) -> PostgresStore:
    store = PostgresStore(url, clock=ManualClock())
    await store.open()
    await store.join(A)
    if heard is not None:
        store.watch(heard)
    return store


async def someone_waits(conn: asyncpg.Connection) -> None:
    """For what this connection holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not await conn.fetchval(WAITING):  # noqa: ASYNC110 -- nothing tells what happens in a server
            await asyncio.sleep(0.002)


async def all_gone(conn: asyncpg.Connection) -> bool:
    """Whether no store has a connection any more; the server takes a moment to notice."""
    try:
        async with asyncio.timeout(2.0):
            while await list_ours(conn):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
    except TimeoutError:
        return False
    return True


# --- rules ------------------------------------------------------------------------------------------------------------


async def test_a_limit_that_is_changed_leaves_alone_what_waits(postgres_url, conn):
    """Another concurrency says nothing of keys and lines: of the tasks that wait with a key none is read, and none is
    written."""
    store = await opened(postgres_url)
    await store.set_queue(QueueSettings(name="default", concurrency=50))
    keyed = [a_record(key=f"key-{n // 2}") for n in range(MANY)]
    await store.turn(A.incarnation, adds=[an_add(*keyed)])
    await store.close()
    before = await conn.fetch(VERSIONS)
    assert len(before) == MANY
    store = await opened(postgres_url)
    await store.queues()
    await store.close()
    await read_since(conn)

    store = await opened(postgres_url)
    await store.set_queue(QueueSettings(name="default", concurrency=60))
    await store.close()
    assert await read_since(conn) < MANY // 10
    assert await conn.fetch(VERSIONS) == before
    store = await opened(postgres_url)
    assert len((await store.turn(A.incarnation, demand=room(99))).claims) == 60
    await store.close()


# --- closing ----------------------------------------------------------------------------------------------------------


async def test_a_close_that_was_cancelled_while_it_waited_can_be_repeated(postgres_url, conn):
    """Of a store that was told to close twice, the first time in vain, neither a connection nor a task is left; and it
    can be opened again."""
    before = asyncio.all_tasks()
    store = await opened(postgres_url, lambda _: None)
    async with conn.transaction():
        await conn.execute(f"SELECT pg_advisory_xact_lock({Lock.QUEUE}, hashtext('default'))")
        turn = asyncio.ensure_future(store.turn(A.incarnation, adds=[an_add(a_record())]))
        await someone_waits(conn)
        closing = asyncio.ensure_future(store.close())
        await asyncio.sleep(0)  # it waits for the turn
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
    assert isinstance((await turn).added[0], list)
    await store.close()
    assert asyncio.all_tasks() <= before
    assert await all_gone(conn)
    await store.open()
    assert sum((await store.count()).values()) == 1
    await store.close()
    assert await all_gone(conn)


async def test_a_close_can_be_repeated_wherever_it_was_cancelled(postgres_url, conn):
    """At whichever step the first close was cancelled, after the second neither a connection nor a task is left."""
    before = asyncio.all_tasks()
    for n in range(STEPS):
        store = await opened(postgres_url, lambda _: None)
        await store.turn(A.incarnation, adds=[an_add(a_record())])
        closing = asyncio.ensure_future(store.close())
        for _ in range(n):
            await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait([closing])
        await store.close()
        assert asyncio.all_tasks() <= before, n
        assert await all_gone(conn), n
