"""What becomes of a task when a run of it has ended."""

import copy
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskyard.errors import RetryLater
from taskyard.model.execution import ErrorCode, ErrorKind, ExecutionError, ExecutionResult
from taskyard.model.move import Move, apply_move
from taskyard.model.notes import CancelRequest, Note, NoteCode
from taskyard.model.retry import NO_RETRY, RetryPolicy
from taskyard.model.settle import QUARANTINE_AFTER, heed_cancel, rescue, settle
from taskyard.model.state import ENDED, LEGAL, TaskState
from taskyard.model.task import TaskRecord
from taskyard.ports.explain import device_lost
from taskyard.testing.samples import NOON, a_record, an_error, seconds
from tests.unit.strategies import errors, jitters, json_values, moves, retry_policies, running_records

LATER = NOON + seconds(60)
THREE = RetryPolicy(max_retries=3)


def running(**fields: Any) -> TaskRecord:
    return a_record(**{"state": TaskState.RUNNING, "attempt": 1, "token": 5, "node": "n", "started_at": NOON, **fields})


def settled(record: TaskRecord, error: ExecutionError | None, *, retry: RetryPolicy = THREE, **more: bool) -> Move:
    result = ExecutionResult(success=error is None, error=error)
    return settle(record, result, retry=retry, now=LATER, jitter=0.0, result_json="42", **more)


@given(running_records, errors | st.none(), retry_policies, jitters, st.booleans())
def test_whatever_happened_the_move_is_legal(
    record: TaskRecord, error: ExecutionError | None, retry: RetryPolicy, jitter: float, asked: bool
):
    """For every result there is a move, and it is a legal one that can be applied."""
    result = ExecutionResult(success=error is None, error=error)
    move = settle(record, result, retry=retry, now=LATER, jitter=jitter, cancel_asked=asked)
    assert move.state in LEGAL[TaskState.RUNNING]
    assert (move.due_at is not None) == (move.state is TaskState.RETRYING)
    apply_move(copy.copy(record), move)


def test_success_completes():
    """A run that succeeded completes its task with its result."""
    move = settled(running(), None)
    assert (move.state, move.result, move.error) == (TaskState.COMPLETED, "42", None)


@pytest.mark.spec("QUE-12")
def test_success_beats_a_cancel_and_says_so():
    """A run that finished before the cancel reached it is completed, and the request stays with the task."""
    record = running(cancel=CancelRequest(NOON, "ann"))
    apply_move(record, settled(record, None, cancel_asked=True))
    assert (record.state, record.cancel) == (TaskState.COMPLETED, CancelRequest(NOON, "ann"))


KINDS = [
    pytest.param(an_error(ErrorKind.VALIDATION, "bad"), TaskState.FAILED, id="validation-fails"),
    pytest.param(an_error(ErrorKind.TIMEOUT, "slow", "TimeoutError"), TaskState.RETRYING, id="timeout-may-retry"),
    pytest.param(an_error(ErrorKind.SYSTEM, "died", "WorkerDied"), TaskState.RETRYING, id="crash-may-retry"),
    pytest.param(an_error(ErrorKind.RUNTIME, "flaky", "ConnectionError"), TaskState.RETRYING, id="transient-retries"),
    pytest.param(an_error(ErrorKind.RUNTIME, "bad", "ValueError"), TaskState.FAILED, id="bad-argument-fails"),
    pytest.param(an_error(ErrorKind.RUNTIME, "odd", "Odd"), TaskState.RETRYING, id="in-no-class-retries"),
    pytest.param(an_error(ErrorKind.REJECTED, "full"), TaskState.QUEUED, id="rejected-is-given-back"),
    pytest.param(an_error(ErrorKind.CANCELED, "stop"), TaskState.CANCELED, id="canceled-is-canceled"),
]


@pytest.mark.spec("QUE-14")
@pytest.mark.parametrize(("error", "state"), KINDS)
def test_each_kind_of_error_has_its_state(error: ExecutionError, state: TaskState):
    """The kind and class of an error decide where the task goes, while retries are left."""
    move = settled(running(), error)
    assert move.state is state
    assert (move.error or error) == error


@pytest.mark.spec("QUE-14")
@pytest.mark.parametrize(("error", "state"), KINDS)
def test_without_retries_what_would_retry_fails(error: ExecutionError, state: TaskState):
    """With no retries left everything that would be tried again fails, and nothing else changes."""
    expected = TaskState.FAILED if state is TaskState.RETRYING else state
    assert settled(running(), error, retry=NO_RETRY).state is expected


@pytest.mark.spec("QUE-12")
@pytest.mark.parametrize("error", [kind.values[0] for kind in KINDS], ids=lambda error: error.kind)
def test_a_cancel_that_was_asked_ends_every_failure(error: ExecutionError):
    """Once a cancel was asked, no error leads to another run: the task is canceled, rejected ones included."""
    move = settled(running(), error, cancel_asked=True)
    assert move.state is TaskState.CANCELED
    assert move.error is not None


