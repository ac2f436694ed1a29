"""The overview of a store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from taskyard import Yard
from taskyard.application.local import LocalApplication
from taskyard.application.overview_documents import OverviewDocument
from taskyard.model.state import TaskState

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
