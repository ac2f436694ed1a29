"""What a consumer may do wrong: raise, return what cannot be kept, take too long. Nothing of it stops the loops."""

import asyncio
import json
import logging
import threading
from dataclasses import replace

import pytest

from taskyard import errors
from taskyard.execution.context import current_run
from taskyard.execution.thread import ThreadExecutor
from taskyard.model.notes import NoteCode
from taskyard.model.queue import QueueSettings
from taskyard.model.retry import NO_RETRY, RetryPolicy
from taskyard.model.task import Claim
from tests.engine.support import Work, quiet


def raising(error: BaseException):
    async def fail(record) -> None:
        raise error

    return fail


@pytest.mark.spec("SCH-10")
async def test_an_exception_is_logged_with_its_stack_and_the_loop_goes_on(rig, caplog):
    """What `consume` raises is logged with its stack, and the next task runs."""

    async def fail(record) -> None:
        raise ValueError("broken")

    rig.consumer("fail", fail)
    first, second = await rig.submit_many("fail", 2)
    await quiet()
    entry = next(entry for entry in caplog.records if first in entry.getMessage())
    assert (entry.name, entry.levelno) == ("taskyard", logging.ERROR)
    verdict = "attempt 1 of 4, final: ValueError is not retried"
    assert entry.getMessage() == f"[fail] task {first} from fail: ValueError: broken ({verdict})"
    assert 'raise ValueError("broken")' in caplog.text
    assert (await rig.outcome(second)).state == "failed"


@pytest.mark.spec("SCH-10")
@pytest.mark.parametrize(
    ("executor", "error"),
    [
        ("inline", SystemExit(3)),
        ("inline", GeneratorExit()),
        ("inline", KeyboardInterrupt()),
        ("thread", SystemExit(3)),
        ("thread", GeneratorExit()),
        ("thread", KeyboardInterrupt()),
    ],
    ids=repr,
)
async def test_a_consumer_cannot_end_the_loop(rig, error, executor):
    """Not even SystemExit, raised by a consumer, stops the loop or the process."""

    def fail_in_thread(record) -> None:
        raise error

    rig.consumer("fail", raising(error) if executor == "inline" else fail_in_thread, retry=NO_RETRY)
    uuid = await rig.submit("fail")
    outcome = await rig.outcome(uuid)
    assert outcome.state == "failed"
    assert outcome.error is not None
    assert outcome.error.type == type(error).__name__


@pytest.mark.spec("SCH-09", "SCH-24")
async def test_an_unknown_source_is_dropped_aloud(start_rig, caplog):
    """A task of an unknown source is failed when due, and logged with all that is known of it."""
    rig = await start_rig(others=1)
    record = rig.record("nobody", args='{"n":1}')
    await rig.offer(record)
    assert (await rig.outcome(record.uuid)).state == "failed"
    assert f"[drop] Unknown task source: nobody {record.task.to_dict()}" in caplog.messages


@pytest.mark.spec("QUE-13")
async def test_retries_wait_longer_each_time(rig):
    """Retries come after 1, 2 and 4 s, the task is `retrying` meanwhile, and then it has failed."""
    rig.consumer("fail", raising(ConnectionError("no")))
    uuid = await rig.submit("fail")
    for wait in (1, 2, 4):
        await quiet()
        record = await rig.found(uuid)
        assert record.state == "retrying"
        assert (record.due_at - rig.clock.now()).total_seconds() == wait
        await rig.advance(wait)
    assert (await rig.state(uuid), len(await rig.store.list_attempts(uuid))) == ("failed", 4)


@pytest.mark.spec("QUE-13")
async def test_a_task_in_backoff_holds_no_slot(rig):
    """While a task waits for its retry, the next one of its source runs."""
    work = Work()

    async def first_fails(record) -> str:
        if record.priority == 0:
            raise ConnectionError
        return await work(record)

    rig.consumer("work", first_fails)
    failing = await rig.submit("work", priority=0)
    other = await rig.submit("work")
    await quiet()
    assert (await rig.state(failing), work.began) == ("retrying", [other])


