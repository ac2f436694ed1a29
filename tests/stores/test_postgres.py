"""What is PostgreSQL's own: its schema, its errors, its locks and its beats."""

import asyncio
import itertools
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import msgspec
import pytest

from taskyard.errors import (
    ChangedMeanwhile,
    DuplicateTask,
    InvalidInput,
    OutcomeUnknown,
    StoreBusy,
    StoreDenied,
    StoreUnreachable,
    StoreUrlInvalid,
    SubmitPending,
    UnknownTask,
)
from taskyard.model.audit import TargetKind, make_entry
from taskyard.model.beats import Beat, Pulses
from taskyard.model.catalogue import ConsumerSpec
from taskyard.model.command import Cancel, Hold, Reschedule, Retry, StartNow
from taskyard.model.event import EventKind
from taskyard.model.execution import Progress
from taskyard.model.limits import Demand
from taskyard.model.move import Move
from taskyard.model.notes import CancelRequest, Note
from taskyard.model.queue import QueueOrder, QueueSettings, SetConcurrency
from taskyard.model.state import TaskState
from taskyard.model.task import Dedupe, OnFailure, TaskRecord
from taskyard.model.task_filter import TaskFilter
from taskyard.model.why import Reason, explain_wait
from taskyard.ports.clock import SystemClock
from taskyard.ports.store import Add, News, Report
from taskyard.settings import make_store
from taskyard.stores.postgres import PostgresStore, commands, connection, hints, link, reader, within
from taskyard.stores.postgres.connection import COMMAND_S, Connection
from taskyard.stores.postgres.constants import CHANNEL, LOCKED_AT_MOST, Lock
from taskyard.stores.postgres.patience import PAUSE_CAP_S, TRIES
from taskyard.stores.postgres.scene import find_scene
from taskyard.stores.postgres.upkeep import RING
from taskyard.testing.clock import ManualClock
from taskyard.testing.postgres import Databases, at_database
from taskyard.testing.samples import NOON, a_node, a_record, an_add, an_error, room, seconds
from taskyard.testing.store_contract.schedules import a_fire, fire, put
from tests.scenario.transactions import DRIVERS
from tests.stores.reads import read_since

pytestmark = pytest.mark.anyio

A, B = a_node("a"), a_node("b")
PATIENCE_S = 20.0

LARGE = '"' + "x" * 400_000 + '"'

WAITING = "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"

AN_EVENT = (
    "INSERT INTO taskyard.event VALUES "
    "(pg_current_xact_id()::text::bigint, 0, 1, 'queued', 'q', 's', ARRAY[now()], ARRAY[$1])"
)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def store(clock: ManualClock, postgres_url: str) -> AsyncIterator[PostgresStore]:
    store = PostgresStore(postgres_url, clock=clock)
    await store.open()
    await store.join(A)
    yield store
    await store.close()


@pytest.fixture
async def other(clock: ManualClock, postgres_url: str) -> AsyncIterator[PostgresStore]:
    """Another process's store on the same database."""
    store = PostgresStore(postgres_url, clock=clock)
    await store.open()
    await store.join(B)
    yield store
    await store.close()


@pytest.fixture
async def stranger(postgres_url: str) -> AsyncIterator[asyncpg.Connection]:
    """A connection of somebody else's."""
    conn = await asyncpg.connect(postgres_url)
    yield conn
    await conn.close()


@pytest.fixture
async def more(postgres_url: str) -> AsyncIterator[list[asyncpg.Connection]]:
    """Two more of them."""
    conns = [await asyncpg.connect(postgres_url) for _ in range(2)]
    yield conns
    for conn in conns:
        await conn.close()


async def until(is_so: Callable[[], Awaitable[object]]) -> None:
    """Wait for what the server does, which nothing of ours is told of."""
    while not await is_so():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def _running(store: PostgresStore, n: int) -> bool:
    return (await store.count()).get(("default", TaskState.RUNNING)) == n


async def _all_closed(store: PostgresStore) -> bool:
    return all(conn.is_closed() for conn in store._db.turns._idle + store._db.reads._idle)


# --- the schema -------------------------------------------------------------------------------------------------------


@pytest.fixture
def empty_url(databases: Databases) -> str:
    return databases.make()


async def test_an_illegal_move_is_refused_by_the_database(store, stranger):
    """The table of legal moves holds against whoever writes to the tables."""
    await store.turn(A.incarnation, adds=[an_add(a_record())])
    with pytest.raises(asyncpg.CheckViolationError, match="illegal move"):
        await stranger.execute("UPDATE taskyard.task SET state = 'interrupted'")
    with pytest.raises(asyncpg.CheckViolationError, match="illegal move"):
        await stranger.execute(
            "INSERT INTO taskyard.task (id, position, due_at, created_at, updated_at, priority, is_parked, state, "
            "uuid, consumer, queue, args) VALUES (0, 0, now(), now(), now(), 1, false, 'retrying', 'u', 's', 'q', '{}')"
        )


@pytest.mark.parametrize(
    "wrong",
    [
        {"due_at": "12000-01-01T00:00:00Z"},
        {"due_at": "infinity"},
        {"due_at": None},
        {"created_at": "0044-03-15 BC"},
        {"queue": ""},
        {"queue": "q" * 3000},
        {"uuid": ""},
        {"timeout_s": -1},
        {"retry": "junk"},
        {"retry": "3"},
    ],
    ids=str,
)
async def test_what_no_node_could_read_cannot_be_submitted_past_our_code(store, stranger, wrong):
    """Who may submit may call the function for it by hand: what it takes, nodes can work with."""
    task = {
        "uuid": "u", "consumer": "fetch", "queue": "default", "args": "{}", "priority": 1,
        "due_at": NOON.isoformat(), "created_at": NOON.isoformat(),
    }  # fmt: skip

    async def submit(**fields: object) -> str:
        where = await stranger.fetchval("SELECT taskyard.database_identity_1()")
        add = {"where": where, "dedupe": "allow", "tasks": [task | fields]}
        return str(await stranger.fetchval("SELECT taskyard.submit_1($1)", msgspec.json.encode(add).decode()))

    with pytest.raises((asyncpg.CheckViolationError, asyncpg.DataError)):
        await submit(**wrong)
    assert "why" not in await submit()
    assert len((await store.turn(A.incarnation, demand=room(9))).claims) == 1


# --- errors -----------------------------------------------------------------------------------------------------------


async def test_an_unreachable_server_is_named():
    """Without a server the error says where it was looked for, and never shows the password."""
    with pytest.raises(StoreUnreachable, match="check that the server runs") as raised:
        await PostgresStore("postgresql://me:secret@127.0.0.1:1/db", clock=SystemClock()).open()
    assert "secret" not in str(raised.value)


async def test_a_missing_database_is_named(databases):
    """Without the database the error says how to make it."""
    url = at_database(databases.url, "nothing_here")
    with pytest.raises(StoreDenied, match="createdb nothing_here"):
        await PostgresStore(url, clock=SystemClock()).open()


