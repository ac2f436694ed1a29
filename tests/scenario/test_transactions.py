"""Submitting inside of a transaction of one's own, on PostgreSQL."""

import asyncio
import sys
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import asyncpg
import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from taskyard import Dedupe, InvalidInput, ResultGone, TaskState, Yard
from taskyard.errors import ClaimLost, DuplicateTask, SubmitPending, UnknownTask
from taskyard.model.task import Task
from taskyard.ports.consumer import BaseTaskConsumer
from taskyard.queueing import pending
from tests.scenario.gates import PATIENCE_S, Gates
from tests.scenario.jobs import build
from tests.scenario.processes import TOP, environment
from tests.scenario.transactions import DRIVERS, Transaction, Undo, by_asyncpg, engine, undone

pytestmark = pytest.mark.spec("SCH-14")


@pytest.fixture(params=DRIVERS)
def transaction(request: pytest.FixtureRequest) -> Transaction:
    return DRIVERS[request.param]


@pytest.fixture
async def yard(postgres_url: str, gates: Gates) -> AsyncIterator[Yard]:
    async with build(postgres_url, gates.port) as yard:
        yield yard


async def test_a_commit_brings_the_task_about(yard, postgres_url, transaction):
    """Before the commit there is no task for anybody else; after it the task runs, and its handle gives the result."""
    async with transaction(postgres_url) as theirs:
        await theirs.write("CREATE TABLE orders (n int)")
        handle = await yard.submit("add", {"a": 1}, connection=theirs.connection)
        with pytest.raises(UnknownTask):
            await handle.record()
        with pytest.raises(ResultGone, match="the transaction it was submitted in has not committed"):
            await handle.result()
    assert handle.is_new
    assert await handle.result(timeout_s=PATIENCE_S) == 2
    async with transaction(postgres_url) as theirs:
        await theirs.write("DROP TABLE orders")


async def test_a_session_that_was_closed(yard, postgres_url):
    """A closed session of SQLAlchemy's begins anew: its task is there if, and only if, that is committed."""
    async with engine(postgres_url) as made, AsyncSession(made) as session:
        await session.close()
        dropped = await yard.submit("add", {"a": 1}, connection=session)
        await session.close()
        kept = await yard.submit("add", {"a": 2}, connection=session)
        await session.commit()
        assert await kept.result(timeout_s=PATIENCE_S) == 3
        with pytest.raises(UnknownTask):
            await dropped.record()


async def test_no_connection_is_a_plain_submit(yard):
    """With None for a connection the task is stored at once."""
    handle = await yard.submit("add", {"a": 1}, connection=None)
    assert await handle.result(timeout_s=PATIENCE_S) == 2


async def test_the_first_statement_may_be_ours(yard, postgres_url, transaction):
    """A transaction in which nothing was done before the submit is one all the same."""
    async with undone(transaction(postgres_url)) as theirs:
        gone = await yard.submit("add", {"a": 1}, connection=theirs.connection)
    async with transaction(postgres_url) as theirs:
        handle = await yard.submit("add", {"a": 2}, connection=theirs.connection)
    assert await handle.result(timeout_s=PATIENCE_S) == 3
    with pytest.raises(UnknownTask):
        await gone.record()


async def test_a_rollback_leaves_nothing(yard, postgres_url, transaction):
    """Of a batch whose transaction is rolled back there is neither a task nor a count nor an event."""
    async with undone(transaction(postgres_url)) as theirs:
        await theirs.write("SELECT 1")
        await yard.submit_many("add", [{"a": n} for n in range(50)], connection=theirs.connection)
    assert await yard.store.count() == {}
    assert await yard.store.list_tasks() == []
    assert (await yard.store.events(after=0)).events == []


