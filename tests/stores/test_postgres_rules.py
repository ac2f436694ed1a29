"""Rules that change while much waits, and queues that are forgotten, on PostgreSQL."""

import asyncio
from collections.abc import Sequence

import asyncpg
import pytest

from taskyard.errors import StoreBusy
from taskyard.model.command import Hold, Release, Retry
from taskyard.model.move import Move
from taskyard.model.order import Priority
from taskyard.model.queue import QueueOrder, QueueSettings
from taskyard.model.task import TaskRecord
from taskyard.stores.postgres import PostgresStore, constants
from taskyard.stores.postgres.constants import Lock
from taskyard.stores.postgres.rules import STEP as STEP_OF_A_RULE
from taskyard.stores.postgres.upkeep import CLEAN_EVERY_S
from taskyard.testing.clock import ManualClock
from taskyard.testing.postgres import UNSEEN, Databases
from taskyard.testing.samples import NOON, a_node, a_record, an_add, an_error, room

A = a_node("a")
STEP = 10
MANY = 60

FIFO = QueueSettings(name="default", order=QueueOrder.FIFO)
BUCKETS = QueueSettings(name="default", order=QueueOrder.BUCKETS)
PRIORITY = QueueSettings(name="default")

WRITTEN_AT_ONCE = "SELECT max(n) FROM (SELECT count(*) AS n FROM taskyard.task GROUP BY xmin) AS transactions"
UNDER_WAY = "SELECT count(*) FROM taskyard.queue WHERE rollout_task_id IS NOT NULL OR rollout_key IS NOT NULL"


