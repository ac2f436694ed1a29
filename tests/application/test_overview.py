"""The overview of a store."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from taskyard import Yard
from taskyard.application.command_requests import Reschedule
from taskyard.application.local import LocalApplication
from taskyard.application.overview_documents import OverviewDocument
from taskyard.model.state import TaskState
from taskyard.model.task import TaskRecord

PATIENCE_S = 20


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    urls = {"memory": "memory://", "sqlite": f"sqlite:///{tmp_path / 'work.db'}"}
    found: str = urls.get(request.param) or request.getfixturevalue("postgres_url")
    return found


@pytest.fixture
async def yard(url: str) -> AsyncIterator[Yard]:
    yard = Yard(url)
    yard.define_queue("calm", concurrency=1)

    @yard.consumer
    async def double(n: int) -> int:
        return 2 * n

    @yard.consumer(queue="calm")
    async def hold() -> None:
        await asyncio.Event().wait()

    async with yard:
        yield yard
        await yard.stop(grace_s=0)


@pytest.fixture
def application(yard: Yard) -> LocalApplication:
    return LocalApplication(yard, actor="test")


async def until_running(application: LocalApplication) -> OverviewDocument:
    async with asyncio.timeout(PATIENCE_S):
        async for seen in application.overview.watch():
            if seen.running:
                return seen
    raise AssertionError("the stream has ended")


async def test_the_overview_tells_what_runs_waits_and_has_finished(yard: Yard, application: LocalApplication) -> None:
    """Counts in all and by queue, the tasks of each kind, the workers, and how fast tasks finish."""
    done = await yard.submit("double", {"n": 1})
    assert await done.result(timeout_s=PATIENCE_S) == 2
    running, queued = [await yard.submit("hold", {}) for _ in range(2)]
    soon, later = [await yard.submit("double", {"n": 1}, delay_s=delay_s) for delay_s in (60, 3600)]
    seen = await until_running(application)
    assert seen.counts == {TaskState.SCHEDULED: 2, TaskState.QUEUED: 1, TaskState.RUNNING: 1, TaskState.COMPLETED: 1}
    assert seen.queues["calm"] == {TaskState.QUEUED: 1, TaskState.RUNNING: 1}
    assert [task.uuid for task in seen.running] == [running.uuid]
    assert [task.uuid for task in seen.waiting] == [soon.uuid, later.uuid]
    assert [task.uuid for task in seen.finished] == [done.uuid]
    assert queued.uuid not in {task.uuid for task in (*seen.running, *seen.waiting, *seen.finished)}
    assert (seen.workers, seen.away_since) == (1, None)
    assert seen.rate > 0


@pytest.mark.spec("QUE-32")
async def test_the_overview_tells_what_starts_next(yard: Yard, application: LocalApplication) -> None:
    """The first tasks of each queue that has some are there with their places; of named tasks, those alone."""
    tasks = [await yard.submit("hold", {}) for _ in range(5)]
    await until_running(application)
    seen = await application.overview.get()
    running, *queued = [task.uuid for task in tasks]
    assert [(one.uuid, one.place, one.waiting, one.queue) for one in seen.next] == [
        (queued[0], 1, 4, "calm"),
        (queued[1], 2, 4, "calm"),
        (queued[2], 3, 4, "calm"),
    ]
    named = await application.overview.get([queued[3], running])
    assert [(one.uuid, one.place) for one in named.next] == [(queued[3], 4)]


async def test_the_overview_of_some_tasks_has_no_others(yard: Yard, application: LocalApplication) -> None:
    """Named by refs, whatever their state."""
    done, other = await yard.submit("double", {"n": 1}), await yard.submit("double", {"n": 2})
    waiting = await yard.submit("double", {"n": 3}, delay_s=3600)
    for handle in (done, other):
        await handle.result(timeout_s=PATIENCE_S)
    seen = await application.overview.get([done.uuid[-12:], waiting.uuid])
    assert seen.counts == {TaskState.COMPLETED: 1, TaskState.SCHEDULED: 1}
    assert [task.uuid for task in (*seen.running, *seen.waiting, *seen.finished)] == [waiting.uuid, done.uuid]


async def test_an_overview_includes_the_events_up_to_its_number(yard: Yard, application: LocalApplication) -> None:
    """A reader of events knows from `seq` which of them an overview includes."""
    handle = await yard.submit("double", {"n": 1})
    await handle.result(timeout_s=PATIENCE_S)
    seen = await application.overview.get()
    assert seen.counts == {TaskState.COMPLETED: 1}
    assert seen.seq == (await application.events.read()).last


async def test_a_watcher_gets_another_overview_after_a_change(yard: Yard, application: LocalApplication) -> None:
    """Without a change it waits; it does not read the store in a loop."""
    handle = await yard.submit("double", {"n": 1}, delay_s=3600)
    watching = application.overview.watch([handle.uuid])
    async with asyncio.timeout(PATIENCE_S):
        assert (await anext(watching)).counts == {TaskState.SCHEDULED: 1}
        await handle.cancel()
        while (seen := await anext(watching)).counts != {TaskState.CANCELED: 1}:
            pass
    assert [task.uuid for task in seen.finished] == [handle.uuid]


@pytest.fixture
def counts(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When the tasks of the store were counted, as each reading of the overview does once."""
    count, counted = yard.store.count, []

    async def spy() -> dict[tuple[str, TaskState], int]:
        counted.append(time.monotonic())
        return await count()

    monkeypatch.setattr(yard.store, "count", spy)
    return counted


