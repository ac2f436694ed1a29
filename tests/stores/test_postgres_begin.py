"""On PostgreSQL a task that can start in the turn that adds it is stored as one that runs. That must change nothing."""

from collections.abc import Awaitable, Callable
from typing import Any

import asyncpg
import msgspec
import pytest

from taskyard.errors import InvalidInput, SubmitPending
from taskyard.model.event import Event, EventKind
from taskyard.model.limits import Demand
from taskyard.model.move import Move
from taskyard.model.order import GAP
from taskyard.model.queue import Pause, QueueOrder, QueueSettings, StopAfterCurrent
from taskyard.model.retry import RetryPolicy
from taskyard.model.state import TaskState
from taskyard.model.task import Claim, TaskExtra, TaskRecord
from taskyard.ports.store import Turned
from taskyard.stores.postgres import PostgresStore
from taskyard.testing.samples import NOON, a_node, a_record, an_add, an_error, room, seconds

pytestmark = pytest.mark.anyio

A, B = a_node("a"), a_node("b")

COUNTED = "SELECT state, sum(n)::integer AS n FROM taskyard.state_count GROUP BY state"


async def begin(store: PostgresStore, record: TaskRecord | None = None, demand: Demand | None = None) -> Turned:
    """Add it where there is room for it."""
    return await store.turn(A.incarnation, adds=[an_add(record or a_record())], demand=demand or room(9))


async def add(store: PostgresStore, **fields: Any) -> TaskRecord:
    record = a_record(**fields)
    await store.turn(A.incarnation, adds=[an_add(record)])
    return record


async def was_queued(conn: asyncpg.Connection) -> bool:
    """Whether a task was ever counted as queued."""
    return "queued" in {row["state"] for row in await conn.fetch(COUNTED)}


def without_numbers(record: TaskRecord | None) -> TaskRecord:
    """But for what a store hands out."""
    assert record is not None
    return msgspec.structs.replace(record, id=0, position=0, token=None, uuid="")


def without_identity(event: Event) -> Event:
    return msgspec.structs.replace(event, seq=0, uuid="", at=NOON)


FULL = {
    "queue": "other", "args": '{"n":1}', "timeout_s": 2.5, "bucket": "left", "origin": "nightly", "priority": 2,
    "retry": RetryPolicy(3), "created_at": NOON - seconds(5), "due_at": NOON - seconds(1),
    "extra": TaskExtra("first pass", {"customer": "42"}, submitted_by="ann"),
}  # fmt: skip


@pytest.mark.parametrize("fields", [{}, FULL], ids=["plain", "full"])
async def test_it_is_as_if_it_had_been_queued_and_then_claimed(store, conn, fields):
    """The claim, the record, the counts, the events, and in the end the run."""
    (begun,) = (await begin(store, a_record(**fields))).claims
    assert not await was_queued(conn)
    begun_record = await store.find(begun.uuid)
    events = (await store.events(after=0)).events
    assert [event.kind for event in events] == [EventKind.SUBMITTED, EventKind.STARTED]
    assert [event.actor for event in events] == [begun.record.submitted_by, ""]
    assert await store.count() == {(begun.record.queue, TaskState.RUNNING): 1}

    await add(store, **fields)
    (claimed,) = (await store.turn(A.incarnation, demand=room(9))).claims
    assert await was_queued(conn)
    later = (await store.events(after=events[-1].seq)).events
    assert list(map(without_identity, later)) == list(map(without_identity, events))
    assert without_numbers(begun.record) == without_numbers(claimed.record)
    assert without_numbers(begun_record) == without_numbers(await store.find(claimed.uuid))
    assert begun.attempt == claimed.attempt == 1
    assert begun.record.id < begun.token < claimed.token
    assert begun.record.position == begun.record.id * GAP
    assert claimed.record.position == claimed.record.id * GAP
    assert begun_record is not None
    assert begun_record.position == begun.record.position

    ended = await store.turn(A.incarnation, settles=[(c, Move.completed(at=NOON)) for c in (begun, claimed)])
    assert ended.settled == [None, None]
    assert await store.count() == {(begun.record.queue, TaskState.COMPLETED): 2}
    one, two = [await store.list_attempts(claim.uuid) for claim in (begun, claimed)]
    assert len(one) == len(two) == 1


