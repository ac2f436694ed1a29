"""The short version of `python -m tests.torture cancels`, and the races it found, one by one."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from taskyard import TaskCanceled, TaskFailed, TaskHandle, TaskState, Yard
from taskyard.model.command import Cancel
from tests.torture import cancels

SEED = 18


@pytest.mark.spec("QUE-12")
def test_no_cancel_is_swallowed_in_one_process(tmp_path: Path) -> None:
    """A cancel at the moment of the finish is honoured, refused or reported, whatever the consumer does about it."""
    assert cancels.run_in_one(tmp_path, trials=100, seed=SEED).failures == []


@pytest.mark.spec("QUE-12")
def test_no_cancel_is_swallowed_between_processes(tmp_path: Path) -> None:
    """The same when the canceller is another process than the one that runs the task."""
    assert cancels.run_in_two(tmp_path, trials=100, seed=SEED).failures == []


class Late:
    """A task that waits for the test, canceled in the store before its node has heard of it."""

    def __init__(self, yard: Yard) -> None:
        self._yard = yard
        self._began, self._go = asyncio.Event(), asyncio.Event()
        self._raises: Exception | None = None

        @yard.consumer
        async def wait() -> str:
            self._began.set()
            await self._go.wait()
            if self._raises is not None:
                raise self._raises
            return "done"

    async def run(self, raises: Exception | None) -> TaskHandle:
        self._raises = raises
        handle = await self._yard.submit("wait")
        await self._began.wait()
        await self._yard.store.apply([handle.uuid], Cancel())
        self._go.set()
        return handle


@pytest.fixture(params=["memory", "sqlite"])
async def late(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Late]:
    yard = Yard("memory://" if request.param == "memory" else f"sqlite:///{tmp_path / 'work.db'}")
    late = Late(yard)
    async with yard:
        yield late


async def test_a_late_cancel_ends_what_would_be_tried_again(late: Late) -> None:
    """A cancel that comes after a retryable failure, before that is written, ends the task, and who waits hears."""
    handle = await late.run(OSError("again"))
    with pytest.raises(TaskCanceled):
        await handle.result(timeout_s=5)


async def test_a_late_cancel_of_a_failed_task_is_reported(late: Late) -> None:
    """A cancel that comes after the last failure changes nothing, and the record says that it was asked."""
    handle = await late.run(ValueError("never"))
    with pytest.raises(TaskFailed):
        await handle.result(timeout_s=5)
    assert (await handle.record()).cancel is not None


async def test_a_late_cancel_of_a_completed_task_is_reported(late: Late) -> None:
    """A cancel that comes after the end changes nothing, and the record says that it was asked."""
    handle = await late.run(None)
    assert await handle.result(timeout_s=5) == "done"
    record = await handle.record()
    assert (record.state, record.cancel is None) == (TaskState.COMPLETED, False)
