"""Documents of queues."""

from __future__ import annotations

from datetime import datetime

from taskyard.application.documents import Document
from taskyard.model.notes import AuditStamp
from taskyard.model.queue import QueueOrder, QueueState
from taskyard.model.state import TaskState


class QueueDocument(Document, frozen=True, kw_only=True):
    """A queue. `concurrency` is how many of its tasks may run at once, None for no limit: `concurrency_override` if a
    person has set one, else `code_concurrency`, which is the code's. `state_set` and `concurrency_set` say which actor
    set the state and the override, when and why.
    `oldest_due_at` is the due time of the task that has waited longest of those that could start. `rate` is how many
    of its tasks finished per second in the last minute; only a list of queues has it."""

    name: str
    state: QueueState
    state_set: AuditStamp | None
    running: int
    concurrency: int | None
    concurrency_override: int | None
    code_concurrency: int | None
    concurrency_set: AuditStamp | None
    order: QueueOrder
    per_key: int
    counts: dict[TaskState, int]
    oldest_due_at: datetime | None = None
    rate: float | None = None