@pytest.mark.spec("QUE-13")
def test_retries_wait_as_the_policy_says():
    """The n-th retry is due after the policy's n-th wait, and is counted."""
    moves = [settled(running(retries=n), an_error()) for n in range(3)]
    assert [move.due_at for move in moves] == [LATER + seconds(s) for s in (1, 2, 4)]
    assert all(move.retried for move in moves)


@pytest.mark.spec("QUE-13")
@given(
    retry_policies.filter(lambda policy: policy.max_retries <= 20), st.lists(errors, min_size=60, max_size=60), jitters
)
def test_retries_never_exceed_the_maximum(policy: RetryPolicy, script: list[ExecutionError], jitter: float):
    """However runs fail, a task that never asks for itself to run later fails for good within 1 + max_retries runs."""
    record, runs = running(), 0
    for error in script:
        if error.kind in {ErrorKind.REJECTED, ErrorKind.CANCELED} or error.type == "RetryLater":
            continue
        runs += 1
        apply_move(
            record, settle(record, ExecutionResult(success=False, error=error), retry=policy, now=LATER, jitter=jitter)
        )
        if record.state in ENDED:
            break
        record.state = TaskState.RUNNING
    assert record.retries <= policy.max_retries
    assert runs <= 1 + policy.max_retries
    assert record.crashes <= QUARANTINE_AFTER


def test_a_task_that_kills_its_worker_is_quarantined_after_three():
    """The third worker a task takes down is its last, however many retries are left."""
    record, crash = running(), an_error(ErrorKind.SYSTEM, "died", "WorkerDied")
    endless = RetryPolicy(max_retries=1000)
    states = []
    for _ in range(QUARANTINE_AFTER):
        move = settled(record, crash, retry=endless)
        apply_move(record, move)
        states.append(record.state)
        record.state = TaskState.RUNNING
    assert states == [TaskState.RETRYING, TaskState.RETRYING, TaskState.FAILED]
    assert record.crashes == 3
    assert record.note == Note(NoteCode.QUARANTINED, facts={"crashes": 3})


def test_other_failures_do_not_count_towards_quarantine():
    """Only a crash of a worker counts towards quarantine."""
    move = settled(running(crashes=2), an_error())
    assert (move.state, move.crashed) == (TaskState.RETRYING, False)


@given(running_records)
def test_given_back_consumes_no_attempt(record: TaskRecord):
    """A rejected run uses up neither an attempt nor a retry."""
    record.cancel = None
    before = copy.copy(record)
    apply_move(record, settled(record, an_error(ErrorKind.REJECTED, "full"), retry=NO_RETRY))
    assert record.state is TaskState.QUEUED
    assert (record.attempt, record.retries, record.crashes) == (before.attempt - 1, before.retries, before.crashes)


def test_retry_later_is_due_when_asked_and_uses_no_retry():
    """A consumer that asks to run later gets its time, and no retry is counted, even with none left."""
    move = settled(running(), an_error(ErrorKind.RUNTIME, "later", "RetryLater", delay_s=90), retry=NO_RETRY)
    assert (move.state, move.due_at, move.retried) == (TaskState.RETRYING, LATER + seconds(90), False)


@given(json_values | st.floats())
def test_a_senseless_delay_is_never_in_the_past(delay_s: object):
    """Whatever a consumer asks for as a delay, the task is due now or later, at a time that exists."""
    move = settled(running(), an_error(ErrorKind.RUNTIME, "later", "RetryLater", delay_s=delay_s))
    assert move.due_at is not None
    assert move.due_at >= LATER


@pytest.mark.parametrize("delay_s", [None, "3600", float("nan"), -5, [1]])
@pytest.mark.parametrize(("retry", "wait_s"), [(NO_RETRY, 1), (RetryPolicy(first_s=0), 1), (RetryPolicy(first_s=9), 9)])
def test_a_senseless_delay_is_no_hot_loop(delay_s: object, retry: RetryPolicy, wait_s: float):
    """What is no delay waits as long as the policy says for a retry, and at least a second."""
    move = settled(running(), an_error(ErrorKind.RUNTIME, "later", "RetryLater", delay_s=delay_s), retry=retry)
    assert move.due_at == LATER + seconds(wait_s)


@pytest.mark.parametrize("delay", [timedelta(hours=1), 3600, 3600.0])
def test_retry_later_takes_seconds_and_timedeltas(delay: float | timedelta):
    """`RetryLater` keeps its delay as seconds, however it was given."""
    later = RetryLater(delay)
    assert (type(later.delay_s), later.delay_s, str(later)) == (float, 3600.0, "again in 3600 s")


@pytest.mark.parametrize("delay", ["5", None, True, -1, float("nan"), float("inf"), timedelta(seconds=-1)])
def test_retry_later_refuses_what_is_no_delay(delay: Any):
    """`RetryLater` of anything but a finite number of seconds raises where it is written."""
    with pytest.raises((TypeError, ValueError), match="RetryLater takes a"):
        RetryLater(delay)


