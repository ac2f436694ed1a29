"""Several yards of one event loop on one store in memory."""

from __future__ import annotations

import asyncio

import pytest

from taskyard import RetryLater, TaskCanceled, TaskState, Yard, current_run
from taskyard.ports.clock import SystemClock
from taskyard.ports.store import ATTEMPTS_KEPT
from taskyard.stores.memory import MemoryStore
from tests.scenario.gates import Gates
from tests.scenario.jobs import build


class CountingStore(MemoryStore):
    """Counts the turns that are taken on it."""

    turns = 0

    async def turn(self, node, **asked):
        self.turns += 1
        return await super().turn(node, **asked)


def make_store() -> CountingStore:
    return CountingStore(SystemClock())


async def test_yards_on_one_store_hear_each_other(gates: Gates):
    """What one yard submits another runs at once, the first hears of the result, and its cancels arrive."""
    store = make_store()
    async with build(store, gates.port), build(store).client() as client:
        handle = await client.submit("add", {"a": 1})
        assert await handle.result(timeout_s=10) == 2
        held = await client.submit("gate", {"name": "held"})
        await gates.begun("held")
        await held.cancel()
        with pytest.raises(TaskCanceled):
            await held.result(timeout_s=10)


async def test_idle_yards_leave_each_other_alone():
    """Two yards with nothing to do take no turns, however much they told each other before."""
    store = make_store()
    async with build(store) as one, build(store) as two:
        for yard in (one, two):
            await (await yard.submit("add", {"a": 1})).result(timeout_s=10)
        for _ in range(50):
            await asyncio.sleep(0)  # what was set off is over
        turns = store.turns
        for _ in range(200):
            await asyncio.sleep(0)
        assert store.turns == turns


async def test_a_yard_that_is_closed_is_not_told_any_more():
    """A store that outlives its yards keeps none of them."""
    store = make_store()
    for _ in range(3):
        async with build(store) as yard:
            assert await (await yard.submit("add", {"a": 1})).result(timeout_s=10) == 2
    assert store._listeners == []
    assert not store._core._running


async def test_the_last_runs_of_a_task_are_kept():
    """A task that postpones itself again and again keeps a bounded number of runs, the latest."""
    yard = Yard("memory://")

    @yard.consumer
    async def again() -> int:
        if current_run().attempt <= ATTEMPTS_KEPT + 5:
            raise RetryLater(0)
        return current_run().attempt

    async with yard:
        handle = await again.submit()
        last = await handle.result(timeout_s=20)
        runs = await yard.store.list_attempts(handle.uuid)
        assert [run.attempt for run in runs] == list(range(last - ATTEMPTS_KEPT + 1, last + 1))
        assert runs[-1].state is TaskState.COMPLETED
