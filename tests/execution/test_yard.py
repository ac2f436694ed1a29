"""In a yard a consumer moves between places by one word."""

import asyncio
import logging
import os

import pytest

from taskyard import ErrorKind, EventKind, TaskCanceled, TaskFailed, TaskState, Yard
from taskyard.errors import InvalidConsumer
from taskyard.model.notes import Note, NoteCode
from tests.execution.app import REST, WORK, endless, too_slow, where, yard

PLACES = pytest.mark.parametrize("consumer", WORK, ids=lambda given: given.__name__)


async def is_running(handle):
    async with asyncio.timeout(20):
        async for _ in yard.events(after=0):
            if await handle.state() is TaskState.RUNNING:
                return


@pytest.mark.spec("EXE-03")
@PLACES
async def test_the_same_code_in_every_place(consumer):
    """Whatever the place and the kind of function, arguments, results, the run, its progress and its errors are the
    same."""
    async with yard:
        handle = await consumer.submit("a.png", quality=7)
        result = await handle.result(timeout_s=20)
        assert result == {"path": "a.png", "quality": 7, "attempt": 1, "source": consumer.__name__}
        progress = (await handle.record()).progress
        assert progress is not None
        assert (progress.fraction, progress.message) == (0.5, "half way")
        with pytest.raises(TaskFailed, match="quality -1") as raised:
            await (await consumer.submit("a.png", quality=-1)).result(timeout_s=20)
        assert (raised.value.kind, raised.value.error_type) == (ErrorKind.RUNTIME, "ValueError")
        assert "in work" in (raised.value.traceback or "")


@pytest.mark.spec("SCH-10", "EXE-03")
@PLACES
async def test_the_log_says_where_it_failed(consumer, caplog):
    """A failed task is logged with the stack of its code, wherever that ran."""
    async with yard:
        handle = await consumer.submit("a.png", quality=-1)
        with pytest.raises(TaskFailed):
            await handle.result(timeout_s=20)
    [entry] = [entry for entry in caplog.records if entry.getMessage().startswith("[fail]")]
    told = f"[fail] task {handle.uuid} from {consumer.__name__}: ValueError: quality -1"
    assert entry.getMessage() == f"{told} (attempt 1 of 1, final)"
    assert 'raise ValueError(f"quality {quality}")' in logging.Formatter().format(entry)


async def test_processes_are_other_processes():
    """A process consumer runs elsewhere, and the class form as well."""
    async with yard:
        assert await (await where.submit()).result(timeout_s=20) != os.getpid()
        assert await (await yard.submit("square", {"n": 5})).result(timeout_s=20) == 26
        assert await (await yard.submit("async_square", {"n": 5})).result(timeout_s=20) == 25


@pytest.mark.spec("EXE-03")
@pytest.mark.parametrize("place", REST)
async def test_a_cancel_interrupts_async_code_everywhere(place, caplog):
    """Async code that is canceled is interrupted where it waits, and cleans up."""
    async with yard:
        handle = await REST[place].submit(600)
        async with asyncio.timeout(20):
            async for event in yard.events(after=0):
                if event.kind is EventKind.PROGRESS:
                    break
        await handle.cancel()
        with pytest.raises(TaskCanceled):
            await handle.result(timeout_s=20)
        [said] = [record.getMessage() for record in caplog.records if record.name == "taskyard.run"]
        assert said.startswith("cleaned up")


@pytest.mark.spec("EXE-05")
@pytest.mark.parametrize("place", REST)
async def test_a_timeout_ends_async_code_everywhere(place):
    """Async code past its timeout is failed as such."""
    async with yard:
        with pytest.raises(TaskFailed) as raised:
            await (await REST[place].options(timeout_s=0.05).submit(600)).result(timeout_s=20)
        assert raised.value.kind == ErrorKind.TIMEOUT


@pytest.mark.spec("EXE-05", "EXE-20")
async def test_a_timeout_is_hard():
    """A task past its timeout is failed as such, and its process is gone with it."""
    async with yard:
        with pytest.raises(TaskFailed) as raised:
            await (await too_slow.submit()).result(timeout_s=20)
        assert raised.value.kind == ErrorKind.TIMEOUT


@pytest.mark.spec("EXE-20")
async def test_a_task_that_kills_its_workers_is_quarantined(caplog):
    """After three workers it is failed, whatever its retry policy says, and the next task runs. Every crash is
    logged."""
    async with yard:
        handle = await yard.submit("deadly")
        with pytest.raises(TaskFailed) as raised:
            await handle.result(timeout_s=20)
        assert raised.value.kind == ErrorKind.SYSTEM
        record = await handle.record()
        assert record.crashes == 3
        assert record.note == Note(NoteCode.QUARANTINED, facts={"crashes": 3})
        assert isinstance(await (await where.submit()).result(timeout_s=20), int)
    *retried, final = [record for record in caplog.records if getattr(record, "error_type", "") == "system"]
    crash = "its worker process exited with code 1"
    assert [line.getMessage()[:-1].partition(", retrying in ")[0] for line in retried] == [
        f"task {handle.uuid} from deadly failed: {crash} (attempt {n} of 21" for n in (1, 2)
    ]
    verdict = "attempt 3 of 21, final: it took down 3 workers"
    assert final.getMessage() == f"[fail] task {handle.uuid} from deadly: {crash} ({verdict})"


async def test_a_cancel_ends_it():
    """A cancel of a task whose code does not look takes effect after the grace."""
    async with yard:
        handle = await endless.submit()
        await is_running(handle)
        await handle.cancel()
        with pytest.raises(TaskCanceled):
            await handle.result(timeout_s=20)


async def test_a_stop_gives_back_what_runs(tmp_path):
    """A stop without grace ends the process, and the task goes back to the queue with no retry used up."""
    yard.use_store(f"sqlite:///{tmp_path}/work.db")
    try:
        async with yard:
            handle = await endless.submit()
            await is_running(handle)
            await yard.stop(grace_s=0)
        async with yard.client():
            record = await handle.record()
            assert (record.state, record.retries, record.crashes) == (TaskState.QUEUED, 0, 0)
    finally:
        yard.use_store("memory://")


@pytest.mark.parametrize("executor", ["process", "isolated"])
def test_a_consumer_nobody_can_find_is_refused(executor):
    """A function inside a function cannot be found by a worker, and is refused when it is made a consumer."""

    def inner() -> None: ...

    with pytest.raises(InvalidConsumer, match="top level of a module"):
        Yard("memory://").consumer(executor=executor)(inner)