def test_a_missing_driver_is_named():
    """Without asyncpg the error says what to install, and nothing else of Taskyard needs it."""
    script = (
        "import sys; sys.modules['asyncpg'] = None\n"
        "from taskyard.settings import make_store\nfrom taskyard.ports.clock import SystemClock\n"
        "try: make_store('postgresql://me@host/db', SystemClock())\nexcept Exception as exc: print(exc)"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert "pip install 'taskyard[postgres]'" in said


@pytest.mark.parametrize("url", ["postgresql://", "postgresql://host", "postgresql://host:port/db"])
def test_an_address_that_cannot_be_is_refused(url):
    """An address without a database, or with a port that is no number, is refused before anything is opened."""
    with pytest.raises(StoreUrlInvalid, match="postgresql://"):
        make_store(url, SystemClock())


def test_a_password_is_not_shown():
    """An address that is refused is repeated without its password."""
    with pytest.raises(StoreUrlInvalid, match=r"me:\*\*\*@host") as raised:
        make_store("postgresql://me:secret@host", SystemClock())
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    "bad",
    [
        {"key": "a\0b"},
        {"consumer": "\ud800"},
        {"queue": os.urandom(4000).hex()},
        {"priority": 7},
        {"uuid": ""},
        {"uuid": "a\x1eb"},
        {"args": '"a\x1eb"'},
        {"args": ""},
        {"args": None},
        {"uuid": None},
        {"uuid": "a\x1eb", "args": "1\x1e2"},
    ],
)
async def test_what_cannot_be_stored_is_refused_alone(store, bad):
    """An add that PostgreSQL cannot store is refused, and the others of its turn are not."""
    fine = a_record()
    turned = await store.turn(A.incarnation, adds=[an_add(a_record(**bad)), an_add(fine)], demand=room(5))
    assert isinstance(turned.added[0], InvalidInput)
    assert [claim.uuid for claim in turned.claims] == [fine.uuid]


async def test_all_that_cannot_be_stored_is_refused_at_once(store):
    """Of several adds that PostgreSQL cannot store, each is refused, and what can be stored beside them is."""
    bad = [an_add(a_record(queue=os.urandom(4000).hex())) for _ in range(2)]
    turned = await store.turn(A.incarnation, adds=[*bad, an_add(fine := a_record())], demand=room(5))
    assert [type(answer) for answer in turned.added[:2]] == [InvalidInput, InvalidInput]
    assert [claim.uuid for claim in turned.claims] == [fine.uuid]


async def test_claims_that_are_too_large_together_are_made_one_after_the_other(store, stranger):
    """Where the arguments of all that could be claimed are more than the server can put together, fewer are claimed."""
    await store.turn(A.incarnation, adds=[an_add(*(a_record() for _ in range(40)))])
    # The server's own limit is a gigabyte: this one is as real, and sooner reached.
    await stranger.execute(
        "CREATE FUNCTION too_much() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "IF (SELECT count(*) FROM changed) > 3 THEN RAISE program_limit_exceeded; END IF; RETURN NULL; END $$; "
        "CREATE TRIGGER too_much AFTER UPDATE ON taskyard.task REFERENCING NEW TABLE AS changed "
        "FOR EACH STATEMENT EXECUTE FUNCTION too_much()"
    )
    try:
        claimed = [len((await store.turn(A.incarnation, demand=room(n))).claims) for n in (24, 40, 2)]
    finally:
        await stranger.execute("DROP FUNCTION too_much CASCADE")
    assert claimed == [3, 1, 2]


async def test_a_note_with_a_nul_is_kept_without_it(store, clock):
    """What a run says at its end is stored, whatever characters it used."""
    (held,) = (await store.turn(A.incarnation, adds=[an_add(a_record())], demand=room(1))).claims
    moves = [(held, Move.completed(at=clock.now(), note=Note.remark("a\0b\ud800")))]
    assert (await store.turn(A.incarnation, settles=moves)).settled == [None]
    record = await store.find(held.uuid)
    assert record.note == Note.remark("a\ufffdb?")


# --- locks ------------------------------------------------------------------------------------------------------------


async def test_a_client_that_does_not_read_keeps_nobody_waiting(store, other):
    """A process that is stopped while the answer to its turn is on its way holds no lock: others go on."""
    await store.turn(A.incarnation, adds=[an_add(*(a_record(args=LARGE) for _ in range(40)), a_record())])
    await other.turn(B.incarnation)
    (connection,) = other._db.turns._idle
    connection._transport.pause_reading()
    unread = asyncio.ensure_future(other.turn(B.incarnation, demand=room(40)))
    async with asyncio.timeout(COMMAND_S - 2):
        await until(lambda: _running(store, 40))
        assert len((await store.turn(A.incarnation, demand=room(1))).claims) == 1
    assert not unread.done()
    connection._transport.resume_reading()
    assert len((await unread).claims) == 40


async def test_limits_hold_whatever_isolation_the_database_has_by_default(empty_url, clock):
    """Where an application has set another isolation level for all sessions, two nodes still claim no more than a queue
    allows."""
    stranger = await asyncpg.connect(empty_url)
    for setting in ("isolation = 'repeatable read'", "read_only = on"):
        await stranger.execute(f"ALTER DATABASE {urlsplit(empty_url).path[1:]} SET default_transaction_{setting}")
    stores = [PostgresStore(empty_url, clock=clock) for _ in range(2)]
    for store, node in zip(stores, (A, B), strict=True):
        await store.open()
        await store.join(node)
    await stores[0].set_queue(QueueSettings(name="default", concurrency=1))
    await stores[0].turn(A.incarnation, adds=[an_add(a_record(consumer="x"), a_record(consumer="y"))])
    async with stranger.transaction(readonly=False):
        await stranger.execute(f"SELECT pg_advisory_xact_lock({Lock.QUEUE}, hashtext('default'))")
        turns = [
            asyncio.ensure_future(stores[0].turn(A.incarnation, demand=room(1, x=1))),
            asyncio.ensure_future(stores[1].turn(B.incarnation, demand=room(1, y=1))),
        ]
        await until(lambda: stranger.fetchval(f"SELECT count(*) = 2 FROM ({WAITING}) AS w"))
    assert sorted([len((await turn).claims) for turn in turns]) == [0, 1]
    for store in stores:
        await store.close()
    await stranger.close()


async def test_work_that_is_submitted_in_an_open_transaction_is_not_waited_for(store, stranger):
    """When somebody's open transaction holds a dedupe slot, a turn says so at once; other adds are not held up."""
    transaction = stranger.transaction()
    await transaction.start()
    await stranger.execute(f"SELECT pg_advisory_xact_lock({Lock.OPEN_SLOT}, hashtext('same'))")
    fine = a_record()
    turned = await store.turn(
        A.incarnation, adds=[an_add(a_record(dedupe_slot="same"), dedupe=Dedupe.MERGE), an_add(fine)], demand=room(9)
    )
    assert isinstance(turned.added[0], SubmitPending)
    assert [claim.uuid for claim in turned.claims] == [fine.uuid]
    await transaction.rollback()
    added = [an_add(a_record(dedupe_slot="same"), dedupe=Dedupe.REFUSE) for _ in range(2)]
    turned = await store.turn(A.incarnation, adds=added)
    assert isinstance(turned.added[0], list)
    assert isinstance(turned.added[1], DuplicateTask)


async def test_an_answer_that_cannot_be_read_leaves_the_outcome_open(store, stranger):
    """The turn has been committed when its answer is read: what it did has to be looked up, not asked for again."""
    await store.turn(A.incarnation, adds=[an_add(a_record())])
    await stranger.execute("UPDATE taskyard.task SET created_at = '12000-01-01'")
    with pytest.raises(OutcomeUnknown):
        await store.turn(A.incarnation, adds=[an_add(a_record())], demand=room(1))
    assert await store.count() == {("default", TaskState.RUNNING): 1, ("default", TaskState.QUEUED): 1}


