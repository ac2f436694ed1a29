"""On PostgreSQL plain runs are completed beside whoever claims from the same queue: what that must not break."""

import asyncio
from collections.abc import Sequence

import asyncpg
import pytest

from taskyard.errors import InvalidInput, SubmitPending
from taskyard.model.move import Move
from taskyard.model.queue import QueueSettings, QueueState, StopAfterCurrent
from taskyard.model.state import TaskState
from taskyard.model.task import Claim
from taskyard.ports.store import Add
from taskyard.stores.postgres import PostgresStore
from taskyard.stores.postgres.constants import Lock
from taskyard.testing.samples import NOON, a_node, a_record, an_add, room, seconds

pytestmark = pytest.mark.anyio

A, B = a_node("a"), a_node("b")
PATIENCE_S = 20.0

WAITING = "SELECT count(*) FROM pg_stat_activity WHERE pg_backend_pid() = ANY (pg_blocking_pids(pid))"

COMPLETE = (
    "SELECT told FROM taskyard.complete_apart($3, ARRAY['default'], "
    "ROW($1::bigint[], $2::bigint[], ARRAY[1], ARRAY[$3::timestamptz], ARRAY['1'], NULL, NULL, NULL, true)"
    "::taskyard.completions_1)"
)


async def begin(store: PostgresStore, *uuids: str) -> list[Claim]:
    """Tasks of these ids run."""
    return (await store.turn(A.incarnation, adds=[an_add(*[a_record(uuid=u) for u in uuids])], demand=room(9))).claims


def completed(claims: Sequence[Claim]) -> list[tuple[Claim, Move]]:
    return [(claim, Move.completed(at=NOON)) for claim in claims]


async def complete(conn: asyncpg.Connection, *claims: Claim) -> None:
    """As a node's turn does, in the transaction that this connection is in."""
    ids, tokens = [claim.record.id for claim in claims], [claim.token for claim in claims]
    assert await conn.fetchval(COMPLETE, ids, tokens, NOON) == len(claims)


async def someone_waits(conn: asyncpg.Connection) -> None:
    """For what this connection holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not await conn.fetchval(WAITING):  # noqa: ASYNC110 -- nothing tells what happens in a server
            await asyncio.sleep(0.002)


async def test_ends_do_not_wait_for_claims(store, conn):
    """Runs are completed while another turn, which claims from their queue, has not been committed."""
    claims = await begin(store, "one", "two")
    async with conn.transaction():
        await conn.execute(f"SELECT pg_advisory_xact_lock({Lock.QUEUE}, hashtext('default'))")
        turned = await store.turn(A.incarnation, settles=completed(claims))
    assert turned.settled == [None, None]
    assert await store.count() == {("default", TaskState.COMPLETED): 2}


async def test_claims_do_not_wait_for_ends(store, conn):
    """Tasks are added and start while a turn that completes others of their queue has not been committed."""
    claims = await begin(store, "one")
    async with conn.transaction():
        await complete(conn, *claims)
        turned = await store.turn(B.incarnation, adds=[an_add(a_record(uuid="two"))], demand=room(9))
        assert [claim.uuid for claim in turned.claims] == ["two"]
    assert (await store.count())["default", TaskState.COMPLETED] == 1


@pytest.mark.spec("QUE-27")
async def test_who_comes_to_wait_for_a_task_that_is_just_ending_does_not_wait_for_ever(store, conn):
    """Neither sees what the other writes: so the one waits for the commit of the other."""
    claims = await begin(store, "parent")
    child = a_record(uuid="child")
    async with conn.transaction():
        await complete(conn, *claims)
        adding = asyncio.ensure_future(store.turn(B.incarnation, adds=[Add([child], after={"child": ["parent"]})]))
        await someone_waits(conn)
    assert isinstance((await adding).added[0], list)
    assert [claim.uuid for claim in (await store.turn(B.incarnation, demand=room(9))).claims] == ["child"]


@pytest.mark.spec("QUE-27")
async def test_an_end_hears_of_who_has_just_come_to_wait_for_it(store, conn):
    """The other way round: the end waits for the commit of who comes to wait, and then tells him."""
    claims = await begin(store, "parent")
    async with conn.transaction():
        await conn.execute(f"SELECT pg_advisory_xact_lock({Lock.COMPLETIONS}, hashtext('default'))")
        ending = asyncio.ensure_future(store.turn(A.incarnation, settles=completed(claims)))
        await someone_waits(conn)
        await conn.execute(
            "INSERT INTO taskyard.task (id, position, due_at, created_at, updated_at, priority, is_parked, state, "
            "uuid, consumer, lane, queue, args) SELECT 999, 999, due_at, due_at, due_at, 1, false, 'blocked', 'child', "
            "consumer, lane, queue, '{}' FROM taskyard.task WHERE uuid = 'parent'"
        )
        await conn.execute("INSERT INTO taskyard.task_relation (id, open_dependencies) VALUES (999, 1)")
        await conn.execute("INSERT INTO taskyard.dependency VALUES (999, $1, false)", claims[0].record.id)
    assert (await ending).settled == [None]
    assert [claim.uuid for claim in (await store.turn(B.incarnation, demand=room(9))).claims] == ["child"]


@pytest.mark.spec("QUE-10")
async def test_two_last_ends_at_a_time_pause_a_queue_that_stops_after_them(store, conn):
    """Neither would know that it is the last."""
    claims = await begin(store, "one", "two")
    await store.control("default", StopAfterCurrent(), by="test")
    endings = [asyncio.ensure_future(store.turn(A.incarnation, settles=completed([claim]))) for claim in claims]
    await asyncio.gather(*endings)
    assert [queue.control.state for queue in await store.queues()] == [QueueState.PAUSED]


@pytest.mark.parametrize("demand", [None, room(9)], ids=["queued", "started"])
async def test_a_uuid_is_not_taken_again_while_its_task_ends(store, conn, demand):
    """Who submits with an id of his own, once more and just as it ends, is told that there is such a task."""
    claims = await begin(store, "mine")
    async with conn.transaction():
        await complete(conn, *claims)
        adding = asyncio.ensure_future(store.turn(B.incarnation, adds=[an_add(a_record(uuid="mine"))], demand=demand))
        await someone_waits(conn)
    (answer,) = (await adding).added
    assert isinstance(answer, InvalidInput | SubmitPending)  # the latter if this machine is slow: it would ask again
    assert await store.count() == {("default", TaskState.COMPLETED): 1}


async def test_nor_in_a_transaction_of_the_users(store, conn, postgres_url):
    """The same of a task that is submitted in somebody's own transaction."""
    claims = await begin(store, "mine")
    users = await asyncpg.connect(postgres_url)
    async with users.transaction():
        async with conn.transaction():
            await complete(conn, *claims)
            adding = asyncio.ensure_future(store.add_within(users, an_add(a_record(uuid="mine"))))
            await someone_waits(conn)
        with pytest.raises(InvalidInput, match="mine"):
            await adding
    await users.close()
    assert await store.count() == {("default", TaskState.COMPLETED): 1}


