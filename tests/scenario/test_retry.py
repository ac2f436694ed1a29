"""When a failed run is tried again: how often, after how long, and which errors are worth it."""

from __future__ import annotations

from datetime import timedelta

import pytest

from taskyard import EventKind, RetryPolicy, TaskFailed, TaskState
from taskyard.errors import CommandRefused
from taskyard.testing.clock import ManualClock
from tests.scenario.gates import heard, told
from tests.scenario.jobs import QUICK, build


@pytest.mark.spec("QUE-13")
async def test_the_waits_double_up_to_their_cap(url, gates):
    """After each failure the task waits 1, 2, 4, 8, 16, 30, 30 s as retrying, not holding its slot, then fails."""
    clock = ManualClock()
    async with build(url, gates.port, clock=clock, queues={"q": {"concurrency": 1}}) as yard:
        policy = RetryPolicy(max_retries=7, jitter=0)
        handle = await yard.submit("gate", {"name": "flaky"}, queue="q", retry=policy)
        for retries, wait_s in enumerate([1, 2, 4, 8, 16, 30, 30]):
            (await gates.begun("flaky")).fail("OSError", f"try {retries}")
            await heard(yard, EventKind.RETRYING, handle.uuid, times=retries + 1)
            record = await handle.record()
            assert (record.state, record.retries) == (TaskState.RETRYING, retries + 1)
            assert record.due_at == clock.now() + timedelta(seconds=wait_s)
            await yard.submit("gate", {"name": "other"}, queue="q")
            (await gates.begun("other")).finish()
            clock.advance(wait_s)
        (await gates.begun("flaky")).fail("OSError", "the last one")
        with pytest.raises(TaskFailed, match="the last one"):
            await handle.result(timeout_s=10)
        runs = await yard.store.list_attempts(handle.uuid)
        assert [run.attempt for run in runs] == list(range(1, 9))
        assert [run.error.message for run in runs if run.error] == [f"try {n}" for n in range(7)] + ["the last one"]


@pytest.mark.spec("QUE-13")
async def test_by_default_a_task_is_tried_four_times(url, gates):
    """Without a policy of its own a task is retried three times, with up to a tenth of each wait drawn by lot."""
    clock = ManualClock()
    async with build(url, gates.port, clock=clock) as yard:
        handle = await yard.submit("gate", {"name": "flaky"})
        for retries, wait_s in enumerate([1, 2, 4]):
            (await gates.begun("flaky")).fail("OSError")
            await heard(yard, EventKind.RETRYING, handle.uuid, times=retries + 1)
            left = ((await handle.record()).due_at - clock.now()).total_seconds()
            assert 0.9 * wait_s <= left <= wait_s
            clock.advance(left)
        (await gates.begun("flaky")).fail("OSError")
        with pytest.raises(TaskFailed):
            await handle.result(timeout_s=10)


@pytest.mark.spec("QUE-13")
async def test_the_nearest_policy_counts(url, gates):
    """The task's own policy goes before the consumer's, and a consumer without one takes its queue's."""
    once, never = RetryPolicy(max_retries=1, first_s=0.01), RetryPolicy(max_retries=0)
    async with build(url, gates.port, queues={"q": {"retry": once}}) as yard:
        for policy, runs in [(None, 2), (never, 1)]:
            handle = await yard.submit("gate", {"name": "flaky"}, queue="q", retry=policy)
            for _ in range(runs):
                (await gates.begun("flaky")).fail("OSError")
            with pytest.raises(TaskFailed):
                await handle.result(timeout_s=10)
            assert (await handle.record()).attempt == runs


ERRORS = [
    pytest.param("ValueError", {}, False, id="bad-value"),
    pytest.param("TypeError", {}, False, id="bad-type"),
    pytest.param("FileNotFoundError", {}, False, id="missing-input"),
    pytest.param("ImportError", {}, False, id="missing-code"),
    pytest.param("OSError", {}, True, id="io"),
    pytest.param("PermissionError", {}, True, id="permission"),
    pytest.param("RuntimeError", {}, True, id="in-no-class"),
    pytest.param("MyError", {}, False, id="own-error-by-its-base"),
    pytest.param("MyError", {"retry_on": ("MyError",)}, True, id="own-error-retried"),
    pytest.param("RuntimeError", {"give_up_on": ("RuntimeError",)}, False, id="given-up-by-choice"),
    pytest.param("FileNotFoundError", {"retry_on": ("OSError",)}, False, id="the-nearer-class-decides"),
]


@pytest.mark.spec("QUE-14")
@pytest.mark.parametrize(("error", "classes", "is_retried"), ERRORS)
async def test_errors_are_classed(url, gates, error, classes, is_retried):
    """Transient errors are tried again, hopeless ones fail at once, and a policy may say which are which."""
    policy = RetryPolicy(first_s=0.01, **classes)
    async with build(url, gates.port) as yard:
        handle = await yard.submit("gate", {"name": "flaky"}, retry=policy)
        (await gates.begun("flaky")).fail(error)
        if is_retried:
            (await gates.begun("flaky")).finish("second time lucky")
            assert await handle.result(timeout_s=10) == "second time lucky"
        else:
            with pytest.raises(TaskFailed) as failed:
                await handle.result(timeout_s=10)
            assert failed.value.error_type == error
            assert (await handle.record()).attempt == 1


async def test_a_failed_task_is_sent_again_by_hand(url, gates):
    """A person's retry runs a failed task again with a fresh set of retries; what has not failed is refused."""
    async with build(url, gates.port) as yard:
        handle = await yard.submit("gate", {"name": "flaky"}, retry=QUICK)
        for _ in range(4):
            (await gates.begun("flaky")).fail("OSError")
        with pytest.raises(TaskFailed):
            await handle.result(timeout_s=10)
        sent = await yard.retry(handle.uuid)
        assert (sent.state in {TaskState.QUEUED, TaskState.RUNNING}, sent.retries) == (True, 0)
        (await gates.begun("flaky")).fail("OSError")
        (await gates.begun("flaky")).finish("at last")
        assert await handle.result(timeout_s=10) == "at last"
        with pytest.raises(CommandRefused, match="only a failed task can be retried; submit a new one") as refused:
            await yard.retry(handle.uuid)
        assert refused.value.code == "not_failed"
        kinds = await told(yard, handle.uuid)
        assert kinds.count(EventKind.FAILED) == 1
        assert kinds[-1] == "completed"
