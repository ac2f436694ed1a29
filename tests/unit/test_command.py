"""What a person asks, decided for every state."""

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import msgspec
import pytest

from taskyard.errors import CommandRefused, InvalidInput
from taskyard.model.command import (
    VERBS,
    AskCancel,
    Asked,
    Cancel,
    Command,
    Decision,
    Hold,
    MoveAfter,
    MoveBefore,
    Redate,
    Release,
    Reorder,
    Reprioritize,
    Reschedule,
    Retry,
    SetPriority,
    Skip,
    StartNow,
    anchor_of,
    apply_change,
    decide,
)
from taskyard.model.move import Move, apply_move
from taskyard.model.notes import AuditStamp, CancelCode, CancelRequest, Note, NoteCode
from taskyard.model.order import Priority
from taskyard.model.queue import QueueOrder
from taskyard.model.state import ENDED, HAS_PLACE, TaskState
from taskyard.model.task import TaskRecord
from taskyard.testing.samples import NOON, a_record, an_error, seconds

LATER = NOON + seconds(1)
S = TaskState

WAITS = {S.CREATED, S.SCHEDULED, S.QUEUED, S.BLOCKED, S.PAUSED, S.RETRYING, S.INTERRUPTED}

ALLOWED: dict[type[Command], set[TaskState]] = {
    Cancel: {*WAITS, S.RUNNING},
    Retry: {S.FAILED, S.INTERRUPTED},
    SetPriority: WAITS,
    Hold: {S.SCHEDULED, S.QUEUED, S.BLOCKED, S.RETRYING},
    Release: {S.PAUSED},
    Skip: {S.SCHEDULED, S.QUEUED, S.BLOCKED, S.PAUSED, S.RETRYING},
    StartNow: {S.SCHEDULED, S.QUEUED, S.PAUSED, S.RETRYING, S.BLOCKED},
    MoveBefore: set(HAS_PLACE),
    MoveAfter: set(HAS_PLACE),
    Reschedule: {S.SCHEDULED, S.QUEUED, S.PAUSED, S.RETRYING, S.BLOCKED},
}

COMMANDS: list[Command] = [
    Cancel("no need"),
    Cancel(force=True),
    Retry(to_head=True),
    Retry(to_head=False),
    SetPriority(Priority.HIGH),
    Hold("wait"),
    Release(),
    Skip("no need"),
    StartNow(),
    StartNow(urgent=True),
    MoveBefore("other"),
    MoveAfter("other"),
    Reschedule(NOON),
    Reschedule(NOON + seconds(60)),
]


def ask(record: TaskRecord, command: Command, **asked: Any) -> Decision:
    return decide(record, Asked(command=command, **{"now": LATER, **asked}))


@pytest.mark.spec("QUE-01")
@pytest.mark.parametrize("state", TaskState)
@pytest.mark.parametrize("command", COMMANDS, ids=repr)
def test_every_command_is_decided_in_every_state(state: TaskState, command: Command):
    """A command either leads to a legal change, or is refused with the state it found, and deciding changes nothing."""
    record, untouched = a_record(uuid="u", state=state), a_record(uuid="u", state=state)
    anchor = a_record(uuid="other", state=S.QUEUED) if anchor_of(command) else None
    if state in ALLOWED[type(command)]:
        decision = ask(record, command, anchor=anchor)
        assert record == untouched
        if isinstance(decision, Move):
            apply_move(record, decision)
        else:
            apply_change(record, decision)
            assert record.state is state
        assert record.updated_at == LATER
    else:
        with pytest.raises(CommandRefused) as refused:
            ask(record, command, anchor=anchor)
        assert (refused.value.uuid, refused.value.state) == ("u", state)
        assert refused.value.command == VERBS[type(command)]
        assert record == untouched


@pytest.mark.spec("QUE-11")
@pytest.mark.parametrize("state", sorted(WAITS))
def test_cancel_ends_what_waits(state: TaskState):
    """What has not started is canceled at once, with the reason given."""
    decision = ask(a_record(state=state), Cancel("no need"), by="ann")
    assert isinstance(decision, Move)
    assert (decision.state, decision.at, decision.error) == (TaskState.CANCELED, LATER, None)
    assert decision.cancel == CancelRequest(LATER, "ann", "no need")


