"""A server with standbys: what counts as stored, and what a process may believe after another server took over."""

from collections.abc import Iterator
from contextlib import suppress

import asyncpg
import pytest

from taskyard.errors import ClaimLost, OutcomeUnknown
from taskyard.model.move import Move
from taskyard.model.task import Claim
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
    heard: list[object] = []
    conn.add_log_listener(lambda _, message: heard.append(message))
    await conn.execute("CREATE TABLE IF NOT EXISTS written (n integer)")
    await conn.execute("SET statement_timeout = '100ms'")
    await conn.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{name}'")
    await conn.execute("SELECT pg_reload_conf()")
    # The server's processes hear of it one after the other. A commit within a statement that lasts too long says so.
    while True:
        heard.clear()
        await conn.execute("DO 'BEGIN INSERT INTO written VALUES (1); COMMIT; END'")
        if bool(heard) == bool(name):
            break
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
        await conn.execute("DELETE FROM taskyard.lane; DELETE FROM taskyard.task; DELETE FROM taskyard.state_count")
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


@pytest.mark.spec("SCH-17")
async def test_what_ran_before_a_failover_settles_nothing_after_it(server: Server, caplog) -> None:
    """A server that took over, and had never heard of the last claim, does not hand out its id and token again."""
    store = PostgresStore(server.url, clock=(clock := ManualClock()))
    await store.open()
    try:
        await store.join(a_node("a"))
        (stale,) = (await store.turn(A, adds=[an_add(a_record())], demand=room(1))).claims
        await _take_over_without(stale, server)
        (held,) = (await store.turn(A, adds=[an_add(a_record())], demand=room(1))).claims
        assert held.token > stale.token + 1_000_000
        assert "ids and tokens leap ahead" in caplog.text
        done = [(claim, Move.completed(at=clock.now())) for claim in (stale, held)]
        assert (await store.turn(A, settles=done)).settled == [ClaimLost(stale.uuid, stale.token), None]
        assert await _leaps(server.url) is False  # nor any other that connects
    finally:
        await store.close()


async def _take_over_without(claim: Claim, server: Server) -> None:
    """Let the server be one that has just taken over from another, on a line of history of its own, and has never heard
    of this claim, its task and its numbers."""
    conn = await asyncpg.connect(server.url)
    await conn.execute("DELETE FROM taskyard.task; DELETE FROM taskyard.event; DELETE FROM taskyard.state_count")
    await conn.execute(f"SELECT setval('taskyard.seq', {claim.record.id}, false)")
    await conn.close()
    server.halt()
    server.follow()
    server.start()
    conn = await asyncpg.connect(server.url)
    assert await conn.fetchval("SELECT pg_is_in_recovery()")
    assert await conn.fetchval("SELECT pg_promote()")
    await conn.close()


async def _leaps(url: str) -> object:
    conn = await asyncpg.connect(url)
    try:
        return await conn.fetchval("SELECT taskyard.skip_numbers_1()")
    finally:
        await conn.close()
