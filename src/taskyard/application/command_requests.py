"""Commands on tasks and queues, as requests. Each becomes the command of the same name in the model; what only the
engine may say, such as that a timeout cancels a task, has no field here."""

from __future__ import annotations

from datetime import datetime

import msgspec

from taskyard.application.documents import Request
from taskyard.application.task_documents import PriorityName
from taskyard.model import command as model
from taskyard.model.given import check_reason
from taskyard.model.order import Priority


class _WithReason(Request, frozen=True, kw_only=True):
    reason: str = ""

    def __post_init__(self) -> None:
        check_reason(self.reason)


# --- on a task --------------------------------------------------------------------------------------------------------


class Cancel(_WithReason, tag="cancel", frozen=True, kw_only=True):
    """End a task: at once if it waits. A run is asked to stop; with `force` it is killed, and what it was writing may
    be damaged."""

    force: bool = False


class Retry(Request, tag="retry", frozen=True, kw_only=True):
    """Send a failed or interrupted task again, at the head of its priority or at the tail."""

    to_head: bool = True


class SetPriority(Request, tag="set_priority", frozen=True, kw_only=True):
    """Change the priority of a task that has not started."""

    priority: PriorityName


class Hold(_WithReason, tag="hold", frozen=True, kw_only=True):
    """Keep a task that has not started from starting; it keeps its place."""


class Release(Request, tag="release", frozen=True, kw_only=True):
    """Let a held task go, at its old place."""


class Skip(_WithReason, tag="skip", frozen=True, kw_only=True):
    """End a task that has not started, as skipped."""


class StartNow(Request, tag="start_now", frozen=True, kw_only=True):
    """Put a task at the head of its priority, or with `urgent` at the head of the high one; also if it waits for its
    time, is held or is blocked by an admission check."""

    urgent: bool = False


class MoveBefore(Request, tag="move_before", frozen=True, kw_only=True):
    """Put a task right before another one of its queue and priority; `other` is a ref."""

    other: str


class MoveAfter(Request, tag="move_after", frozen=True, kw_only=True):
    """Put a task right after another one of its queue and priority; `other` is a ref."""

    other: str


class Reschedule(Request, tag="reschedule", frozen=True, kw_only=True):
    """Make a task due at another time, earlier or later."""

    due_at: datetime

    def __post_init__(self) -> None:
        model.Reschedule(self.due_at)


TaskCommand = Cancel | Retry | SetPriority | Hold | Release | Skip | StartNow | MoveBefore | MoveAfter | Reschedule
"""What a person asks of a task."""

_TASK_COMMANDS: dict[type[TaskCommand], type[model.Command]] = {
    Cancel: model.Cancel,
    Retry: model.Retry,
    SetPriority: model.SetPriority,
    Hold: model.Hold,
    Release: model.Release,
    Skip: model.Skip,
    StartNow: model.StartNow,
    MoveBefore: model.MoveBefore,
    MoveAfter: model.MoveAfter,
    Reschedule: model.Reschedule,
}


def task_command(request: TaskCommand) -> model.Command:
    """The command as the model has it."""
    if isinstance(request, SetPriority):
        return model.SetPriority(Priority.of(request.priority))
    return _TASK_COMMANDS[type(request)](**msgspec.structs.asdict(request))


def verb_of(request: TaskCommand) -> str:
    """`cancel`, as in a sentence."""
    return model.VERBS[_TASK_COMMANDS[type(request)]]


# --- on a queue -------------------------------------------------------------------------------------------------------


class Pause(_WithReason, tag="pause", frozen=True, kw_only=True):
    """Start nothing more; what runs goes on."""


class Resume(Request, tag="resume", frozen=True, kw_only=True):
    """Start tasks again. Takes back a pause, and a stop that is under way."""


class StopAfterCurrent(_WithReason, tag="stop_after_current", frozen=True, kw_only=True):
    """Pause, and be shown as stopping until what runs has ended."""


class SetConcurrency(_WithReason, tag="set_concurrency", frozen=True, kw_only=True):
    """Run at most so many tasks at once, whatever the code says; None lifts what was set."""

    concurrency: int | None


QueueCommand = Pause | Resume | StopAfterCurrent | SetConcurrency
"""What a person asks of a queue."""