@pytest.mark.spec("QUE-12")
def test_cancel_asks_what_runs():
    """What runs is asked to stop and goes on running; asking twice keeps the time of the first."""
    record = a_record(state=TaskState.RUNNING)
    for at in (LATER, LATER + seconds(5)):
        decision = ask(record, Cancel(), now=at)
        assert isinstance(decision, AskCancel)
        apply_change(record, decision)
    assert (record.state, record.cancel) == (TaskState.RUNNING, CancelRequest(LATER))


@pytest.mark.spec("QUE-12")
@pytest.mark.parametrize("state", [S.QUEUED, S.RUNNING])
def test_what_asks_for_a_cancel_is_kept(state: TaskState):
    """A cancel that no person asked for says what asked: a newer task, or a schedule."""
    decision = ask(a_record(state=state), Cancel(code=CancelCode.OVERLAP, subject="nightly"))
    assert isinstance(decision, Move | AskCancel)
    assert decision.cancel == CancelRequest(LATER, code=CancelCode.OVERLAP, subject="nightly")


@pytest.mark.spec("QUE-12")
def test_a_cancel_by_force_warns():
    """Force is kept on the record, also when it follows a cancel that asked, and people read a warning."""
    record = a_record(state=TaskState.RUNNING)
    asked, forced = ask(record, Cancel("late"), by="bob"), ask(record, Cancel("stuck", force=True), by="ann")
    assert isinstance(asked, AskCancel)
    assert isinstance(forced, AskCancel)
    for change in (asked, msgspec.structs.replace(forced, at=LATER + seconds(5)), asked):
        apply_change(record, change)
    assert record.cancel == CancelRequest(LATER, "ann", "stuck", is_forced=True)
    assert "may be damaged" in record.remarks


@pytest.mark.spec("QUE-12")
def test_a_forced_cancel_keeps_what_was_asked_first():
    """Force without a reason of its own keeps the time and the reason of the first request."""
    record = a_record(state=TaskState.RUNNING)
    for at, command, by in ((LATER, Cancel("late"), "bob"), (LATER + seconds(5), Cancel(force=True), "ann")):
        decision = ask(record, command, now=at, by=by)
        assert isinstance(decision, AskCancel)
        apply_change(record, decision)
    assert record.cancel == CancelRequest(LATER, "ann", "late", is_forced=True)


def test_a_task_that_waits_is_not_killed():
    """Force means nothing for a task that does not run: it is canceled without the warning."""
    decision = ask(a_record(state=S.QUEUED), Cancel(force=True))
    assert isinstance(decision, Move)
    assert decision.cancel == CancelRequest(LATER)


def test_nothing_is_made_due_where_the_calendar_ends():
    """Neither a store nor arithmetic could hold it; a moment in another zone is kept in UTC."""
    for year, zone in ((9999, timezone(-timedelta(hours=12))), (9500, UTC), (1, UTC)):
        with pytest.raises(InvalidInput, match=r"between the years 1970 and 9000|outside of the calendar"):
            Reschedule(datetime(year, 12, 31, 23, tzinfo=zone))
    assert Reschedule(datetime(2030, 1, 1, 2, tzinfo=timezone(timedelta(hours=2)))).due_at.tzinfo is UTC


def by_ann(code: NoteCode, reason: str = "", **facts: str) -> Note:
    return Note(code, "ann", reason, LATER, {**facts})


BY_ANN: list[tuple[Command, TaskState, Note | AuditStamp | CancelRequest]] = [
    (SetPriority(Priority.HIGH), S.QUEUED, by_ann(NoteCode.PRIORITY_CHANGED, priority="high")),
    (StartNow(), S.QUEUED, by_ann(NoteCode.START_REQUESTED)),
    (StartNow(), S.SCHEDULED, by_ann(NoteCode.START_REQUESTED)),
    (MoveBefore("other"), S.QUEUED, by_ann(NoteCode.MOVED)),
    (Reschedule(NOON), S.SCHEDULED, by_ann(NoteCode.RESCHEDULED)),
    (Reschedule(NOON + seconds(60)), S.QUEUED, by_ann(NoteCode.RESCHEDULED)),
    (Cancel("late"), S.QUEUED, CancelRequest(LATER, "ann", "late")),
    (Cancel("late"), S.RUNNING, CancelRequest(LATER, "ann", "late")),
    (Retry(), S.FAILED, by_ann(NoteCode.RETRIED)),
    (Hold("wait"), S.QUEUED, AuditStamp("ann", LATER, "wait")),
    (Release(), S.PAUSED, by_ann(NoteCode.RELEASED)),
    (Skip("no need"), S.QUEUED, by_ann(NoteCode.SKIPPED, "no need")),
]