async def test_a_uuid_in_an_open_transaction_is_not_waited_for(store, other, stranger):
    """When somebody's open transaction has submitted a task with the same uuid, the turn says so of that one add, soon;
    what else it brings is done, and nobody has to wait. When the transaction has ended, the answer is certain."""
    held, fine, queued = a_record(uuid="mine"), [a_record() for _ in range(5)], a_record()
    await store.turn(A.incarnation, adds=[an_add(queued)])
    transaction = stranger.transaction()
    await transaction.start()
    await store.add_within(stranger, an_add(a_record(uuid="mine")))
    adds = [*(an_add(record) for record in fine), an_add(held)]
    async with asyncio.timeout(COMMAND_S / 2):
        turned = await store.turn(A.incarnation, adds=adds, demand=room(1))
        assert len((await other.turn(B.incarnation, demand=room(9))).claims) == len(fine)
    assert isinstance(turned.added.pop(), SubmitPending)
    assert [added.uuid for (added,) in turned.added] == [record.uuid for record in fine]
    assert [claim.uuid for claim in turned.claims] == [queued.uuid]
    await transaction.commit()
    (answer,) = (await store.turn(A.incarnation, adds=[an_add(held)])).added
    assert isinstance(answer, InvalidInput)


@pytest.mark.spec("QUE-29")
async def test_events_are_told_while_a_stranger_keeps_a_transaction_open(store, stranger):
    """A transaction of somebody else's, open since before and with writes of its own, hides no event of ours."""
    transaction = stranger.transaction()
    await transaction.start()
    await stranger.execute("CREATE TABLE of_mine (n integer)")
    after = (await store.events(after=-1)).last
    await store.turn(A.incarnation, adds=[an_add(task := a_record())], demand=room(1))
    page = await store.events(after=after)
    assert [(event.kind, event.uuid) for event in page.events] == [("submitted", task.uuid), ("running", task.uuid)]
    await transaction.rollback()


@pytest.mark.spec("QUE-29")
async def test_a_turn_that_has_written_nothing_yet_hides_no_event(store, stranger, more):
    """While a stranger's transaction is open, a turn of ours that waits for a queue does not hold back what is told."""
    turn, _ = more
    async with stranger.transaction(), turn.transaction():
        await stranger.execute("SELECT pg_current_xact_id()")
        await turn.execute(f"SELECT pg_advisory_xact_lock_shared({Lock.EVENTS}, 0)")
        after = (await store.events(after=-1)).last
        await store.turn(A.incarnation, adds=[an_add(task := a_record())])
        assert [event.uuid for event in (await store.events(after=after)).events] == [task.uuid]


@pytest.mark.spec("QUE-29")
async def test_a_turn_with_the_newest_number_hides_no_event(postgres_url, clock, stranger, more):
    """A turn of ours that began after everything that has ended does not hold back what is told."""
    reader = PostgresStore(postgres_url, clock=clock)  # which sends no hints: they have numbers, too
    await reader.open()
    turn, newer = more
    async with stranger.transaction():
        await stranger.execute("SELECT pg_current_xact_id()")
        await turn.execute(AN_EVENT, "told")
        async with newer.transaction(), turn.transaction():
            await newer.execute("SELECT pg_current_xact_id()")  # the first number after those that have ended
            await turn.execute(f"SELECT pg_advisory_xact_lock_shared({Lock.EVENTS}, 0), pg_current_xact_id()")
            page = await reader.events(after=0)
            assert [event.uuid for event in page.events] == ["told"]
            assert (await reader.events(after=-1)).last == page.last
    await reader.close()


async def test_the_events_of_an_open_turn_hold_back_those_after_it(store, stranger):
    """What a transaction of ours has not committed yet is not passed over: later events wait for it."""
    transaction = stranger.transaction()
    await transaction.start()
    await stranger.execute(f"SELECT pg_advisory_xact_lock_shared({Lock.EVENTS}, 0)")
    await stranger.execute(AN_EVENT, "early")
    after = (await store.events(after=-1)).last
    await store.turn(A.incarnation, adds=[an_add(task := a_record())])
    assert (await store.events(after=after)).events == []
    await transaction.commit()
    assert [event.uuid for event in (await store.events(after=after)).events] == ["early", task.uuid]


@pytest.mark.parametrize("order", [QueueOrder.PRIORITY, QueueOrder.FIFO])
async def test_a_wrong_count_does_not_stop_a_queue(store, stranger, order):
    """A queue of which nothing runs starts its tasks, whatever was once counted."""
    await store.set_queue(QueueSettings(name="default", concurrency=1, order=order))
    await stranger.execute("INSERT INTO taskyard.state_count VALUES ('default', 'running', 5)")
    turned = await store.turn(A.incarnation, adds=[an_add(a_record(), a_record())], demand=room(9))
    assert len(turned.claims) == 1
    assert (await store.count())["default", TaskState.RUNNING] == 1


async def test_an_end_that_nobody_is_left_to_hear_of_is_forgotten(store, stranger, clock):
    """A task on the list of ends to be told, whose dependents are gone, does not keep the nodes taking turns."""
    await stranger.execute("INSERT INTO taskyard.pending_release (task, uuid, state) VALUES (1, 'gone', 'completed')")
    assert (await store.turn(A.incarnation)).next_due is None


async def test_claims_do_not_walk_over_what_was_claimed(store, clock):
    """The mark of a lane follows the claims, and goes back for a task that stands before it."""
    for _ in range(3):
        await store.turn(A.incarnation, adds=[an_add(*(a_record() for _ in range(1000)))])
    claims = (await store.turn(A.incarnation, demand=room(2500))).claims
    low = await store._db.read(lambda conn: conn.fetchval("SELECT low_1 FROM taskyard.watermark"))
    assert low == claims[-1].record.position
    await store.turn(A.incarnation, settles=[(claims[0], Move.given_back(at=clock.now()))])
    (again,) = (await store.turn(A.incarnation, demand=room(1))).claims
    assert again.uuid == claims[0].uuid


async def test_known_tasks_are_found_without_reading_all_others(empty_url, clock):
    """Settling, promoting and a key's turn read a few entries of what waits and runs, with plans made when all was
    empty."""
    store = PostgresStore(empty_url, clock=clock)
    await store.open()
    await store.join(A)

    async def one_of_each() -> None:
        now = clock.now()
        due_at = now + timedelta(seconds=1)
        tasks = a_record(now, priority=0, key="k"), a_record(now, priority=0, due_at=due_at)
        await store.turn(A.incarnation, adds=[an_add(*tasks)])
        clock.advance(1)
        first, second = (await store.turn(A.incarnation, demand=room(2))).claims
        moves = [(first, Move.completed(at=now, result="1")), (second, Move.given_back(at=now))]
        assert (await store.turn(A.incarnation, settles=moves)).settled == [None, None]
        (second,) = (await store.turn(A.incarnation, demand=room(1))).claims
        await store.turn(A.incarnation, settles=[(second, Move.completed(at=now, result="1"))])

    await one_of_each()
    await store.turn(A.incarnation, adds=[an_add(*(a_record(clock.now()) for _ in range(3000)))])
    await store.turn(A.incarnation, demand=room(1000))
    await one_of_each()
    await store.close()  # with its connections go the counts of what they read
    stranger = await asyncpg.connect(empty_url)

    async def is_alone() -> bool:
        others = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        return bool(await stranger.fetchval(others) == 0)

    await until(is_alone)
    rows = await stranger.fetch("SELECT indexrelname, idx_tup_read FROM pg_stat_user_indexes WHERE relname = 'task'")
    read = {row["indexrelname"]: row["idx_tup_read"] for row in rows}
    await stranger.close()
    assert read["task_lane"] < 2500  # the claim of a thousand, and walking over them once
    assert read["task_running"] < 500


