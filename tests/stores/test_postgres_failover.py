"""A server with standbys: what counts as stored, and what a process may believe after another server took over."""

import asyncio
from collections.abc import Iterator
from contextlib import suppress

import asyncpg
import pytest

from taskyard.errors import OutcomeUnknown
from taskyard.stores.postgres import PostgresStore
from taskyard.testing.clock import ManualClock
from taskyard.testing.postgres import Server
from taskyard.testing.samples import a_node, a_record, an_add, room

A = a_node("a").incarnation


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server(settings=("fsync=off", "full_page_writes=off", "synchronous_commit=on"))
    try:
        server.start()
        yield server
    finally:
        server.stop()


async def _standby_is(name: str, url: str) -> None:
    """From here on a commit waits for that standby, which there is not; or for none."""
    conn = await asyncpg.connect(url)
    await conn.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{name}'")
    await conn.execute("SELECT pg_reload_conf()")
    while await conn.fetchval("SHOW synchronous_standby_names") != name:  # noqa: ASYNC110 -- the server does not tell
        await asyncio.sleep(0.01)
    await conn.close()


@pytest.mark.spec("SCH-14")
async def test_what_no_standby_has_is_not_acknowledged(server: Server) -> None:
    """While a standby that has to confirm is away, a submit is not said to be stored, though the server has it."""
    store = PostgresStore(server.url, clock=ManualClock(), command_s=1.0)
    await store.open()
    try:
        await store.join(a_node("a"))
        await store.turn(A, adds=[an_add(a_record())])
        await _standby_is("gone", server.url)
        with pytest.raises(OutcomeUnknown):
            await store.turn(A, adds=[an_add(task := a_record())])
        await _standby_is("", server.url)
        assert await store.find(task.uuid) is not None
        assert len((await store.turn(A, demand=room(9))).claims) == 2
    finally:
        await store.close()


@pytest.mark.spec("SCH-14")
async def test_another_server_is_told_anew_where_tasks_stand(postgres_url: str) -> None:
    """After a failover to a standby that had not heard of a lane, what is submitted there is started all the same."""
    store, conn = PostgresStore(postgres_url, clock=ManualClock()), await asyncpg.connect(postgres_url)
    await store.open()
    try:
        await store.join(a_node("a"))
        await store.turn(A, adds=[an_add(a_record())])
        # To our connections it is as if another server had taken over, which is behind.
        await conn.execute("DELETE FROM taskyard.lane; DELETE FROM taskyard.task; DELETE FROM taskyard.tally")
        await conn.execute(
            "SELECT pg_terminate_backend(pid, 1000) FROM pg_stat_activity "
            "WHERE application_name = 'taskyard' AND datname = current_database()"
        )
        with suppress(OutcomeUnknown):  # that the connections are lost may be heard only now
            await store.turn(A)
        await store.turn(A, adds=[an_add(task := a_record())])
        assert [claim.uuid for claim in (await store.turn(A, demand=room(9))).claims] == [task.uuid]
    finally:
        await conn.close()
        await store.close()
