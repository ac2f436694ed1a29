"""Taskyard's side of every scenario: the only file here that knows its API."""

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import apsw
import uvloop

from benchmarks.reading import Reading, percentile
from taskyard import ConsumerFunction, TaskHandle, Yard
from taskyard.model.limits import Demand, QueueSettings
from taskyard.model.move import Move
from taskyard.model.state import TaskState
from taskyard.model.task import Claim, TaskRecord, new_uuid
from taskyard.ports.store import Add, Node, Store
from taskyard.scheduling.clock import SystemClock
from taskyard.stores.sqlite import SqliteStore

SLOTS = 200
WARM_UP = 500
RESULT_TIMEOUT_S = 60.0
SETTLED_POLL_S = 0.001
FAR_FUTURE_S = 3600.0
DATABASE = "ours.db"

Submit = Callable[[int], Awaitable[TaskHandle]]


async def noop(number: int) -> int:
    return number


def _url(folder: Path) -> str:
    return f"sqlite:///{folder / DATABASE}"


def _persisted(database: Path, *states: TaskState) -> int:
    """Counted in the file after the yard let go of it: only what was committed."""
    file = apsw.Connection(str(database), flags=apsw.SQLITE_OPEN_READONLY)
    marks = ", ".join("?" for _ in states)
    return int(
        file.execute(f"SELECT count(*) FROM task WHERE state IN ({marks})", [str(state) for state in states]).get
    )


async def _completed(yard: Yard) -> int:
    counts = await yard.store.count()
    return sum(number for (_, state), number in counts.items() if state is TaskState.COMPLETED)


async def _until_completed(yard: Yard, count: int) -> None:
    """The last bodies have run; their results are about to be committed. Asking earlier would be in the way."""
    async with asyncio.timeout(RESULT_TIMEOUT_S):
        while await _completed(yard) < count:  # noqa: ASYNC110 -- nothing tells when a store holds n results
            await asyncio.sleep(SETTLED_POLL_S)


# --- memory: submit, run, result kept -------------------------------------------------------------------------------


def memory(folder: Path, count: int, clients: str) -> Reading:
    return uvloop.run(_memory(count, {"one": _by_one, "many": _by_many}[clients]))


async def _memory(count: int, submit_and_wait: Callable[[Submit, int], Awaitable[list[object]]]) -> Reading:
    yard = Yard("memory://", max_running=SLOTS)
    consumer = yard.consumer(concurrent_count=SLOTS)(noop)
    async with yard:
        await submit_and_wait(lambda number: consumer.submit(number=number), WARM_UP)
        began = time.perf_counter()
        results = await submit_and_wait(lambda number: consumer.submit(number=number), count)
        elapsed = time.perf_counter() - began
        kept = await _completed(yard) - WARM_UP
    right = sum(result == number for number, result in enumerate(results))
    return Reading(count / elapsed, given=count, held=min(kept, right))


async def _by_one(submit: Submit, count: int) -> list[object]:
    """One submitter: everything is submitted, then every result is awaited."""
    handles = [await submit(number) for number in range(count)]
    return [await handle.result() for handle in handles]


async def _by_many(submit: Submit, count: int) -> list[object]:
    """A client for each task, which submits it and waits for its result, as long as it takes: like the bare loop's."""

    async def client(number: int) -> object:
        handle = await submit(number)
        return await handle.result()

    return await asyncio.gather(*[client(number) for number in range(count)])


# --- SQLite: emptying a queue ---------------------------------------------------------------------------------------


def drain(folder: Path, count: int) -> Reading:
    return uvloop.run(_drain(folder, count))


async def _drain(folder: Path, count: int) -> Reading:
    await _queue_without_running(folder, count)
    yard = Yard(_url(folder), max_running=SLOTS)
    all_ran, ran = asyncio.Event(), 0

    @yard.consumer(name="noop", concurrent_count=SLOTS)
    async def counted_noop(number: int) -> int:
        nonlocal ran
        ran += 1
        if ran == count:
            all_ran.set()
        return number

    began = time.perf_counter()
    async with yard:
        await all_ran.wait()
        await _until_completed(yard, count)
        elapsed = time.perf_counter() - began
    return Reading(count / elapsed, given=count, held=_persisted(folder / DATABASE, TaskState.COMPLETED))