async def test_a_run_that_reports_does_not_hold_up_its_cancel(store, clock, monkeypatch):
    """Tasks that write down their progress all the time can be canceled, and what they said last is kept."""
    (held,) = (await store.turn(A.incarnation, adds=[an_add(a_record())], demand=room(1))).claims
    read, said = commands.read, [0]

    async def read_before_a_report(conn: Connection, uuids: list[str]) -> Any:
        found = await read(conn, uuids)
        said[0] += 1
        await store.turn(A.incarnation, reports=[Report(held, note=Note.remark(f"step {said[0]}"))])
        return found

    monkeypatch.setattr(commands, "read", read_before_a_report)
    (applied,) = await store.apply([held.uuid], Cancel())
    assert applied.refused is None
    record = await store.find(held.uuid)
    assert (record.cancel, record.note) == (CancelRequest(clock.now()), Note.remark(f"step {said[0]}"))


async def test_who_is_always_too_late_gives_way(store, stranger, monkeypatch):
    """A command that others get in the way of time and again is tried again after a pause, and given up in the end: for
    that task alone, and not as if the store were locked."""
    await store.turn(A.incarnation, adds=[an_add(task := a_record(), calm := a_record())])
    read, asked = commands.read, []

    async def read_before_a_change(conn: Connection, uuids: list[str]) -> Any:
        asked.append(time.monotonic())
        found = await read(conn, uuids)
        await stranger.execute("UPDATE taskyard.task SET updated_at = now() WHERE uuid = $1", task.uuid)
        return found

    monkeypatch.setattr(commands, "read", read_before_a_change)
    monkeypatch.setattr(random, "random", lambda: 1.0)
    restless, done = await store.apply([task.uuid, calm.uuid], Cancel())
    assert isinstance(restless.refused, ChangedMeanwhile)
    assert (done.record.state, await store.find(calm.uuid)) == (TaskState.CANCELED, done.record)
    apart = [later - earlier for earlier, later in itertools.pairwise(asked)]
    assert len(apart) == TRIES - 1
    assert min(apart[10:]) >= PAUSE_CAP_S


async def test_a_fire_waits_until_what_it_cancels_is_at_rest(store, stranger, monkeypatch):
    """A fire that cancels a task which changes for a while, each time right before it comes to it, is made in the end,
    and the task is canceled."""
    await put(store)
    (earlier,) = await fire(store, a_fire())
    read, restless_until = commands.read, time.monotonic() + 0.4

    async def read_before_a_change(conn: Connection, uuids: list[str]) -> Any:
        found = await read(conn, uuids)
        if time.monotonic() < restless_until:
            await stranger.execute("UPDATE taskyard.task SET updated_at = now() WHERE uuid = $1", earlier.uuid)
        return found

    monkeypatch.setattr(commands, "read", read_before_a_change)
    monkeypatch.setattr(random, "random", lambda: 1.0)
    (later,) = await fire(store, a_fire(NOON + seconds(60)), cancels=True)
    assert (await store.find(earlier.uuid)).state is TaskState.CANCELED
    assert await store.find(later.uuid) is not None


async def test_what_a_fire_cancels_is_told_and_counted(store, stranger):
    """Readers of events wait for a fire that is under way, as they do for a turn: what it cancels is heard of, and the
    counts are right, though others have written meanwhile and what they counted was put together."""
    await store.join(A)
    await put(store)
    (earlier,) = await fire(store, a_fire())
    await store.turn(A.incarnation)
    heard = await store.events(after=0)
    async with stranger.transaction():
        await stranger.execute(
            "INSERT INTO taskyard.fire (id, schedule, fire_at, task, kind) VALUES (-1, 'nightly', $1, '', '')",
            NOON + seconds(60),
        )
        firing = asyncio.create_task(fire(store, a_fire(NOON + seconds(60)), cancels=True))
        await until(lambda: stranger.fetchval("SELECT 1 FROM pg_locks WHERE NOT granted"))
        await store.turn(A.incarnation, adds=[an_add(a_record(queue="elsewhere"))])
        heard = await store.events(after=heard.last)
        await store.turn(A.incarnation, adds=[an_add(a_record(queue="elsewhere"))])
        await store._db.write("SELECT taskyard.compact_1($1)", RING)
        await stranger.execute("DELETE FROM taskyard.fire WHERE id = -1")
    await firing
    told = [event.kind for event in (await store.events(after=heard.last)).events if event.uuid == earlier.uuid]
    assert told == [EventKind.CANCELED]
    found = Counter((task.queue, task.state) for task in await store.list_tasks())
    assert {lane: n for lane, n in (await store.count()).items() if n} == found


async def test_a_fire_does_not_wait_until_all_that_it_cancels_have_run(store, other, monkeypatch):
    """Of many tasks that a fire cancels, one starts before each try: it fires all the same, and all of them are
    canceled or asked to stop, but not what was fired."""
    await put(store)
    earlier = await fire(store, *[a_fire(NOON + seconds(n)) for n in range(100)])
    await store.turn(A.incarnation)
    read, begun = commands.read, []

    async def read_before_a_start(conn: Connection, uuids: list[str]) -> Any:
        found = await read(conn, uuids)
        begun.extend((await other.turn(B.incarnation, demand=room(1))).claims)
        return found

    monkeypatch.setattr(commands, "read", read_before_a_start)
    (later,) = await fire(store, a_fire(NOON + seconds(600)), cancels=True)
    monkeypatch.undo()
    assert 0 < len(begun) < 50
    found = [await store.find(task.uuid) for task in earlier]
    assert {record.state for record in found} == {TaskState.CANCELED, TaskState.RUNNING}
    asked = {record.uuid for record in found if record.state is TaskState.RUNNING and record.cancel is not None}
    assert asked == {claim.uuid for claim in begun}
    assert (await store.find(later.uuid)).state is TaskState.SCHEDULED


async def test_who_starts_meanwhile_holds_up_nobody_else(store, other, monkeypatch):
    """Of many tasks that a command is for, one starts before each try: the others are changed by the first."""
    tasks = [a_record() for _ in range(50)]
    await store.turn(A.incarnation, adds=[an_add(*tasks)])
    read, asked = commands.read, []

    async def read_before_a_claim(conn: Connection, uuids: list[str]) -> Any:
        asked.append(len(uuids))
        found = await read(conn, uuids)
        await other.turn(B.incarnation, demand=room(1))
        return found

    monkeypatch.setattr(commands, "read", read_before_a_claim)
    uuids = [task.uuid for task in tasks]
    applied = await store.apply(uuids, Hold("wait"), by="ann")
    assert asked == [50, 1]
    assert [one.refused is not None for one in applied] == [True] + [False] * 49
    assert await store.count() == {("default", TaskState.RUNNING): 1, ("default", TaskState.PAUSED): 49}
    told = [event.uuid for event in (await store.events(after=0)).events if event.kind is EventKind.PAUSED]
    assert told == uuids[1:]


async def test_who_waits_for_one_that_is_not_sent_again_is_not_either(store, clock, stranger, monkeypatch):
    """A failed task and the one that failed with it are sent again together, or, if somebody is faster, only the one
    for which that still holds: nothing is left waiting in vain."""
    parent, child, alone = (a_record() for _ in range(3))
    child.on_failure = OnFailure.FAIL
    add = Add([parent, child, alone], after={child.uuid: [parent.uuid]})
    claims = (await store.turn(A.incarnation, adds=[add], demand=room(3))).claims
    failed = Move.failed(at=clock.now(), error=an_error())
    await store.turn(A.incarnation, settles=[(claim, failed) for claim in claims])
    read, tries = commands.read_bonds, []

    async def read_before_a_prune(conn: Connection, records: list[TaskRecord], now: datetime) -> Any:
        bonds = await read(conn, records, now)
        tries.append(len(records))
        await stranger.execute("DELETE FROM taskyard.finished WHERE uuid = $1", parent.uuid)
        return bonds

    monkeypatch.setattr(commands, "read_bonds", read_before_a_prune)
    one, two, three = await store.apply([parent.uuid, child.uuid, alone.uuid], Retry())
    assert tries == [3, 1]
    assert isinstance(one.refused, UnknownTask)
    assert (two.record.state, two.record.open_dependencies, three.record.state) == (
        TaskState.QUEUED,
        0,
        TaskState.QUEUED,
    )