async def test_an_end_that_cannot_be_stored_is_refused_as_such(store, conn):
    """Not as a database that is busy, which would be asked for ever: what else has ended could then not be written."""
    claims = await begin(store, "twice", "fine")
    await store.turn(A.incarnation, settles=completed(await begin(store, "other")))
    await conn.execute("UPDATE taskyard.finished SET uuid = 'twice'")
    for adds in ([], [an_add(a_record())]):
        with pytest.raises(InvalidInput, match="finished_uuid"):
            await store.turn(A.incarnation, settles=completed(claims), adds=adds)
    assert (await store.turn(A.incarnation, settles=completed(claims[1:]))).settled == [None]


@pytest.mark.spec("QUE-02")
async def test_ends_in_a_queue_with_a_limit_take_turns_with_claims(store, conn):
    """There a claim counts what runs, and what is told of it is in the order of the commits."""
    await store.set_queue(QueueSettings(name="default", concurrency=1))
    claims = await begin(store, "one", "two")
    async with conn.transaction():
        await conn.execute(f"SELECT pg_advisory_xact_lock({Lock.QUEUE}, hashtext('default'))")
        ending = asyncio.ensure_future(store.turn(A.incarnation, settles=completed(claims)))
        await someone_waits(conn)
    assert (await ending).settled == [None]
    assert [claim.uuid for claim in (await store.turn(B.incarnation, demand=room(9))).claims] == ["two"]


async def test_a_limit_that_is_set_meanwhile_waits_for_the_ends(store, conn):
    """From then on what is counted must be certain."""
    claims = await begin(store, "one", "two")
    async with conn.transaction():
        await complete(conn, claims[0])
        limiting = asyncio.ensure_future(store.set_queue(QueueSettings(name="default", concurrency=2)))
        await someone_waits(conn)
    await limiting
    await store.turn(B.incarnation, adds=[an_add(a_record(), a_record())])
    assert len((await store.turn(B.incarnation, demand=room(9))).claims) == 1


async def test_what_is_due_is_promoted_by_ends_as_well(store):
    """A turn that only settles promotes what is due, as every turn does."""
    claims = await begin(store, "one")
    await store.turn(A.incarnation, adds=[an_add(a_record(uuid="due", due_at=NOON + seconds(1)))])
    store._clock.advance(2)
    assert (await store.turn(A.incarnation, settles=completed(claims))).next_due is None
    assert [claim.uuid for claim in (await store.turn(B.incarnation, demand=room(9))).claims] == ["due"]
    assert (await store.count())["default", TaskState.COMPLETED] == 1
