"""A task that waits for others, and what their ends mean for it: pure rules, which every store follows."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import datetime
from enum import StrEnum
from graphlib import CycleError, TopologicalSorter

from taskyard.errors import DependencyLost
from taskyard.model.execution import ErrorCode, ErrorKind, ExecutionError
from taskyard.model.move import Move
from taskyard.model.notes import DEPENDENCY_ENDED, Fact, Note, NoteCode
from taskyard.model.state import COMPLETED, ENDED, TaskState
from taskyard.model.task import OnFailure, TaskRecord

DEPENDENCY_FAILED = "DependencyFailed"
"""The type of the error of a task that failed unrun, because one that it waited for did not complete."""


class Stand(StrEnum):
    """What one dependency is to the task that waits for it."""

    OPEN = "open"
    DONE = "done"
    LOST = "lost"


def stand_of(parent: TaskState, on_failure: OnFailure | None) -> Stand:
    """Where a task stands that another waits for, which goes on `on_failure` if that ends without having completed."""
    if parent is COMPLETED:
        return Stand.DONE
    if parent not in ENDED:
        return Stand.OPEN
    return Stand.DONE if on_failure is OnFailure.IGNORE else Stand.LOST


def unblock(record: TaskRecord, *, now: datetime) -> Move:
    """All that it waited for is done: it goes to the place it has had since it was submitted, or waits for its time."""
    if record.due_at > now:
        return Move(state=TaskState.SCHEDULED, at=now)
    return Move.queued(at=now)


def give_up(record: TaskRecord, parent: str, state: TaskState, *, now: datetime) -> Move:
    """One that it waited for, `parent`, has ended as `state` and can no longer complete."""
    if record.on_failure is OnFailure.SKIP:
        facts: dict[str, Fact] = {"task": parent, "state": str(state)}
        return Move(state=TaskState.SKIPPED, at=now, note=Note(NoteCode.DEPENDENCY, facts=facts))
    return Move.failed(at=now, error=lost_to(parent, state))


def lost_to(parent: str, state: str) -> ExecutionError:
    """The error of a task that cannot run, because `parent` has ended as `state`. Who is sent again in vain gets that
    of the one that is in the way then.

    Of the six kinds of errors an executor knows, `rejected` is the one of a run that never began."""
    details = {"task": parent, "state": str(state)}
    return ExecutionError(
        kind=ErrorKind.REJECTED, code=ErrorCode.DEPENDENCY, types=(DEPENDENCY_FAILED,), details=details
    )


def refuse_revival(record: TaskRecord, parent: str, state: TaskState) -> DependencyLost:
    """It cannot be sent again: `parent` would only fail it once more."""
    return DependencyLost(record.uuid, record.state, parent, state, DEPENDENCY_ENDED[state])


def find_cycle(after: Mapping[str, Collection[str]]) -> list[str] | None:
    """Tasks of one batch that wait for each other, if there are any. What a batch did not bring cannot wait for it."""
    inside = {child: [parent for parent in parents if parent in after] for child, parents in after.items()}
    try:
        TopologicalSorter(inside).prepare()
    except CycleError as exc:
        found: list[str] = exc.args[1][:-1]
        return found
    return None
