"""Notes, holds and cancel requests as values, and the sentences that people read of them."""

import msgspec
import pytest

from taskyard.model.execution import ErrorCode, ErrorKind, ExecutionError
from taskyard.model.notes import (
    AuditStamp,
    CancelCode,
    CancelRequest,
    Note,
    NoteCode,
    cancel_reason,
    describe_cancel,
    describe_hold,
    describe_note,
)
from taskyard.model.state import TaskState
from taskyard.model.task import Outcome
from taskyard.testing.samples import NOON, a_record

S, N = TaskState, NoteCode

SENTENCES = [
    (Note.remark("took the second server"), "took the second server"),
    (Note(N.RELEASED, "ann"), "released by ann"),
    (Note(N.SKIPPED, "ann", "no need"), "skipped by ann: no need"),
    (Note(N.SKIPPED, reason="no need"), "skipped: no need"),
    (Note(N.RETRIED, "ann"), "sent again by ann"),
    (Note(N.RUN_AGAIN, "ann"), "run again by ann"),
    (Note(N.PRIORITY_CHANGED, "ann", facts={"priority": "high"}), "priority changed to high by ann"),
    (Note(N.START_REQUESTED, "ann"), "started by ann"),
    (Note(N.MOVED, "ann"), "moved by ann"),
    (Note(N.RESCHEDULED, "ann"), "rescheduled by ann"),
    (Note(N.CANCEL_OVERDUE, facts={"grace_s": 2.5}), "it did not stop within 2.5 s of the cancel request"),
    (Note(N.STOPPED_BY_CANCEL, reason="killed"), "killed"),
    (Note(N.CANCELED_INSTEAD_OF_RETRY), "canceled instead of another run"),
    (Note(N.FAILED_WHILE_CANCELING), "it failed while it was being canceled"),
    (Note(N.QUARANTINED, facts={"crashes": 3}), "quarantined: it took down 3 workers"),
    (Note(N.RETURNED, reason="no worker is free"), "no worker is free"),
    (Note(N.NODE_STOPPED), "its node was stopped"),
    (Note(N.LEASE_LOST), "its node lost its lease"),
    (Note(N.NODE_DIED, facts={"node": "host-1"}), "its node host-1 died"),
    (Note(N.DEVICE_LOST, facts={"device": "emu-1"}), "its device emu-1 was lost"),
    (Note(N.DEPENDENCY, facts={"task": "a-1", "state": "failed"}), "its dependency a-1 failed"),
    (Note(N.DEPENDENCY, facts={"task": "a-1", "state": "canceled"}), "its dependency a-1 was canceled"),
    (Note(N.DEPENDENCY, facts={"task": "a-1", "state": "skipped"}), "its dependency a-1 was skipped"),
    (Note(N.DEPENDENCY, facts={"task": "a-1", "state": "lost"}), "its dependency a-1 did not complete"),
]


@pytest.mark.parametrize(("note", "sentence"), SENTENCES, ids=lambda value: value if isinstance(value, str) else "")
def test_a_note_is_a_sentence(note: Note, sentence: str):
    """Every note has a sentence that says what happened, who did it and why."""
    assert describe_note(note) == sentence


def test_every_code_has_a_sentence():
    """The list above leaves no code out."""
    assert {note.code for note, _ in SENTENCES} == set(NoteCode)


