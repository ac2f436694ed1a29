"""What happened, in order: what result waiters, live views and other processes follow."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from enum import StrEnum
from typing import Any

import msgspec

from taskyard.errors import InvalidInput, quote
from taskyard.model.execution import Progress
from taskyard.model.state import TaskState


class EventKind(StrEnum):
    """A move is told by the state it led to; the rest are named here."""

    SUBMITTED = "submitted"
    SCHEDULED = "scheduled"
    QUEUED = "queued"
    BLOCKED = "blocked"
    STARTED = "running"
    RETRYING = "retrying"
    PAUSED = "paused"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELED = "canceled"
    SKIPPED = "skipped"
    INTERRUPTED = "interrupted"
    PRIORITY_CHANGED = "priority_changed"
    CANCEL_REQUESTED = "cancel_requested"
    REORDERED = "reordered"
    RESCHEDULED = "rescheduled"
    PROGRESS = "progress"
    QUEUE_PAUSED = "queue_paused"
    QUEUE_STOPPING = "queue_stopping"
    QUEUE_RESUMED = "queue_resumed"
    QUEUE_CHANGED = "queue_changed"
    DEVICE_ADDED = "device_added"
    DEVICE_CHANGED = "device_changed"
    DEVICE_REMOVED = "device_removed"
    DEVICE_UP = "device_up"
    DEVICE_DOWN = "device_down"
    DEVICE_DRAINED = "device_drained"
    DEVICE_TAKEN = "device_taken"
    DEVICE_QUARANTINED = "device_quarantined"
    DEVICE_GIVEN_BACK = "device_given_back"
    ACCOUNT_QUARANTINED = "account_quarantined"
    ACCOUNT_RELEASED = "account_released"


DEVICE_KINDS = frozenset(kind for kind in EventKind if kind.startswith(("device_", "account_")))
"""Kinds of events that are about a device, or about an account of a pool."""

ALERTS = frozenset({EventKind.DEVICE_QUARANTINED, EventKind.ACCOUNT_QUARANTINED})
"""Kinds of events that a person should look at: nothing goes on by itself."""


TOLD_AS: dict[TaskState, EventKind] = {state: EventKind(state) for state in TaskState if state is not TaskState.CREATED}


USUAL_BEFORE: dict[EventKind, TaskState] = {
    EventKind.SUBMITTED: TaskState.CREATED,
    EventKind.STARTED: TaskState.QUEUED,
    EventKind.PROGRESS: TaskState.RUNNING,
    EventKind.CANCEL_REQUESTED: TaskState.RUNNING,
    EventKind.COMPLETED: TaskState.RUNNING,
    EventKind.RETRYING: TaskState.RUNNING,
    EventKind.INTERRUPTED: TaskState.RUNNING,
}
"""The state before most events of a kind, which are stored without it."""


class EventDetail(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What an event says beyond kind, task and time. Most events of the hot path have none: `before` is left out where
    it is the usual one."""

    before: TaskState | None = None
    actor: str = ""
    code: str = ""
    progress: Progress | None = None
    after: TaskState | None = None
    device: str = ""


NO_DETAIL = EventDetail()


def make_detail(kind: EventKind, before: TaskState, *, actor: str = "", code: str = "") -> EventDetail | None:
    """None if there is nothing to say that the kind does not say."""
    usual = USUAL_BEFORE.get(kind) is before
    if usual and not actor and not code:
        return None
    return EventDetail(None if usual else before, actor, code)


class Event(msgspec.Struct, frozen=True, gc=False):
    """One thing that happened. `before` is the state of the task until then, `after` from then on; `actor` is who asked
    for it; `code` is why: the code of a note or of a cancel request, or the class of an error. `progress` comes with
    progress alone. Where a whole queue is meant, `uuid` and `consumer` are empty.

    An event of a device has its name as `device` and its pool as `queue`; `code` is the reason that was given, or why
    it is down. An event of an account has the account as `code`, and its pool and consumer."""

    seq: int
    at: datetime
    kind: EventKind
    uuid: str
    consumer: str
    queue: str
    before: TaskState | None = None
    after: TaskState | None = None
    actor: str = ""
    code: str = ""
    progress: Progress | None = None
    device: str = ""

    @property
    def is_alert(self) -> bool:
        """Whether a person should look at it."""
        return self.kind in ALERTS

    @classmethod
    def of(
        cls, seq: int, at: datetime, kind: EventKind, uuid: str, consumer: str, queue: str, detail: EventDetail | None
    ) -> Event:
        detail = detail or NO_DETAIL
        before = detail.before or USUAL_BEFORE.get(kind)
        after = detail.after or USUAL_AFTER.get(kind, before)
        return cls(
            seq,
            at,
            kind,
            uuid,
            consumer,
            queue,
            before,
            after,
            detail.actor,
            detail.code,
            detail.progress,
            detail.device,
        )


USUAL_AFTER: dict[EventKind, TaskState] = {
    EventKind.SUBMITTED: TaskState.QUEUED,
    **{kind: state for state, kind in TOLD_AS.items()},
}
"""The state after an event of a kind; one that is no change of state leaves the task in the state it had."""

_SUBMITTED_AS = {state: EventDetail(after=state) for state in (TaskState.SCHEDULED, TaskState.BLOCKED)}


def submit_detail(state: TaskState, actor: str) -> EventDetail | None:
    """What the event of a new task says: the state that it begins in, unless it is queued, and who submitted it."""
    if not actor:
        return _SUBMITTED_AS.get(state)
    return EventDetail(actor=actor, after=None if state is TaskState.QUEUED else state)


def check_kinds(kinds: Any) -> frozenset[EventKind]:
    """One kind or several, by their names."""
    several = [kinds] if isinstance(kinds, str) or not isinstance(kinds, Iterable) else list(kinds)
    if not several:
        raise InvalidInput("kinds is empty, so nothing would ever be heard; leave it out to hear of everything")
    try:
        return frozenset(map(EventKind, several))
    except ValueError:
        unknown = next(kind for kind in several if kind not in list(EventKind))
        raise InvalidInput(f"{quote(unknown)} is no kind of event; known are {', '.join(EventKind)}") from None


class EventFilter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which events somebody wants to hear of; None means any. What is told of a whole queue has neither a source nor a
    task."""

    kinds: frozenset[EventKind] | None = None
    queue: str | None = None
    consumer: str | None = None
    uuids: frozenset[str] | None = None

    def matches(self, event: Event) -> bool:
        return (
            (self.kinds is None or event.kind in self.kinds)
            and (self.queue is None or event.queue == self.queue)
            and (self.consumer is None or event.consumer == self.consumer)
            and (self.uuids is None or event.uuid in self.uuids)
        )


ANY_EVENT = EventFilter()
"""Matches every event."""


class EventPage(msgspec.Struct, frozen=True):
    """Events after a number, oldest first. `last` is where to go on from; `missed` says that older ones were trimmed
    before they were read, or that the number is of another store than this one is now, so that the reader should look
    at the records instead."""

    events: list[Event]
    last: int
    missed: bool = False
