"""What code can do with its run in every place: log, and save how far it is."""

import asyncio
import logging

import pytest

from taskyard import EventKind, TaskFailed, TaskState
from tests.execution.app import resume_async, resume_in_process, resume_in_thread, resume_inline, save, yard

PLACES = pytest.mark.parametrize(
    "consumer", [resume_inline, resume_in_thread, resume_in_process, resume_async], ids=lambda given: given.__name__
)
SAVED = {"at": [7, "é"]}


@PLACES
async def test_a_retried_run_gets_its_checkpoint_back(consumer):
    """What the failed run saved last is what the next one finds; a completed task keeps none."""
    async with yard:
        handle = await consumer.submit("raise")
        assert await handle.result(timeout_s=20) == {"attempt": 2, "found": SAVED}
        assert (await handle.record()).checkpoint is None


async def test_a_checkpoint_survives_the_worker_that_saved_it():
    """A process that dies right after saving has saved."""
    async with yard:
        handle = await resume_in_process.submit("exit")
        assert await handle.result(timeout_s=20) == {"attempt": 2, "found": SAVED}
        assert (await handle.record()).crashes == 1


async def test_a_checkpoint_survives_the_yard(tmp_path):
    """A task that goes back to the queue of a store on disk finds it when the store is opened again."""
    yard.use_store(f"sqlite:///{tmp_path}/work.db")
    try:
        async with yard:
            handle = await resume_in_process.submit("sleep")
            async with asyncio.timeout(20):
                async for event in yard.events(after=0):
                    if event.kind is EventKind.PROGRESS:
                        break
            await yard.stop(grace_s=0)
        async with yard.client():
            record = await handle.record()
            assert (record.state, record.checkpoint) == (TaskState.QUEUED, '{"at":[7,"é"]}')
        async with yard:
            assert (await handle.result(timeout_s=20))["found"] == SAVED
    finally:
        yard.use_store("memory://")


@pytest.mark.parametrize(("kind", "error"), [("object", "NotJson"), ("large", "PayloadTooLarge")])
async def test_what_cannot_be_saved_fails_the_run(kind, error):
    """The code hears of it where it saves."""
    async with yard:
        with pytest.raises(TaskFailed) as raised:
            await (await save.submit(kind)).result(timeout_s=20)
        assert raised.value.error_type == error
        assert "a checkpoint" in str(raised.value)


@PLACES
async def test_a_run_logs(consumer, caplog):
    """A line says which run it is of, in its fields and its text, wherever it was written."""
    caplog.set_level(logging.WARNING)
    async with yard:
        handle = await consumer.submit("raise")
        await handle.result(timeout_s=20)
    lines = [record for record in caplog.records if record.name == "taskyard.run"]
    tail = f"[task={handle.uuid} consumer={consumer.__name__} attempt="
    assert [line.getMessage() for line in lines] == [
        f"found None, 100% sure {tail}1]",
        f"found {SAVED}, 100% sure {tail}2]",
    ]
    if consumer in (resume_in_process, resume_async):  # where whatever is logged crosses to the host
        lines += [record for record in caplog.records if record.name == "somebody.else"]
    said = {(line.task, line.consumer, line.attempt) for line in lines}
    assert said == {(handle.uuid, consumer.__name__, 1), (handle.uuid, consumer.__name__, 2)}
