"""What a person asks of one task, and the pure decision what that means for it now."""

from __future__ import annotations

from datetime import datetime

import msgspec

from taskyard.errors import CommandRefused
from taskyard.model.blocker import Blocker, blocker_key, stored_detail
from taskyard.model.event import EventDetail, EventKind, make_detail
from taskyard.model.move import Move
from taskyard.model.notes import AuditStamp, CancelCode, CancelRequest, Fact, Note, NoteCode
from taskyard.model.order import Priority
from taskyard.model.queue import QueueOrder
from taskyard.model.state import ENDED, HAS_PLACE, LEGAL, QUEUED, RUNNING, WAITING_FOR_TIME, TaskState
from taskyard.model.task import TaskRecord, moment


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Stop it: at once when it waits, by asking its run when it is running. With `force` the run is not asked but
    killed, where it can be: what it was writing may be damaged. `code` and `subject` say what asks, where that is not
    a person."""

    reason: str = ""
    force: bool = False
    code: CancelCode = CancelCode.REQUESTED
    subject: str = ""


class Retry(msgspec.Struct, frozen=True, tag="retry"):
    """Send a failed or interrupted task again, at the head of its priority or at the tail."""

    to_head: bool = True


class SetPriority(msgspec.Struct, frozen=True, tag="set_priority"):
    """Change the priority of a task that has not started."""

    priority: Priority


class Hold(msgspec.Struct, frozen=True, tag="hold"):
    """Keep a task that has not started from starting; it keeps its place."""

    reason: str = ""


class Release(msgspec.Struct, frozen=True, tag="release"):
    """Let a task go that was held: where it belongs now, by its due time, and at its old place."""


class Skip(msgspec.Struct, frozen=True, tag="skip"):
    """End a task that has not started, as skipped."""

    reason: str = ""


class StartNow(msgspec.Struct, frozen=True, tag="start_now"):
    """To the head of its priority, or `urgent`: to that of the high ones; also what waits for its time, is held, or is
    blocked by an admission check: a node that has the check runs it again. It never goes before what runs."""

    urgent: bool = False


class MoveBefore(msgspec.Struct, frozen=True, tag="move_before"):
    """Put it right before another task of its queue and priority."""

    other: str


class MoveAfter(msgspec.Struct, frozen=True, tag="move_after"):
    """Put it right after another task of its queue and priority."""

    other: str


class Reschedule(msgspec.Struct, frozen=True, tag="reschedule"):
    """Make it due at another time, earlier or later."""

    due_at: datetime

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "due_at", moment("at", self.due_at))


class _OfBlocker(msgspec.Struct, frozen=True):
    kind: str
    detail: str

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "detail", stored_detail(self.detail))


class Block(_OfBlocker, frozen=True, tag="block"):
    """Keep a queued task from starting until this blocker is freed; it keeps its place. A node asks for it."""


class Unblock(_OfBlocker, frozen=True, tag="unblock"):
    """Let a task go on that waits for this blocker. A node asks for it."""


Command = (
    Cancel
    | Retry
    | SetPriority
    | Hold
    | Release
    | Skip
    | StartNow
    | MoveBefore
    | MoveAfter
    | Reschedule
    | Block
    | Unblock
)

VERBS: dict[type[Command], str] = {
    Cancel: "cancel",
    Retry: "retry",
    SetPriority: "change the priority of",
    Hold: "hold",
    Release: "release",
    Skip: "skip",
    StartNow: "start",
    MoveBefore: "move",
    MoveAfter: "move",
    Reschedule: "reschedule",
    Block: "block",
    Unblock: "unblock",
}


_NOT_STARTED = frozenset(TaskState) - ENDED - {RUNNING}

FITS: dict[type[Command], frozenset[TaskState]] = {
    Cancel: frozenset(TaskState) - ENDED,
    Retry: frozenset({TaskState.FAILED, TaskState.INTERRUPTED}),
    SetPriority: _NOT_STARTED,
    Hold: frozenset(state for state in TaskState if TaskState.PAUSED in LEGAL[state]),
    Release: frozenset({TaskState.PAUSED}),
    Skip: frozenset(state for state in TaskState if TaskState.SKIPPED in LEGAL[state]),
    StartNow: WAITING_FOR_TIME | {QUEUED, TaskState.PAUSED, TaskState.BLOCKED},
    MoveBefore: HAS_PLACE,
    MoveAfter: HAS_PLACE,
    Reschedule: WAITING_FOR_TIME | HAS_PLACE,
    Block: frozenset({QUEUED}),
    Unblock: frozenset({TaskState.BLOCKED}),
}
"""The states of a task in which a command may have an effect; in all others `decide` refuses it."""


class AskCancel(msgspec.Struct, frozen=True):
    """No move yet: the run is asked to stop, and settles as canceled when it has."""

    at: datetime
    cancel: CancelRequest
    note: Note | None = None

    kind = EventKind.CANCEL_REQUESTED


class Reprioritize(msgspec.Struct, frozen=True):
    """No move: the task keeps its state and its place, among those of another priority."""

    at: datetime
    priority: int
    note: Note | None = None

    kind = EventKind.PRIORITY_CHANGED


class Reorder(msgspec.Struct, frozen=True):
    """No move: the task keeps its state and gets another place, at the head of a priority, or beside the task that
    stands at `beside`."""

    at: datetime
    priority: int
    beside: int | None = None
    before: bool = True
    note: Note | None = None

    kind = EventKind.REORDERED


class Redate(msgspec.Struct, frozen=True):
    """No move: the task keeps its state and is due at another time."""

    at: datetime
    due_at: datetime
    note: Note | None = None

    kind = EventKind.RESCHEDULED


Change = AskCancel | Reprioritize | Reorder | Redate
Decision = Move | Change


def anchor_of(command: Command) -> str | None:
    """The other task that has to be looked at to decide, if there is one."""
    return command.other if isinstance(command, MoveBefore | MoveAfter) else None


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A command with all that is needed to decide it: who asks, when, in what order the queue goes, and the task that
    `anchor_of` names, if there is one."""

    command: Command
    now: datetime
    by: str = ""
    order: QueueOrder = QueueOrder.PRIORITY
    anchor: TaskRecord | None = None


