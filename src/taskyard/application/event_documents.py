"""Documents of events."""

from __future__ import annotations

from datetime import datetime

from taskyard.application.documents import Document
from taskyard.application.task_documents import PriorityName, TaskError
from taskyard.model.event import EventKind
from taskyard.model.execution import Progress
from taskyard.model.state import TaskState


class EventDocument(Document, frozen=True, kw_only=True):
    """One event, with what the store knows of its task when it is read. An event of a whole queue has no `uuid` and no
    `consumer`; `before` and `after` are states of the task, `actor` asked for it, `code` says why.

    An event of a device has its name as `device` and its pool as `queue`. An event of an account of a pool has the
    account as `code`. `is_alert` marks the events that a person should look at. `device` is also that of the attempt
    which began or finished with this event.

    `node` is the incarnation that ran the attempt which began or finished with this event; `duration_s` and `error`
    belong to an attempt that finished. `due_at` is set where the task waits for its time from then on, `priority` where
    it was changed, `blocker` where the task is blocked: a text such as `disk /data`."""

    seq: int
    at: datetime
    kind: EventKind
    uuid: str
    consumer: str
    queue: str
    before: TaskState | None = None
    after: TaskState | None = None
    actor: str | None = None
    code: str | None = None
    attempt: int | None = None
    node: str | None = None
    progress: Progress | None = None
    duration_s: float | None = None
    error: TaskError | None = None
    due_at: datetime | None = None
    priority: PriorityName | None = None
    blocker: str | None = None
    device: str | None = None
    is_alert: bool = False


class EventPageDocument(Document, frozen=True, kw_only=True):
    """Events in order, oldest first. The next page begins after the number `last`. `missed`: the store has dropped some
    events after the number that was asked for."""

    events: tuple[EventDocument, ...]
    last: int
    missed: bool = False