async def test_a_task_that_is_just_being_pruned_is_not_sent_again(store, clock, stranger):
    """Whoever retries a failed task while another forgets it hears that there is no such task."""
    (held,) = (await store.turn(A.incarnation, adds=[an_add(a_record())], demand=room(1))).claims
    await store.turn(A.incarnation, settles=[(held, Move.failed(at=clock.now(), error=an_error()))])
    async with stranger.transaction():
        assert await stranger.fetchval("SELECT taskyard.prune_1(now(), '0', 1, NULL, NULL)") == 1
        retrying = asyncio.ensure_future(store.apply([held.uuid], Retry()))
        await until(lambda: stranger.fetchval("SELECT 1 FROM pg_locks WHERE NOT granted"))
    (applied,) = await retrying
    assert isinstance(applied.refused, UnknownTask)
    assert await store.count() == {}


async def test_who_is_steered_before_anybody_has_heard_of_it(store, stranger, clock):
    """Of a task that was submitted in a transaction and is not due yet, it is told first that it was submitted, and
    once, whatever is done to it."""
    tasks = [a_record(due_at=clock.now() + seconds(60)) for _ in range(4)]
    async with stranger.transaction():
        await store.add_within(stranger, an_add(*tasks))
    started, canceled, put_off, left = [task.uuid for task in tasks]
    await store.apply([started], StartNow())
    await store.apply([canceled], Cancel())
    await store.apply([put_off], Reschedule(clock.now() + seconds(61)))
    clock.advance(70)
    await store.turn(A.incarnation, demand=room(9))
    told: dict[str, list[str]] = {}
    for event in (await store.events(after=0)).events:
        told.setdefault(event.uuid, []).append(str(event.kind))
    assert told == {
        started: ["submitted", "queued", "running"],
        canceled: ["submitted", "canceled"],
        put_off: ["submitted", "rescheduled", "queued", "running"],
        left: ["submitted", "queued", "running"],
    }


async def _work(url: str, clock: ManualClock, rounds: int) -> None:
    """Ten tasks a round, and what nodes and clients ask meanwhile; half of the tasks belong to a queue with a limit."""
    store = PostgresStore(url, clock=clock)
    await store.open()
    await store.join(A)
    await store.set_queue(QueueSettings(name="narrow", concurrency=5))
    for _ in range(rounds):
        after = (await store.events(after=-1)).last
        tasks = [a_record(clock.now(), queue=queue) for queue in ("wide", "narrow") for _ in range(5)]
        await store.turn(A.incarnation, adds=[an_add(*tasks)])
        claims = (await store.turn(A.incarnation, demand=room(20))).claims
        assert len(claims) == 10
        assert (await store.turn(A.incarnation, demand=room(20))).claims == []
        failed, *others = claims
        await store.turn(
            A.incarnation,
            settles=[(failed, Move.failed(at=clock.now(), error=an_error()))],
            reports=[Report(others[0], Progress(0.5))],
        )
        done = [(claim, Move.completed(at=clock.now(), result="1")) for claim in others]
        await store.turn(A.incarnation, settles=done)
        assert (await store.signals(A.incarnation)).cancels == []
        assert len((await store.events(after=after)).events) == 31
        assert all(await store.outcomes([task.uuid for task in tasks]))
        assert await store.dead_nodes() == []
        await store._upkeep._tidy()
    await store.leave(A.incarnation)
    await store.close()


@pytest.mark.parametrize("is_analyzed", [False, True], ids=["plans-kept", "plans-anew"])
async def test_a_foreign_snapshot_makes_nothing_read_more_and_more(empty_url, clock, monkeypatch, is_analyzed):
    """While somebody keeps a transaction open, and with it all that is dead, turns and questions read no more than at
    its beginning; also when the server has counted how little else there is."""
    monkeypatch.setattr("taskyard.stores.postgres.upkeep.RING", 100)
    await _work(empty_url, clock, 5)
    foreign, stranger = await asyncpg.connect(empty_url), await asyncpg.connect(empty_url)
    await read_since(stranger)
    async with foreign.transaction(isolation="repeatable_read"):
        await foreign.fetchval("SELECT count(*) FROM taskyard.task")
        await _work(empty_url, clock, 40)
        early = await read_since(stranger)
        await _work(empty_url, clock, 80)
        if is_analyzed:
            await stranger.execute("ANALYZE")
        await read_since(stranger)
        await _work(empty_url, clock, 40)
        late = await read_since(stranger)
    await foreign.close()
    await stranger.close()
    assert late < 1.3 * early, (early, late)


async def test_a_node_whose_clock_is_ahead_forgets_nothing_early(store, postgres_url):
    """What is kept for an hour is kept for an hour by the server's clock, whatever a node takes the time to be."""
    now = datetime.now(UTC)
    adds = [an_add(a_record(), a_record())]
    claims = (await store.turn(A.incarnation, adds=adds, demand=room(2))).claims
    ended = [Move.completed(at=now - timedelta(minutes=59)), Move.completed(at=now - timedelta(minutes=61))]
    await store.turn(A.incarnation, settles=list(zip(claims, ended, strict=True)))
    clock = ManualClock(now + timedelta(days=1))
    ahead = PostgresStore(postgres_url, clock=clock)
    await ahead.open()
    assert await ahead.prune(finished_before=clock.now() - timedelta(hours=1)) == 1
    assert await ahead.find(claims[0].uuid) is not None
    await ahead.close()


async def test_a_node_whose_clock_is_ahead_keeps_the_audit_record(store, postgres_url):
    """The audit record is kept by the server's clock: a node that is a year ahead forgets only what is old enough."""
    now = datetime.now(UTC)
    for minutes in (59, 61):
        entry = make_entry("ana", "pause", TargetKind.QUEUE, f"q{minutes}", now=now - timedelta(minutes=minutes))
        assert entry is not None
        await store.put_audit(entry)
    clock = ManualClock(now + timedelta(days=400))
    ahead = PostgresStore(postgres_url, clock=clock)
    await ahead.open()
    assert await ahead.prune_audit(clock.now() - timedelta(hours=1)) == 1
    assert [entry.target for entry in await ahead.list_audit()] == ["q59"]
    await ahead.close()


async def test_a_node_whose_clock_is_ahead_keeps_the_catalogue(store, postgres_url):
    """The last specification of a consumer stays for a week by the server's clock, also if a node that is a year ahead
    joins."""
    here, now = PostgresStore(postgres_url, clock=SystemClock()), datetime.now(UTC)
    await here.open()
    spec = ConsumerSpec(name="fetch")
    node = msgspec.structs.replace(a_node("c"), consumers=("fetch",), specs={"fetch": spec.hash})
    await here.join(node, [spec])
    await here.leave(node.incarnation)
    await here.close()
    ahead = PostgresStore(postgres_url, clock=ManualClock(now + timedelta(days=400)))
    await ahead.open()
    await ahead.join(a_node("d"), [])
    assert [stored.spec for stored in await ahead.list_specs()] == [spec]
    await ahead.close()


