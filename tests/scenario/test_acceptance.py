"""The six cases of the scheduler's design (最小行为验收清单), as written: the standalone Scheduler, the real clock."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from taskyard import BaseTaskConsumer, Scheduler, Task, TaskConsumerRegistry, TaskState

pytestmark = pytest.mark.spec("SCH-24")

PATIENCE_S = 10


def now() -> datetime:
    return datetime.now(UTC)


def later(seconds: float) -> datetime:
    return now() + timedelta(seconds=seconds)


class Recorder(BaseTaskConsumer):
    """Notes what runs and when; holds every run until `let_go`, if it is told to hold."""

    def __init__(self, name: str, *, count: int = 1, holds: bool = False) -> None:
        self.name, self.concurrent_count = name, count
        self.fired: list[tuple[str, datetime]] = []
        self.log: list[str] = []
        self.most_at_once = self._at_once = 0
        self._go = asyncio.Event()
        if not holds:
            self._go.set()
        self._changed = asyncio.Condition()

    async def consume(self, task: Task) -> Any:
        label = task.args["label"]
        self.fired.append((label, now()))
        self.log.append(f"+{label}")
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        await self._tell()
        await self._go.wait()
        await asyncio.sleep(0.01)  # the work itself: long enough that runs which may overlap, do
        self._at_once -= 1
        self.log.append(f"-{label}")
        await self._tell()

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def let_go(self) -> None:
        self._go.set()

    async def seen(self, entries: int) -> None:
        """Wait until so many beginnings and ends have been noted."""
        async with asyncio.timeout(PATIENCE_S), self._changed:
            await self._changed.wait_for(lambda: len(self.log) >= entries)

    @property
    def order(self) -> list[str]:
        return [label for label, _ in self.fired]

    def task(self, label: str, at: datetime | None = None) -> Task:
        return Task(source=self.name, args={"label": label}, schedule_at=at or now())


@pytest.fixture
def registry() -> TaskConsumerRegistry:
    return TaskConsumerRegistry()


@pytest.fixture
async def scheduler(registry: TaskConsumerRegistry) -> AsyncIterator[Scheduler]:
    scheduler = Scheduler(registry)
    await scheduler.start()
    yield scheduler
    await scheduler.stop()


@pytest.mark.spec("SCH-05")
async def test_1_tasks_fire_in_order_of_their_time(scheduler, registry):
    """1. 顺序触发: of t0 < t1 < t2, handed in out of order, each fires at its time and none before another's."""
    recorder = Recorder("r", count=3)
    registry.register(recorder)
    start = now()
    at = {label: start + timedelta(seconds=s) for label, s in [("t0", 0.1), ("t1", 0.25), ("t2", 0.4)]}
    for label in ("t2", "t0", "t1"):
        scheduler.add_task(recorder.task(label, at[label]))
    await recorder.seen(6)
    assert recorder.order == ["t0", "t1", "t2"]
    for label, fired in recorder.fired:
        assert timedelta(0) <= fired - at[label] < timedelta(seconds=0.5), label


@pytest.mark.spec("SCH-04")
async def test_2_an_earlier_task_overtakes_one_that_is_waited_for(scheduler, registry):
    """2. 插队唤醒: while t+5 s is waited for, a t+1 s task added at +0.5 s fires at about +1 s."""
    recorder = Recorder("r")
    registry.register(recorder)
    start = now()
    waiting = recorder.task("t+5", start + timedelta(seconds=5))
    scheduler.add_task(waiting)
    await asyncio.sleep(0.5)
    scheduler.add_task(recorder.task("t+1", start + timedelta(seconds=1)))
    await recorder.seen(2)
    [(label, fired)] = recorder.fired
    assert label == "t+1"
    assert timedelta(seconds=1) <= fired - start < timedelta(seconds=1.5)
    left = await scheduler.store.find(waiting.uuid)
    assert left is not None
    assert (left.state, left.due_at) == (TaskState.SCHEDULED, waiting.schedule_at)


@pytest.mark.spec("SCH-06")
async def test_3_a_past_time_fires_at_once(scheduler, registry):
    """3. 过去任务: a task that was due a second ago fires at once."""
    recorder = Recorder("r")
    registry.register(recorder)
    added = now()
    scheduler.add_task(recorder.task("late", later(-1)))
    await recorder.seen(2)
    assert recorder.fired[0][1] - added < timedelta(seconds=0.5)


@pytest.mark.spec("SCH-08")
async def test_4_one_at_a_time(scheduler, registry):
    """4. 并发上限: three tasks of a source with concurrency=1 run strictly one after another."""
    recorder = Recorder("r", count=1)
    registry.register(recorder)
    for label in "abc":
        scheduler.add_task(recorder.task(label))
    await recorder.seen(6)
    assert recorder.log == ["+a", "-a", "+b", "-b", "+c", "-c"]


@pytest.mark.spec("SCH-08")
async def test_4_two_at_a_time(scheduler, registry):
    """4. 并发上限: with concurrency=2 at most two run at once, and two do."""
    recorder = Recorder("r", count=2, holds=True)
    registry.register(recorder)
    for label in "abcde":
        scheduler.add_task(recorder.task(label))
    await recorder.seen(2)
    assert recorder.log == ["+a", "+b"]
    recorder.let_go()
    await recorder.seen(10)
    assert recorder.most_at_once == 2
    assert recorder.order == list("abcde")


@pytest.mark.spec("SCH-09")
async def test_5_an_unknown_source_is_dropped_with_an_error(scheduler, registry, caplog):
    """5. 未知源: a task of an unknown source is logged as an error when it is due, ends as failed, and harms nobody."""
    recorder = Recorder("r")
    registry.register(recorder)
    stray = Task(source="nobody", args={"a": 1})
    with caplog.at_level(logging.ERROR, "taskyard"):
        scheduler.add_task(stray)
        scheduler.add_task(recorder.task("after"))
        await recorder.seen(2)
    assert f"[drop] Unknown task source: nobody {stray.to_dict()}" in caplog.messages
    dropped = await scheduler.store.find(stray.uuid)
    assert dropped is not None
    assert dropped.state is TaskState.FAILED


@pytest.mark.spec("SCH-11")
async def test_6_stop_fires_nothing_new_and_lets_what_runs_finish(scheduler, registry):
    """6. 停止语义: stop() under load fires nothing new from that moment, and every running task finishes by itself."""
    recorder = Recorder("r", count=20, holds=True)
    registry.register(recorder)
    for n in range(200):
        scheduler.add_task(recorder.task(str(n)))
    await recorder.seen(20)
    stopping = asyncio.create_task(scheduler.stop())
    await asyncio.sleep(0)
    recorder.let_go()
    await stopping
    assert recorder.order == [str(n) for n in range(20)]
    assert sorted(recorder.log) == sorted([f"+{n}" for n in range(20)] + [f"-{n}" for n in range(20)])
    counts = {state: n for (_, state), n in (await scheduler.store.count()).items()}
    assert counts == {TaskState.COMPLETED: 20, TaskState.QUEUED: 180}
