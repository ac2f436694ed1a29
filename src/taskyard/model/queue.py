"""What a person says about a whole queue, kept apart from the rules that code sets for it, and what follows from it."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Self

import msgspec

from taskyard.model.event import EventDetail, EventKind
from taskyard.model.limits import QueueSettings
from taskyard.model.notes import AuditStamp
from taskyard.model.state import TaskState


class QueueState(StrEnum):
    """Whether a queue starts tasks. What runs is never touched: a queue that is `stopping` still has some of it, and
    becomes `paused` with the last."""

    RUNNING = "running"
    STOPPING = "stopping"
    PAUSED = "paused"


class QueueControl(msgspec.Struct, frozen=True, kw_only=True):
    """What people have said about a queue. `concurrency` stands in the place of the rule that code has set, until it is
    lifted; None leaves that rule alone. `state_set` says who set the state, `concurrency_set` who set the limit."""

    state: QueueState = QueueState.RUNNING
    state_set: AuditStamp | None = None
    concurrency: int | None = None
    concurrency_set: AuditStamp | None = None

    @property
    def is_open(self) -> bool:
        """Whether anything of the queue may start."""
        return self.state is QueueState.RUNNING


UNTOUCHED = QueueControl()


class Pause(msgspec.Struct, frozen=True, tag=True):
    """Start nothing more; what runs goes on."""

    reason: str = ""


class Resume(msgspec.Struct, frozen=True, tag=True):
    """Start tasks again. Takes a pause back, and a stop that is under way."""


class StopAfterCurrent(msgspec.Struct, frozen=True, tag=True):
    """Pause, and be seen as stopping until what runs has ended."""

    reason: str = ""


class SetConcurrency(msgspec.Struct, frozen=True, tag=True):
    """Run at most so many at once, whatever the rules say; None gives the word back to the rules."""

    concurrency: int | None
    reason: str = ""


QueueCommand = Pause | Resume | StopAfterCurrent | SetConcurrency


def steer(control: QueueControl, command: QueueCommand, *, by: str, now: datetime, running: int) -> QueueControl:
    """What `command` makes of `control`, with so many tasks of the queue running. A word that changes nothing answers
    with `control` itself, so that the first to say it is remembered."""
    match command:
        case Pause(reason):
            return _close(control, QueueState.PAUSED, AuditStamp(by, now, reason))
        case StopAfterCurrent(reason):
            return _close(control, QueueState.STOPPING if running else QueueState.PAUSED, AuditStamp(by, now, reason))
        case Resume():
            if control.is_open:
                return control
            return msgspec.structs.replace(control, state=QueueState.RUNNING, state_set=AuditStamp(by, now))
        case SetConcurrency(concurrency, reason):
            if concurrency == control.concurrency:
                return control
            return msgspec.structs.replace(
                control, concurrency=concurrency, concurrency_set=AuditStamp(by, now, reason)
            )


def _close(control: QueueControl, state: QueueState, said: AuditStamp) -> QueueControl:
    if control.state is state and control.state_set is not None and control.state_set.reason == said.reason:
        return control
    return msgspec.structs.replace(control, state=state, state_set=said)


def drained(control: QueueControl) -> QueueControl:
    """The last task of a queue that was stopping has ended: it is paused, by the same word."""
    return msgspec.structs.replace(control, state=QueueState.PAUSED)


_TOLD = {
    QueueState.RUNNING: EventKind.QUEUE_RESUMED,
    QueueState.STOPPING: EventKind.QUEUE_STOPPING,
    QueueState.PAUSED: EventKind.QUEUE_PAUSED,
}


def control_detail(old: QueueControl, new: QueueControl) -> EventDetail | None:
    """What the event of a change says beyond its kind: who asked."""
    stamp = new.concurrency_set if new.concurrency_set != old.concurrency_set else new.state_set
    return None if stamp is None or not stamp.actor else EventDetail(actor=stamp.actor)


def told_as(old: QueueControl, new: QueueControl) -> EventKind | None:
    """The event that tells of a change; None if there is none."""
    if new is old or new == old:
        return None
    if (new.concurrency, new.concurrency_set) != (old.concurrency, old.concurrency_set):
        return EventKind.QUEUE_CHANGED
    return _TOLD[new.state]


class QueueStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A queue as the store knows it: the rules that code has set, what people have said, how many tasks it holds in
    each state, and since when the first in its lanes wait, of those that could start."""

    name: str
    settings: QueueSettings
    control: QueueControl
    counts: dict[TaskState, int]
    oldest_due_at: datetime | None = None

    @classmethod
    def empty(cls, name: str) -> Self:
        """That of a queue nobody has used yet."""
        return cls(name=name, settings=QueueSettings(name=name), control=UNTOUCHED, counts={})
