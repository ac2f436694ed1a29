"""What a person asks of one task, and the pure decision what that means for it now."""

from __future__ import annotations

from datetime import datetime

import msgspec

from taskyard.errors import CommandRefused
from taskyard.model.execution import ErrorKind, ExecutionError
from taskyard.model.move import Move
from taskyard.model.order import Priority
from taskyard.model.state import ENDED, LEGAL, TaskState
from taskyard.model.task import TaskRecord


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Stop it: at once when it waits, by asking its run when it is running."""

    reason: str = ""


class Retry(msgspec.Struct, frozen=True, tag=True):
    """Send a failed task again, at the head of its priority or at the tail."""

    to_head: bool = True


class SetPriority(msgspec.Struct, frozen=True, tag=True):
    """Change the priority of a task that has not started."""

    priority: Priority


Command = Cancel | Retry | SetPriority


class AskCancel(msgspec.Struct, frozen=True):
    """No move yet: the run is asked to stop, and settles as canceled when it has."""

    at: datetime
    reason: str = ""


class Reprioritize(msgspec.Struct, frozen=True):
    """No move: the task keeps its state and changes its lane's order."""

    at: datetime
    priority: Priority


Decision = Move | AskCancel | Reprioritize


def decide(record: TaskRecord, command: Command, *, now: datetime) -> Decision:
    """What `command` does to `record`, or `CommandRefused` naming the state it found."""
    match command:
        case Cancel(reason):
            return _cancel(record, reason, now)
        case Retry(to_head):
            if record.state is TaskState.FAILED:
                return Move.queued(at=now, to_head=to_head)
            hint = (
                "only a failed task can be sent again; submit a new one"
                if record.state in ENDED
                else "it has not ended yet"
            )
            raise CommandRefused(record.uuid, "retry", record.state, hint)
        case SetPriority(priority):
            if record.state in ENDED or record.state is TaskState.RUNNING:
                raise CommandRefused(record.uuid, "change the priority of", record.state)
            return Reprioritize(at=now, priority=priority)


def _cancel(record: TaskRecord, reason: str, now: datetime) -> Decision:
    if record.state is TaskState.RUNNING:
        return AskCancel(at=now, reason=reason)
    if TaskState.CANCELED in LEGAL[record.state]:
        return Move.canceled(at=now, error=ExecutionError(kind=ErrorKind.CANCELED, message=reason))
    raise CommandRefused(record.uuid, "cancel", record.state)


def apply_decision(record: TaskRecord, decision: AskCancel | Reprioritize) -> None:
    """Change `record` as a decision says that is no move."""
    record.updated_at = decision.at
    if isinstance(decision, Reprioritize):
        record.priority = decision.priority
    elif record.cancel_asked_at is None:
        record.cancel_asked_at = decision.at
        if decision.reason:
            record.cancel_reason = decision.reason
            record.note = f"asked to cancel: {decision.reason}"