async def test_the_few_that_did_not_complete_are_found_among_the_many(store, stranger, clock):
    """Listing what failed or was canceled does not read all that was completed."""
    await store.turn(A.incarnation, adds=[an_add(*(a_record(clock.now()) for _ in range(2000)))])
    first, *others = (await store.turn(A.incarnation, demand=room(2000))).claims
    moves = [(claim, Move.completed(at=clock.now(), result="1")) for claim in others]
    await store.turn(A.incarnation, settles=[(first, Move.canceled(at=clock.now())), *moves])
    await stranger.execute("ANALYZE taskyard.finished")
    used = "SELECT idx_scan FROM pg_stat_user_indexes WHERE indexrelname = 'finished_other'"
    before = await stranger.fetchval(used)
    assert [task.uuid for task in await store.list_tasks(TaskFilter(states=(TaskState.CANCELED,)))] == [first.uuid]
    await store._db.reads.close()  # with its connections go the counts of what they read
    await until(lambda: stranger.fetchval(f"SELECT ({used}) > $1", before))


async def test_however_many_speak_of_a_queue_at_once_all_are_heard(store, other):
    """Each that gets in the way of another has been heard itself: nobody is told that the store is busy, from one
    process as from several."""
    said = [
        asker.control("q", SetConcurrency(number, f"try {number}"), by="ann")
        for number in range(1, 101)
        for asker in (store, other)
    ]
    heard = await asyncio.gather(*said)
    assert sorted(status.control.concurrency for status in heard) == sorted([*range(1, 101)] * 2)
    (status,) = await store.queues()
    assert status.control in [one.control for one in heard]


# --- liveness ---------------------------------------------------------------------------------------------------------


@pytest.mark.spec("QUE-23")
async def test_a_node_that_does_not_beat_is_dead_after_its_lease(store, other, clock):
    """Others see it by their own clock: not before they have watched it for a lease, and never if it beats."""
    lease = store.lease(A.incarnation)
    await lease.open()
    assert await other.dead_nodes() == []
    clock.advance(other._lease_s - 0.1)
    assert await lease.beat()
    assert await other.dead_nodes() == []
    clock.advance(other._lease_s - 0.1)
    assert await other.dead_nodes() == []
    clock.advance(0.2)
    assert await other.dead_nodes() == [A.incarnation]
    assert await store.dead_nodes() == []
    (held,) = (await store.turn(A.incarnation, adds=[an_add(a_record())], demand=room(1))).claims
    assert await other.rescue(A.incarnation) == [held.uuid]
    assert not await lease.beat()
    assert (await store.turn(A.incarnation, demand=room(5))).claims == []
    await lease.close()


async def test_a_silent_node_is_told_of_what_it_runs(store, other, stranger):
    """From two missed beats on, long before it is given up, whoever asks about its tasks is told when it last beat."""
    (held,) = (await store.turn(A.incarnation, adds=[an_add(a_record())], demand=room(1))).claims
    record = await other.find(held.uuid)
    quiet = "UPDATE taskyard.node SET beat_at = now() - make_interval(secs => $1 * lease_s) RETURNING beat_at"
    await stranger.execute(quiet, 0.3)
    assert explain_wait(record, await other.scene([record])) is None
    for leases, nodes in ((0.5, 2), (1.5, 0)):
        beat_at = await stranger.fetchval(quiet, leases)
        scene = await other.scene([record])
        why = explain_wait(record, scene)
        assert why is not None
        assert (why.reason, why.since, len(scene.nodes)) == (Reason.NODE_SILENT, beat_at, nodes)
        assert "there is no other to take the task back" in why.text


async def test_a_beat_at_the_last_moment_prevents_the_rescue(store, other, clock):
    """A node that was seen dead and beats before it is rescued keeps its tasks."""
    lease = store.lease(A.incarnation)
    await lease.open()
    (held,) = (await store.turn(A.incarnation, adds=[an_add(a_record())], demand=room(1))).claims
    await other.dead_nodes()
    clock.advance(other._lease_s)
    assert await other.dead_nodes() == [A.incarnation]
    assert await lease.beat()
    assert await other.rescue(A.incarnation) == []
    done = Move.completed(at=clock.now())
    assert (await store.turn(A.incarnation, settles=[(held, done)])).settled == [None]
    await lease.close()


async def test_a_node_that_was_never_watched_is_not_rescued_while_it_beats(store, other, clock, stranger):
    """Who takes a node back without having looked at it does so only if it does not beat meanwhile."""
    (held,) = (await store.turn(A.incarnation, adds=[an_add(a_record())], demand=room(1))).claims
    async with stranger.transaction():
        await stranger.execute(f"SELECT pg_advisory_xact_lock({Lock.NODE}, hashtext($1))", A.incarnation)
        rescuing = asyncio.ensure_future(other.rescue(A.incarnation))
        await until(lambda: stranger.fetchval(WAITING))
        lease = store.lease(A.incarnation)
        assert await lease.beat()
        await lease.close()
    assert await rescuing == []
    assert await other.rescue(A.incarnation) == [held.uuid]


def test_a_clock_that_steps_makes_nobody_dead():
    """Only time that passed while it was watched counts against a node."""
    clock = ManualClock()
    pulses = Pulses(clock.monotonic)
    beat = Beat(1, lease_s=15.0)
    assert pulses.look({"a": beat}) == []
    clock.step(timedelta(days=1).total_seconds())
    assert pulses.look({"a": beat}) == []
    clock.advance(15)
    assert pulses.look({"a": beat, "b": Beat(7, lease_s=15.0)}) == ["a"]


async def test_a_node_is_given_up_after_its_own_lease(clock, postgres_url):
    """Nodes that were given different leases judge each other by the lease of the one that is silent."""
    patient = PostgresStore(postgres_url, clock=clock, lease_s=30.0)
    hasty = PostgresStore(postgres_url, clock=clock, lease_s=2.0)
    for store, node in ((patient, A), (hasty, B)):
        await store.open()
        await store.join(node)
    assert (await patient.dead_nodes(), await hasty.dead_nodes()) == ([], [])
    clock.advance(3)
    assert (await patient.dead_nodes(), await hasty.dead_nodes()) == ([B.incarnation], [])
    clock.advance(27)
    assert await hasty.dead_nodes() == [A.incarnation]
    await patient.close()
    await hasty.close()


# --- connections and hints --------------------------------------------------------------------------------------------


async def test_an_answer_that_does_not_come_is_not_waited_for(clock, postgres_url):
    """A turn that is not answered in time has an unknown outcome, and the next one goes over another connection."""
    store = PostgresStore(postgres_url, clock=clock, command_s=0.5)
    await store.open()
    await store.turn("nobody")
    connection: Any = store._db.turns._idle[0]
    connection._transport.pause_reading()
    with pytest.raises(OutcomeUnknown):
        await store.turn("nobody")
    assert connection.is_closed()
    assert (await store.turn("nobody")).claims == []
    await store.close()


async def test_a_turn_that_gets_no_lock_is_known_to_have_done_nothing(clock, postgres_url, stranger):
    """Who waits in vain for a queue's lock is told that the store is busy, and keeps its connection."""
    store = PostgresStore(postgres_url, clock=clock, command_s=2.0)
    await store.open()
    await store.turn("nobody")
    (connection,) = store._db.turns._idle
    async with stranger.transaction():
        await stranger.execute(f"SELECT pg_advisory_xact_lock({Lock.QUEUE}, hashtext('slow'))")
        with pytest.raises(StoreBusy):
            await store.turn("nobody", adds=[an_add(a_record(queue="slow"))])
    assert store._db.turns._idle == [connection]
    assert await store.count() == {}
    await store.close()


