"""Submits with the scope `key_idle` beside claims of other connections: a key is found either idle or running."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import asyncpg
import pytest

from taskyard.errors import DuplicateTask, StoreBusy
from taskyard.model.event import EventKind
from taskyard.model.move import Move
from taskyard.model.queue import QueueOrder, QueueSettings
from taskyard.model.task import Dedupe, DedupeScope, TaskRecord
from taskyard.ports.store import Add, Added, Store
from taskyard.stores.postgres import PostgresStore
from taskyard.stores.sqlite import SqliteStore
from taskyard.testing.clock import ManualClock
from taskyard.testing.samples import NOON, a_node, a_record, an_add, room
from tests.stores.test_postgres_beside import done_or_waiting, standing_still, who_waits

A, B = a_node("a"), a_node("b")
ACCOUNTS, SUBMITS = [str(n) for n in range(4)], 400
PHONES = QueueSettings(name="default", order=QueueOrder.FIFO)


def a_task(account: str, kind: str = "daily") -> TaskRecord:
    slot = f"{kind} {account}"
    return a_record(consumer=kind, key=account, dedupe_slot=slot, dedupe_scope=DedupeScope.KEY_IDLE)


def asked(record: TaskRecord, dedupe: Dedupe = Dedupe.REFUSE) -> Add:
    return Add([record], dedupe)


# --- many at once -----------------------------------------------------------------------------------------------------


@pytest.fixture(params=["sqlite", "postgres"])
def make(request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock) -> Callable[[], Store]:
    if request.param == "sqlite":
        return lambda: SqliteStore(tmp_path / "work.db", clock=clock, synchronous="NORMAL")
    url: str = request.getfixturevalue("postgres_url")
    return lambda: PostgresStore(url, clock=clock)


@pytest.fixture
async def handles(make: Callable[[], Store]) -> AsyncIterator[list[Store]]:
    """Three stores on one database, each with connections of its own, as three processes have them."""
    async with AsyncExitStack() as opened:
        stores = [make() for _ in range(3)]
        for store in stores:
            await store.open()
            opened.push_async_callback(store.close)
        await stores[0].join(A)
        opened.push_async_callback(stores[0].leave, A.incarnation)
        yield stores


async def submit_some(store: Store, seed: int) -> Counter[str]:
    """Ask for work of random accounts; how often each answer was given."""
    rng, told = random.Random(seed), Counter[str]()
    for _ in range(SUBMITS):
        record = a_task(rng.choice(ACCOUNTS), rng.choice(["daily", "weekly"]))
        dedupe = rng.choice([Dedupe.REFUSE, Dedupe.MERGE])
        (answer,) = (await store.turn("nobody", adds=[asked(record, dedupe)])).added
        if isinstance(answer, DuplicateTask):
            told["the key runs" if answer.key else "it pends"] += 1
        else:
            assert isinstance(answer, list), answer
            told["stored" if answer[0].is_new else "merged"] += 1
    return told


async def run_some(store: Store, until: asyncio.Event) -> None:
    """Start and complete what there is, one turn each, so that a key runs between two turns."""
    while not until.is_set():
        for claim in (await store.turn(A.incarnation, demand=room(2))).claims:
            await asyncio.sleep(0)
            await store.turn(A.incarnation, settles=[(claim, Move.completed(at=NOON))])


@pytest.mark.spec("QUE-19", "DEV-05")
async def test_no_task_of_an_account_is_accepted_while_another_of_it_runs(handles: list[Store]) -> None:
    """Two submit and one claims, as fast as they can: by the events of the store, whatever was accepted was accepted
    while nothing of its account ran and the same work was not pending."""
    await handles[0].set_queue(PHONES)
    is_over = asyncio.Event()
    running = asyncio.ensure_future(run_some(handles[0], is_over))
    told = await asyncio.gather(submit_some(handles[1], 1), submit_some(handles[2], 2))
    is_over.set()
    await running
    answers = told[0] + told[1]
    assert min(answers[one] for one in ("stored", "merged", "the key runs", "it pends")) > 0, answers
    records = {record.uuid: record for record in await handles[0].list_tasks(limit=10_000)}
    assert len(records) == answers["stored"]
    page = await handles[0].events(after=0, limit=10_000)
    assert not page.missed
    runs: dict[str | None, str] = {}
    pends: dict[str | None, str] = {}
    for event in page.events:
        record = records.get(event.uuid)
        if record is None:
            continue
        match event.kind:
            case EventKind.SUBMITTED:
                assert record.key not in runs, f"accepted while {runs.get(record.key)} ran"
                assert record.dedupe_key not in pends
                pends[record.dedupe_key] = record.uuid
            case EventKind.STARTED:
                assert record.key not in runs
                runs[record.key] = record.uuid
            case EventKind.COMPLETED:
                assert runs.pop(record.key) == record.uuid
                del pends[record.dedupe_key]


# --- one interleaving at a time, on PostgreSQL ------------------------------------------------------------------------


@pytest.mark.spec("QUE-19", "DEV-05")
@pytest.mark.parametrize("dedupe", [Dedupe.REFUSE, Dedupe.MERGE, Dedupe.REPLACE])
async def test_a_submit_waits_for_a_claim_of_its_queue(
    store: PostgresStore, conn: asyncpg.Connection, dedupe: Dedupe
) -> None:
    """A submit that comes while a claim of another node is being written is answered as the claim leaves the key."""
    first = a_record(key="7", consumer="weekly")
    await store.turn(A.incarnation, adds=[an_add(first)])
    async with standing_still(conn, "event"):
        claiming = asyncio.ensure_future(store.turn(A.incarnation, demand=room(1)))
        (claims,) = await who_waits(conn)
        adding = asyncio.ensure_future(store.turn(B.incarnation, adds=[asked(a_task("7"), dedupe)]))
        await done_or_waiting(adding, conn, claims)
        assert not adding.done()
    assert [claim.uuid for claim in (await claiming).claims] == [first.uuid]
    (answer,) = (await adding).added
    if dedupe is Dedupe.MERGE:
        assert answer == [Added(first.uuid, is_new=False)]
    else:
        assert isinstance(answer, DuplicateTask)
        assert (answer.existing, answer.key) == (first.uuid, "7")


@pytest.mark.spec("QUE-19")
async def test_a_claim_waits_for_a_submit_of_its_queue(store: PostgresStore, conn: asyncpg.Connection) -> None:
    """A claim that comes while a submit is being written starts after it: the submit found the key idle, and was
    accepted before anything of the key ran."""
    first, second = a_record(key="7", consumer="weekly"), a_task("7")
    await store.turn(A.incarnation, adds=[an_add(first)])
    async with standing_still(conn, "event"):
        adding = asyncio.ensure_future(store.turn(B.incarnation, adds=[asked(second)]))
        (adds,) = await who_waits(conn)
        claiming = asyncio.ensure_future(store.turn(A.incarnation, demand=room(1)))
        await done_or_waiting(claiming, conn, adds)
        # On a busy machine it may have waited for as long as the store lets it wait.
        assert not claiming.done() or isinstance(claiming.exception(), StoreBusy)
    assert (await adding).added == [[Added(second.uuid)]]
    try:
        turned = await claiming
    except StoreBusy:
        turned = await store.turn(A.incarnation, demand=room(1))
    assert [claim.uuid for claim in turned.claims] == [first.uuid]
    told = [(event.kind, event.uuid) for event in (await store.events(after=0)).events]
    assert told.index((EventKind.SUBMITTED, second.uuid)) < told.index((EventKind.STARTED, first.uuid))


@pytest.mark.spec("QUE-19")
@pytest.mark.parametrize("dedupe", [Dedupe.REFUSE, Dedupe.MERGE])
async def test_a_key_that_runs_keeps_a_task_out_of_a_transaction(
    store: PostgresStore, conn: asyncpg.Connection, dedupe: Dedupe
) -> None:
    """A task that is stored without the lock of its queue, as those of schedules are, is a duplicate while its key
    runs, and stands for its work afterwards."""
    (running,) = (await store.turn(A.incarnation, adds=[an_add(a_record(key="7"))], demand=room(1))).claims
    idle = a_task("8")
    async with conn.transaction():
        if dedupe is Dedupe.MERGE:
            merged = await store.add_within(conn, Add([a_task("7"), idle, a_task("8")], dedupe))
            assert [(one.uuid, one.is_new) for one in merged] == [
                (running.uuid, False), (idle.uuid, True), (idle.uuid, False),
            ]  # fmt: skip
        else:
            with pytest.raises(DuplicateTask) as refused:
                await store.add_within(conn, asked(a_task("7")))
            assert (refused.value.existing, refused.value.key) == (running.uuid, "7")
            await store.add_within(conn, asked(idle))
    (again,) = (await store.turn(B.incarnation, adds=[asked(a_task("8"))])).added
    assert isinstance(again, DuplicateTask)
    assert again.existing == idle.uuid
    (claim,) = (await store.turn(A.incarnation, demand=room(9))).claims
    assert (claim.uuid, claim.record.dedupe_scope) == (idle.uuid, DedupeScope.KEY_IDLE)


@pytest.mark.spec("QUE-19")
async def test_work_that_is_just_being_claimed_is_not_accepted_without_the_lock(
    store: PostgresStore, conn: asyncpg.Connection, postgres_url: str
) -> None:
    """A transaction that does not wait for a claim finds the task either queued or running: the same work is merged
    into it before the claim is written, and afterwards."""
    first = a_task("7")
    await store.turn(A.incarnation, adds=[asked(first)])
    users = await asyncpg.connect(postgres_url)
    try:
        async with standing_still(conn, "event"):
            claiming = asyncio.ensure_future(store.turn(A.incarnation, demand=room(1)))
            await who_waits(conn)
            async with users.transaction():
                assert await store.add_within(users, asked(a_task("7"), Dedupe.MERGE)) == [
                    Added(first.uuid, is_new=False)
                ]
        assert len((await claiming).claims) == 1
        async with users.transaction():
            assert await store.add_within(users, asked(a_task("7"), Dedupe.MERGE)) == [Added(first.uuid, is_new=False)]
    finally:
        await users.close()
