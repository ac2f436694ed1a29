"""The event loop of the simulation: virtual time, any order, processes that freeze and die."""

import asyncio
import random
from collections.abc import Iterator

import pytest

from taskyard.testing.simulation.loop import Process, Stalled, VirtualLoop


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    loop = VirtualLoop(random.Random(1))
    yield loop
    loop.close()


def test_time_passes_when_nothing_is_ready(loop: VirtualLoop) -> None:
    """A day of sleep takes no time, and timers fire in their order."""
    woken: list[float] = []

    async def sleep(seconds: float) -> None:
        await asyncio.sleep(seconds)
        woken.append(loop.time())

    async def all_of_them() -> None:
        await asyncio.gather(*(sleep(seconds) for seconds in (86_400, 1, 3600)))

    loop.run_until_complete(all_of_them())
    assert woken == [1, 3600, 86_400]


def test_ready_callbacks_come_in_any_order() -> None:
    """Callbacks that are ready together are called in an order that the seed alone decides."""

    def order(seed: int) -> list[int]:
        loop, called = VirtualLoop(random.Random(seed)), list[int]()
        for number in range(5):
            loop.call_soon(called.append, number)
        loop.call_later(1, loop.stop)
        loop.run_forever()
        loop.close()
        return called

    orders = [order(seed) for seed in range(50)]
    assert orders == [order(seed) for seed in range(50)]
    assert len({tuple(one) for one in orders}) > 30
    assert all(sorted(one) == list(range(5)) for one in orders)


async def tick(told: list[float], loop: VirtualLoop) -> None:
    try:
        while True:
            await asyncio.sleep(1)
            told.append(round(loop.time()))
    finally:
        told.append(-1)


def test_a_frozen_process_goes_on_later(loop: VirtualLoop) -> None:
    """Nothing of a frozen process runs until it is thawed; what came due meanwhile runs then."""
    process, told = Process(loop, "one"), list[float]()
    ticking = process.spawn(tick(told, loop))
    loop.call_later(2.5, process.freeze)
    loop.call_later(10.2, process.thaw)
    loop.call_later(11.7, loop.stop)
    loop.run_forever()
    assert told == [1, 2, 10, 11]
    assert not ticking.done()


def test_a_dead_process_never_runs_again(loop: VirtualLoop) -> None:
    """Nothing of a killed process runs any more, what cleans up neither; its tasks' children die with it."""
    process, told = Process(loop, "one"), list[float]()

    async def parent() -> None:
        await asyncio.create_task(tick(told, loop))

    started = process.spawn(parent())
    loop.call_later(2.5, process.kill)
    loop.call_later(10, loop.stop)
    loop.run_forever()
    assert told == [1, 2]
    assert not started.done()
    assert len(process.tasks) == 2


def test_what_waits_for_nothing_is_told(loop: VirtualLoop) -> None:
    """When nothing is ready and no timer is set, the loop says so instead of hanging."""
    with pytest.raises(Stalled):
        loop.run_until_complete(asyncio.Event().wait())


def test_a_callback_that_raises_is_noted(loop: VirtualLoop) -> None:
    """An exception that nobody catches is not lost."""
    loop.call_soon(lambda: 1 / 0)
    loop.call_later(1, loop.stop)
    loop.run_forever()
    assert "ZeroDivisionError" in loop.broken[0]
