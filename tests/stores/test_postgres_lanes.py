"""Lanes of tasks that require the same, claims of tasks that are named, and blockers, on PostgreSQL."""

import secrets
from datetime import timedelta

import asyncpg
import msgspec
import pytest

from taskyard.errors import InvalidInput
from taskyard.model.blocker import DETAIL_BYTES, encode_requirements, lane_of
from taskyard.model.command import Block, Retry, Unblock
from taskyard.model.limits import Demand
from taskyard.model.move import Move
from taskyard.model.queue import QueueOrder, QueueSettings
from taskyard.model.state import TaskState
from taskyard.model.task import Dedupe, DedupeScope
from taskyard.model.task_filter import TaskFilter
from taskyard.ports.store import Add, BlockedGroup
from taskyard.stores.postgres import constants
from taskyard.stores.postgres.constants import LONGEST_NAME_BYTES
from taskyard.testing.postgres import UNSEEN, Databases
from taskyard.testing.samples import NOON, a_node, a_record, an_add, an_error, room

A = a_node("a")
EU = encode_requirements({"role": "eu"})
EU_LANE = lane_of("fetch", EU)
FITS = Demand(9, {EU_LANE: 9})
MANY = 12


@pytest.fixture
def few_locked_url(databases: Databases, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of a database where a turn locks three queues at most."""
    monkeypatch.setattr(constants, "LOCKED_AT_MOST", 3)
    return databases.make()


async def test_what_a_task_requires_is_kept_on_every_way_into_the_store(store, conn):
    """Submitted in a transaction of a user, beside others that are looked at, or sent again after a failure."""
    async with conn.transaction():
        await store.add_within(conn, an_add(within := a_record(requires=EU)))
    checked = a_record(requires=EU, dedupe_slot="work", dedupe_scope=DedupeScope.PENDING)
    await store.turn(A.incarnation, adds=[Add([a_record(), checked], dedupe=Dedupe.MERGE)])
    assert (await store.turn(A.incarnation, demand=Demand(9, {"fetch": 1}))).claims[0].record.requires is None
    claims = (await store.turn(A.incarnation, demand=FITS)).claims
    assert {claim.uuid for claim in claims} == {within.uuid, checked.uuid}
    failed = [(claim, Move.failed(at=NOON, error=an_error())) for claim in claims]
    await store.turn(A.incarnation, settles=failed)
    assert (await store.find(checked.uuid)).requires == EU
    await store.apply([within.uuid, checked.uuid], Retry())
    assert (await store.turn(A.incarnation, demand=room(9, fetch=9))).claims == []
    claims = (await store.turn(A.incarnation, demand=FITS)).claims
    assert {claim.uuid: claim.record.requires for claim in claims} == {within.uuid: EU, checked.uuid: EU}


async def test_each_lane_of_a_consumer_has_a_mark_of_its_own(store, conn):
    """Claims of one lane, and of two at once, raise the marks of these lanes; nothing is lost sight of."""
    tasks = [a_record(requires=EU if n % 2 else None) for n in range(2000)]
    await store.turn(A.incarnation, adds=[an_add(*tasks)])

    async def marks() -> dict[str, int]:
        rows = await conn.fetch("SELECT DISTINCT ON (lane) lane, low_1 FROM taskyard.watermark ORDER BY lane, n DESC")
        return {lane: low for lane, low in rows}  # noqa: C416 - they are no tuples

    await store.turn(A.incarnation, demand=Demand(600, {EU_LANE: 600}))
    (mark,) = [low for lane, low in (await marks()).items() if lane == EU_LANE]
    assert (await marks()).get("fetch", 0) < mark
    claims = (await store.turn(A.incarnation, demand=Demand(1300, {"fetch": 1300, EU_LANE: 1300}))).claims
    assert (await marks()) == {
        lane: max(claim.record.position for claim in claims if claim.record.lane == lane) for lane in ("fetch", EU_LANE)
    }
    left = (await store.turn(A.incarnation, demand=Demand(1300, {"fetch": 1300, EU_LANE: 1300}))).claims
    assert len(left) == 100


async def test_a_claim_of_named_tasks_starts_nothing_that_it_adds(store):
    """A task that is submitted in the turn stands in line, also on a store with nothing to do."""
    task = a_record()
    turned = await store.turn(A.incarnation, adds=[an_add(task)], demand=Demand(9, {"fetch": 9}, only={}))
    assert turned.claims == []
    ids = [record.id for record in await store.preview(room(9))]
    (held,) = (await store.turn(A.incarnation, demand=Demand(9, {"fetch": 9}, only={ids[0]: "emu-1"}))).claims
    assert (held.uuid, held.record.device) == (task.uuid, "emu-1")


async def test_a_settle_may_name_another_place_than_its_claim(store):
    """What a move says of the place where the run was goes before what the claim said."""
    tasks = [a_record() for _ in range(3)]
    await store.turn(A.incarnation, adds=[an_add(*tasks)])
    ids = [record.id for record in await store.preview(room(9))]
    claims = (await store.turn(A.incarnation, demand=Demand(9, {"fetch": 9}, only=dict.fromkeys(ids, "emu-1")))).claims
    moves = [
        Move(state=TaskState.COMPLETED, at=NOON, result="1", device="emu-2"),
        Move(state=TaskState.FAILED, at=NOON, error=an_error(), device="emu-2"),
        Move.retrying(at=NOON, due_at=NOON + timedelta(seconds=1), error=an_error()),
    ]
    await store.turn(A.incarnation, settles=list(zip(claims, moves, strict=True)))
    found = [[run.device for run in await store.list_attempts(task.uuid)] for task in tasks]
    assert found == [["emu-2"], ["emu-2"], ["emu-1"]]


@pytest.mark.parametrize("postgres_url", ["few_locked_url"], indirect=True)
async def test_what_was_previewed_starts_however_many_queues_there_are(store):
    """A turn locks some of very many queues, drawn by lot: those of the tasks that it names are always among them."""
    await store.turn(A.incarnation, adds=[an_add(*[a_record(queue=f"queue-{n}") for n in range(MANY)])])
    for n in range(MANY, 0, -2):
        previewed = await store.preview(Demand(n, {"fetch": n}))
        assert len(previewed) == n
        only = {record.id: None for record in previewed[:2]}
        claims = (await store.turn(A.incarnation, demand=Demand(9, {"fetch": 9}, only=only))).claims
        assert [claim.uuid for claim in claims] == [record.uuid for record in previewed[:2]]


@pytest.fixture
def no_lanes_kept_url(databases: Databases, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of a database where lanes are dropped however few there are."""
    monkeypatch.setattr(constants, "LANES_KEPT", 0)
    return databases.make()


@pytest.mark.parametrize("postgres_url", ["no_lanes_kept_url"], indirect=True)
async def test_no_task_is_lost_with_a_spent_lane(store, conn):
    """A lane of tasks with requirements is dropped when none of its tasks may start, although some are parked behind
    their key. They start when the key is free. Other lanes stay."""
    held = [a_record(requires=EU, key="k") for _ in range(3)]
    await store.turn(A.incarnation, adds=[an_add(*held, a_record(), a_record(queue="cpu", requires=EU))])
    (claim,) = (await store.turn(A.incarnation, demand=Demand(1, {EU_LANE: 1}))).claims
    assert claim.uuid == held[0].uuid
    before = {("default", "fetch"), ("default", EU_LANE), ("cpu", EU_LANE)}
    for lanes in (before, before - {("default", EU_LANE)}):
        assert {tuple(row) for row in await conn.fetch("SELECT queue, lane FROM taskyard.lane")} == lanes
        await conn.execute("SELECT taskyard.drop_spent_lanes_1('')")
    for task in held[1:]:
        await store.turn(A.incarnation, settles=[(claim, Move.completed(at=NOON))])
        assert await conn.fetch(UNSEEN) == []
        (claim,) = (await store.turn(A.incarnation, demand=Demand(1, {EU_LANE: 1}))).claims
        assert claim.uuid == task.uuid
        await conn.execute("SELECT taskyard.drop_spent_lanes_1('')")
    assert len((await store.turn(A.incarnation, demand=room(9))).claims) == 2


@pytest.fixture
def postgres_url(request: pytest.FixtureRequest, databases: Databases) -> str:
    """The shared database, or that of the fixture which a test names."""
    name = getattr(request, "param", None)
    return databases.empty() if name is None else str(request.getfixturevalue(name))


async def test_a_preview_writes_nothing(store, conn):
    """A count of runs that is wrong is set right by a claim, and not by a preview; neither keeps a queue standing."""
    settings = QueueSettings(name="default", concurrency=1)
    await store.set_queue(settings)
    await store.turn(A.incarnation, adds=[an_add(task := a_record())])
    await conn.execute("INSERT INTO taskyard.state_count VALUES ('default', 'running', 1)")
    sizes = "SELECT count(*), pg_current_wal_insert_lsn() FROM taskyard.state_count"
    for tries_left in range(9, -1, -1):  # the server itself writes to the log now and then
        before = await conn.fetchrow(sizes)
        assert [record.uuid for record in await store.preview(room(1))] == [task.uuid]
        after = await conn.fetchrow(sizes)
        if after == before:
            break
        assert tries_left, (before, after)
    assert len((await store.turn(A.incarnation, demand=room(1))).claims) == 1


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [*QueueOrder])
async def test_the_longest_lane_has_room_in_all_indexes(store, conn, order: QueueOrder):
    """A consumer and what it requires are as long together as a name may be, in a queue of any order."""
    name = {field: secrets.token_hex(LONGEST_NAME_BYTES // 2) for field in ("queue", "bucket", "detail", "requires")}
    requires = encode_requirements({"disk": name["requires"]})
    assert requires is not None
    requires = encode_requirements({"disk": name["requires"][: LONGEST_NAME_BYTES - len(lane_of("fetch", requires))]})
    await store.set_queue(QueueSettings(name=name["queue"], order=order))
    task = a_record(queue=name["queue"], bucket=name["bucket"], requires=requires)
    assert len(task.lane) == LONGEST_NAME_BYTES
    async with conn.transaction():
        await store.add_within(conn, an_add(task))
    await store.turn(A.incarnation, demand=Demand(1, {"none": 1}))
    longest = name["detail"][:DETAIL_BYTES]
    for command in (Block("disk", longest), Unblock("disk", longest)):
        (applied,) = await store.apply([task.uuid], command)
        assert applied.refused is None
    assert len((await store.turn(A.incarnation, demand=Demand(9, {task.lane: 9}))).claims) == 1
    longer = a_record(requires=encode_requirements({"disk": secrets.token_hex(4 * LONGEST_NAME_BYTES)}))
    with pytest.raises(InvalidInput):
        async with conn.transaction():
            await store.add_within(conn, an_add(longer))
    turned = await store.turn(A.incarnation, adds=[an_add(longer), an_add(fine := a_record())], demand=room(9))
    assert isinstance(turned.added[0], InvalidInput)
    assert [claim.uuid for claim in turned.claims] == [fine.uuid]


@pytest.mark.parametrize(
    "wrong",
    [{"requires": "junk"}, {"requires": "[]"}, {"requires": "3"}, {"requires": '{"a": 1}'}, {"consumer": "a\x1fb"}],
    ids=str,
)
async def test_requirements_that_no_node_could_read_cannot_be_submitted_by_hand(store, conn, wrong):
    """Who may submit may call the function for it by hand: what it takes, nodes can work with."""
    task = {
        "uuid": "u", "consumer": "fetch", "queue": "default", "args": "{}", "priority": 1,
        "due_at": NOON.isoformat(), "created_at": NOON.isoformat(),
    }  # fmt: skip
    where = await conn.fetchval("SELECT taskyard.database_identity_1()")
    add = {"where": where, "dedupe": "allow", "tasks": [task | wrong]}
    with pytest.raises((asyncpg.CheckViolationError, asyncpg.DataError)):
        await conn.fetchval("SELECT taskyard.submit_1($1)", msgspec.json.encode(add).decode())
    add["tasks"] = [task | {"requires": EU}]
    assert "why" not in await conn.fetchval("SELECT taskyard.submit_1($1)", msgspec.json.encode(add).decode())
    assert len((await store.turn(A.incarnation, demand=FITS)).claims) == 1


@pytest.mark.parametrize("detail", ["/a\udce9.mp4", "/a\0b"])
async def test_a_blocker_whose_name_is_no_text_blocks_and_frees(store, detail: str):
    """A file's name need not be text: it is stored as it can be, and freed by its own name."""
    await store.turn(A.incarnation, adds=[an_add(task := a_record())])
    await store.apply([task.uuid], Block("output", detail))
    (group,) = await store.list_blockers()
    assert group == BlockedGroup(group.key, "fetch", 1, task.uuid)
    assert [uuid for _, uuid in await store.list_ids(TaskFilter(blocker=group.key))] == [task.uuid]
    (applied,) = await store.apply([task.uuid], Unblock("output", detail))
    assert applied.refused is None


async def test_a_blocker_whose_name_no_index_takes_is_refused(store):
    """It is told so, and the task stays as it was."""
    await store.turn(A.incarnation, adds=[an_add(task := a_record())])
    with pytest.raises(InvalidInput, match="longer than"):
        await store.apply([task.uuid], Block("output", secrets.token_hex(4000)))
    assert [claim.uuid for claim in (await store.turn(A.incarnation, demand=room(1))).claims] == [task.uuid]