async def _queue_without_running(folder: Path, count: int) -> None:
    async with _submitting(folder) as consumer:
        await consumer.submit_many([{"number": number} for number in range(count)])


@asynccontextmanager
async def _submitting(folder: Path) -> AsyncIterator[ConsumerFunction[..., Any]]:
    """A yard that takes tasks and runs none."""
    yard = Yard(_url(folder), max_running=SLOTS)
    consumer = yard.consumer(concurrent_count=SLOTS)(noop)
    async with yard.client():
        yield consumer


# --- SQLite: submitting ---------------------------------------------------------------------------------------------


def clients(folder: Path, count: int, clients: int) -> Reading:
    return uvloop.run(_clients(folder, count, clients))


async def _clients(folder: Path, count: int, clients: int) -> Reading:
    async with _submitting(folder) as consumer:
        numbers = iter(range(count))

        async def client() -> None:
            for number in numbers:
                await consumer.submit(number=number)

        began = time.perf_counter()
        await asyncio.gather(*[client() for _ in range(clients)])
        elapsed = time.perf_counter() - began
    return Reading(count / elapsed, given=count, held=_persisted(folder / DATABASE, TaskState.QUEUED))


def batch(folder: Path, batches: int, size: int) -> Reading:
    return uvloop.run(_batch(folder, batches, size))


async def _batch(folder: Path, batches: int, size: int) -> Reading:
    async with _submitting(folder) as consumer:
        began = time.perf_counter()
        for first in range(0, batches * size, size):
            await consumer.submit_many([{"number": number} for number in range(first, first + size)])
        elapsed = time.perf_counter() - began
    given = batches * size
    return Reading(given / elapsed, given=given, held=_persisted(folder / DATABASE, TaskState.QUEUED))


# --- SQLite: starting -----------------------------------------------------------------------------------------------


def idle(folder: Path, count: int, gap_s: float) -> Reading:
    return uvloop.run(_idle(folder, count, gap_s))


async def _idle(folder: Path, count: int, gap_s: float) -> Reading:
    """p50 from the call of `submit` to the first line of the task."""
    yard = Yard(_url(folder), max_running=SLOTS)
    started = 0.0

    @yard.consumer(concurrent_count=SLOTS)
    async def stamp() -> None:
        nonlocal started
        started = time.perf_counter()

    times = []
    async with yard:
        for _ in range(count):
            await asyncio.sleep(gap_s)
            asked = time.perf_counter()
            handle = await stamp.submit()
            await handle.result(timeout_s=RESULT_TIMEOUT_S)
            times.append(started - asked)
    return Reading(percentile(times, 50), given=count, held=_persisted(folder / DATABASE, TaskState.COMPLETED))


LEAD_S = 1.5  # all tasks are in the store before the first is due
EARLY_S = 0.001  # the wall clock and the monotonic one may part by less than this in a run


def lateness(folder: Path, count: int, within_s: float) -> Reading:
    # asyncio's own loop, like the limit it is held against.
    return asyncio.run(_lateness(folder, count, within_s))


async def _lateness(folder: Path, count: int, within_s: float) -> Reading:
    """p99 of how long after its time a task starts."""
    yard = Yard(_url(folder), max_running=SLOTS)
    all_ran = asyncio.Event()
    late: list[float] = []

    @yard.consumer(concurrent_count=SLOTS)
    async def stamp(due_mono: float) -> None:
        late.append(time.monotonic() - due_mono)
        if len(late) == count:
            all_ran.set()

    async with yard:
        monotonic_to_wall = time.time() - time.monotonic()
        start_mono = time.monotonic() + LEAD_S
        dues = [start_mono + random.uniform(0, within_s) for _ in range(count)]
        await asyncio.gather(
            *[
                stamp.options(schedule_at=datetime.fromtimestamp(due_mono + monotonic_to_wall, UTC)).submit(due_mono)
                for due_mono in dues
            ]
        )
        await all_ran.wait()
        await _until_completed(yard, count)
    if min(late) < -EARLY_S:
        raise RuntimeError(f"a task started {-min(late):.4f} s before it was due")
    return Reading(percentile(late, 99), given=count, held=_persisted(folder / DATABASE, TaskState.COMPLETED))


# --- SQLite: a large backlog ------------------------------------------------------------------------------------------