async def test_a_savepoint_takes_back_what_is_inside_of_it(yard, postgres_url, transaction):
    """What was submitted inside of a savepoint that is rolled back is gone and its slot free; what is around stays."""
    async with transaction(postgres_url) as theirs:
        before = await yard.submit("add", {"a": 1}, connection=theirs.connection)
        async with undone(theirs.savepoint()):
            inside = await yard.submit("add", {"a": 2}, dedupe="refuse", connection=theirs.connection)
        after = await yard.submit("add", {"a": 2}, dedupe="refuse", connection=theirs.connection)
    assert [await handle.result(timeout_s=PATIENCE_S) for handle in (before, after)] == [2, 3]
    with pytest.raises(UnknownTask):
        await inside.record()
    assert await yard.store.count() == {("default", TaskState.COMPLETED): 2}


async def test_options_and_batches(yard, postgres_url, transaction):
    """Everything that `submit` takes works there, through `options` as well; a batch keeps its order and its keys."""
    later = datetime.now(UTC) + timedelta(hours=1)
    async with transaction(postgres_url) as theirs:
        options = {"priority": "high", "queue": "other", "key": "k", "timeout_s": 9.5, "schedule_at": later}
        one = await yard.submit("echo", {"value": "ü\0"}, connection=theirs.connection, **options)
        many = await yard.submit_many("echo", [{"value": n} for n in range(30)], key="k", connection=theirs.connection)
    record = await one.record()
    assert (record.priority, record.queue, record.key, record.timeout_s) == (0, "other", "k", 9.5)
    assert (record.state, record.due_at, record.args) == (TaskState.SCHEDULED, later, '{"value":"ü\\u0000"}')
    assert [await handle.result(timeout_s=PATIENCE_S) for handle in many] == list(range(30))
    runs = [(await yard.store.list_attempts(handle.uuid))[0] for handle in many]
    assert sorted(runs, key=lambda run: run.token) == runs


async def test_the_decorated_function_takes_a_connection(postgres_url):
    """`work.options(connection=…).submit(…)` is the same as `yard.submit("work", …, connection=…)`."""
    yard = Yard(postgres_url)

    @yard.consumer
    async def work(n: int) -> int:
        return n * 2

    async with yard:
        async with by_asyncpg(postgres_url) as theirs:
            within = work.options(connection=theirs.connection)
            handles = [await within.submit(4), *await within.submit_many([{"n": 5}])]
        assert [await handle.result(timeout_s=PATIENCE_S) for handle in handles] == [8, 10]


async def test_events_tell_of_it_once_it_is_there(yard, postgres_url):
    """The first event of a task is that it was submitted, as of any other, and comes after the commit."""
    async with by_asyncpg(postgres_url) as theirs:
        handle = await yard.submit("add", {"a": 1}, connection=theirs.connection)
        other = await yard.submit("add", {"a": 2})
        await other.result(timeout_s=PATIENCE_S)
        seen = (await yard.store.events(after=0)).last
    await handle.result(timeout_s=PATIENCE_S)
    told = [(event.kind, event.uuid) for event in (await yard.store.events(after=seen)).events]
    assert told == [(kind, handle.uuid) for kind in ("submitted", "queued", "running", "completed")]


async def test_a_client_submits_for_others(yard, postgres_url):
    """A process that runs nothing itself submits, and hears of the result when another has run the task."""
    async with build(postgres_url).client() as client, by_asyncpg(postgres_url) as theirs:
        handle = await client.submit("add", {"a": 5}, connection=theirs.connection)
        await theirs.write("COMMIT")
        assert await handle.result(timeout_s=PATIENCE_S) == 6
        await theirs.write("BEGIN")