def decide(record: TaskRecord, asked: Asked) -> Decision:
    """What the command does to `record`, or `CommandRefused` naming the state it found."""
    command, now, by = asked.command, asked.now, asked.by
    if record.state not in FITS[type(command)]:
        raise _refused(record, command, refusal_code(command, record.state))
    match command:
        case Cancel():
            return _cancel(record, command, now, by)
        case Retry(to_head):
            return Move.queued(at=now, to_head=to_head, note=_note(NoteCode.RETRIED, asked))
        case SetPriority(priority):
            note = _note(NoteCode.PRIORITY_CHANGED, asked, priority=priority.label)
            return Reprioritize(at=now, priority=priority.value, note=note)
        case Hold(reason):
            return Move(state=TaskState.PAUSED, at=now, hold=AuditStamp(by, now, reason))
        case Release():
            # One whose time has come while it was held joins the line as others do that are due.
            to_tail = record.is_parked and not _is_tried_again(record)
            return Move(
                state=_where_it_belongs(record, now), at=now, to_tail=to_tail, note=_note(NoteCode.RELEASED, asked)
            )
        case Skip(reason):
            return Move(state=TaskState.SKIPPED, at=now, note=Note(NoteCode.SKIPPED, by, reason, now))
        case StartNow(urgent):
            return _start_now(record, asked, Priority.HIGH.value if urgent else record.priority)
        case MoveBefore() | MoveAfter():
            return _beside(record, command, asked)
        case Reschedule(due_at):
            return _reschedule(record, due_at, asked)
        case Block() | Unblock():
            return _block(record, command, now, by)


def _block(record: TaskRecord, command: Block | Unblock, now: datetime, by: str) -> Move:
    if isinstance(command, Block):
        return Move(state=TaskState.BLOCKED, at=now, blocker=Blocker(command.kind, command.detail, now), actor=by)
    if record.blocked_by != blocker_key(command.kind, command.detail):
        waits_for = "" if record.blocker is None else record.blocker.label
        raise _refused(record, command, "other_blocker", f"it waits for {waits_for}")
    return Move(state=QUEUED if record.due_at <= now else TaskState.SCHEDULED, at=now, actor=by)


def refusal_code(command: Command, state: TaskState) -> str:
    """Why `decide` refuses any task in this state, which the command does not fit."""
    match command:
        case Retry():
            return "not_failed" if state in ENDED else "not_finished"
        case Hold() if state is RUNNING:
            return "never_held"
        case MoveBefore() | MoveAfter():
            return "not_in_line"
    return f"is_{state}"


def _refused(record: TaskRecord, command: Command, code: str, detail: str = "") -> CommandRefused:
    return CommandRefused(record.uuid, VERBS[type(command)], record.state, code=code, detail=detail)


def _note(code: NoteCode, asked: Asked, **facts: Fact) -> Note | None:
    """A command that no actor is named for leaves the note as it is."""
    return Note(code, asked.by, at=asked.now, facts=facts) if asked.by else None


