"""A queue: the rules that code sets, what a person sets on top of them, and what follows from both."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime, timedelta
from enum import StrEnum
from functools import lru_cache
from typing import Self

import msgspec

from taskyard.model.event import EventDetail, EventKind
from taskyard.model.fairness import Patience
from taskyard.model.notes import AuditStamp
from taskyard.model.retry import RetryPolicy
from taskyard.model.state import TaskState

AUTO_RECOVER = 1
"""Times: a node or a device is lost once for reasons of its own; if it happens again, the task is the likely cause."""

RETRIES_PER_S = 500.0
"""More than a node has to try again in ordinary times, and far less than what it could send at whoever is down."""


class QueueOrder(StrEnum):
    """Who goes first in a queue.

    `priority`: high, normal, low; within one, first in first out among those that can start. `fifo`: first in first
    out, whatever the priority, and the head is never skipped: while it cannot start, nobody behind it does. `buckets`:
    the same within each bucket, and the buckets take turns; one whose head cannot start is passed over.

    What waits for its time, before its first attempt or between two, stands in no line and holds up nobody; for the
    next attempt it comes back to its place."""

    PRIORITY = "priority"
    FIFO = "fifo"
    BUCKETS = "buckets"


class QueueSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The rules of one queue, held across every process on the store. `concurrency=None` sets no limit of its own;
    `per_key` is how many tasks with one key may run at once; `auto_recover` how often a task is taken back from a dead
    node or a lost device before it is failed; `retry` the policy of consumers that name none.

    At most `retries_per_s` of its retries become due in a second, on each node; None lets all come when their policy
    says, however many they are.

    With `order="priority"` a lower priority is let in once after `starve_after` starts of higher ones, or when it has
    waited for `starve_wait_s` seconds; None waits for ever."""

    name: str
    concurrency: int | None = None
    per_key: int = 1
    auto_recover: int = AUTO_RECOVER
    retry: RetryPolicy = RetryPolicy()
    order: QueueOrder = QueueOrder.PRIORITY
    starve_after: int | None = 8
    starve_wait_s: float | None = 600.0
    retries_per_s: float | None = RETRIES_PER_S

    @property
    def patience(self) -> Patience:
        return _patience(self.starve_after, self.starve_wait_s)

    @property
    def is_strict(self) -> bool:
        """Whether places alone count, and what cannot start holds up others."""
        return self.order is not QueueOrder.PRIORITY

    def __post_init__(self) -> None:
        if self.concurrency is not None and self.concurrency < 1:
            raise ValueError(f"queue {self.name!r}: concurrency must be at least 1, or None for no limit")
        if self.per_key < 1 or self.auto_recover < 0:
            raise ValueError(f"queue {self.name!r}: per_key must be at least 1 and auto_recover not negative")
        if self.starve_after is not None and self.starve_after < 1:
            raise ValueError(f"queue {self.name!r}: starve_after must be at least 1, or None for never")
        if self.starve_wait_s is not None and self.starve_wait_s <= 0:
            raise ValueError(f"queue {self.name!r}: starve_wait_s must be more than 0, or None for never")
        if self.retries_per_s is not None and not 0 < self.retries_per_s < math.inf:
            raise ValueError(f"queue {self.name!r}: retries_per_s must be more than 0, or None for no limit")


@lru_cache(maxsize=64)
def _patience(after: int | None, wait_s: float | None) -> Patience:
    """Every claim asks for it, and queues have few different ones."""
    return Patience(after, None if wait_s is None else timedelta(seconds=wait_s))


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


class Pause(msgspec.Struct, frozen=True, tag="pause"):
    """Start nothing more; what runs goes on."""

    reason: str = ""


class Resume(msgspec.Struct, frozen=True, tag="resume"):
    """Start tasks again. Takes a pause back, and a stop that is under way."""


class StopAfterCurrent(msgspec.Struct, frozen=True, tag="stop_after_current"):
    """Pause, and be seen as stopping until what runs has ended."""

    reason: str = ""


class SetConcurrency(msgspec.Struct, frozen=True, tag="set_concurrency"):
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


def rooms(
    queues: Mapping[str, QueueSettings], controls: Mapping[str, QueueControl], running: Mapping[str, int]
) -> dict[str, int]:
    """How many more each queue may start, of those that have a limit. What a person has said goes before the rules."""
    room = {
        name: queue.concurrency - running.get(name, 0)
        for name, queue in queues.items()
        if queue.concurrency is not None
    }
    for name, control in controls.items():
        if not control.is_open:
            room[name] = 0
        elif control.concurrency is not None:
            room[name] = control.concurrency - running.get(name, 0)
    return room


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