KILLED = """
import asyncio, sys, asyncpg
from tests.scenario.jobs import build

async def main(url, how):
    conn = await asyncpg.connect(url)
    await conn.execute("BEGIN")
    async with build(url).client() as yard:
        handle = await yard.submit("add", {"a": 1}, dedupe="merge", connection=conn)
        if how == "after":
            await conn.execute("COMMIT")
        print(handle.uuid, flush=True)
        await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("when", ["before", "after"])
async def test_killed_around_the_commit(yard, postgres_url, when):
    """A process killed before its commit leaves no task and frees the slot; killed right after it, the task runs."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", KILLED, postgres_url, when, env=environment(), cwd=TOP, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE_S):
        uuid = (await process.stdout.readline()).decode().strip()
    process.kill()
    await process.wait()
    if when == "after":
        assert await yard.handle(uuid).result(timeout_s=PATIENCE_S) == 2
        return
    again = await yard.submit("add", {"a": 1}, dedupe="merge")
    assert again.uuid != uuid
    assert await again.result(timeout_s=PATIENCE_S) == 2
    with pytest.raises(UnknownTask):
        await yard.handle(uuid).record()


# --- the same work twice ----------------------------------------------------------------------------------------------


async def test_merging_and_refusing_into_what_is_pending(yard, gates, postgres_url, transaction):
    """A duplicate of a pending task is merged or refused, of one in the same transaction too, and the transaction goes
    on."""
    pending_one = await yard.submit("gate", {"name": "slow"}, dedupe="merge")
    run = await gates.begun("slow")
    async with transaction(postgres_url) as theirs:
        given = {"connection": theirs.connection}
        merged = await yard.submit("gate", {"name": "slow"}, dedupe="merge", **given)
        assert (merged.uuid, merged.is_new) == (pending_one.uuid, False)
        with pytest.raises(DuplicateTask) as refused:
            await yard.submit("gate", {"name": "slow"}, dedupe="refuse", **given)
        assert refused.value.existing == pending_one.uuid
        own = await yard.submit("add", {"a": 1}, dedupe="merge", **given)
        again = await yard.submit("add", {"a": 1}, dedupe="merge", **given)
        batch = [{"a": 2}, {"a": 1}, {"a": 2}]
        many = await yard.submit_many("add", batch, dedupe="merge", **given)
        with pytest.raises(DuplicateTask, match="in this batch twice"):
            await yard.submit_many("add", [{"a": 3}, {"a": 3}], dedupe="refuse", **given)
        allowed = await yard.submit("add", {"a": 1}, **given)
    run.finish("through")
    assert again == own == many[1]
    assert many[0] == many[2]
    assert [handle.is_new for handle in many] == [True, False, False]
    assert await allowed.result(timeout_s=PATIENCE_S) == await own.result(timeout_s=PATIENCE_S) == 2
    assert await merged.result(timeout_s=PATIENCE_S) == "through"
    assert sum((await yard.store.count()).values()) == 4


async def test_an_open_transaction_holds_up_nobody_else(yard, postgres_url, monkeypatch):
    """While a transaction with a slot stays open, other submits and runs go on; the same work is waited for, in vain
    for as long as it takes to give up, and is merged or stored when the transaction has ended."""
    monkeypatch.setattr(pending, "PENDING_S", 2 * PATIENCE_S)
    async with by_asyncpg(postgres_url) as theirs:
        held = await yard.submit("add", {"a": 1}, dedupe="merge", delay_s=3600, connection=theirs.connection)
        patient = asyncio.create_task(yard.submit("add", {"a": 1}, dedupe="merge"))
        for n in range(20):
            other = await yard.submit("echo", {"value": n}, dedupe="merge")
            assert await other.result(timeout_s=PATIENCE_S) == n
        monkeypatch.setattr(pending, "PENDING_S", 0.1)
        with pytest.raises(SubmitPending, match="it was waited for in vain"):
            await yard.submit("add", {"a": 1}, dedupe="refuse")
        async with by_asyncpg(postgres_url) as another:
            with pytest.raises(SubmitPending):
                await yard.submit("add", {"a": 1}, dedupe="merge", connection=another.connection)
            fine = await yard.submit("add", {"a": 7}, dedupe="merge", connection=another.connection)
        assert await fine.result(timeout_s=PATIENCE_S) == 8
        assert not patient.done()
    merged = await patient
    assert (merged.uuid, merged.is_new) == (held.uuid, False)
    with pytest.raises(DuplicateTask):
        await yard.submit("add", {"a": 1}, dedupe="refuse")