async def test_watchers_share_the_readings(yard: Yard, counts: list[float]) -> None:
    """Ten watchers of ten applications read the store as often as one does; each hears of every change."""

    async def until_canceled(mine: LocalApplication) -> int:
        async for seen in mine.overview.watch():
            heard.add(mine)
            if len(heard) == 10:
                all_heard.set()
            if seen.counts == {TaskState.CANCELED: 1}:
                return seen.seq
        raise AssertionError("the stream has ended")

    handle = await yard.submit("double", {"n": 1}, delay_s=3600)
    heard: set[LocalApplication] = set()
    all_heard = asyncio.Event()
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        watching = [group.create_task(until_canceled(LocalApplication(yard, actor=f"web:{n}"))) for n in range(10)]
        await all_heard.wait()
        await handle.cancel()
    assert len({task.result() for task in watching}) == 1
    assert len(counts) < 10


async def test_a_watcher_reads_ten_times_a_second_at_most(
    yard: Yard, application: LocalApplication, counts: list[float]
) -> None:
    """However many changes there are, and whatever interval is asked for."""
    handle = await yard.submit("double", {"n": 1}, delay_s=3600)
    watching = application.overview.watch(min_interval_s=-1.0)
    async with asyncio.timeout(PATIENCE_S):
        for n in range(5):
            await anext(watching)
            later = Reschedule(due_at=datetime.now(UTC) + timedelta(hours=n + 2))
            (receipt,) = await application.tasks.apply([handle.uuid], later)
            assert receipt.ok
    gaps = [after - before for before, after in itertools.pairwise(counts)]
    assert len(gaps) == 4
    assert min(gaps) > 0.09


async def test_a_watcher_that_leaves_takes_nothing_from_the_others(yard: Yard, application: LocalApplication) -> None:
    """Whichever of them was reading when it was canceled; the tasks that it had found are found again."""
    reading = asyncio.Event()

    async def hang(uuid: str) -> TaskRecord | None:
        reading.set()
        await asyncio.Event().wait()
        return None

    handle = await yard.submit("double", {"n": 1}, delay_s=3600)
    other = application.overview.watch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(yard.store, "find", hang)
        leaving = asyncio.ensure_future(anext(application.overview.watch()))
        await reading.wait()
        staying = asyncio.ensure_future(anext(other))
        await asyncio.sleep(0)
    leaving.cancel()
    async with asyncio.timeout(PATIENCE_S):
        assert [task.uuid for task in (await staying).waiting] == [handle.uuid]
