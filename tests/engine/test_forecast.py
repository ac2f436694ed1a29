"""A forecast against a yard that runs: the same order, and the same times."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from random import Random

import pytest

from taskyard import QueueOrder, TaskState, Yard
from taskyard.testing.clock import ManualClock

PASSES = 40
"""Passes of the event loop in which a yard on a memory store does all that it can do now."""

RUN_S = {"quick": 3.0, "slow": 7.5}


async def settle_down() -> None:
    for _ in range(PASSES):
        await asyncio.sleep(0)


def make_yard(clock: ManualClock, order: QueueOrder, started: dict[str, datetime]) -> Yard:
    yard = Yard("memory://", clock=clock)
    yard.define_queue("one", concurrency=1, order=order, starve_after=3, starve_wait_s=40)

    async def run(name: str) -> None:
        started[name] = clock.now()
        await clock.wait(asyncio.Event(), clock.monotonic() + RUN_S[name.partition("-")[0]])

    @yard.consumer(queue="one")
    async def quick(name: str) -> None:
        await run(name)

    @yard.consumer(queue="one")
    async def slow(name: str) -> None:
        await run(name)

    return yard


@asynccontextmanager
async def opened(yard: Yard, clock: ManualClock) -> AsyncIterator[Yard]:
    """Time goes on while it stops."""
    await yard.start()
    try:
        yield yard
    finally:
        stopping = asyncio.ensure_future(yard.stop(grace_s=0))
        while not stopping.done():
            clock.advance(1.0)
            await asyncio.sleep(0)
        await stopping


async def run_until_idle(yard: Yard, clock: ManualClock) -> None:
    while True:
        counts = (await yard.queue("one").status()).counts
        if not counts.get(TaskState.QUEUED) and not counts.get(TaskState.RUNNING):
            return
        clock.advance(clock.next_wake_s or 1.0)
        await settle_down()


@pytest.mark.spec("QUE-32")
@pytest.mark.parametrize("order", QueueOrder)
@pytest.mark.parametrize("seed", range(4))
async def test_a_yard_starts_its_tasks_as_shown(order: QueueOrder, seed: int) -> None:
    """With keys, priorities, patience and a held task, each task starts at the place and the time that were shown."""
    clock, rng, started = ManualClock(), Random(seed), dict[str, datetime]()
    async with opened(make_yard(clock, order, started), clock) as yard:
        for n in range(3):
            for name in RUN_S:
                await yard.submit(name, {"name": f"{name}-early-{n}"})
        await settle_down()
        await run_until_idle(yard, clock)
        names: dict[str, str] = {}
        for n in range(14):
            name = rng.choice(list(RUN_S))
            bucket = {"bucket": rng.choice("ab")} if order is QueueOrder.BUCKETS else {}
            task = await yard.submit(
                name, {"name": f"{name}-{n}"}, priority=rng.choice(("high", "normal", "low")),
                key=rng.choice((None, "a", "b")), **bucket,
            )  # fmt: skip
            names[task.uuid] = f"{name}-{n}"
        await settle_down()
        shown = await yard.queue("one").order(limit=100)
        assert (len(shown.running), len(shown.waiting)) == (1, 13)
        if order is QueueOrder.PRIORITY:
            await yard.hold(shown.waiting[5].uuid)
            shown = await yard.queue("one").order(limit=100)
        await run_until_idle(yard, clock)
        happened = {name: at for name, at in started.items() if name in {names[one.uuid] for one in shown.waiting}}
        assert [names[one.uuid] for one in shown.waiting] == sorted(happened, key=happened.__getitem__)
        assert {names[one.uuid]: one.expected_start_at for one in shown.waiting} == happened