@pytest.mark.parametrize(
    ("note", "sentence"),
    [
        (Note(N.PRIORITY_CHANGED, "ann"), "priority changed by ann"),
        (Note(N.CANCEL_OVERDUE, facts={"grace_s": "long"}), "cancel overdue"),
        (Note(N.QUARANTINED, facts={"workers": 3}), "quarantined"),
        (Note(N.NODE_DIED, reason="no beat"), "node died: no beat"),
        (Note(N.DEPENDENCY, facts={"state": "failed"}), "dependency"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_note_of_another_version_falls_back_to_its_code(note: Note, sentence: str):
    """A note whose facts are missing, or of another kind, is read by the words of its code."""
    assert describe_note(note) == sentence


@pytest.mark.parametrize(
    ("note", "sentence"),
    [
        (Note(N.SKIPPED, "{ann}", "{why} 100 %"), "skipped by {ann}: {why} 100 %"),
        (Note(N.NODE_DIED, facts={"node": "{0}"}), "its node {0} died"),
    ],
)
def test_text_of_a_person_is_repeated_as_it_is(note: Note, sentence: str):
    """Braces in a name, a reason or a fact are not taken for a place to fill."""
    assert describe_note(note) == sentence


@pytest.mark.parametrize(
    ("hold", "sentence"),
    [
        (AuditStamp("ann", NOON, "wait for the disk"), "held by ann: wait for the disk"),
        (AuditStamp("ann", NOON), "held by ann"),
        (AuditStamp("", NOON), "held"),
    ],
)
def test_a_hold_is_a_sentence(hold: AuditStamp, sentence: str):
    """A hold says who holds the task, and why."""
    assert describe_hold(hold) == sentence


BY_ANN = CancelRequest(NOON, "ann", "late")
FORCED = CancelRequest(NOON, "ann", "stuck", is_forced=True)
REPLACED = CancelRequest(NOON, code=CancelCode.REPLACED, subject="a-2")
OVERLAP = CancelRequest(NOON, code=CancelCode.OVERLAP, subject="nightly")


@pytest.mark.parametrize(
    ("cancel", "is_canceled", "sentence"),
    [
        (CancelRequest(NOON), True, "canceled"),
        (CancelRequest(NOON), False, "cancel requested"),
        (BY_ANN, True, "canceled by ann: late"),
        (BY_ANN, False, "cancel requested by ann: late"),
        (FORCED, True, "canceled by force by ann: stuck; what it was writing may be damaged"),
        (FORCED, False, "cancel requested by force by ann: stuck; what it was writing may be damaged"),
        (REPLACED, True, "canceled: replaced by task a-2"),
        (OVERLAP, True, "canceled: the next run of schedule nightly came due"),
        (OVERLAP, False, "cancel requested: the next run of schedule nightly came due"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_cancel_request_is_a_sentence(cancel: CancelRequest, is_canceled: bool, sentence: str):
    """A cancel request says who asked, why, and whether what the run was writing may be damaged."""
    assert describe_cancel(cancel, is_canceled=is_canceled) == sentence


def test_every_cancel_code_has_a_reason():
    """Whatever asks for a cancel, the reason that people read says so."""
    reasons = {cancel.code: cancel_reason(cancel) for cancel in (BY_ANN, REPLACED, OVERLAP)}
    assert reasons == {
        CancelCode.REQUESTED: "late",
        CancelCode.REPLACED: "replaced by task a-2",
        CancelCode.OVERLAP: "the next run of schedule nightly came due",
    }
    assert set(reasons) == set(CancelCode)


def test_remarks_tell_all_of_it():
    """The remarks of a task have its hold, its cancel request and its note, each if there is one."""
    hold, note = AuditStamp("ann", NOON, "wait"), Note(N.RESCHEDULED, "eve")
    assert a_record().remarks == ""
    assert a_record(state=S.PAUSED, hold=hold, note=note).remarks == "held by ann: wait; rescheduled by eve"
    assert a_record(state=S.RUNNING, cancel=BY_ANN).remarks == "cancel requested by ann: late"
    killed = a_record(state=S.CANCELED, cancel=BY_ANN, note=Note(N.STOPPED_BY_CANCEL, reason="killed"))
    assert killed.remarks == "canceled by ann: late; killed"


@pytest.mark.spec("QUE-12")
@pytest.mark.parametrize("state", [S.COMPLETED, S.FAILED])
def test_a_cancel_that_came_too_late_is_no_cancel(state: TaskState):
    """A task that completed or failed says that a cancel was requested, not that it was canceled."""
    assert a_record(state=state, cancel=BY_ANN).remarks == "cancel requested by ann: late"


STOPPED = ExecutionError(kind=ErrorKind.CANCELED, message="killed")
RAISED = ExecutionError(kind=ErrorKind.CANCELED, message="nothing to do", types=("Cancel",))
EARLIER = ExecutionError(kind=ErrorKind.RUNTIME, message="boom", types=("ValueError",))


@pytest.mark.parametrize(
    ("cancel", "error", "text"),
    [
        (None, None, ""),
        (BY_ANN, None, "late"),
        (REPLACED, None, "replaced by task a-2"),
        (None, RAISED, "nothing to do"),
        (BY_ANN, RAISED, "late; nothing to do"),
        (BY_ANN, STOPPED, "late"),
        (None, STOPPED, "killed"),
        (BY_ANN, EARLIER, "late"),
    ],
)
def test_why_a_task_was_canceled(cancel: CancelRequest | None, error: ExecutionError | None, text: str):
    """The reason is that of the request and that of the code that canceled itself; an error of an earlier attempt is
    no reason."""
    assert Outcome("a-1", S.CANCELED, None, error, cancel).cancel_text == text


@pytest.mark.parametrize(
    ("code", "details", "text"),
    [
        (ErrorCode.DEPENDENCY, {"task": "a-1", "state": "failed"}, "its dependency a-1 failed"),
        (ErrorCode.DEPENDENCY, {"task": "a-1", "state": "lost"}, "its dependency a-1 did not complete"),
        (ErrorCode.NODE_DIED, {"node": "host-1"}, "its node host-1 died"),
        (ErrorCode.DEVICE_LOST, {"device": "emu-1"}, "its device emu-1 was lost"),
        (None, {}, "boom"),
    ],
)
def test_an_error_is_a_sentence(code: ErrorCode | None, details: dict[str, str], text: str):
    """An error of the engine is read by its code and its facts, any other by its message."""
    message = "" if code else "boom"
    assert ExecutionError(kind=ErrorKind.SYSTEM, code=code, details=details, message=message).text == text


@pytest.mark.parametrize(
    "value",
    [
        *(note for note, _ in SENTENCES),
        Note(N.MOVED, "ann", at=NOON),
        AuditStamp("ann", NOON, "wait"),
        BY_ANN,
        FORCED,
        REPLACED,
    ],
    ids=repr,
)
def test_what_is_stored_reads_the_same(value: msgspec.Struct):
    """Notes, holds and cancel requests survive being written as JSON."""
    assert msgspec.json.decode(msgspec.json.encode(value), type=type(value)) == value
