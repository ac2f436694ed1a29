"""A worker process, as programs start and stop it."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from taskyard import Yard
from taskyard.application.command_requests import Cancel
from taskyard.application.opening import open_application
from taskyard.application.worker import ServedConsumer, StopReport, WorkerProcess
from taskyard.model.state import TaskState
from taskyard.version import VERSION

PATIENCE_S = 20


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'work.db'}"


def build(url: str) -> Yard:
    yard = Yard(url)

    @yard.consumer(concurrency=3)
    async def hold() -> None:
        await asyncio.Event().wait()

    return yard


async def started(worker: WorkerProcess, yard: Yard) -> str:
    """The id of a task that runs in the worker."""
    handle = await yard.submit("hold", {})
    async with asyncio.timeout(PATIENCE_S):
        async for event in yard.events(after=0, kinds="running"):
            if event.uuid == handle.uuid:
                break
    assert worker.running == 1
    return handle.uuid


async def test_a_worker_says_what_it_serves(url: str) -> None:
    """Its name and incarnation, the store without a password, and each consumer with its queue and limit."""
    yard = build(url)
    worker = WorkerProcess(yard)
    await worker.start()
    info = worker.info
    (node,) = await worker.application("test").nodes.list()
    await worker.stop(grace_s=0)
    assert (info.version, info.name, info.incarnation, info.store) == (VERSION, node.name, node.incarnation, url)
    assert info.consumers == (ServedConsumer(name="hold", queue="default", concurrency=3),)


async def test_what_runs_goes_back_when_a_worker_stops(url: str) -> None:
    """After the grace the runs are interrupted, the report says that nothing is left, and the task is queued again."""
    yard = build(url)
    worker = WorkerProcess(yard)
    await worker.start()
    uuid = await started(worker, yard)
    assert await worker.stop(grace_s=0) == StopReport(unstopped=0, all_results_saved=True)
    async with open_application(Yard(url), actor="test") as application:
        task = await application.tasks.get(uuid)
    assert (task.state, task.attempt) == (TaskState.QUEUED, 0)


async def test_an_interrupt_cuts_the_grace_short(url: str) -> None:
    """A stop with a long grace ends at once after `interrupt`."""
    yard = build(url)
    worker = WorkerProcess(yard)
    await worker.start()
    await started(worker, yard)
    stopping = asyncio.create_task(worker.stop(grace_s=3600))
    await asyncio.sleep(0)
    worker.interrupt()
    async with asyncio.timeout(PATIENCE_S):
        assert (await stopping).unstopped == 0


async def test_a_run_that_cannot_be_stopped_is_reported(url: str) -> None:
    """A thread that goes on is counted as unstopped: only the end of the process would end it."""
    yard, began, release = build(url), threading.Event(), threading.Event()

    @yard.consumer
    def stubborn() -> None:
        began.set()
        release.wait()

    worker = WorkerProcess(yard)
    await worker.start()
    await yard.submit("stubborn", {})
    assert await asyncio.to_thread(began.wait, PATIENCE_S)
    try:
        report = await worker.stop(grace_s=0)
    finally:
        release.set()
    assert report.unstopped == 1


async def test_a_drained_worker_says_so_when_nothing_runs(url: str) -> None:
    """`wait_drained` returns once the node was asked to drain and its runs have ended."""
    yard = build(url)
    worker = WorkerProcess(yard)
    await worker.start()
    uuid = await started(worker, yard)
    drained = asyncio.create_task(worker.wait_drained())
    async with open_application(Yard(url), actor="test") as application:
        receipt = await application.nodes.drain(worker.info.name)
        assert (receipt.acknowledged, receipt.draining, drained.done()) == (True, True, False)
        await application.tasks.apply([uuid], Cancel())
    async with asyncio.timeout(PATIENCE_S):
        await drained
    await worker.stop(grace_s=0)