async def test_who_waits_for_a_rollback_is_stored(yard, postgres_url):
    """Work that was submitted in a transaction that is rolled back is stored for whoever submitted it meanwhile."""
    async with undone(by_asyncpg(postgres_url)) as theirs:
        gone = await yard.submit("add", {"a": 1}, dedupe="merge", connection=theirs.connection)
        waiting = asyncio.create_task(yard.submit("add", {"a": 1}, dedupe="merge"))
        await yard.submit("echo")  # by the turn that is taken then, the other has been told to wait
    handle = await waiting
    assert handle.is_new
    assert handle.uuid != gone.uuid
    assert await handle.result(timeout_s=PATIENCE_S) == 2


async def test_crosswise_transactions_end(yard, postgres_url, monkeypatch):
    """Two transactions that each want what the other has submitted are told so in time, instead of waiting for ever."""
    monkeypatch.setattr(pending, "PENDING_S", 0.1)
    async with by_asyncpg(postgres_url) as one, by_asyncpg(postgres_url) as two:
        await yard.submit("add", {"a": 1}, dedupe="merge", connection=one.connection)
        await yard.submit("add", {"a": 2}, dedupe="merge", connection=two.connection)
        tried = await asyncio.gather(
            yard.submit("add", {"a": 2}, dedupe="merge", connection=one.connection),
            yard.submit("add", {"a": 1}, dedupe="merge", connection=two.connection),
            return_exceptions=True,
        )
    assert [type(error) for error in tried] == [SubmitPending, SubmitPending]
    assert await settled(yard) == 2


async def settled(yard: Yard) -> int:
    """How many tasks there are, when all of them have ended."""
    with yard._engine.changes() as changes:
        while any(state is not TaskState.COMPLETED for _, state in await yard.store.count()):
            changes.clear()
            async with asyncio.timeout(PATIENCE_S):
                await changes.wait()
    return sum((await yard.store.count()).values())


@pytest.mark.slow
async def test_many_transactions_and_submits_of_the_same_work(yard, gates, postgres_url):
    """However transactions, rollbacks and plain submits of the same work meet, at most one of it is pending at a
    time."""
    names = [f"work-{n}" for n in range(4)]

    async def by_transactions(client: int) -> set[tuple[str, str]]:
        found: set[tuple[str, str]] = set()
        for n in range(12):
            try:
                async with by_asyncpg(postgres_url) as theirs:
                    name = names[(client + n) % 4]
                    handle = await yard.submit("gate", {"name": name}, dedupe="merge", connection=theirs.connection)
                    if n % 3 == 0:
                        raise Undo
                    found.add((name, handle.uuid))
            except Undo:
                pass
        return found

    async def by_turns(client: int) -> set[tuple[str, str]]:
        found: set[tuple[str, str]] = set()
        for n in range(12):
            name = names[(client + n) % 4]
            found.add((name, (await yard.submit("gate", {"name": name}, dedupe="merge")).uuid))
        return found

    everybody = await asyncio.gather(*(do(n) for n in range(6) for do in (by_transactions, by_turns)))
    found = {one for some in everybody for one in some}
    assert sorted(name for name, _ in found) == names
    for _ in names:
        (await gates.next()).finish("done")
    assert await settled(yard) == len(names)