def do(record: TaskRecord, command: Command, **asked: Any) -> None:
    decision = ask(record, command, **asked)
    apply_move(record, decision) if isinstance(decision, Move) else apply_change(record, decision)


@pytest.mark.parametrize(("command", "state", "kept"), BY_ANN, ids=repr)
def test_who_asked_is_noted(command: Command, state: TaskState, kept: Note | AuditStamp | CancelRequest):
    """Every command leaves who asked for it on the task, and when."""
    record = a_record(state=state)
    do(record, command, by="ann", anchor=a_record(uuid="other", state=S.QUEUED))
    assert [value for value in (record.note, record.hold, record.cancel) if value is not None] == [kept]


def test_a_command_of_nobody_leaves_the_note():
    """A command that no actor is named for does not replace what was noted before."""
    record = a_record(state=S.QUEUED, note=Note.remark("half done"))
    do(record, SetPriority(Priority.LOW))
    assert record.note == Note.remark("half done")


def test_who_holds_a_task_is_not_forgotten():
    """A held task tells who holds it and why, and apart from that what was done to it last."""
    record = a_record(state=S.QUEUED)
    for command, by in ((Hold("wait"), "ann"), (SetPriority(Priority.LOW), "bob"), (Reschedule(NOON), "eve")):
        do(record, command, by=by)
    assert record.hold == AuditStamp("ann", LATER, "wait")
    assert record.note == Note(NoteCode.RESCHEDULED, "eve", at=LATER)


@pytest.mark.spec("QUE-17")
@pytest.mark.parametrize("command", [Release(), StartNow(), Skip(), Cancel()], ids=repr)
def test_a_task_that_is_not_held_has_no_hold(command: Command):
    """Whatever ends a hold, nobody is named as the holder any more."""
    record = a_record(state=S.PAUSED, hold=AuditStamp("ann", NOON))
    do(record, command, by="bob")
    assert record.hold is None


@pytest.mark.parametrize("state", [S.BLOCKED, S.PAUSED])
def test_a_task_with_dependencies_is_not_started(state: TaskState):
    """A task that waits for others cannot be started by hand, and the refusal says what it waits for."""
    with pytest.raises(CommandRefused, match="it waits for other tasks, and starts when") as refused:
        ask(a_record(state=state, open_dependencies=1), StartNow())
    assert refused.value.code == "has_dependencies"


def test_a_task_that_a_check_blocks_is_started_by_hand():
    """It has no blocker then, and stands at the head."""
    record = a_record(state=S.BLOCKED, blocked_by="disk:/data", blocked_at=NOON)
    decision = ask(record, StartNow())
    assert isinstance(decision, Move)
    assert (decision.state, decision.to_head) == (S.QUEUED, True)
    apply_move(record, decision)
    assert (record.blocker, record.blocked_by, record.blocked_at) == (None, None, None)


@pytest.mark.spec("QUE-15")
@pytest.mark.parametrize("to_head", [True, False])
def test_retry_queues_a_failed_task_where_asked(to_head: bool):
    """A failed task goes back to its queue, at the head or at the tail as asked."""
    decision = ask(a_record(state=TaskState.FAILED), Retry(to_head=to_head))
    assert isinstance(decision, Move)
    assert (decision.state, decision.to_head) == (TaskState.QUEUED, to_head)


@pytest.mark.spec("QUE-15")
@pytest.mark.parametrize("state", sorted(set(TaskState) - ALLOWED[Retry]))
def test_a_refused_retry_says_what_to_do(state: TaskState):
    """A retry that does not fit says whether to wait or to submit anew."""
    with pytest.raises(CommandRefused, match="submit a new one" if state in ENDED else "not finished yet") as refused:
        ask(a_record(state=state), Retry())
    assert refused.value.code == ("not_failed" if state in ENDED else "not_finished")