async def limited(store: PostgresStore) -> None:
    await store.set_queue(QueueSettings(name="default", concurrency=1))


async def in_turn(store: PostgresStore) -> None:
    await store.set_queue(QueueSettings(name="default", order=QueueOrder.FIFO))


async def in_buckets(store: PostgresStore) -> None:
    await store.set_queue(QueueSettings(name="default", order=QueueOrder.BUCKETS))


async def with_something_queued(store: PostgresStore) -> None:
    await add(store)


async def with_something_queued_for_others(store: PostgresStore) -> None:
    await add(store, consumer="shrink")


@pytest.mark.parametrize(
    "prepare",
    [
        limited,
        in_turn,
        with_something_queued,
        with_something_queued_for_others,
        in_buckets,
    ],
)
async def test_where_more_counts_it_stands_in_line(store, conn, prepare: Callable[[PostgresStore], Awaitable[None]]):
    """A limit, an order, a priority, others before it: then it is queued first, and starts by the rules for that."""
    await prepare(store)
    await conn.execute("DELETE FROM taskyard.state_count WHERE state = 'queued'")
    record = a_record()
    assert record.uuid in {claim.uuid for claim in (await begin(store, record)).claims}
    assert await was_queued(conn)


@pytest.mark.parametrize(("before", "priority"), [(0, 1), (1, 2), (2, 1)])
async def test_where_there_were_other_priorities_it_stands_in_line(store, conn, before, priority):
    """Each start counts for who is passed over there, also if nobody waits just now. If all began at once, nobody was
    passed over."""
    await begin(store, a_record(priority=priority))
    await begin(store, a_record(priority=before))
    assert not await was_queued(conn)
    await add(store, priority=before)
    await store.turn(A.incarnation, demand=room(1))
    await conn.execute("DELETE FROM taskyard.state_count WHERE state = 'queued'")
    await begin(store, a_record(priority=priority))
    assert await was_queued(conn)


async def test_it_does_not_go_before_others(store):
    """What was there before it has the place that was left."""
    queued = await add(store)
    assert [claim.uuid for claim in (await begin(store, demand=room(1))).claims] == [queued.uuid]


@pytest.mark.parametrize("fields", [{"queue": "other"}, {"due_at": NOON + seconds(1)}], ids=["elsewhere", "due"])
async def test_others_start_beside_it(store, fields):
    """What is queued elsewhere, or has just become due, does not have to wait for the next turn."""
    before, fresh = await add(store, **fields), a_record()
    store._clock.advance(2)
    assert {claim.uuid for claim in (await begin(store, fresh)).claims} == {before.uuid, fresh.uuid}


async def test_a_run_that_is_tried_again_at_once_starts_beside_it(store):
    """It ends and becomes due in the turn that adds another task."""
    (failed,) = (await begin(store)).claims
    again = Move.retrying(at=NOON, due_at=NOON, error=an_error())
    fresh = a_record()
    turned = await store.turn(A.incarnation, settles=[(failed, again)], adds=[an_add(fresh)], demand=room(9))
    assert {claim.uuid for claim in turned.claims} == {failed.uuid, fresh.uuid}


async def test_a_key_is_held_from_the_start(store):
    """Of two tasks with one key, the second waits."""
    (holder,) = (await begin(store, a_record(key="k"))).claims
    assert holder.record.key == "k"
    assert (await begin(store, a_record(key="k"))).claims == []


