"""Submits in transactions of others, on PostgreSQL: what must be refused there, and what must not be waited for."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import msgspec
import pytest

from taskyard.errors import ClaimLost, InvalidInput, SubmitPending
from taskyard.model.move import Move
from taskyard.model.queue import QueueOrder, QueueSettings
from taskyard.model.task import Dedupe, DedupeScope
from taskyard.ports.store import Add
from taskyard.stores.postgres import PostgresStore, constants
from taskyard.testing.samples import NOON, a_node, a_record, an_add, room

A, B = a_node("a"), a_node("b")
PATIENCE_S = 5.0

LONGEST = 1200
"""Bytes of a name that stands in an index: two of them are in one, and an index takes 2,704 bytes."""

LEVELS = ["read_committed", "repeatable_read", "serializable"]

NAMES = ["uuid", "consumer", "queue", "key", "bucket", "origin", "dedupe_slot"]


@pytest.fixture
async def users(postgres_url: str) -> AsyncIterator[asyncpg.Connection]:
    """A connection of somebody else's, beside the first."""
    conn = await asyncpg.connect(postgres_url)
    yield conn
    await conn.close()


def a_name(n: int = LONGEST) -> str:
    """Of so many bytes, which do not get fewer when they are compressed."""
    return secrets.token_hex(n)[:n]


# --- names that no index takes ----------------------------------------------------------------------------------------


async def submit(conn: asyncpg.Connection, **fields: object) -> str:
    """By hand, as anybody may who may submit."""
    task = {
        "uuid": secrets.token_hex(8), "consumer": "fetch", "queue": "default", "args": "{}", "priority": 1,
        "due_at": NOON.isoformat(), "created_at": NOON.isoformat(),
    }  # fmt: skip
    where = await conn.fetchval("SELECT taskyard.database_identity_1()")
    add = {"where": where, "dedupe": "merge", "tasks": [task | fields]}
    return str(await conn.fetchval("SELECT taskyard.submit_1($1)", msgspec.json.encode(add).decode()))


def of_length(n: int, *names: str) -> dict[str, Any]:
    """These names of a record, each of so many bytes."""
    return {name: a_name(n) for name in names}


async def run_all(store: PostgresStore) -> int:
    """Take what is there to its end; how many those were."""
    claims = (await store.turn(A.incarnation, demand=room(99))).claims
    ended = await store.turn(A.incarnation, settles=[(claim, Move.completed(at=NOON)) for claim in claims])
    assert ended.settled == [None] * len(claims)
    return len(claims)