@pytest.mark.spec("QUE-13")
async def test_whose_retry_policy_counts(rig):
    """The task's own policy comes before its consumer's, that before the queue's, and that before the node's."""
    rig.consumer("plain", raising(OSError()))
    rig.consumer("own", raising(OSError()), retry=RetryPolicy(first_s=10, jitter=0))
    rig.queues["slow"] = QueueSettings(name="slow", retry=RetryPolicy(first_s=20, jitter=0))
    uuids = [
        await rig.submit("plain"),
        await rig.submit("own", queue="slow"),
        await rig.submit("plain", queue="slow"),
        await rig.submit("own", queue="slow", retry=RetryPolicy(first_s=30, cap_s=30, jitter=0)),
    ]
    await quiet()
    waits = [((await rig.found(uuid)).due_at - rig.clock.now()).total_seconds() for uuid in uuids]
    assert waits == [1, 10, 20, 30]


@pytest.mark.spec("QUE-14")
@pytest.mark.parametrize(
    ("error", "state"),
    [
        (ConnectionError(), "retrying"),
        (PermissionError(), "retrying"),
        (BlockingIOError(), "retrying"),
        (RuntimeError(), "retrying"),
        (Exception("in no class"), "retrying"),
        (FileNotFoundError(), "failed"),
        (ValueError(), "failed"),
        (UnicodeDecodeError("utf-8", b"", 0, 1, "corrupt"), "failed"),
        (NotImplementedError(), "failed"),
        (ModuleNotFoundError("codec"), "failed"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value,
)
async def test_errors_are_classed(rig, error, state):
    """What may pass is tried again; what cannot get better fails at once; what is in no class is tried again."""
    rig.consumer("fail", raising(error))
    uuid = await rig.submit("fail")
    await quiet()
    assert await rig.state(uuid) == state


@pytest.mark.spec("QUE-14")
async def test_consumers_add_classes_of_their_own(rig):
    """A consumer's policy can make an error retryable, or not, by its class."""
    policy = RetryPolicy.on(retry_on=[UnicodeError], give_up_on=[ConnectionError])
    rig.consumer("parse", raising(UnicodeDecodeError("utf-8", b"", 0, 1, "corrupt")), retry=policy)
    rig.consumer("fetch", raising(ConnectionResetError()), retry=policy)
    parse, fetch = await rig.submit("parse"), await rig.submit("fetch")
    await quiet()
    assert (await rig.state(parse), await rig.state(fetch)) == ("retrying", "failed")


async def test_steering_is_no_failure(rig, caplog):
    """RetryLater postpones without using up a retry, Cancel ends as canceled, and neither is logged as a failure."""
    rig.consumer("later", raising(errors.RetryLater(7)))
    rig.consumer("cancel", raising(errors.Cancel("not needed")))
    later, cancel = await rig.submit("later"), await rig.submit("cancel")
    await quiet()
    record = await rig.found(later)
    assert (record.state, record.retries) == ("retrying", 0)
    assert (record.due_at - rig.clock.now()).total_seconds() == 7
    assert (await rig.outcome(cancel)).state == "canceled"
    assert caplog.records == []


@pytest.mark.parametrize(
    ("result", "error"),
    [
        (object(), "NotJson"),
        ({1: {2, object}}, "NotJson"),
        ("x" * 200, "PayloadTooLarge"),
        ("é" * 60, "PayloadTooLarge"),
    ],
    ids=["object", "set", "long", "long-in-bytes"],
)
async def test_a_result_that_cannot_be_kept_fails_the_task(start_rig, result, error):
    """A result that is no JSON or too large fails the task at once, with an error that says what to do."""
    rig = await start_rig(max_payload_bytes=100)

    async def give(record):
        return result

    rig.consumer("give", give)
    outcome = await rig.outcome(await rig.submit("give"))
    assert outcome.state == "failed"
    assert outcome.error is not None
    assert outcome.error.type == error


async def test_results_are_kept_as_json(rig):
    """What a consumer returns is what its waiter reads, by way of JSON."""

    async def give(record):
        return {"list": [1, None, "é"], "deep": {"x": 1.5}}

    rig.consumer("give", give)
    outcome = await rig.outcome(await rig.submit("give"))
    assert json.loads(outcome.result or "") == {"list": [1, None, "é"], "deep": {"x": 1.5}}


async def test_the_tighter_timeout_counts(rig):
    """Of the task's and the consumer's timeout the smaller one ends the run, as `timeout`."""

    async def forever(record) -> None:
        await asyncio.Event().wait()

    rig.consumer("forever", forever, timeout_s=1000, retry=NO_RETRY)
    rig.consumer("short", forever, timeout_s=0.001, retry=NO_RETRY)
    one = await rig.submit("forever", timeout_s=0.001)
    two = await rig.submit("short", timeout_s=1000)
    for uuid in (one, two):
        error = (await rig.outcome(uuid)).error
        assert error is not None
        assert error.kind == "timeout"


async def test_a_thread_past_its_deadline_says_so_and_keeps_its_slot(rig):
    """A thread past its timeout is told, its record says that it cannot be stopped, and it settles when it ends."""
    go_on = threading.Event()

    def slow(record) -> str:
        go_on.wait(10)
        assert current_run().cancelled
        return "late"

    rig.consumer("slow", slow, timeout_s=0.001, retry=NO_RETRY)
    first, second = await rig.submit_many("slow", 2)
    assert await rig.probes.reported.next() == [first]
    note = (await rig.found(first)).note
    assert note is not None
    assert (note.code, "cannot be stopped" in note.reason) == (NoteCode.REMARK, True)
    assert [await rig.state(uuid) for uuid in (first, second)] == ["running", "queued"]
    go_on.set()
    error = (await rig.outcome(first)).error
    assert error is not None
    assert error.kind == "timeout"
    await rig.outcome(second)


async def test_a_missing_executor_fails_the_task(rig):
    """A consumer that wants an executor the node does not have fails its tasks, and says which."""

    async def work(record) -> None: ...

    rig.consumer("work", work, executor="warp")
    outcome = await rig.outcome(await rig.submit("work"))
    assert outcome.state == "failed"
    assert outcome.error is not None
    assert "'warp'" in outcome.error.message


async def test_a_rejected_run_goes_back_and_waits_a_moment(rig):
    """What an executor rejects goes back without using up an attempt, and is not tried again in a tight loop."""
    rig.executors["thread"] = ThreadExecutor(max_workers=1, queue_limit=0)
    go_on = threading.Event()

    def work(record) -> None:
        go_on.wait(10)

    rig.consumer("work", work, concurrency=2)
    first, second = await rig.submit_many("work", 2)
    await quiet()
    turns = rig.store.turns
    await rig.advance(0.05)
    assert rig.store.turns == turns
    await rig.advance(0.1)
    assert [run.state for run in await rig.store.list_attempts(second)] == ["interrupted", "running"]
    go_on.set()
    await rig.outcome(first)
    await rig.advance(1)
    await rig.outcome(second)
    assert (await rig.found(second)).attempt == 1
    await rig.executors["thread"].shutdown()


async def test_a_start_that_fails_costs_its_own_task_alone(rig):
    """A bug between claim and run: everybody who submitted is answered, the others run, and no slot is lost."""
    work = Work()
    rig.consumer("work", work, concurrency=5)
    await quiet()
    start = rig.engine._runner.start
    records = [rig.record("work") for _ in range(5)]

    def stumble(claim: Claim) -> None:
        if claim.uuid == records[1].uuid:
            raise RuntimeError("stumbled")
        start(claim)

    dispatcher = rig.engine._dispatcher
    dispatcher.connect(replace(dispatcher._hooks, start=stumble))
    answers = [rig.offer(record) for record in records]
    await quiet()
    assert all(answer.done() for answer in answers)
    outcome = await rig.outcome(records[1].uuid)
    assert (outcome.state, outcome.error.message) == ("failed", "the run could not be begun: stumbled")
    assert len(work.began) == 4
    for uuid in list(work.began):
        work.let_go(uuid)
    await quiet()
    again = await rig.submit_many("work", 5)
    await quiet()
    assert work.began[4:] == again