@pytest.mark.parametrize("isolation", ["repeatable_read", "serializable"])
async def test_a_transaction_that_cannot_see_the_window(yard, postgres_url, isolation):
    """The same of work that stands for a window, also when it is done; what can be seen is merged into, and a window
    that is over is in nobody's way."""
    conn = await asyncpg.connect(postgres_url)
    window = {"dedupe": "merge", "dedupe_scope": "window", "dedupe_window_s": 3600, "dedupe_key": "k"}
    async with conn.transaction(isolation=isolation):
        assert (await yard.submit("add", {"a": 1}, dedupe="refuse", dedupe_key="other", connection=conn)).is_new
    async with undone(conn.transaction(isolation=isolation)):
        await conn.fetchval("SELECT count(*) FROM taskyard.task")
        first = await yard.submit("add", {"a": 1}, **window)
        await first.result(timeout_s=PATIENCE_S)
        with pytest.raises(InvalidInput, match="run it again"):
            await yard.submit("add", {"a": 1}, dedupe="refuse", dedupe_key="k", connection=conn)
    async with conn.transaction(isolation=isolation):
        merged = await yard.submit("add", {"a": 1}, dedupe="merge", dedupe_key="k", connection=conn)
    assert (merged.uuid, merged.is_new) == (first.uuid, False)
    await conn.execute("UPDATE taskyard.dedupe_window SET until = now()")
    async with conn.transaction(isolation=isolation):
        assert (await yard.submit("add", {"a": 1}, dedupe="merge", dedupe_key="k", connection=conn)).is_new
    await conn.close()


async def test_a_transaction_that_cannot_see_the_duplicate(yard, postgres_url):
    """At a stricter isolation level, what was submitted since the transaction began is a reason to begin it again."""
    conn = await asyncpg.connect(postgres_url)
    transaction = conn.transaction(isolation="repeatable_read")
    await transaction.start()
    await conn.fetchval("SELECT count(*) FROM taskyard.task")
    await yard.submit("add", {"a": 1}, dedupe="merge", delay_s=3600)
    with pytest.raises(InvalidInput, match="run it again"):
        await yard.submit("add", {"a": 1}, dedupe="merge", connection=conn)
    await transaction.rollback()
    async with conn.transaction(isolation="repeatable_read"):
        assert not (await yard.submit("add", {"a": 1}, dedupe="merge", connection=conn)).is_new
    await conn.close()


async def test_a_uuid_of_ones_own_must_be_new(postgres_url):
    """A task with the id of another is refused, with all of its batch, and the transaction goes on."""
    yard = Yard(postgres_url)

    class Own(BaseTaskConsumer):
        name = "own"

        def produce(self, args):
            return Task(source=self.name, args=args, uuid=args["id"], schedule_at=datetime.now(UTC))

        async def consume(self, task):
            return None

    yard.register(Own())
    async with yard:
        await (await yard.submit("own", {"id": "ended"})).result(timeout_s=PATIENCE_S)
        await yard.submit("own", {"id": "waiting"}, delay_s=3600)
        async with by_asyncpg(postgres_url) as theirs:
            for taken in ("ended", "waiting", "twice"):
                batch = [{"id": "twice"}, {"id": taken}]
                with pytest.raises(InvalidInput, match=f"a task {taken} is in the store already"):
                    await yard.submit_many("own", batch, connection=theirs.connection)
            await yard.submit("own", {"id": "new"}, connection=theirs.connection)
        await yard.handle("new").result(timeout_s=PATIENCE_S)
        with pytest.raises(UnknownTask):
            await yard.handle("twice").record()


async def test_a_stale_run_submits_nothing(postgres_url, gates):
    """A run whose task was given to another cannot submit in a transaction either."""
    yard = build(postgres_url, gates.port)
    said: asyncio.Future[object] = asyncio.get_running_loop().create_future()

    @yard.consumer
    async def parent() -> None:
        async with by_asyncpg(postgres_url) as theirs:
            await yard.submit("add", {"a": 1}, connection=theirs.connection)
            await yard.store.rescue(yard._engine.incarnation)
            (lost,) = await asyncio.gather(
                yard.submit("add", {"a": 2}, connection=theirs.connection), return_exceptions=True
            )
        said.set_result(lost)

    async with yard:
        await yard.submit("parent", dedupe=Dedupe.ALLOW)
        async with asyncio.timeout(PATIENCE_S):
            assert isinstance(await said, ClaimLost)
        sources = [record.args for record in await yard.store.list_tasks() if record.consumer == "add"]
        assert sources == ['{"a":1}']
