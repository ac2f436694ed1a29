"""Runs whose device is lost while they go on."""

import logging

import pytest

from taskyard.execution.inline import InProcessExecutor
from taskyard.model.execution import ErrorCode, ExecutionResult
from taskyard.model.notes import Note, NoteCode
from taskyard.model.queue import QueueSettings
from taskyard.model.retry import RetryPolicy
from taskyard.ports.executor import ExecutionRequest
from taskyard.ports.explain import device_lost, failed
from taskyard.ports.sink import RunFailed, RunFinished, RunReturned
from tests.engine.support import Rig, Work, quiet
from tests.engine.test_cancel import cancel


class Phone(InProcessExecutor):
    """Loses its device in the first `losses` runs."""

    def __init__(self, losses: int) -> None:
        super().__init__()
        self.losses = losses
        self.began: list[str] = []

    async def submit(self, request: ExecutionRequest) -> ExecutionResult:
        self.began.append(request.request_id)
        result = await super().submit(request)
        return failed(device_lost("emu-1")) if len(self.began) <= self.losses else result


class Recorder:
    kinds = (RunFailed, RunReturned)

    def __init__(self) -> None:
        self.events: list[RunFinished] = []

    def tell(self, event: RunFinished) -> None:
        self.events.append(event)


async def submit_two(rig: Rig, auto_recover: int, losses: int) -> tuple[Phone, Work, str, str]:
    """Two tasks for a phone that takes one at a time, of which the first has begun."""
    settings = QueueSettings(name="default", concurrency=1, auto_recover=auto_recover)
    rig.queues["default"] = settings
    await rig.store.set_queue(settings)
    rig.executors["phone"] = phone = Phone(losses)
    work = Work()
    rig.consumer("work", work, executor="phone", retry=RetryPolicy(max_retries=5))
    first, second = await rig.submit_many("work", 2)
    await quiet()
    return phone, work, first, second


@pytest.mark.spec("QUE-23")
async def test_a_task_whose_device_is_lost_runs_again_before_the_others(rig):
    """It goes back to the head of its queue and its next attempt completes; the first was interrupted and says why."""
    recorder = Recorder()
    rig.sinks.add(recorder)
    phone, work, first, second = await submit_two(rig, auto_recover=1, losses=1)
    work.let_go(first)
    work.let_go(second)
    assert (await rig.outcome(first)).state == "completed"
    assert (await rig.outcome(second)).state == "completed"
    assert phone.began == [first, first, second]
    record = await rig.found(first)
    assert (record.attempt, record.recoveries, record.retries, record.crashes) == (2, 1, 0, 0)
    attempts = await rig.store.list_attempts(first)
    assert [(one.state, one.error and one.error.code) for one in attempts] == [
        ("interrupted", ErrorCode.DEVICE_LOST), ("completed", None),
    ]  # fmt: skip
    (event,) = recorder.events
    assert isinstance(event, RunReturned)
    assert (event.status, event.reason) == ("interrupted", "its device emu-1 was lost")


@pytest.mark.spec("QUE-23")
@pytest.mark.parametrize("auto_recover", [0, 2])
async def test_a_task_that_loses_device_after_device_is_failed(rig, caplog, auto_recover):
    """After as many recoveries as its queue allows it fails with that error, although retries are left, and the log
    says so; the queue goes on."""
    caplog.set_level(logging.INFO, "taskyard")
    recorder = Recorder()
    rig.sinks.add(recorder)
    phone, work, first, second = await submit_two(rig, auto_recover=auto_recover, losses=auto_recover + 1)
    work.let_go(first)
    work.let_go(second)
    outcome = await rig.outcome(first)
    assert (await rig.outcome(second)).state == "completed"
    assert phone.began == [first] * (auto_recover + 1) + [second]
    assert (outcome.state, outcome.error) == ("failed", device_lost("emu-1"))
    record = await rig.found(first)
    assert (record.recoveries, record.retries, record.crashes) == (auto_recover, 0, 0)
    assert record.note == Note(NoteCode.DEVICE_LOST, facts={"device": "emu-1"})
    assert {one.state for one in await rig.store.list_attempts(first)} == {"interrupted"}
    *returned, last = recorder.events
    assert len(returned) == auto_recover
    assert isinstance(last, RunFailed)
    assert (last.is_final, last.has_crashed) == (True, False)
    assert "its device emu-1 was lost" in caplog.text
    assert "`auto_recover` of its queue is used up" in caplog.text


@pytest.mark.spec("QUE-12")
async def test_a_cancel_wins_over_the_loss_of_a_device(rig):
    """A task that is being canceled when its device is lost does not run again."""
    phone, work, first, second = await submit_two(rig, auto_recover=3, losses=1)
    await cancel(rig, first)
    work.let_go(second)
    assert (await rig.outcome(first)).state == "canceled"
    assert phone.began == [first, second]