async def test_what_was_lost_takes_effect_before_what_is_asked_next_or_never(store, stranger):
    """A turn whose connection broke while the server was busy with it does nothing after somebody has looked."""
    await store.turn(A.incarnation)
    (connection,) = store._db.turns._idle
    pid = connection.get_server_pid()
    transaction = stranger.transaction()
    await transaction.start()
    await stranger.execute(f"SELECT pg_advisory_xact_lock({Lock.QUEUE}, hashtext('slow'))")
    lost = asyncio.ensure_future(store.turn(A.incarnation, adds=[an_add(late := a_record(queue="slow"))]))
    waits = "SELECT pid FROM pg_stat_activity WHERE pid = $1 AND wait_event_type = 'Lock'"
    await until(lambda: store._db.read(lambda conn: conn.fetchval(waits, pid)))
    connection._transport.abort()
    with pytest.raises(OutcomeUnknown):
        await lost
    assert await store.list_tasks() == []
    lives = "SELECT pid FROM pg_stat_activity WHERE pid = $1"
    assert await store._db.read(lambda conn: conn.fetchval(lives, pid)) is None
    await transaction.rollback()
    assert await store.find(late.uuid) is None


async def test_a_lost_connection_is_replaced(store, stranger):
    """When the server ends every session, the next calls go through on new ones."""
    await store.turn(A.incarnation, adds=[an_add(a_record())])
    await stranger.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE application_name = 'taskyard' AND datname = current_database()"
    )
    await until(lambda: _all_closed(store))
    assert len((await store.turn(A.incarnation, demand=room(1))).claims) == 1
    assert len(await store.nodes()) == 1


async def test_after_a_loss_readers_share_what_there_is(store, stranger):
    """When every session was ended, many who read at once all get an answer, over a few new connections."""
    await asyncio.gather(*(store.count() for _ in range(8)))
    await stranger.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE application_name = 'taskyard' AND datname = current_database()"
    )
    await until(lambda: _all_closed(store))
    async with asyncio.timeout(COMMAND_S):
        answers = await asyncio.gather(*(store.count() for _ in range(40)))
    assert answers == [{}] * 40
    assert 1 <= len(store._db.reads._idle) < 10  # each for himself would have left all ten that are kept


async def test_who_is_cancelled_while_others_wait_leaves_his_connection_to_them(store, stranger):
    """A reader that was cancelled just when it got a connection takes none away."""
    await store.count()
    store._db.reads._gate.trouble()
    async with store._db.reads.use() as only:
        first, second = (asyncio.create_task(store.count()) for _ in range(2))
        await asyncio.sleep(0)
        assert len(store._db.reads._waiting) == 2
    first.cancel()
    assert await second == {}
    assert only in store._db.reads._idle


@pytest.mark.parametrize("listens", [True, False])
async def test_others_hear_of_a_commit(store, other, stranger, monkeypatch, listens):
    """What one process writes, another hears of: by a hint, however seldom it looks, or, when its listener was just
    killed, by looking."""
    if listens:
        monkeypatch.setattr(hints, "POLL_S", 1000.0)
    heard = asyncio.Event()
    other.watch(lambda _: heard.set())
    async with asyncio.timeout(PATIENCE_S):
        await until(lambda: stranger.fetchval("SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'LISTEN%'"))
        await heard.wait()  # the first look
        heard.clear()
        if not listens:
            await stranger.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'LISTEN%'")
        await store.turn(A.incarnation, adds=[an_add(a_record())])
        assert await heard.wait()


async def test_others_hear_what_kind_of_thing_happened(store, other, stranger, monkeypatch):
    """Who only adds tasks tells just that; who ends or changes any says more, and who joins or leaves the most."""
    monkeypatch.setattr(hints, "POLL_S", 1000.0)
    heard: asyncio.Queue[News] = asyncio.Queue()
    other.watch(heard.put_nowait)
    async with asyncio.timeout(PATIENCE_S):
        await until(lambda: stranger.fetchval("SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'LISTEN%'"))
        assert await heard.get() is News.CHANGED  # the first look
        await store.join(A)
        assert await heard.get() is News.NODES
        record = a_record()
        await store.turn(A.incarnation, adds=[an_add(record)])
        assert await heard.get() is News.ADDED
        await store.turn(A.incarnation, adds=[an_add(a_record(dedupe_slot="s"), dedupe=Dedupe.REPLACE)])
        assert await heard.get() is News.CHANGED
        await store.apply([record.uuid], Cancel())
        assert await heard.get() is News.CHANGED
        await store.turn(A.incarnation, adds=[an_add(a_record())])
        assert await heard.get() is News.ADDED


async def test_listening_goes_on_whatever_went_wrong(store, other, stranger, monkeypatch):
    """An error that nobody has thought of costs a listener its connection, and not its ears."""
    monkeypatch.setattr(hints, "POLL_S", 1000.0)
    tries = itertools.count()

    async def connect_in_vain_once(url: str) -> Connection:
        if next(tries) == 0:
            raise RuntimeError("of a driver's own")
        return await connection.connect(url)

    monkeypatch.setattr(hints, "connect", connect_in_vain_once)
    heard = asyncio.Event()
    other.watch(lambda _: heard.set())
    async with asyncio.timeout(PATIENCE_S):
        await until(lambda: stranger.fetchval("SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'LISTEN%'"))
        await heard.wait()  # the first look
        heard.clear()
        await store.turn(A.incarnation, adds=[an_add(a_record())])
        await heard.wait()
    assert next(tries) == 2


async def test_others_are_told_of_what_is_left_for_them(store, clock, monkeypatch):
    """A turn that takes all it brought tells nobody; one that takes an old task and leaves one that has become due, of
    another source, tells the others."""
    told: list[bool] = []
    await store.turn(A.incarnation, adds=[an_add(a_record(consumer="x"), a_record(consumer="x", priority=2))])
    later = clock.now() + timedelta(seconds=1)
    await store.turn(A.incarnation, adds=[an_add(a_record(consumer="y", due_at=later))])
    monkeypatch.setattr(store._db.hints, "tell", lambda _: told.append(True))
    await store.turn(A.incarnation, adds=[an_add(a_record(consumer="x", priority=0))], demand=room(1, x=1))
    assert told == []
    clock.advance(1)
    assert len((await store.turn(A.incarnation, demand=room(1, x=1))).claims) == 1
    assert told == [True]


@pytest.mark.parametrize("driver", DRIVERS)
async def test_a_commit_of_the_users_is_heard_of_and_notifies_nobody_itself(
    postgres_url, clock, stranger, monkeypatch, driver
):
    """When somebody's transaction brings tasks about, its process and the others hear of it, and not before; the
    notification is none of the transaction's own, which would hold up every other commit on the server."""
    monkeypatch.setattr(hints, "POLL_S", 1000.0)
    store = PostgresStore(postgres_url, clock=clock)
    await store.open()
    here, there = asyncio.Event(), asyncio.Event()
    told_by: list[int] = []

    def told(_conn: object, pid: int, *_: object) -> None:
        told_by.append(pid)
        there.set()

    store.watch(lambda _: here.set())
    async with asyncio.timeout(PATIENCE_S):
        await here.wait()  # the first look
        here.clear()
        await stranger.add_listener(CHANNEL, told)
        async with DRIVERS[driver](postgres_url) as theirs:
            await store.add_within(theirs.connection, an_add(a_record()))
            store._transactions._look(within.LOOK_CAP_S)
            assert not here.is_set()
            pid = await stranger.fetchval(
                "SELECT pid FROM pg_stat_activity WHERE query LIKE '%submit_1%' AND pid <> pg_backend_pid()"
            )
            assert pid is not None
        await here.wait()
        await there.wait()
    assert pid not in told_by
    await store.close()