@pytest.fixture
def postgres_url(databases: Databases, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of a database where a step is a small one."""
    monkeypatch.setattr(constants, "RULED_AT_MOST", STEP)
    monkeypatch.setattr(constants, "LOOKED_AT_MOST", 3 * STEP)
    monkeypatch.setattr(constants, "LANES_KEPT", 2)
    monkeypatch.setattr(constants, "LOCKED_AT_MOST", 3)
    return databases.make()


@pytest.fixture
async def conn(postgres_url: str, store: PostgresStore):
    """Nothing that may start was lost sight of when it is closed."""
    conn = await asyncpg.connect(postgres_url)
    yield conn
    assert await conn.fetch(UNSEEN) == []
    await conn.close()


async def add(store: PostgresStore, records: Sequence[TaskRecord]) -> list[str]:
    """In turns of the size of a step."""
    for n in range(0, len(records), STEP):
        await store.turn(A.incarnation, adds=[an_add(*records[n : n + STEP])])
    return [record.uuid for record in records]


def mixed(n: int = MANY) -> list[TaskRecord]:
    """Of all priorities, and of three buckets."""
    return [a_record(priority=[*Priority][i % 3], bucket=["x", "y", None][i // 2 % 3]) for i in range(n)]


async def run_all(store: PostgresStore, at_once: int = 1) -> list[str]:
    """In the order in which they start."""
    started: list[str] = []
    while claims := (await store.turn(A.incarnation, demand=room(at_once))).claims:
        started += [claim.uuid for claim in claims]
        await store.turn(A.incarnation, settles=[(claim, Move.completed(at=NOON)) for claim in claims])
    return started


async def keep_up(store: PostgresStore, clock: ManualClock) -> None:
    """Let a minute go by, and a turn come, which lets upkeep do what there is to do."""
    clock.advance(CLEAN_EVERY_S)
    await store.turn(A.incarnation)
    await store._upkeep.finish()
    assert not await store._db.read(lambda conn: conn.fetchval(UNDER_WAY))


# --- rules ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rules", [FIFO, BUCKETS])
async def test_an_order_comes_to_what_waits_in_steps(store, conn, rules: QueueSettings):
    """No transaction writes more than a step, and others go on in between."""
    await add(store, mixed())
    await store.set_queue(rules)
    assert await conn.fetchval(WRITTEN_AT_ONCE) <= STEP
    assert await conn.fetchval("SELECT count(*) FROM taskyard.task WHERE fifo_bucket IS NULL") == 0
    assert await conn.fetchval(UNDER_WAY) == 0


@pytest.mark.parametrize("per_key", [1, 2])
async def test_another_limit_of_keys_comes_to_what_waits_in_steps(store, conn, per_key: int):
    await store.set_queue(QueueSettings(name="default", per_key=3 - per_key))
    await add(store, [a_record(key=f"key-{i // 3}") for i in range(3 * MANY)])
    await store.set_queue(QueueSettings(name="default", per_key=per_key))
    assert await conn.fetchval(WRITTEN_AT_ONCE) <= 2 * STEP
    started = (await store.turn(A.incarnation, demand=room(999))).claims
    assert len(started) == MANY * per_key


async def test_a_step_is_as_long_for_keys_with_much_behind_them(store, conn):
    """Whatever their limit was, and will be: what is written in one go are tasks, and not keys."""
    await add(store, [a_record(key=f"key-{i // 5}") for i in range(3 * MANY)])
    for per_key in (5, 1, 99):
        await store.set_queue(QueueSettings(name="default", per_key=per_key))
        assert await conn.fetchval(WRITTEN_AT_ONCE) <= 2 * STEP
    assert len((await store.turn(A.incarnation, demand=room(999))).claims) == 3 * MANY


@pytest.mark.parametrize("rules", [FIFO, BUCKETS])
async def test_something_may_start_at_every_step_on_the_way_of_an_order(store, conn, rules: QueueSettings):
    """Also of tasks with keys, where the first in line waits behind another of its key by the order before."""
    records = [a_record(key=f"key-{99 - i // 2}", priority=[Priority.LOW, Priority.HIGH][i % 2]) for i in range(MANY)]
    await add(store, records)
    await store._rules.declare(rules)
    has_more = True
    while has_more:
        has_more = await store._rules.go_on()
        (claim,) = (await store.turn(A.incarnation, demand=room(1))).claims
        await store.turn(A.incarnation, settles=[(claim, Move.given_back(at=NOON))])
    assert await conn.fetchval("SELECT ordering FROM taskyard.queue") == rules.order
    assert {*await run_all(store)} == {record.uuid for record in records}


async def test_one_queue_that_does_not_come_on_holds_up_no_other(store, clock, conn, monkeypatch):
    """Upkeep goes on with the others, and with this one the next time."""
    for queue in ("a", "b", "c"):
        await add(store, [a_record(queue=queue) for _ in range(MANY)])
        await store._rules.declare(QueueSettings(name=queue, order=QueueOrder.FIFO))
    write = store._db.write

    async def write_but_not_b(sql: str, *arguments: object) -> object:
        if sql == STEP_OF_A_RULE and arguments == ("b",):
            raise StoreBusy("a", "b")
        return await write(sql, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(store._db, "write", write_but_not_b)
        clock.advance(CLEAN_EVERY_S)
        await store.turn(A.incarnation)
        await store._upkeep.finish()
    orders = {row["name"]: row["ordering"] for row in await conn.fetch("SELECT name, ordering FROM taskyard.queue")}
    assert orders == {"a": "fifo", "b": "priority", "c": "fifo"}
    await keep_up(store, clock)


async def test_closing_leaves_rules_on_their_way_to_others(store, clock, monkeypatch):
    """It does not wait until they are there."""
    other = PostgresStore(store.url, clock=clock)
    await other.open()
    await add(store, mixed())
    write = other._db.write
    closing: list[asyncio.Future[None]] = []

    async def write_and_close(sql: str, *arguments: object) -> object:
        row = await write(sql, *arguments)
        if sql == STEP_OF_A_RULE and not closing:
            closing.append(asyncio.ensure_future(other.close()))
            await asyncio.sleep(0)
        return row

    monkeypatch.setattr(other._db, "write", write_and_close)
    await other.set_queue(FIFO)
    await closing[0]
    assert await store._db.read(lambda conn: conn.fetchval(UNDER_WAY))
    await keep_up(store, clock)


@pytest.mark.parametrize("steps", range(MANY // STEP + 1))
@pytest.mark.parametrize("rules", [FIFO, BUCKETS])
async def test_an_order_that_somebody_left_on_its_way_is_brought_there_by_others(
    store, clock, conn, rules: QueueSettings, steps: int
):
    """Wherever he died; and until it is there, the order before holds."""
    uuids = await add(store, records := mixed())
    await store._rules.declare(rules)
    for _ in range(steps):
        await store._rules.go_on()
    first = min(records, key=lambda record: record.priority)
    (started,) = (await store.turn(A.incarnation, demand=room(1))).claims
    assert started.uuid == first.uuid
    uuids.remove(first.uuid)
    await keep_up(store, clock)
    if rules is FIFO:
        assert await run_all(store) == uuids
    else:
        started = await run_all(store)
        buckets = {record.uuid: record.bucket or "" for record in records}
        assert [buckets[uuid] for uuid in started[:6]] == ["", "x", "y"] * 2
        assert sorted(started) == sorted(uuids)


async def test_a_limit_of_keys_that_somebody_left_on_its_way_is_brought_there_by_others(store, clock, conn):
    await add(store, [a_record(key=f"key-{i // 3}") for i in range(3 * MANY)])
    await store._rules.declare(QueueSettings(name="default", per_key=2))
    await store._rules.go_on()
    await keep_up(store, clock)
    assert len((await store.turn(A.incarnation, demand=room(999))).claims) == 2 * MANY


@pytest.mark.parametrize("steps", [0, 2, 4])
@pytest.mark.parametrize("last", [FIFO, BUCKETS, PRIORITY])
@pytest.mark.parametrize("then", [FIFO, BUCKETS, PRIORITY])
async def test_of_orders_that_are_set_one_after_the_other_the_last_holds(
    store, conn, then: QueueSettings, last: QueueSettings, steps: int
):
    """Also if the ones before were not there yet."""
    await store.set_queue(FIFO)
    uuids = await add(store, records := mixed())
    await store._rules.declare(then)
    for _ in range(steps):
        await store._rules.go_on()
    await asyncio.gather(store.set_queue(last), store._rules.go_on())
    assert await conn.fetchval("SELECT ordering FROM taskyard.queue") == last.order
    started = await run_all(store, at_once=7)
    assert sorted(started) == sorted(uuids)
    if last is FIFO:
        assert started == uuids
    if last is PRIORITY:
        assert started[0] == min(records, key=lambda record: record.priority).uuid


async def test_what_comes_while_an_order_is_on_its_way_stands_in_line(store, clock, conn):
    """Be it new, sent again, given back, released, or submitted in a transaction of somebody else's."""
    old = await add(store, [a_record() for _ in range(MANY)])
    failed, given_back = (await store.turn(A.incarnation, demand=room(2))).claims
    await store.turn(A.incarnation, settles=[(failed, Move.failed(at=NOON, error=an_error()))])
    await store.apply([old[2]], Hold())
    user = await asyncpg.connect(store.url)
    transaction = user.transaction()
    await transaction.start()
    (within,) = await store.add_within(user, an_add(a_record()))
    await store._rules.declare(FIFO)
    for _ in range(3):
        await store._rules.go_on()
    assert await conn.fetchval(UNDER_WAY) == 1
    await transaction.commit()
    await user.close()
    await store.turn(A.incarnation, settles=[(given_back, Move.given_back(at=NOON))])
    await store.apply([old[2]], Release())
    new = await add(store, [a_record()])
    await keep_up(store, clock)
    left = {*old, *new, within.uuid} - {failed.uuid}
    assert {*await run_all(store)} == left


async def test_others_go_on_while_rules_are_on_their_way(store, conn, monkeypatch):
    """Between any two steps a turn has all that it needs."""
    await add(store, mixed())
    other, started = PostgresStore(store.url, clock=ManualClock()), list[str]()
    await other.open()
    write = store._db.write

    async def write_and_look(sql: str, *arguments: object) -> object:
        answer = await write(sql, *arguments)
        started.extend(claim.uuid for claim in (await other.turn(A.incarnation, demand=room(1))).claims)
        return answer

    monkeypatch.setattr(store._db, "write", write_and_look)
    await store.set_queue(FIFO)
    assert len({*started}) > MANY // STEP
    await other.close()


# --- queues that are forgotten ----------------------------------------------------------------------------------------


async def count_lanes(conn: asyncpg.Connection) -> int:
    n: int = await conn.fetchval("SELECT count(*) FROM taskyard.lane")
    return n


def in_each(n: int = 5) -> list[TaskRecord]:
    return [a_record(queue=f"queue-{i}") for i in range(n)]


async def test_queues_of_which_nothing_is_left_are_forgotten(store, clock, conn):
    """A turn then looks at the others alone; and what comes again is found again, whoever has known them before."""
    other = PostgresStore(store.url, clock=ManualClock())
    await other.open()
    for _ in range(2):
        uuids = {*await add(other, in_each()), *await add(store, in_each())}
        assert await count_lanes(conn) == 5
        assert {*await run_all(store)} == uuids
        await keep_up(store, clock)
        assert await count_lanes(conn) == 0
        assert await conn.fetchval("SELECT count(*) FROM taskyard.watermark") == 0
    await other.close()


async def test_few_queues_are_not_forgotten(store, clock, conn):
    """Those come again and again."""
    await add(store, in_each(2))
    await run_all(store)
    await keep_up(store, clock)
    assert await count_lanes(conn) == 2


async def test_a_queue_of_which_something_is_left_is_not_forgotten(store, clock, conn):
    """Whatever its state is."""
    records = in_each(6)
    await add(store, records)
    await store.apply([records[0].uuid], Hold())
    (running,) = (await store.turn(A.incarnation, demand=room(1))).claims
    await keep_up(store, clock)
    assert await count_lanes(conn) == 6
    assert len(await run_all(store)) == 4
    await keep_up(store, clock)
    left = {row["queue"] for row in await conn.fetch("SELECT queue FROM taskyard.lane")}
    assert left == {records[0].queue, running.record.queue}


async def test_a_queue_that_somebody_is_busy_with_is_not_forgotten(store, clock, conn):
    """He may be about to add to it; the others are, however many they are."""
    await add(store, in_each(17))
    await run_all(store)
    async with conn.transaction():
        await conn.execute(f"SELECT pg_advisory_xact_lock({Lock.QUEUE}, hashtext('queue-3'))")
        await keep_up(store, clock)
        assert [row["queue"] for row in await conn.fetch("SELECT queue FROM taskyard.lane")] == ["queue-3"]


async def test_what_returns_to_a_queue_that_was_forgotten_is_found(store, clock, conn):
    """What failed and is sent again, what is due, and what was submitted in a transaction of somebody else's."""
    records = in_each()
    await add(store, records)
    while claims := (await store.turn(A.incarnation, demand=room(9))).claims:
        await store.turn(A.incarnation, settles=[(claim, Move.failed(at=NOON, error=an_error())) for claim in claims])
    await keep_up(store, clock)
    assert await count_lanes(conn) == 0
    await store.apply([record.uuid for record in records[:2]], Retry())
    async with conn.transaction():
        await store.add_within(conn, an_add(within := a_record(queue="queue-3")))
    assert {*await run_all(store)} == {records[0].uuid, records[1].uuid, within.uuid}
