"""What a move does to a record."""

import copy
from typing import Any

import msgspec
import pytest
from hypothesis import given

from taskyard.errors import IllegalMove
from taskyard.model.move import Move, apply_move
from taskyard.model.notes import CancelRequest, Note, NoteCode
from taskyard.model.settle import node_died
from taskyard.model.state import ENDED, LEGAL, TaskState
from taskyard.model.task import TaskRecord
from taskyard.testing.samples import NOON, a_record, an_error, seconds
from tests.unit.strategies import moves, records

LATER = NOON + seconds(1)


def running(**fields: Any) -> TaskRecord:
    return a_record(
        state=TaskState.RUNNING, attempt=2, token=9, node="n", started_at=NOON, cancel=CancelRequest(NOON), **fields
    )


@pytest.mark.spec("QUE-01")
@given(records, moves)
def test_a_record_never_leaves_the_graph(record: TaskRecord, move: Move):
    """A legal move arrives where it says; an illegal one is refused and changes nothing."""
    before = copy.copy(record)
    if move.state in LEGAL[record.state]:
        apply_move(record, move)
        assert record.state is move.state
        assert record.updated_at == move.at
    else:
        with pytest.raises(IllegalMove):
            apply_move(record, move)
        assert record == before


@given(records, moves)
def test_the_dedupe_slot_is_free_exactly_when_the_task_has_ended(record: TaskRecord, move: Move):
    """A move frees the slot if it ends the task, and never otherwise."""
    # One that failed had let go of its slot: sent again, it takes the one it remembers.
    slot = record.dedupe_key if record.state is TaskState.FAILED else record.dedupe_slot
    if move.state in LEGAL[record.state]:
        apply_move(record, move)
        assert record.dedupe_slot == (None if record.state in ENDED else slot)


@given(records, moves)
def test_only_a_running_task_has_a_token_and_a_node(record: TaskRecord, move: Move):
    """Whatever leaves running gives up its token and its node."""
    if record.state is TaskState.RUNNING and move.state in LEGAL[record.state]:
        apply_move(record, move)
        assert (record.token, record.node) == (None, None)


@pytest.mark.spec("QUE-12")
@given(records, moves)
def test_a_cancel_request_stays_when_the_task_has_finished(record: TaskRecord, move: Move):
    """However a run ends, the request to cancel it stays with the task."""
    cancel = record.cancel
    if record.state is TaskState.RUNNING and move.state in LEGAL[record.state]:
        apply_move(record, move)
        assert record.cancel == cancel


@pytest.mark.spec("QUE-12", "QUE-15")
def test_a_task_that_is_sent_again_has_no_cancel_request():
    """A failed task that is sent again runs as if nobody had asked to cancel it."""
    record = running()
    apply_move(record, Move.failed(at=LATER, error=an_error()))
    assert record.cancel == CancelRequest(NOON)
    apply_move(record, Move.queued(at=LATER))
    assert record.cancel is None


@given(records, moves)
def test_a_finished_time_marks_what_ended(record: TaskRecord, move: Move):
    """A task has a time of ending, and a result if the move has one, exactly while it is ended."""
    if move.state in LEGAL[record.state]:
        apply_move(record, move)
        assert record.finished_at == (move.at if record.state in ENDED else None)
        assert record.result == (move.result if record.state in ENDED else None)


@given(records, moves)
def test_what_was_asked_never_changes(record: TaskRecord, move: Move):
    """No move touches identity, arguments, priority, place, key, limits or the time of creation."""
    asked = (
        "uuid",
        "id",
        "consumer",
        "queue",
        "args",
        "priority",
        "position",
        "key",
        "timeout_s",
        "retry",
        "created_at",
    )
    before = {name: getattr(record, name) for name in asked}
    if move.state in LEGAL[record.state]:
        apply_move(record, move)
        assert {name: getattr(record, name) for name in asked} == before


@given(records, moves)
def test_counters_count_what_the_move_says(record: TaskRecord, move: Move):
    """Retries, crashes and recoveries grow by one when the move counts as one; sent again by a person, all are zero. A
    completed run counts as nothing, whatever the move says."""
    before = copy.copy(record)
    if move.state in LEGAL[record.state]:
        apply_move(record, move)
        if move.state is TaskState.COMPLETED:
            assert (record.attempt, record.retries, record.crashes) == (before.attempt, before.retries, before.crashes)
            return
        assert record.attempt == before.attempt - move.unspent
        if before.state is TaskState.FAILED:
            assert (record.retries, record.crashes, record.recoveries) == (0, 0, 0)
        else:
            assert record.retries == before.retries + move.retried
            assert record.crashes == before.crashes + move.crashed
            assert record.recoveries == before.recoveries + move.recovered


def test_completed_keeps_the_result_and_drops_the_error():
    """A task that succeeds at last shows its result and no error of an earlier try."""
    record = running(error=an_error())
    apply_move(record, Move.completed(at=LATER, result="[1]", note=Note.remark("n")))
    assert (record.state, record.result, record.error) == (TaskState.COMPLETED, "[1]", None)
    assert record.note == Note.remark("n")


def test_failed_keeps_the_error():
    """A failed task says why."""
    record, error = running(), an_error()
    apply_move(record, Move.failed(at=LATER, error=error, crashed=True))
    assert (record.state, record.error, record.crashes, record.result) == (TaskState.FAILED, error, 1, None)


@pytest.mark.spec("QUE-13")
def test_retrying_waits_until_it_is_due():
    """A retry has a time to wait for and counts; one the consumer asked for itself does not count."""
    counted, steered = running(), running()
    apply_move(counted, Move.retrying(at=LATER, due_at=LATER + seconds(4), error=an_error()))
    apply_move(steered, Move.retrying(at=LATER, due_at=LATER + seconds(4), error=an_error(), retried=False))
    assert (counted.due_at, counted.retries) == (LATER + seconds(4), 1)
    assert (steered.due_at, steered.retries) == (LATER + seconds(4), 0)


def test_given_back_uses_no_attempt_up():
    """A run that is given back unrun leaves the attempt unspent, and its row says interrupted."""
    record, move = running(), Move.given_back(at=LATER, note=Note(NoteCode.NODE_STOPPED))
    apply_move(record, move)
    assert (record.state, record.attempt, record.note) == (TaskState.QUEUED, 1, Note(NoteCode.NODE_STOPPED))
    assert move.run is TaskState.INTERRUPTED
    assert not move.to_head


@pytest.mark.spec("QUE-23")
def test_recovered_goes_to_the_head_and_is_counted():
    """A task taken back from a dead node goes to the head, and the recovery is counted."""
    record = running()
    apply_move(record, Move.interrupted(at=LATER, error=node_died("n"), note=Note(NoteCode.NODE_DIED)))
    move = Move.recover(at=LATER)
    apply_move(record, move)
    assert (record.state, record.recoveries, record.attempt) == (TaskState.QUEUED, 1, 2)
    assert record.error is None  # it is the attempt's
    assert move.to_head


def test_a_move_is_a_value():
    """A move cannot be changed once made, and survives being written down."""
    move = Move.retrying(at=NOON, due_at=LATER, error=an_error())
    with pytest.raises(AttributeError):
        move.state = TaskState.FAILED  # type: ignore[misc]
    assert msgspec.json.decode(msgspec.json.encode(move), type=Move) == move