@pytest.mark.spec("QUE-10")
async def test_nothing_starts_in_a_queue_that_is_paused(store):
    await store.control("default", Pause(), by="test")
    assert (await begin(store)).claims == []
    assert await store.count() == {("default", TaskState.QUEUED): 1}


@pytest.mark.spec("QUE-10")
async def test_nothing_starts_in_a_queue_that_stops_after_what_runs(store):
    """Not in the turn of its last end either."""
    (last,) = (await begin(store)).claims
    await store.control("default", StopAfterCurrent(), by="test")
    assert (await begin(store)).claims == []
    ended = [(last, Move.completed(at=NOON))]
    assert (await store.turn(A.incarnation, settles=ended, adds=[an_add(a_record())], demand=room(9))).claims == []


@pytest.mark.parametrize("demand", [room(5, shrink=5), room(5, fetch=0, others=5)], ids=["of-others", "full"])
async def test_nothing_starts_that_the_node_has_no_room_for(store, demand):
    assert (await begin(store, demand=demand)).claims == []
    assert await store.count() == {("default", TaskState.QUEUED): 1}


async def test_nothing_starts_on_a_node_that_was_given_up(store):
    """What it ran, nobody would take back."""
    await store.leave(A.incarnation)
    assert (await begin(store)).claims == []
    assert [claim.attempt for claim in (await store.turn(B.incarnation, demand=room(9))).claims] == [1]


async def test_what_is_due_later_waits_for_its_time(store):
    turned = await begin(store, a_record(due_at=NOON + seconds(3)))
    assert (turned.claims, turned.next_due) == ([], NOON + seconds(3))


async def test_who_has_waited_for_a_key_starts_beside_it(store):
    """A key becomes free in the turn that adds another task: both start in it."""
    (holder,) = (await begin(store, a_record(key="k"))).claims
    waiting = await add(store, key="k")
    fresh = a_record()
    turned = await store.turn(
        A.incarnation, settles=[(holder, Move.completed(at=NOON))], adds=[an_add(fresh)], demand=room(9)
    )
    assert {claim.uuid for claim in turned.claims} == {waiting.uuid, fresh.uuid}


@pytest.mark.parametrize("has_ended", [False, True])
async def test_a_uuid_that_is_taken_is_refused(store, has_ended):
    """Whether its task is there or has ended; and nothing of the second is kept."""
    (claim,) = (await begin(store, a_record(uuid="mine"))).claims
    if has_ended:
        await store.turn(A.incarnation, settles=[(claim, Move.completed(at=NOON))])
    turned = await begin(store, a_record(uuid="mine"))
    assert turned.claims == []
    assert isinstance(turned.added[0], InvalidInput)
    assert sum((await store.count()).values()) == 1


async def test_a_uuid_in_an_open_transaction_is_not_waited_for(store, conn):
    """What else the turn brings is done meanwhile."""
    (claim,) = (await begin(store)).claims
    async with conn.transaction():
        await store.add_within(conn, an_add(a_record(uuid="mine")))
        turned = await store.turn(
            A.incarnation,
            settles=[(claim, Move.completed(at=NOON))],
            adds=[an_add(a_record(uuid="mine"))],
            demand=room(9),
        )
    assert turned.settled == [None]
    assert isinstance(turned.added[0], SubmitPending)


async def test_a_node_that_dies_has_what_it_began_taken_back(store):
    (claim,) = (await begin(store)).claims
    assert await store.rescue(A.incarnation) == [claim.uuid]
    (again,) = (await store.turn(B.incarnation, demand=room(9))).claims
    assert again.attempt == 2
    assert again.token > claim.token


def tokens(claims: list[Claim]) -> list[int]:
    return [claim.token for claim in claims]


async def test_tokens_grow_with_the_starts(store):
    """However a task came to run."""
    first = (await begin(store)).claims
    await add(store)
    second = (await begin(store)).claims
    third = (await begin(store)).claims
    assert len(second) == 2
    assert tokens(first + second + third) == sorted(tokens(first + second + third))