@pytest.mark.spec("QUE-23")
@given(running_records, st.integers(0, 5), retry_policies, st.booleans())
def test_a_lost_device_is_recovered_from_as_often_as_the_queue_says(
    record: TaskRecord, auto_recover: int, retry: RetryPolicy, asked: bool
):
    """A task whose device was lost is canceled if that was asked, goes back to the head if it may, else fails with that
    error, however many retries are left; neither a retry nor a crash is counted."""
    before, error = copy.copy(record), device_lost("emu-1")
    move = settle(
        record, ExecutionResult(success=False, error=error), retry=retry, auto_recover=auto_recover, now=LATER,
        jitter=0.0, cancel_asked=asked,
    )  # fmt: skip
    apply_move(record, move)
    assert record.error == error
    assert (record.attempt, record.retries, record.crashes) == (before.attempt, before.retries, before.crashes)
    if asked:
        assert (record.state, record.recoveries) == (TaskState.CANCELED, before.recoveries)
        return
    assert record.note == Note(NoteCode.DEVICE_LOST, facts={"device": "emu-1"})
    if before.recoveries < auto_recover:
        assert (record.state, move.to_head, move.run) == (TaskState.QUEUED, True, TaskState.INTERRUPTED)
        assert record.recoveries == before.recoveries + 1
    else:
        assert (record.state, record.recoveries) == (TaskState.FAILED, before.recoveries)
        assert move.run is TaskState.INTERRUPTED


@pytest.mark.spec("QUE-12")
def test_a_cancel_that_comes_after_the_loss_of_a_device_wins():
    """A request that the node had not heard of when the device was lost turns the way back into a cancel."""
    move = heed_cancel(settled(running(), device_lost("emu-1")))
    assert (move.state, move.recovered) == (TaskState.CANCELED, False)


@pytest.mark.spec("QUE-23")
@given(running_records, st.integers(0, 5))
def test_rescue_recovers_as_often_as_the_queue_says(record: TaskRecord, auto_recover: int):
    """A dead node's task is interrupted, then canceled if asked, recovered to the head if it may, else failed."""
    cancel, recoveries, attempt = record.cancel, record.recoveries, record.attempt
    first, second = rescue(record, auto_recover=auto_recover, now=LATER, node="host-1")
    assert first.state is TaskState.INTERRUPTED
    apply_move(record, first)
    apply_move(record, second)
    assert record.note == Note(NoteCode.NODE_DIED, facts={"node": "host-1"})
    if cancel is not None:
        assert (record.state, record.cancel) == (TaskState.CANCELED, cancel)
    elif recoveries < auto_recover:
        assert (record.state, second.to_head, record.recoveries) == (TaskState.QUEUED, True, recoveries + 1)
    else:
        assert (record.state, record.recoveries) == (TaskState.FAILED, recoveries)
        assert record.error is not None
        assert (record.error.code, record.error.details) == (ErrorCode.NODE_DIED, {"node": "host-1"})
    assert record.attempt == attempt


def test_a_failure_without_a_reason_is_still_a_failure():
    """A result that is no success and names no error is not taken for a success."""
    move = settle(running(), ExecutionResult(success=False), retry=NO_RETRY, now=LATER, jitter=0.0)
    assert (move.state, move.error and move.error.kind) == (TaskState.FAILED, ErrorKind.RUNTIME)


@pytest.mark.spec("QUE-12")
@given(moves)
def test_a_heeded_cancel_lets_nothing_run_again(move: Move):
    """When a cancel was asked, what would run again is canceled, and the rest is left alone; an error of its code is
    kept."""
    heeded = heed_cancel(move)
    if move.state in {TaskState.QUEUED, TaskState.RETRYING}:
        raised = move.error if move.error is not None and move.error.types else None
        assert (heeded.state, heeded.at, heeded.error) == (TaskState.CANCELED, move.at, raised)
        assert heeded.note == Note(NoteCode.CANCELED_INSTEAD_OF_RETRY)
    elif move.state is TaskState.CANCELED:
        assert (heeded.state, heeded.at) == (TaskState.CANCELED, move.at)
        assert heeded.error is None or heeded.error == move.error
    else:
        assert heeded is move


@pytest.mark.spec("QUE-12")
def test_how_an_executor_stopped_a_run_is_noted():
    """The words of an executor that carried out a cancel are a note, not an error; what the code raised stays one."""
    stopped = ExecutionError(kind=ErrorKind.CANCELED, message="killed")
    heeded = heed_cancel(Move.canceled(at=LATER, error=stopped))
    assert (heeded.error, heeded.note) == (None, Note(NoteCode.STOPPED_BY_CANCEL, reason="killed"))
    raised = Move.canceled(at=LATER, error=an_error(ErrorKind.CANCELED, "stop", "Cancel"))
    assert heed_cancel(raised) is raised