@pytest.mark.parametrize("too_long", [LONGEST + 1, 2000, 6000])
@pytest.mark.parametrize("name", NAMES)
async def test_a_name_that_no_index_takes_cannot_be_submitted_by_hand(store, conn, name: str, too_long: int):
    """What is stored there, a node queues later, together with whatever else is due: it must be able to."""
    with pytest.raises((asyncpg.CheckViolationError, asyncpg.DataError)):
        await submit(conn, **{name: a_name(too_long)})
    with pytest.raises((asyncpg.CheckViolationError, asyncpg.DataError)):
        await submit(conn, **{name: "é" * (LONGEST // 2 + 1)})
    assert "why" not in await submit(conn, **{name: "é" * (LONGEST // 2)})
    assert "why" not in await submit(conn)
    assert await run_all(store) == 2


@pytest.mark.parametrize("name", NAMES)
async def test_a_name_that_no_index_takes_cannot_be_submitted(store, conn, name: str):
    """It is refused in the transaction, and not when the task is to be queued; and what is taken has room in all
    indexes, in a queue of either kind."""
    longest = of_length(LONGEST, *NAMES)
    await store.set_queue(QueueSettings(name=longest["queue"], order=QueueOrder.BUCKETS))
    for fields in (longest, longest | {"queue": a_name(), "uuid": a_name(), "dedupe_slot": a_name()}):
        async with conn.transaction():
            await store.add_within(conn, an_add(a_record(**fields), dedupe=Dedupe.MERGE))
    assert await run_all(store) == 2
    transaction = conn.transaction()
    await transaction.start()
    with pytest.raises(InvalidInput):
        await store.add_within(conn, an_add(a_record(**of_length(LONGEST + 1, name)), dedupe=Dedupe.MERGE))
    await transaction.rollback()
    await store.turn(A.incarnation, adds=[an_add(a_record())])
    assert await run_all(store) == 1


# --- runs that are over -----------------------------------------------------------------------------------------------


@pytest.mark.spec("SCH-17")
@pytest.mark.parametrize("isolation", LEVELS)
@pytest.mark.parametrize("has_ended", [False, True], ids=["given-to-another", "ended"])
async def test_a_run_that_is_over_submits_nothing_whatever_its_transaction_can_see(
    store, conn, isolation: str, has_ended: bool
):
    """A run whose task has ended since its transaction began, or was given to another, is refused, also where that
    transaction goes on seeing what was."""
    (claim,) = (await store.turn(A.incarnation, adds=[an_add(a_record())], demand=room(1))).claims
    transaction, child = conn.transaction(isolation=isolation), a_record()
    await transaction.start()
    await conn.fetchval("SELECT count(*) FROM taskyard.task")
    if has_ended:
        assert (await store.turn(A.incarnation, settles=[(claim, Move.completed(at=NOON))])).settled == [None]
    else:
        assert await store.rescue(A.incarnation) == [claim.uuid]
        assert len((await store.turn(B.incarnation, demand=room(1))).claims) == 1
    with pytest.raises(ClaimLost):
        await store.add_within(conn, an_add(child, parent=claim))
    await transaction.rollback()
    assert await store.find(child.uuid) is None


@pytest.mark.spec("SCH-17")
@pytest.mark.parametrize("isolation", LEVELS)
async def test_a_run_that_submits_in_an_open_transaction_is_in_nobodys_way(store, conn, isolation: str):
    """While that transaction stays open the run's task is taken back, given to another and ended, and nobody waits."""
    (claim,) = (await store.turn(A.incarnation, adds=[an_add(a_record())], demand=room(1))).claims
    child = a_record()
    async with conn.transaction(isolation=isolation):
        assert [one.is_new for one in await store.add_within(conn, an_add(child, parent=claim))] == [True]
        async with asyncio.timeout(PATIENCE_S):
            assert await store.rescue(A.incarnation) == [claim.uuid]
            (again,) = (await store.turn(B.incarnation, demand=room(1))).claims
            assert (await store.turn(B.incarnation, settles=[(again, Move.completed(at=NOON))])).settled == [None]
    assert [claim.uuid for claim in (await store.turn(B.incarnation, demand=room(1))).claims] == [child.uuid]


# --- more slots than are locked ---------------------------------------------------------------------------------------

MANY = constants.LOCKED_AT_MOST + 1


def slots(n: int, **fields: Any) -> Add:
    """New tasks for the same work each time."""
    records = [a_record(dedupe_slot=f"slot-{i}", dedupe_key=f"slot-{i}", **fields) for i in range(n)]
    return an_add(*records, dedupe=Dedupe.MERGE)


@pytest.mark.parametrize("isolation", LEVELS)
@pytest.mark.parametrize(("first", "second"), [(MANY, 1), (MANY, MANY), (1, MANY)])
async def test_of_many_in_an_open_transaction_none_keeps_another_waiting(
    store, conn, users, isolation: str, first: int, second: int
):
    """Another transaction, or a turn, is told that the work is pending, and can go on; after the commit it merges."""
    beside = a_record()
    async with conn.transaction(isolation=isolation):
        added = await store.add_within(conn, slots(first))
        async with asyncio.timeout(PATIENCE_S):
            transaction = users.transaction(isolation=isolation)
            await transaction.start()
            with pytest.raises(SubmitPending):
                await store.add_within(users, slots(second))
            assert [one.is_new for one in await store.add_within(users, an_add(beside))] == [True]
            assert await users.fetchval("SHOW lock_timeout") == await conn.fetchval("SHOW lock_timeout")
            # Of two that are serializable and have looked for the same, only one can be committed.
            await (transaction.rollback() if isolation == "serializable" else transaction.commit())
        async with asyncio.timeout(PATIENCE_S):
            (answer,) = (await store.turn(A.incarnation, adds=[slots(second)])).added
            assert isinstance(answer, SubmitPending)
    async with users.transaction(isolation=isolation):
        merged = await store.add_within(users, slots(min(first, second)))
    assert [one.uuid for one in merged] == [one.uuid for one in added][: len(merged)]
    assert (await store.find(beside.uuid) is None) == (isolation == "serializable")
    assert not isinstance((await store.turn(A.incarnation, adds=[slots(3)])).added[0], Exception)


async def test_other_work_beside_many_in_an_open_transaction_is_in_nobodys_way(store, conn, users):
    async with conn.transaction():
        await store.add_within(conn, slots(MANY))
        record = a_record(dedupe_slot="else", dedupe_key="else")
        async with asyncio.timeout(PATIENCE_S), users.transaction():
            (added,) = await store.add_within(users, an_add(record, dedupe=Dedupe.MERGE))
            assert added.is_new
        async with asyncio.timeout(PATIENCE_S), users.transaction():
            (merged,) = await store.add_within(users, an_add(a_record(dedupe_slot="else"), dedupe=Dedupe.MERGE))
            assert merged.uuid == record.uuid


@pytest.mark.parametrize("isolation", LEVELS)
async def test_a_window_beside_many_in_an_open_transaction_keeps_no_queue_waiting(store, conn, isolation: str):
    """Where such a transaction has looked for windows, a turn that opens one waits for a moment only, and is told."""
    async with conn.transaction(isolation=isolation):
        await store.add_within(conn, slots(MANY))
        record = a_record(dedupe_slot="slot-1", dedupe_key="slot-1", dedupe_scope=DedupeScope.WINDOW)
        async with asyncio.timeout(PATIENCE_S / 2):
            turned = await store.turn(A.incarnation, adds=[Add([record], dedupe=Dedupe.MERGE, window_s=10.0)])
        assert isinstance(turned.added[0], SubmitPending) == (isolation != "read_committed")