async def test_one_turn_tells_others_with_its_commit_and_who_comes_at_the_same_time_apart_from_it(
    postgres_url, clock, stranger
):
    """Others hear of a submit by the commit that brings it, unless somebody else just notifies with his: then they hear
    of it by a notification of its own, because such commits wait for each other."""
    store = PostgresStore(postgres_url, clock=clock)
    await store.open()
    heard: asyncio.Queue[int] = asyncio.Queue()
    await stranger.add_listener(CHANNEL, lambda _conn, pid, *_: heard.put_nowait(pid))
    async with store._db.turns.use() as conn:
        pid = conn.get_server_pid()
    async with asyncio.timeout(PATIENCE_S):
        await store.turn(A.incarnation, adds=[an_add(a_record())])
        assert await heard.get() == pid
        store._db.hints._offer_from_mono = 0.0  # as if it were some time later
        async with stranger.transaction():
            await stranger.execute("SELECT pg_advisory_xact_lock($1, 0)", int(Lock.HINT))
            await store.turn(A.incarnation, adds=[an_add(a_record())])
        assert await heard.get() != pid
    await store.close()


async def _told_before(last: str, heard: asyncio.Queue[str]) -> list[str]:
    """What is heard before this word, which was sent later."""
    words: list[str] = []
    async with asyncio.timeout(PATIENCE_S):
        while (word := (await heard.get()).split()[-1]) != last:
            words.append(word)
    return words


async def test_others_have_been_told_when_a_store_is_closed(postgres_url, clock, stranger):
    """Whoever asks for one thing and closes, as a command does, is heard of no later than that."""
    store = PostgresStore(postgres_url, clock=clock)
    await store.open()
    heard: asyncio.Queue[str] = asyncio.Queue()
    await stranger.add_listener(CHANNEL, lambda _conn, _pid, _channel, word: heard.put_nowait(word))
    await store.set_queue(QueueSettings(name="cpu"))
    await store.close()
    await stranger.execute(f"NOTIFY {CHANNEL}, 'closed'")
    assert await _told_before("closed", heard) == [News.CHANGED.name]


async def test_a_turn_in_flight_when_a_store_is_closed_is_told(postgres_url, clock, stranger, more, monkeypatch):
    """Closing waits for it before hints end, though its hint does not go with its commit."""
    store = PostgresStore(postgres_url, clock=clock)
    await store.open()
    heard: asyncio.Queue[str] = asyncio.Queue()
    await stranger.add_listener(CHANNEL, lambda _conn, _pid, _channel, word: heard.put_nowait(word))

    async def refuse(*_args: object, **_named: object) -> Connection:
        raise StoreUnreachable(postgres_url, "no more connections")

    notifying, turning = more
    async with asyncio.timeout(PATIENCE_S), notifying.transaction():
        await store.set_queue(QueueSettings(name="cpu"))
        await heard.get()  # hints have a connection now, until they are closed
        await notifying.execute("SELECT pg_advisory_xact_lock($1, 0)", int(Lock.HINT))
        async with turning.transaction():
            await turning.execute(f"SELECT pg_advisory_xact_lock({Lock.QUEUE}, hashtext('default'))")
            turn = asyncio.ensure_future(store.turn(A.incarnation, adds=[an_add(a_record())]))
            await until(lambda: stranger.fetchval(WAITING))
            monkeypatch.setattr(link, "connect", refuse)
            closing = asyncio.ensure_future(store.close())
        await closing
        await stranger.execute(f"NOTIFY {CHANNEL}, 'closed'")
    assert await _told_before("closed", heard) == [News.ADDED.name]
    assert turn.result().added


async def test_a_hint_that_does_not_get_through_is_not_waited_for_when_a_store_is_closed(
    postgres_url, clock, stranger, monkeypatch
):
    """It is given up when others have looked by themselves."""
    monkeypatch.setattr(hints, "POLL_S", 0.01)
    store = PostgresStore(postgres_url, clock=clock)
    await store.open()
    heard: asyncio.Queue[str] = asyncio.Queue()
    await stranger.add_listener(CHANNEL, lambda _conn, _pid, _channel, word: heard.put_nowait(word))
    async with asyncio.timeout(PATIENCE_S), store._db.hints._send.use():
        await store.set_queue(QueueSettings(name="cpu"))
        await store.close()
    await stranger.execute(f"NOTIFY {CHANNEL}, 'closed'")
    assert await _told_before("closed", heard) == []


async def test_why_a_page_of_tasks_waits_takes_five_queries(store: PostgresStore) -> None:
    """To list a hundred tasks and say why each of them waits takes at most five queries."""
    for order in QueueOrder:
        await store.set_queue(QueueSettings(name=order, order=order, concurrency=1))
    records = [a_record(queue=order, key=str(n % 7) if n % 2 else None) for order in QueueOrder for n in range(40)]
    await store.turn(A.incarnation, adds=[an_add(*records)], demand=room(9))
    asked: list[str] = []
    async with store._db.reads.use() as conn:
        with conn.query_logger(lambda record: asked.append(record.query)):
            page = await reader.list_tasks(conn, TaskFilter(), None, 100)
            scene = await find_scene(conn, page, now=page[0].due_at)
    found = [explain_wait(record, scene) for record in page]
    assert len(page) == 100
    assert {why.reason for why in found if why is not None} >= {Reason.QUEUE_FULL, Reason.KEY_BUSY}
    own = [query for query in asked if "taskyard." in query]  # the driver asks once for the types that it meets
    assert 1 < len(own) <= 5


async def test_a_large_batch_with_ties_is_stored(store):
    """Ten thousand tasks that wait for each other, stand for some work or come from a run are one turn, which takes
    the time of ten thousand, and not of all their pairs; and no lock for each of them."""
    await store.join(A)
    await store.turn(A.incarnation, adds=[an_add(a_record(consumer="parent"))])
    (parent,) = (await store.turn(A.incarnation, demand=Demand(1, {"parent": 1}))).claims
    chain = [a_record(group_id="all") for _ in range(10_000)]
    after = {later.uuid: [earlier.uuid] for earlier, later in itertools.pairwise(chain)}
    slots = [a_record(dedupe_slot=f"slot {n}") for n in range(10_000)]
    adds = [
        msgspec.structs.replace(an_add(*chain), after=after, parent=parent),
        an_add(*slots, dedupe=Dedupe.MERGE),
    ]
    for add in adds:
        (added,) = (await store.turn(A.incarnation, adds=[add])).added
        assert [one.is_new for one in added] == [True] * 10_000
    again = an_add(*(a_record(dedupe_slot=record.dedupe_slot) for record in slots), dedupe=Dedupe.MERGE)
    (added,) = (await store.turn(A.incarnation, adds=[again])).added
    assert [one.uuid for one in added] == [record.uuid for record in slots]


async def test_more_queues_than_are_locked_at_once(store):
    """Of very many queues in which something may start a turn locks only some; the turns that follow come to all."""
    await store.join(A)
    tasks = [a_record(queue=f"queue {n}") for n in range(LOCKED_AT_MOST + 100)]
    await store.turn(A.incarnation, adds=[an_add(*tasks)])
    claimed: set[str] = set()
    while claims := (await store.turn(A.incarnation, demand=room(LOCKED_AT_MOST * 2))).claims:
        assert len(claims) <= LOCKED_AT_MOST
        claimed |= {claim.uuid for claim in claims}
    assert claimed == {task.uuid for task in tasks}
