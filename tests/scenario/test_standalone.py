"""A queue alone: what its tasks may ask for, how many run, and a start that fails."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from taskyard import (
    BaseTaskConsumer,
    InvalidInput,
    QueueOrder,
    Reason,
    Scheduler,
    StandaloneQueue,
    Task,
    TaskConsumerRegistry,
    TaskState,
)
from taskyard.errors import DuplicateTask, StoreUnavailable, StoreUrlInvalid, UnknownTask
from taskyard.ports.clock import SystemClock
from taskyard.stores.memory import MemoryStore
from taskyard.stores.sqlite import SqliteStore

PATIENCE_S = 20


class Crowd(BaseTaskConsumer):
    """Runs until all that are expected have come."""

    name = "crowd"
    concurrent_count = 1_000

    def __init__(self, expected: int) -> None:
        self.expected, self.here, self.complete = expected, 0, asyncio.Event()

    async def consume(self, task: Task) -> Any:
        self.here += 1
        if self.here == self.expected:
            self.complete.set()
        await self.complete.wait()
        return task.args


def registry_of(*consumers: BaseTaskConsumer) -> TaskConsumerRegistry:
    registry = TaskConsumerRegistry()
    for consumer in consumers:
        registry.register(consumer)
    return registry


def a_task(n: int = 0) -> Task:
    return Task("crowd", {"n": n})


@pytest.mark.spec("QUE-28")
async def test_as_many_run_as_the_queue_lets():
    """The concurrency of a queue alone is its only limit, however high it is, and when it is raised while it runs."""
    crowd = Crowd(250)
    async with StandaloneQueue(registry_of(crowd), concurrency=150) as queue, asyncio.timeout(PATIENCE_S):
        uuids = await queue.add(*[a_task(n) for n in range(250)])
        assert crowd.here <= 150
        await queue.set_concurrency(250)
        assert [await queue.outcome(uuid) for uuid in uuids] == [{"n": n} for n in range(250)]


@pytest.mark.spec("QUE-28")
async def test_a_task_has_a_key_a_bucket_and_dedupe():
    """What tasks of a yard can ask for, those of a queue alone can too; when they are due they say themselves."""
    queue = StandaloneQueue(registry_of(Crowd(1)), concurrency=9, order=QueueOrder.BUCKETS)
    async with queue:
        await queue.pause()
        (first,) = await queue.add(a_task(1), key="k", bucket="b", dedupe="merge", priority="high")
        record = await queue.get(first)
        assert (record.key, record.bucket, record.priority) == ("k", "b", 0)
        assert await queue.add(a_task(1), dedupe="merge") == [first]
        with pytest.raises(DuplicateTask):
            await queue.add(a_task(1), dedupe="refuse")
        (last,) = await queue.add(a_task(2), after=[first], on_failure="skip")
        assert (await queue.get(last)).state is TaskState.BLOCKED
        await queue.skip(first)
        assert (await queue.get(last)).state is TaskState.SKIPPED
        for elsewhere in ({"queue": "other"}, {"delay_s": 5}, {"colour": "red"}):
            with pytest.raises(InvalidInput):
                await queue.add(a_task(), **elsewhere)


async def test_a_bucket_needs_a_queue_that_has_some():
    """Its order is known, and does not change: a bucket without effect is refused."""
    async with StandaloneQueue(registry_of(Crowd(1))) as queue:
        with pytest.raises(InvalidInput, match="make it with order='buckets'"):
            await queue.add(a_task(), bucket="b")
        assert await queue.store.count() == {}


@pytest.mark.spec("QUE-22", "QUE-28")
async def test_it_says_why_a_task_waits():
    """The reason is that of a yard; none for a task that has ended, and an error for one that is not there."""
    async with StandaloneQueue(registry_of(Crowd(1))) as queue:
        await queue.pause(reason="backup")
        (uuid,) = await queue.add(a_task())
        why = await queue.why(uuid)
        assert why is not None
        assert (why.reason, "backup" in why.text) == (Reason.QUEUE_PAUSED, True)
        await queue.resume()
        await queue.outcome(uuid)
        assert await queue.why(uuid) is None
        with pytest.raises(UnknownTask):
            await queue.why("nobody")


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"retry": 3}, "must be a RetryPolicy"),
        ({"retry": 0}, "must be a RetryPolicy"),
        ({"order": "junk"}, "not one of priority, fifo, buckets"),
        ({"order": None}, "not one of priority, fifo, buckets"),
        ({"concurrency": 0}, "whole number from 1"),
        ({"auto_recover": -1}, "whole number from 0"),
        ({"auto_recover": "1"}, "a whole number"),
        ({"store": 5}, "sqlite:///work.db"),
        ({"store": "work.db"}, "sqlite:///path/to/work.db"),
        ({"registry": None}, "TaskConsumerRegistry"),
    ],
)
def test_a_queue_alone_that_makes_no_sense_is_refused(settings: dict[str, Any], advice: str):
    """When it is made, with what to write, and not by the first task that fails."""
    with pytest.raises((InvalidInput, StoreUrlInvalid), match=advice):
        StandaloneQueue(**{"registry": registry_of(Crowd(1)), **settings})


async def test_what_is_no_task_is_refused():
    """By a queue alone and by a scheduler, which run on; so is an id that is none."""
    async with StandaloneQueue(registry_of(Crowd(1))) as queue:
        nothing: list[Any] = [5, None, "crowd", Crowd(1)]
        for wrong in nothing:
            with pytest.raises(InvalidInput, match="must be a Task"):
                await queue.add(wrong)
            with pytest.raises(InvalidInput, match="must be a Task"):
                Scheduler(registry_of()).add_task(wrong)
        for ask in (queue.get, queue.outcome, queue.why):
            with pytest.raises(InvalidInput, match="uuid must be"):
                await ask(nothing[0])
        (uuid,) = await queue.add(a_task())
        assert await queue.outcome(uuid) == {"n": 0}
    with pytest.raises(InvalidInput, match="TaskConsumerRegistry"):
        Scheduler(nothing[0])


async def test_a_queue_alone_takes_an_address_and_an_order_by_name(tmp_path: Path):
    """As a yard does; what it has done is in that file."""
    where = tmp_path / "work.db"
    async with StandaloneQueue(registry_of(Crowd(1)), store=f"sqlite:///{where}", order="fifo") as queue:
        (uuid,) = await queue.add(a_task())
        await queue.outcome(uuid)
        assert (await queue.status()).settings.order is QueueOrder.FIFO
    async with StandaloneQueue(registry_of(Crowd(1)), store=where) as queue:
        assert (await queue.get(UUID(uuid))).state is TaskState.COMPLETED


async def test_a_start_that_fails_leaves_nothing_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The store is closed again, and the next start is a start."""
    store = SqliteStore(tmp_path / "work.db", clock=SystemClock())
    queue = StandaloneQueue(registry_of(Crowd(1)), store=store)

    async def broken(*args: Any) -> None:
        raise StoreUnavailable("somebody pulled the plug")

    with monkeypatch.context() as patch:
        patch.setattr(store, "join", broken)
        with pytest.raises(StoreUnavailable, match="plug"):
            await queue.__aenter__()
    async with queue:
        (uuid,) = await queue.add(a_task(7))
        assert await queue.outcome(uuid) == {"n": 7}


async def test_a_scheduler_that_could_not_start_can_be_started(monkeypatch: pytest.MonkeyPatch):
    """A second start tries again instead of doing nothing."""
    crowd = Crowd(1)
    scheduler = Scheduler(registry_of(crowd))
    assert isinstance(scheduler.store, MemoryStore)

    async def broken(*args: Any) -> None:
        raise StoreUnavailable("somebody pulled the plug")

    with monkeypatch.context() as patch:
        patch.setattr(scheduler.store, "join", broken)
        with pytest.raises(StoreUnavailable, match="plug"):
            await scheduler.start()
    await scheduler.start()
    scheduler.add_task(a_task())
    async with asyncio.timeout(PATIENCE_S):
        await crowd.complete.wait()
    await scheduler.stop()
