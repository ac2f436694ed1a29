"""How much a statement reads: with plans that were made when all was empty, as little behind many tasks as before."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import asyncpg
import pytest

from taskyard.model.command import (
    Block,
    Cancel,
    Command,
    Hold,
    MoveAfter,
    Release,
    Reschedule,
    Retry,
    SetPriority,
    Skip,
    StartNow,
    Unblock,
)
from taskyard.model.limits import Demand
from taskyard.model.move import Move
from taskyard.model.order import GAP, Priority
from taskyard.model.queue import Pause, Resume, StopAfterCurrent
from taskyard.model.task import Claim, Dedupe, DedupeScope, OnFailure, TaskRecord, new_uuid
from taskyard.model.task_filter import TaskFilter
from taskyard.ports.store import Add, Added
from taskyard.stores.postgres import PostgresStore, constants, schema, upkeep
from taskyard.stores.postgres.connection import PLANS, connect
from taskyard.testing.clock import ManualClock
from taskyard.testing.postgres import Databases
from taskyard.testing.samples import a_node, a_record, an_add, an_error, room
from tests.stores.reads import list_ours, read_since

pytestmark = pytest.mark.anyio

A, B = a_node("a"), a_node("b")
MANY, ROUNDS, GONE = 3000, 10, 80


def ours(**fields: Any) -> TaskRecord:
    """A task of a source that the crowd has not."""
    return a_record(consumer="ours", priority=Priority.HIGH, **fields)


async def add(store: PostgresStore, *adds: Add) -> None:
    for added in (await store.turn(A.incarnation, adds=adds)).added:
        assert isinstance(added, list), added


async def claim(store: PostgresStore, n: int = 1) -> list[Claim]:
    claims = (await store.turn(A.incarnation, demand=room(n, ours=n))).claims
    assert len(claims) == n
    return claims


async def settle(store: PostgresStore, *settles: tuple[Claim, Move]) -> None:
    turned = await store.turn(A.incarnation, settles=settles)
    assert turned.settled == [None] * len(settles)


async def complete(store: PostgresStore, clock: ManualClock, *claims: Claim) -> None:
    await settle(store, *((held, Move.completed(at=clock.now(), result="1")) for held in claims))


async def command(store: PostgresStore, uuid: str, *commands: Command) -> None:
    for one in commands:
        (applied,) = await store.apply([uuid], one)
        assert applied.refused is None


JOINED = re.compile(
    r"\bJOIN taskyard\.\w+ AS (\w+) ON \1\.(?:id|uuid|place) = \w+[.\[]"  # a table, to what is in a list
    r"|\b(?:USING|FROM) \w+ WHERE \w+\.(?:id|uuid|child|task|n) = \w+\."  # an update or a delete, by a list
    r"|^\s+(?:FROM [^\n]*\n\s+)?WHERE (\w+)\.(?:id|uuid|child) = \w+\.(?!.*SELECT)",
    re.MULTILINE,
)


def test_ids_of_a_list_are_looked_for_one_by_one() -> None:
    """Where a table is joined to a list, by = ANY (ARRAY[…]): bundle/locks.sql says why."""
    assert [found.group() for found in JOINED.finditer(schema.bundle().sql)] == []


# --- one of each ------------------------------------------------------------------------------------------------------


async def merge(store: PostgresStore, clock: ManualClock) -> None:
    """Two for the same work, and its end."""
    slot = new_uuid()
    for _ in range(2):
        await add(store, Add([ours(dedupe_slot=slot, dedupe_scope=DedupeScope.PENDING)], dedupe=Dedupe.MERGE))
    await complete(store, clock, *await claim(store))


async def replace(store: PostgresStore, clock: ManualClock) -> None:
    slot = new_uuid()
    for _ in range(2):
        await add(store, Add([ours(dedupe_slot=slot, dedupe_scope=DedupeScope.PENDING)], dedupe=Dedupe.REPLACE))
    await complete(store, clock, *await claim(store))


async def keep_for_a_window(store: PostgresStore, clock: ManualClock) -> None:
    record = ours(dedupe_slot=new_uuid(), dedupe_scope=DedupeScope.WINDOW)
    await add(store, Add([record], dedupe=Dedupe.MERGE, window_s=10.0))
    await complete(store, clock, *await claim(store))
    clock.advance(20)


async def ask_for_a_busy_key(store: PostgresStore, clock: ManualClock) -> None:
    """Two of one key, of which the second comes while the first runs."""
    key = new_uuid()
    records = [ours(key=key, dedupe_slot=new_uuid(), dedupe_scope=DedupeScope.KEY_IDLE) for _ in range(2)]
    await add(store, Add(records[:1], dedupe=Dedupe.MERGE))
    (held,) = await claim(store)
    (merged,) = (await store.turn(A.incarnation, adds=[Add(records[1:], dedupe=Dedupe.MERGE)])).added
    assert merged == [Added(held.uuid, is_new=False)]
    await complete(store, clock, held)


async def wait_for_another(store: PostgresStore, clock: ManualClock) -> None:
    """A task after another, both of a group; the one ends and the other may run."""
    group = new_uuid()
    first, then = ours(group_id=group), ours(group_id=group)
    await add(store, Add([first]), Add([then], after={then.uuid: [first.uuid]}))
    await complete(store, clock, *await claim(store))
    await complete(store, clock, *await claim(store))


async def submit_from_a_run(store: PostgresStore, clock: ManualClock) -> None:
    await add(store, an_add(ours()))
    (held,) = await claim(store)
    await add(store, Add([ours()], parent=held))
    await complete(store, clock, held, *await claim(store))


async def fail_and_retry(store: PostgresStore, clock: ManualClock) -> None:
    await add(store, an_add(ours()))
    (held,) = await claim(store)
    later = clock.now() + timedelta(seconds=5)
    await settle(store, (held, Move.retrying(at=clock.now(), due_at=later, error=an_error())))
    clock.advance(5)
    (held,) = await claim(store)
    await settle(store, (held, Move.failed(at=clock.now(), error=an_error())))
    await command(store, held.uuid, Retry())
    await complete(store, clock, *await claim(store))


async def steer(store: PostgresStore, clock: ManualClock) -> None:
    """Every command that a task in line may be given."""
    one, other = ours(), ours()
    await add(store, an_add(one, other))
    later = clock.now() + timedelta(hours=1)
    await command(
        store,
        one.uuid,
        Hold(),
        Release(),
        SetPriority(Priority.NORMAL),
        SetPriority(Priority.HIGH),
        MoveAfter(other.uuid),
    )
    await command(store, one.uuid, StartNow(), Reschedule(later), Cancel())
    await command(store, other.uuid, Skip())


async def cancel_a_run(store: PostgresStore, clock: ManualClock) -> None:
    await add(store, an_add(ours()))
    (held,) = await claim(store)
    await command(store, held.uuid, Cancel())
    assert (await store.signals(A.incarnation)).cancels == [held.uuid]
    await settle(store, (held, Move.canceled(at=clock.now())))


async def steer_with_dependents(store: PostgresStore, clock: ManualClock) -> None:
    """Who waits for a task fails with it, and is sent again with it."""
    first, then = ours(), ours(on_failure=OnFailure.FAIL)
    await add(store, Add([first]), Add([then], after={then.uuid: [first.uuid]}))
    await command(store, first.uuid, Hold(), Release())
    (held,) = await claim(store)
    await settle(store, (held, Move.failed(at=clock.now(), error=an_error())))
    await command(store, first.uuid, Retry())
    await command(store, then.uuid, Retry())
    await complete(store, clock, *await claim(store))
    await command(store, then.uuid, Cancel())


async def control_a_queue(store: PostgresStore, clock: ManualClock) -> None:
    for asked in (Pause(), Resume(), StopAfterCurrent(), Resume()):
        await store.control("side", asked, by="me")
    await add(store, an_add(ours(queue="side")))
    await complete(store, clock, *await claim(store))


async def forget(store: PostgresStore, clock: ManualClock) -> None:
    """What ended first is forgotten first; that of the crowd is younger."""
    await add(store, an_add(ours()))
    await complete(store, clock, *await claim(store))
    await store.prune(finished_before=clock.now() - timedelta(days=1), limit=10)


async def take_turns_by_key(store: PostgresStore, clock: ManualClock) -> None:
    key = new_uuid()
    await add(store, an_add(ours(key=key), ours(key=key)))
    await complete(store, clock, *await claim(store))
    await complete(store, clock, *await claim(store))


async def submit_with_a_transaction(store: PostgresStore, clock: ManualClock) -> None:
    conn = await asyncpg.connect(store._db.url)
    async with conn.transaction():
        record = ours(dedupe_slot=new_uuid(), dedupe_scope=DedupeScope.PENDING)
        await store.add_within(conn, Add([record], dedupe=Dedupe.MERGE))
    await conn.close()
    await complete(store, clock, *await claim(store))


async def read_about_one(store: PostgresStore, clock: ManualClock) -> None:
    await add(store, an_add(record := ours()))
    assert await store.find(record.uuid) is not None
    assert len(await store.outcomes([record.uuid])) == 1
    assert await store.list_known([record.uuid]) == {record.uuid}
    await complete(store, clock, *await claim(store))
    assert len(await store.list_attempts(record.uuid)) == 1


async def block_and_free(store: PostgresStore, clock: ManualClock) -> None:
    """What admission checks do: look at what goes next, block it and free it, and start it at a place."""
    demand = room(1, ours=1)
    await add(store, an_add(record := ours()))
    (looked,) = await store.preview(demand)
    await command(store, record.uuid, Block("disk", "/data"))
    assert await store.preview(demand) == []
    await command(store, record.uuid, Unblock("disk", "/data"))
    named = Demand(1, demand.per_lane, only={looked.id: "emu-1"})
    (held,) = (await store.turn(A.incarnation, demand=named)).claims
    assert held.record.device == "emu-1"
    await complete(store, clock, held)


async def list_what_is_blocked(store: PostgresStore, clock: ManualClock) -> None:
    await add(store, an_add(record := ours()))
    await command(store, record.uuid, Block("disk", "/data"))
    assert [group.first for group in await store.list_blockers()] == [record.uuid]
    assert [uuid for _, uuid in await store.list_ids(TaskFilter(blocker="disk:/data"))] == [record.uuid]
    await command(store, record.uuid, Unblock("disk", "/data"))
    await complete(store, clock, *await claim(store))


EACH = [
    merge, replace, keep_for_a_window, ask_for_a_busy_key, wait_for_another, submit_from_a_run, fail_and_retry, steer,
    cancel_a_run, take_turns_by_key, steer_with_dependents, control_a_queue, forget, submit_with_a_transaction,
    read_about_one, block_and_free, list_what_is_blocked,
]  # fmt: skip


@pytest.fixture
def url(databases: Databases) -> str:
    return databases.make()


@pytest.mark.parametrize("is_analyzed", [False, True], ids=["plans-kept", "plans-anew"])
@pytest.mark.parametrize("each", EACH)
async def test_what_is_done_to_one_task_does_not_read_the_others(
    url: str, each: Callable[[PostgresStore, ManualClock], Awaitable[None]], is_analyzed: bool
) -> None:
    """Neither by plans that were made when there was nothing, nor by those that are made when the server has counted
    what there is."""
    clock = ManualClock()
    store, conn = PostgresStore(url, clock=clock), await asyncpg.connect(url)
    await store.open()
    await store.join(A)
    await each(store, clock)
    ours = await list_ours(conn)
    await crowd(url, clock)
    if is_analyzed:
        await conn.execute("ANALYZE")
    await read_since(conn, but=ours)
    for _ in range(ROUNDS):
        await each(store, clock)
    await store.close()
    read = await read_since(conn)
    await conn.close()
    assert read < 3 * MANY, read


WALKING = {
    # What is due is looked for among all that has waited for its time since.
    fail_and_retry, steer, submit_with_a_transaction,
    # Claims begin to read where a task stood that was sent again.
    steer_with_dependents,
    # What was said of this very queue, and whom this very node was to cancel.
    control_a_queue, cancel_a_run,
    # What this very blocker has blocked.
    list_what_is_blocked,
}  # fmt: skip
"""What docs/POSTGRES.md says of transactions that are kept open."""


@pytest.mark.parametrize("is_analyzed", [False, True], ids=["uncounted", "counted"])
@pytest.mark.parametrize("each", [each for each in EACH if each not in WALKING])
async def test_what_is_done_to_one_task_does_not_read_what_is_gone(
    url: str, each: Callable[[PostgresStore, ManualClock], Awaitable[None]], is_analyzed: bool, monkeypatch
) -> None:
    """While somebody's snapshot keeps alive what others like it have left, and also when the server has counted how
    little else there is."""
    monkeypatch.setattr(constants, "RAISE_AFTER", 4 * GAP)
    monkeypatch.setattr(constants, "RAISE_ONE_IN", 1)
    monkeypatch.setattr(upkeep, "RING", 100)
    clock, conn, foreign = ManualClock(), await asyncpg.connect(url), await asyncpg.connect(url)
    await repeat(each, url, clock, 2)
    async with foreign.transaction(isolation="repeatable_read"):
        await foreign.fetchval("SELECT count(*) FROM taskyard.task")
        await read_since(conn)
        await repeat(each, url, clock, ROUNDS)
        early = await read_since(conn)
        await repeat(each, url, clock, GONE)
        if is_analyzed:
            await conn.execute("ANALYZE")
        await read_since(conn)
        await repeat(each, url, clock, ROUNDS)
        late = await read_since(conn)
    await foreign.close()
    await conn.close()
    assert late < early + 0.75 * ROUNDS * GONE, (early, late)


async def repeat(
    each: Callable[[PostgresStore, ManualClock], Awaitable[None]], url: str, clock: ManualClock, times: int
) -> None:
    store = PostgresStore(url, clock=clock)
    await store.open()
    await store.join(A)
    for _ in range(times):
        await each(store, clock)
    await store.leave(A.incarnation)
    await store.close()
    conn = await connect(url, settings=PLANS)
    while not await conn.fetchval("SELECT taskyard.compact_1($1)", upkeep.RING):  # noqa: ASYNC110 -- another is at it
        await asyncio.sleep(0.01)
    assert await conn.fetchval("SELECT count(*) FROM taskyard.state_count WHERE queue = ''") < ROUNDS
    await conn.close()


async def crowd(url: str, clock: ManualClock) -> None:
    """Of many tasks half have ended. All are of a group and stand for some work; those that wait do so for another."""
    store = PostgresStore(url, clock=clock)
    await store.open()
    await store.join(B)
    parent, *tasks = [
        a_record(group_id="many", dedupe_slot=f"crowd-{n}", dedupe_scope=DedupeScope.PENDING) for n in range(MANY + 1)
    ]
    await store.turn(B.incarnation, adds=[Add([parent, *tasks[: MANY // 2]], dedupe=Dedupe.MERGE)])
    held, *claims = (await store.turn(B.incarnation, demand=room(MANY))).claims
    assert held.uuid == parent.uuid
    done = [(claim, Move.completed(at=clock.now(), result="1")) for claim in claims]
    await store.turn(B.incarnation, settles=done)
    others = tasks[MANY // 2 :]
    after = {task.uuid: [parent.uuid] for task in others[: MANY // 4]}
    await store.turn(B.incarnation, adds=[Add(others, dedupe=Dedupe.MERGE, after=after)])
    await store.close()
