"""What a person asks of one task, and the pure decision what that means for it now."""

from __future__ import annotations

from datetime import datetime

import msgspec

from taskyard.errors import CommandRefused
from taskyard.model.event import EventKind
from taskyard.model.execution import ErrorKind, ExecutionError
from taskyard.model.limits import QueueOrder
from taskyard.model.move import Move
from taskyard.model.order import Priority
from taskyard.model.settle import ASKED_TO_CANCEL, CANCELED_BY_FORCE
from taskyard.model.state import ENDED, HAS_PLACE, LEGAL, QUEUED, RUNNING, WAITING_FOR_TIME, TaskState
from taskyard.model.task import TaskRecord, moment

DAMAGED = "what it was writing may be damaged"
ONLY_IN_LINE = "only what stands in line can be moved"
WAITS_FOR_OTHERS = "it waits for other tasks, and starts when they have completed"

THEN = "; then "
"""Between who holds a task and what was done to it since."""


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Stop it: at once when it waits, by asking its run when it is running. With `force` the run is not asked but
    killed, where it can be: what it was writing may be damaged."""

    reason: str = ""
    force: bool = False


class Retry(msgspec.Struct, frozen=True, tag=True):
    """Send a failed or interrupted task again, at the head of its priority or at the tail."""

    to_head: bool = True


class SetPriority(msgspec.Struct, frozen=True, tag=True):
    """Change the priority of a task that has not started."""

    priority: Priority


class Hold(msgspec.Struct, frozen=True, tag=True):
    """Keep a task that has not started from starting; it keeps its place."""

    reason: str = ""


class Release(msgspec.Struct, frozen=True, tag=True):
    """Let a task go that was held: where it belongs now, by its due time, and at its old place."""


class Skip(msgspec.Struct, frozen=True, tag=True):
    """End a task that has not started, as skipped."""

    reason: str = ""


class StartNow(msgspec.Struct, frozen=True, tag=True):
    """To the head of its priority, or `urgent`: to that of the high ones; also what waits for its time or is held. It
    never goes before what runs."""

    urgent: bool = False


class MoveBefore(msgspec.Struct, frozen=True, tag=True):
    """Put it right before another task of its queue and priority."""

    other: str


class MoveAfter(msgspec.Struct, frozen=True, tag=True):
    """Put it right after another task of its queue and priority."""

    other: str


class Reschedule(msgspec.Struct, frozen=True, tag=True):
    """Make it due at another time, earlier or later."""

    due_at: datetime

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "due_at", moment("at", self.due_at))


Command = Cancel | Retry | SetPriority | Hold | Release | Skip | StartNow | MoveBefore | MoveAfter | Reschedule

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
}


_NOT_STARTED = frozenset(TaskState) - ENDED - {RUNNING}

FITS: dict[type[Command], frozenset[TaskState]] = {
    Cancel: frozenset(TaskState) - ENDED,
    Retry: frozenset({TaskState.FAILED, TaskState.INTERRUPTED}),
    SetPriority: _NOT_STARTED,
    Hold: frozenset(state for state in TaskState if TaskState.PAUSED in LEGAL[state]),
    Release: frozenset({TaskState.PAUSED}),
    Skip: frozenset(state for state in TaskState if TaskState.SKIPPED in LEGAL[state]),
    StartNow: WAITING_FOR_TIME | {QUEUED, TaskState.PAUSED},
    MoveBefore: HAS_PLACE,
    MoveAfter: HAS_PLACE,
    Reschedule: WAITING_FOR_TIME | HAS_PLACE,
}
"""The states of a task in which a command may have an effect; in all others `decide` refuses it."""


class AskCancel(msgspec.Struct, frozen=True):
    """No move yet: the run is asked to stop, and settles as canceled when it has."""

    at: datetime
    reason: str = ""
    note: str | None = None
    force: bool = False

    kind = EventKind.CANCEL_ASKED


class Reprioritize(msgspec.Struct, frozen=True):
    """No move: the task keeps its state and its place, among those of another priority."""

    at: datetime
    priority: int
    note: str | None = None

    kind = EventKind.PRIORITY_CHANGED


class Reorder(msgspec.Struct, frozen=True):
    """No move: the task keeps its state and gets another place, at the head of a priority, or beside the task that
    stands at `beside`."""

    at: datetime
    priority: int
    beside: int | None = None
    before: bool = True
    note: str | None = None

    kind = EventKind.REORDERED


class Redate(msgspec.Struct, frozen=True):
    """No move: the task keeps its state and is due at another time."""

    at: datetime
    due_at: datetime
    note: str | None = None

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
        raise _refused(record, command, _hint(record.state, command))
    match command:
        case Cancel():
            return _cancel(record, command, now, by)
        case Retry(to_head):
            return Move.queued(at=now, to_head=to_head, note=_note("sent again", by) if by else None)
        case SetPriority(priority):
            note = _added(record, f"priority changed to {priority.label}", by)
            return Reprioritize(at=now, priority=priority.value, note=note)
        case Hold(reason):
            return Move(state=TaskState.PAUSED, at=now, note=_note("held", by, reason))
        case Release():
            # One whose time has come while it was held joins the line as others do that are due.
            to_tail = record.parked and not _is_tried_again(record)
            return Move(state=_where_it_belongs(record, now), at=now, to_tail=to_tail, note=_note("released", by))
        case Skip(reason):
            return Move(state=TaskState.SKIPPED, at=now, note=_note("skipped", by, reason))
        case StartNow(urgent):
            return _start_now(record, command, Priority.HIGH.value if urgent else record.priority, now, by)
        case MoveBefore() | MoveAfter():
            return _beside(record, command, asked)
        case Reschedule(due_at):
            return _reschedule(record, due_at, now, by)


def why_unfit(command: Command, state: TaskState) -> str:
    """What `decide` would say of any task in this state, which the command does not fit."""
    return CommandRefused("", VERBS[type(command)], state, _hint(state, command)).why


def _hint(state: TaskState, command: Command) -> str:
    """What to know, or to do instead, where a command does not fit the state."""
    match command:
        case Retry():
            is_over = state in ENDED
            return "only a failed task can be sent again; submit a new one" if is_over else "it has not ended yet"
        case Hold() if state is RUNNING:
            return "a running task is never held"
        case StartNow() if state is TaskState.BLOCKED:
            return WAITS_FOR_OTHERS
        case MoveBefore() | MoveAfter():
            return ONLY_IN_LINE
    return ""


def _refused(record: TaskRecord, command: Command, hint: str = "") -> CommandRefused:
    return CommandRefused(record.uuid, VERBS[type(command)], record.state, hint)


def _note(what: str, by: str, reason: str = "") -> str:
    return what + (f" by {by}" if by else "") + (f": {reason}" if reason else "")


def _added(record: TaskRecord, what: str, by: str) -> str | None:
    """Who did something that leaves the task in its state. Of one that is held, who holds it and why is told first."""
    if not by:
        return None
    note = _note(what, by)
    held = (record.note or "").partition(THEN)[0] if record.state is TaskState.PAUSED else ""
    return f"{held}{THEN}{note}" if held else note


def _cancel(record: TaskRecord, command: Cancel, now: datetime, by: str) -> Decision:
    reason = command.reason
    if record.state is RUNNING:
        if command.force:
            return AskCancel(now, reason, f"{_note(CANCELED_BY_FORCE, by, reason)}; {DAMAGED}", force=True)
        return AskCancel(now, reason, _note(ASKED_TO_CANCEL, by, reason) if reason or by else None)
    error = ExecutionError(kind=ErrorKind.CANCELED, message=reason)
    return Move.canceled(at=now, error=error, note=f"canceled by {by}" if by else None)


def _where_it_belongs(record: TaskRecord, now: datetime) -> TaskState:
    """The state of a task that nobody holds."""
    if record.waits:
        return TaskState.BLOCKED
    if record.due_at <= now:
        return QUEUED
    return TaskState.RETRYING if _is_tried_again(record) else TaskState.SCHEDULED


def _is_tried_again(record: TaskRecord) -> bool:
    return record.retries > 0 and record.error is not None


def _start_now(record: TaskRecord, command: Command, priority: int, now: datetime, by: str) -> Decision:
    if record.state is QUEUED:
        return Reorder(at=now, priority=priority, note=_added(record, "started", by))
    if record.waits:
        raise _refused(record, command, WAITS_FOR_OTHERS)
    # What is due now waits no longer: it must not seem to have waited since a time that is still to come.
    due_at = min(record.due_at, now)
    note = _note("started", by) if by else None
    return Move(state=QUEUED, at=now, due_at=due_at, to_head=True, priority=priority, note=note)


def _beside(record: TaskRecord, command: MoveBefore | MoveAfter, asked: Asked) -> Reorder:
    anchor = asked.anchor
    if not record.has_place:
        raise _refused(record, command, ONLY_IN_LINE)
    if anchor is None:
        raise _refused(record, command, f"there is no task {command.other}")
    if anchor.uuid == record.uuid:
        raise _refused(record, command, "it cannot be put beside itself")
    if not anchor.has_place:
        raise _refused(record, command, f"task {anchor.uuid} is {anchor.state}, and does not stand in line")
    theirs, own = _row_of(anchor, asked.order), _row_of(record, asked.order)
    if theirs != own:
        raise _refused(record, command, f"task {anchor.uuid} stands in {theirs}, this one in {own}")
    note = _added(record, "moved", asked.by)
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


def _reschedule(record: TaskRecord, due_at: datetime, now: datetime, by: str) -> Decision:
    note = _added(record, "rescheduled", by)
    if record.state is QUEUED and due_at > now:
        return Move(state=TaskState.SCHEDULED, at=now, due_at=due_at, note=note)
    return Redate(at=now, due_at=due_at, note=note)


def apply_change(record: TaskRecord, change: Change) -> None:
    """Change `record` as a decision says that is no move. The place that a `Reorder` leads to is the store's part."""
    record.updated_at = change.at
    match change:
        case Reprioritize() | Reorder():
            record.priority = change.priority
        case Redate():
            record.due_at = change.due_at
            if record.state is TaskState.PAUSED and not record.waits and change.due_at > change.at:
                record.parked = True  # as one that is not held, it leaves the line
        case AskCancel():
            if record.cancel_asked_at is not None and not change.force:
                return  # it was told already; what was said first stands
            record.cancel_asked_at = record.cancel_asked_at or change.at
            record.cancel_forced = record.cancel_forced or change.force
            record.cancel_reason = change.reason or record.cancel_reason
    record.note = record.note if change.note is None else change.note
