"""What happened, in order: what result waiters, live views and other processes follow."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

import msgspec

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
    CANCEL_ASKED = "cancel_asked"
    REORDERED = "reordered"
    RESCHEDULED = "rescheduled"
    PROGRESS = "progress"
    QUEUE_PAUSED = "queue_paused"
    QUEUE_STOPPING = "queue_stopping"
    QUEUE_RESUMED = "queue_resumed"
    QUEUE_CHANGED = "queue_changed"


TOLD_AS: dict[TaskState, EventKind] = {state: EventKind(state) for state in TaskState if state is not TaskState.CREATED}


class Event(msgspec.Struct, frozen=True, gc=False):
    """`uuid` and `source` are empty where it is told of a whole queue."""

    seq: int
    at: datetime
    kind: EventKind
    uuid: str
    source: str
    queue: str


class EventFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which events somebody wants to hear of; None means any. What is told of a whole queue has neither a source nor a
    task."""

    kinds: frozenset[EventKind] | None = None
    queue: str | None = None
    source: str | None = None
    uuids: frozenset[str] | None = None

    def matches(self, event: Event) -> bool:
        return (
            (self.kinds is None or event.kind in self.kinds)
            and (self.queue is None or event.queue == self.queue)
            and (self.source is None or event.source == self.source)
            and (self.uuids is None or event.uuid in self.uuids)
        )


class EventPage(msgspec.Struct, frozen=True):
    """Events after a number, oldest first. `last` is where to go on from; `missed` says that older ones were trimmed
    before they were read, or that the number is of another store than this one is now, so that the reader should look
    at the records instead."""

    events: list[Event]
    last: int
    missed: bool = False