@pytest.mark.spec("QUE-05")
def test_set_priority_changes_only_the_priority():
    """Changing the priority of a waiting task leaves its state as it is."""
    record = a_record(state=TaskState.QUEUED)
    decision = ask(record, SetPriority(Priority.LOW))
    assert isinstance(decision, Reprioritize)
    apply_change(record, decision)
    assert (record.state, record.priority) == (TaskState.QUEUED, Priority.LOW)


@pytest.mark.spec("QUE-17")
@pytest.mark.parametrize(
    ("fields", "state"),
    [
        ({}, S.QUEUED),
        ({"due_at": NOON + seconds(60)}, S.SCHEDULED),
        ({"due_at": NOON + seconds(60), "retries": 1, "error": an_error()}, S.RETRYING),
        ({"retries": 1, "error": an_error()}, S.QUEUED),
    ],
)
def test_a_task_is_released_to_where_it_belongs(fields: dict[str, Any], state: TaskState):
    """By its due time: it waits on for that, for its retry, or stands in line again."""
    decision = ask(a_record(state=S.PAUSED, **fields), Release())
    assert isinstance(decision, Move)
    assert (decision.state, decision.to_head) == (state, False)


@pytest.mark.spec("QUE-17")
def test_a_running_task_is_never_held():
    """It is refused, and said why."""
    with pytest.raises(CommandRefused, match="a running task is never held") as refused:
        ask(a_record(state=S.RUNNING), Hold())
    assert refused.value.code == "never_held"


@pytest.mark.spec("QUE-06")
@pytest.mark.parametrize("state", [S.SCHEDULED, S.PAUSED, S.RETRYING])
def test_what_waits_for_its_time_starts_now(state: TaskState):
    """It is due now, at the head, and of the priority that was asked for."""
    decision = ask(a_record(state=state, due_at=NOON + seconds(60)), StartNow(urgent=True))
    assert isinstance(decision, Move)
    assert (decision.state, decision.due_at, decision.to_head, decision.priority) == (S.QUEUED, LATER, True, 0)


@pytest.mark.spec("QUE-07")
@pytest.mark.parametrize(
    ("order", "other", "fits"),
    [
        (QueueOrder.PRIORITY, {}, True),
        (QueueOrder.PRIORITY, {"queue": "cpu"}, False),
        (QueueOrder.PRIORITY, {"priority": 0}, False),
        (QueueOrder.PRIORITY, {"bucket": "x"}, True),
        (QueueOrder.FIFO, {"priority": 0, "bucket": "x"}, True),
        (QueueOrder.FIFO, {"queue": "cpu"}, False),
        (QueueOrder.BUCKETS, {"priority": 0}, True),
        (QueueOrder.BUCKETS, {"bucket": "x"}, False),
        (QueueOrder.PRIORITY, {"state": S.RUNNING}, False),
        (QueueOrder.PRIORITY, {"uuid": "u"}, False),
        (QueueOrder.PRIORITY, None, False),
    ],
)
def test_a_task_is_moved_among_those_it_stands_with(order: QueueOrder, other: dict[str, Any] | None, fits: bool):
    """Beside another one in line, of its queue, and of its priority or bucket where that counts; not beside itself."""
    record = a_record(uuid="u", state=S.QUEUED)
    anchor = None if other is None else a_record(**{"uuid": "v", "state": S.PAUSED, "position": 7, **other})
    if fits:
        assert ask(record, MoveBefore("v"), order=order, anchor=anchor) == Reorder(LATER, 1, 7, True)
        assert ask(record, MoveAfter("v"), order=order, anchor=anchor) == Reorder(LATER, 1, 7, False)
    else:
        with pytest.raises(CommandRefused):
            ask(record, MoveBefore("v"), order=order, anchor=anchor)


@pytest.mark.parametrize(
    ("state", "due_s", "expected"),
    [(S.QUEUED, 60, S.SCHEDULED), (S.QUEUED, 0, None), (S.SCHEDULED, 60, None), (S.RETRYING, 0, None)],
)
def test_a_task_is_rescheduled_either_way(state: TaskState, due_s: float, expected: TaskState | None):
    """What stands in line goes out of it until then; what waits for a time waits for the new one."""
    due_at = NOON + seconds(due_s)
    decision = ask(a_record(state=state), Reschedule(due_at))
    if expected is None:
        assert decision == Redate(LATER, due_at)
    else:
        assert isinstance(decision, Move)
        assert (decision.state, decision.due_at) == (expected, due_at)
