"""How long ended tasks are kept."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from taskyard import InvalidInput, RetryPolicy, TaskFailed, TaskHandle, TaskState, Yard
from taskyard.errors import StoreUnavailable
from taskyard.stores.memory import MemoryStore
from taskyard.testing.clock import ManualClock
from tests.scenario.gates import PATIENCE_S
from tests.scenario.jobs import build

HOUR_S = 3600.0


async def count(yard: Yard, state: TaskState) -> int:
    return sum(n for (_, found), n in (await yard.store.count()).items() if found is state)


async def gone(yard: Yard, clock: ManualClock) -> None:
    """Until nothing that ended is left; a minute or so passes each time that we look."""
    async with asyncio.timeout(PATIENCE_S):
        while await count(yard, TaskState.COMPLETED):
            clock.advance(61)
            await asyncio.sleep(0)


async def ended(yard: Yard, n: int) -> list[TaskHandle]:
    handles = await yard.submit_many("add", [{"a": 1}] * n)
    for handle in handles:
        assert await handle.result(timeout_s=10) == 2
    return handles


async def test_what_ended_long_ago_is_forgotten(url):
    """A serving yard forgets what ended more than `keep_s` ago, however much it is, and nothing else."""
    clock = ManualClock()
    async with build(url, clock=clock, keep_s=HOUR_S) as yard:
        await ended(yard, 1200)
        later = await yard.submit("add", {"a": 1}, delay_s=100_000 * HOUR_S)
        clock.advance(HOUR_S - 120)
        await asyncio.sleep(0.05)
        assert await count(yard, TaskState.COMPLETED) == 1200
        await gone(yard, clock)
        assert await later.state() is TaskState.SCHEDULED
        assert await (await yard.submit("add", {"a": 2})).result(timeout_s=10) == 3


async def test_everything_is_kept_if_asked(file_url):
    """`keep_s=None` forgets nothing, and neither does a yard that only submits."""
    clock = ManualClock()
    async with build(file_url, clock=clock, keep_s=None) as yard:
        (handle,) = await ended(yard, 1)
    clock.advance(1000 * 86_400)
    async with build(file_url, clock=clock, keep_s=None) as yard:
        assert await yard.handle(handle.uuid).state() is TaskState.COMPLETED
    async with build(file_url, clock=clock, keep_s=0).client() as yard:
        clock.advance(120)
        await asyncio.sleep(0.05)
        assert await yard.handle(handle.uuid).state() is TaskState.COMPLETED
    async with build(file_url, clock=clock) as yard:
        await gone(yard, clock)


async def test_only_the_latest_are_kept(url):
    """A yard told to keep so many forgets the others, the oldest first, however much there is; what waits stays."""
    clock = ManualClock()
    yard = build(url, clock=clock, keep_s=None)
    yard.keep_latest(3)
    async with yard:
        await ended(yard, 1200)
        waiting = await yard.submit("add", {"a": 1}, delay_s=100_000 * HOUR_S)
        latest = []
        for _ in range(3):
            clock.advance(0.5)
            latest += await ended(yard, 1)
        while await count(yard, TaskState.COMPLETED) > 3:
            clock.advance(10)
            await asyncio.sleep(0.01)
        assert [await handle.state() for handle in latest] == [TaskState.COMPLETED] * 3
        assert await waiting.state() is TaskState.SCHEDULED


async def test_what_failed_is_kept_apart(url):
    """A yard may keep the tasks that failed by an age, here for ever, and a number of their own."""
    clock = ManualClock()
    yard = build(url, clock=clock, keep_s=HOUR_S)
    yard.keep_latest(2)
    yard.keep_failed(age_s=None, latest=3)

    @yard.consumer(retry=RetryPolicy(max_retries=0))
    async def fail() -> None:
        raise ValueError("broken")

    async with yard:
        failed = []
        for _ in range(5):
            clock.advance(0.5)
            failed.append(await yard.submit("fail"))
            with pytest.raises(TaskFailed):
                await failed[-1].result(timeout_s=10)
        for _ in range(4):
            clock.advance(0.5)
            await ended(yard, 1)
        async with asyncio.timeout(PATIENCE_S):
            while await count(yard, TaskState.COMPLETED) > 2 or await count(yard, TaskState.FAILED) > 3:
                clock.advance(61)
                await asyncio.sleep(0.01)
        clock.advance(HOUR_S)
        await gone(yard, clock)
        assert [await handle.state() for handle in failed[2:]] == [TaskState.FAILED] * 3


class Grudging(MemoryStore):
    """Fails its first prunes."""

    refusals = 2

    async def prune(self, **asked: Any) -> int:
        if self.refusals:
            self.refusals -= 1
            raise StoreUnavailable("not now")
        return await super().prune(**asked)


async def test_a_store_that_cannot_prune_is_tried_again(caplog):
    """A store that fails a prune is tried again later, with one word in the log, and tasks run on meanwhile."""
    clock = ManualClock()
    async with build(Grudging(clock), clock=clock, keep_s=1) as yard:
        await ended(yard, 3)
        await gone(yard, clock)
        await ended(yard, 1)
    assert [record.message for record in caplog.records if "pruned" in record.message] == [
        "ended tasks are not pruned for now: not now"
    ]


@pytest.mark.parametrize("keep_s", [-1, float("nan"), float("inf")])
def test_a_senseless_time_to_keep_is_refused(keep_s):
    """What is no time to keep tasks for is refused when the yard is made."""
    with pytest.raises(InvalidInput, match="or None to keep everything"):
        Yard("memory://", keep_s=keep_s)