def _cancel(record: TaskRecord, command: Cancel, now: datetime, by: str) -> Decision:
    is_forced = command.force and record.state is RUNNING
    cancel = CancelRequest(now, by, command.reason, command.code, command.subject, is_forced)
    return AskCancel(now, cancel) if record.state is RUNNING else Move.canceled(at=now, cancel=cancel)


def _where_it_belongs(record: TaskRecord, now: datetime) -> TaskState:
    """The state of a task that nobody holds."""
    if record.open_dependencies:
        return TaskState.BLOCKED
    if record.due_at <= now:
        return QUEUED
    return TaskState.RETRYING if _is_tried_again(record) else TaskState.SCHEDULED


def _is_tried_again(record: TaskRecord) -> bool:
    return record.retries > 0 and record.error is not None


def _start_now(record: TaskRecord, asked: Asked, priority: int) -> Decision:
    now, note = asked.now, _note(NoteCode.START_REQUESTED, asked)
    if record.state is QUEUED:
        return Reorder(at=now, priority=priority, note=note)
    if record.open_dependencies:
        raise _refused(record, asked.command, "has_dependencies")
    # What is due now waits no longer: it must not seem to have waited since a time that is still to come.
    due_at = min(record.due_at, now)
    return Move(state=QUEUED, at=now, due_at=due_at, to_head=True, priority=priority, note=note)


def _beside(record: TaskRecord, command: MoveBefore | MoveAfter, asked: Asked) -> Reorder:
    anchor = asked.anchor
    if not record.has_place:
        raise _refused(record, command, "not_in_line")
    if anchor is None:
        raise _refused(record, command, "unknown_task", f"there is no task {command.other}")
    if anchor.uuid == record.uuid:
        raise _refused(record, command, "same_task")
    if not anchor.has_place:
        raise _refused(
            record, command, "other_not_in_line", f"task {anchor.uuid} is {anchor.state}, and does not stand in line"
        )
    theirs, own = _row_of(anchor, asked.order), _row_of(record, asked.order)
    if theirs != own:
        raise _refused(record, command, "other_line", f"task {anchor.uuid} stands in {theirs}, this one in {own}")
    note = _note(NoteCode.MOVED, asked)
    return Reorder(asked.now, record.priority, anchor.position, isinstance(command, MoveBefore), note)


def _row_of(record: TaskRecord, order: QueueOrder) -> str:
    """Those among whom its place counts, in words."""
    match order:
        case QueueOrder.PRIORITY:
            return f"queue {record.queue!r}, {Priority(record.priority).label}"
        case QueueOrder.FIFO:
            return f"queue {record.queue!r}"
        case QueueOrder.BUCKETS:
            return f"queue {record.queue!r}, bucket {record.bucket or ''!r}"


def _reschedule(record: TaskRecord, due_at: datetime, asked: Asked) -> Decision:
    now, note = asked.now, _note(NoteCode.RESCHEDULED, asked)
    if record.state is QUEUED and due_at > now:
        return Move(state=TaskState.SCHEDULED, at=now, due_at=due_at, note=note)
    return Redate(at=now, due_at=due_at, note=note)


def _merged(first: CancelRequest | None, forced: CancelRequest) -> CancelRequest:
    """A forced request after another: it keeps the time of the first, and its reason if it brings none."""
    if first is None:
        return forced
    return msgspec.structs.replace(forced, at=first.at, reason=forced.reason or first.reason)


def change_detail(record: TaskRecord, change: Change) -> EventDetail | None:
    """What the event of a change says beyond its kind; `record` is the task before or after it."""
    if isinstance(change, AskCancel):
        return make_detail(change.kind, record.state, actor=change.cancel.actor, code=change.cancel.code)
    actor = "" if change.note is None else change.note.actor
    return make_detail(change.kind, record.state, actor=actor)


def apply_change(record: TaskRecord, change: Change) -> None:
    """Change `record` as a decision says that is no move. The place that a `Reorder` leads to is the store's part."""
    record.updated_at = change.at
    match change:
        case Reprioritize() | Reorder():
            record.priority = change.priority
        case Redate():
            record.due_at = change.due_at
            if record.state is TaskState.PAUSED and not record.open_dependencies and change.due_at > change.at:
                record.is_parked = True  # as one that is not held, it leaves the line
        case AskCancel():
            if record.cancel is not None and not change.cancel.is_forced:
                return  # the first request stands
            record.cancel = _merged(record.cancel, change.cancel)
    record.note = record.note if change.note is None else change.note