FULL_SOURCES = [f"full-{number}" for number in range(50)]
FREE_SOURCES = [f"free-{number}" for number in range(10)]
KEYED_SOURCE = "keyed"
TAKEN_KEYS = [f"key-{number}" for number in range(100)]
FILL_AT_ONCE = 1_000
PENDING = (TaskState.QUEUED, TaskState.RUNNING)


def fill_backlog(folder: Path, database: str, count: int) -> Reading:
    """45 % in sources that will be at their limit, 45 % behind keys that will be taken, 10 % free to start."""
    began = time.perf_counter()
    asyncio.run(_fill_backlog(database, count))
    elapsed = time.perf_counter() - began
    return Reading(count / elapsed, given=count, held=_persisted(Path(database), *PENDING))


def claim_from_backlog(folder: Path, database: str, queued: int, claims: int) -> Reading:
    """p99 of a turn that claims one task, when all that is not free is at its limit."""
    return asyncio.run(_claim_from_backlog(Path(database), queued, claims))


@asynccontextmanager
async def _joined(database: Path) -> AsyncIterator[tuple[Store, str]]:
    store = SqliteStore(database, clock=SystemClock())
    await store.open()
    node = Node(incarnation=new_uuid(), name="benchmark", pid=os.getpid(), host="localhost")
    await store.join(node)
    await store.set_queue(QueueSettings(name="default", per_key=1))
    yield store, node.incarnation
    await store.close()


async def _fill_backlog(database: str, count: int) -> None:
    async with _joined(Path(database)) as (store, node):
        for first in range(0, count, FILL_AT_ONCE):
            records = [_waiting(number) for number in range(first, min(count, first + FILL_AT_ONCE))]
            await store.turn(node, adds=[Add(records)])


def _waiting(number: int) -> TaskRecord:
    share, turn = number % 20, number // 20
    if share < 9:
        return _record(FULL_SOURCES[(turn * 9 + share) % len(FULL_SOURCES)])
    if share < 18:
        return _record(KEYED_SOURCE, key=TAKEN_KEYS[(turn * 9 + share) % len(TAKEN_KEYS)])
    return _record(FREE_SOURCES[(turn * 2 + share) % len(FREE_SOURCES)])


def _record(source: str, *, key: str | None = None) -> TaskRecord:
    now = datetime.now(UTC)
    return TaskRecord(
        uuid=new_uuid(), source=source, due_at=now, created_at=now, updated_at=now, key=key, args='{"number": 1}'
    )


async def _claim_from_backlog(database: Path, queued: int, claims: int) -> Reading:
    async with _joined(database) as (store, node):
        pending = _pending(await store.count())
        if pending < queued:
            raise RuntimeError(f"{pending:,} tasks wait, not {queued:,}")
        await _take_up_limits(store, node)
        times = [await _timed_claim(store, node) for _ in range(claims)]
        resident = _resident_bytes()
    held = _persisted(database, *PENDING)
    return Reading(percentile(times, 99), given=pending, held=held, also={"resident_bytes": resident})


def _pending(counts: dict[tuple[str, TaskState], int]) -> int:
    return sum(number for (_, state), number in counts.items() if state in PENDING)


async def _take_up_limits(store: Store, node: str) -> None:
    """One running task of every full source and of every key; from here on no demand asks for the full sources."""
    room = {**dict.fromkeys(FULL_SOURCES, 1), KEYED_SOURCE: len(TAKEN_KEYS)}
    await store.turn(node, demand=Demand(total=sum(room.values()), sources=room))


ROOM = Demand(total=1, sources={**dict.fromkeys(FULL_SOURCES, 0), KEYED_SOURCE: 1, **dict.fromkeys(FREE_SOURCES, 1)})


async def _timed_claim(store: Store, node: str) -> float:
    """One task is added, one claimed, which is timed, and that one completed: the backlog stays as it was."""
    await store.turn(node, adds=[Add([_record(random.choice(FREE_SOURCES))])])
    began = time.perf_counter()
    turned = await store.turn(node, demand=ROOM)
    elapsed = time.perf_counter() - began
    (claim,) = turned.claims
    await store.turn(node, settles=[_completion(claim)])
    return elapsed


def _completion(claim: Claim) -> tuple[Claim, Move]:
    return claim, Move.completed(at=datetime.now(UTC))


def _resident_bytes() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return float(pages * os.sysconf("SC_PAGE_SIZE"))
