"""The overview of a store."""

from __future__ import annotations

from datetime import datetime

from msgspec import field

from taskyard.application.documents import Document
from taskyard.application.task_documents import PriorityName, TaskDocument
from taskyard.model.state import TaskState


class NextTask(Document, frozen=True, kw_only=True):
    """A task that waits for its turn: `place` of `waiting` in its queue, and when it starts, if that is known."""

    uuid: str
    queue: str
    consumer: str
    priority: PriorityName
    place: int
    waiting: int
    expected_start_at: datetime | None


class OverviewDocument(Document, frozen=True, kw_only=True):
    """What a store, or some of its tasks, is doing. `running` are the oldest runs, `next` the tasks that start next, a
    few of each queue, `waiting` tasks that start by themselves at a known time, the soonest first, `finished` those
    that finished last, the latest first. `rate` is how many tasks finished per second. All events up to the number
    `seq` are in it; `next` is a few seconds old.

    While the store does not answer, `away_since` is set, `away_reason` says why, and the rest is as it was then."""

    counts: dict[TaskState, int] = field(default_factory=dict)
    queues: dict[str, dict[TaskState, int]] = field(default_factory=dict)
    workers: int = 0
    rate: float = 0.0
    running: tuple[TaskDocument, ...] = ()
    next: tuple[NextTask, ...] = ()
    waiting: tuple[TaskDocument, ...] = ()
    finished: tuple[TaskDocument, ...] = ()
    seq: int = 0
    away_since: datetime | None = None
    away_reason: str = ""
