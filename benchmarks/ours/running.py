"""Running: what a yard does with what is queued, from the first line of a task to its result in the store."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path

import uvloop

from benchmarks.ours.places import persisted, url_of
from benchmarks.ours.submitting import SLOTS, noop, queue_without_running
from benchmarks.reading import Reading, percentile
from taskyard import TaskHandle, Yard
from taskyard.model.state import TaskState

WARM_UP = 500
RESULT_TIMEOUT_S = 60.0
SETTLED_POLL_S = 0.001

Submit = Callable[[int], Awaitable[TaskHandle]]


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
    consumer = yard.consumer(concurrency=SLOTS)(noop)
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


# --- emptying a queue ------------------------------------------------------------------------------------------------


def drain(folder: Path, count: int, dsn: str | None = None, slots: int = SLOTS) -> Reading:
    return uvloop.run(_drain(url_of(folder, dsn), count, slots))


async def _drain(url: str, count: int, slots: int) -> Reading:
    await queue_without_running(url, count)
    yard = Yard(url, max_running=slots)
    all_ran, ran = asyncio.Event(), 0

    @yard.consumer(name="noop", concurrency=slots)
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
    return Reading(count / elapsed, given=count, held=await persisted(url, TaskState.COMPLETED))


# --- starting --------------------------------------------------------------------------------------------------------


def idle(folder: Path, count: int, gap_s: float, dsn: str | None = None) -> Reading:
    return uvloop.run(_idle(url_of(folder, dsn), count, gap_s))


async def _idle(url: str, count: int, gap_s: float) -> Reading:
    """p50 from the call of `submit` to the first line of the task."""
    yard = Yard(url, max_running=SLOTS)
    started = 0.0

    @yard.consumer(concurrency=SLOTS)
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
    return Reading(percentile(times, 50), given=count, held=await persisted(url, TaskState.COMPLETED))


LEAD_S = 1.5  # all tasks are in the store before the first is due
EARLY_S = 0.001  # the wall clock and the monotonic one may part by less than this in a run


def lateness(folder: Path, count: int, within_s: float) -> Reading:
    # asyncio's own loop, like the limit it is held against.
    return asyncio.run(_lateness(url_of(folder, None), count, within_s))


async def _lateness(url: str, count: int, within_s: float) -> Reading:
    """p99 of how long after its time a task starts."""
    yard = Yard(url, max_running=SLOTS)
    all_ran = asyncio.Event()
    late: list[float] = []

    @yard.consumer(concurrency=SLOTS)
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
    return Reading(percentile(late, 99), given=count, held=await persisted(url, TaskState.COMPLETED))
