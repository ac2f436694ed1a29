"""A yard is opened once and closed once, whoever asks how often."""

import asyncio

import pytest

from taskyard.errors import InvalidInput, StoreUnavailable
from taskyard.testing.clock import ManualClock
from taskyard.yard import Yard
from tests.engine.support import ShakyStore, quiet


class CountingStore(ShakyStore):
    """Counts how often it was opened and closed; neither is done at once."""

    opened = closed = 0

    async def open(self) -> None:
        self.opened += 1
        await asyncio.sleep(0)
        await super().open()

    async def close(self) -> None:
        self.closed += 1
        await asyncio.sleep(0)
        await super().close()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(clock: ManualClock, anyio_backend: str) -> CountingStore:
    return CountingStore(clock)


async def test_a_second_stop_waits_for_the_first(store, clock):
    """A stop() during a stop() returns when the first does, and the store is closed once, after what ran has ended."""
    yard = Yard(store, clock=clock)
    go_on = asyncio.Event()

    @yard.consumer
    async def work() -> None:
        await go_on.wait()

    await yard.start()
    handle = await work.submit()
    await quiet()
    first = asyncio.create_task(yard.stop(grace_s=None))
    await quiet()
    second, third = asyncio.create_task(yard.stop()), asyncio.create_task(yard.stop())
    await quiet()
    third.cancel()
    await quiet()
    assert (first.done(), second.done(), store.closed) == (False, False, 0)
    go_on.set()
    await asyncio.gather(first, second)
    record = await store.find(handle.uuid)
    assert record is not None
    assert (record.state, store.closed) == ("completed", 1)


async def test_a_second_start_opens_nothing(store):
    """Of two start() at once the second is refused, and one store is opened; the yard opens again after its stop."""
    yard = Yard(store)
    first = asyncio.create_task(yard.start())
    await asyncio.sleep(0)
    with pytest.raises(InvalidInput):
        await yard.start()
    await first
    assert store.opened == 1
    await yard.stop()
    async with yard:
        assert store.opened == 2


async def test_a_start_that_failed_may_be_tried_again(store):
    """A start() that failed leaves the yard closed, not half open."""
    yard = Yard(store)

    async def fail() -> None:
        raise StoreUnavailable("gone")

    store.open = fail
    with pytest.raises(StoreUnavailable):
        await yard.start()
    del store.open
    async with yard:
        assert store.opened == 1
