"""Documents of a queue in the order in which it will start, and of why many tasks wait."""

from __future__ import annotations

from datetime import datetime

from taskyard.application.documents import Document
from taskyard.application.task_documents import PriorityName, WhyDocument
from taskyard.model.execution import Progress
from taskyard.model.queue import QueueOrder, QueueState
from taskyard.model.state import TaskState
from taskyard.model.why import Reason


class TaskPlace(Document, frozen=True, kw_only=True):
    """Where a task stands in its queue: `place` of `waiting`, the first to start is 1."""

    queue: str
    place: int
    waiting: int
    priority: PriorityName


class QueueEntry(Document, frozen=True, kw_only=True):
    """A task of a queue. A task that waits has a `place`, and an `expected_start_at` if that is known; a running task
    has an `expected_end_at`, or `is_late` if it has run longer than usual. `what_if_start_at` is the expected start
    under the concurrency that was asked about. With `is_estimated` these starts come after a run that is late."""

    uuid: str
    consumer: str
    title: str
    state: TaskState
    priority: PriorityName
    key: str | None
    place: int | None
    created_at: datetime
    due_at: datetime
    started_at: datetime | None
    progress: Progress | None
    expected_start_at: datetime | None
    expected_end_at: datetime | None
    is_late: bool
    is_estimated: bool
    what_if_start_at: datetime | None
    why: WhyDocument | None


class WhatIf(Document, frozen=True, kw_only=True):
    """When all would be over under another concurrency. `slots` is how many tasks would run at once, by the room that
    the workers have."""

    concurrency: int
    slots: int | None
    finished_at: datetime | None
    is_lower_bound: bool


class QueueOrderDocument(Document, frozen=True, kw_only=True):
    """A queue in the order in which it will start. `running` is what runs, `waiting` what will start, `apart` what is
    held, blocked or waits for its time. Each is cut to the limit that was asked for; `counts` are exact.

    `finished_at` is when all that runs and waits will be over, None if that is not known. It is exact, as far as
    medians are, with `is_exact`, the earliest time with `is_lower_bound`, and else an estimate. `without_median` are
    consumers with fewer than three completed runs: their tasks, and those that start after them, have no expected
    times. `concurrency` is the one that holds, `slots` how many tasks run at once within it, by
    the room that the workers have; None is no limit."""

    queue: str
    at: datetime
    state: QueueState
    order: QueueOrder
    concurrency: int | None
    slots: int | None
    counts: dict[TaskState, int]
    running: tuple[QueueEntry, ...]
    waiting: tuple[QueueEntry, ...]
    apart: tuple[QueueEntry, ...]
    finished_at: datetime | None
    is_exact: bool
    is_lower_bound: bool
    without_median: tuple[str, ...]
    what_if: WhatIf | None = None


class WaitGroup(Document, frozen=True, kw_only=True):
    """Tasks of one queue that wait for the same. `subject` is what they wait for, as a value: by reason a key, the key
    of a blocker such as "disk:/data", a task, a queue, a bucket, a consumer, an executor, or the actor that holds
    them. `text` and `remedy` are those of the task `uuid`, which has waited longest; `command` is what to type to free
    them, empty if no command does. `consumer` is theirs, if they have only one."""

    reason: Reason
    subject: str
    queue: str
    consumer: str | None
    count: int
    uuid: str
    text: str
    remedy: str
    command: str
    since: datetime | None
    until: datetime | None
    blocking_task: str | None


class WaitSummary(Document, frozen=True, kw_only=True):
    """Why tasks wait, added up: `total` of them, in groups, the largest first. Of more than 10,000, `explained` were
    drawn, and the counts of the groups are estimates. `groups` has at most as many as were asked for; `more_groups` are
    left out. `no_match` says why nothing matches, if the filter names an unknown queue or consumer."""

    total: int
    explained: int
    is_sampled: bool
    groups: tuple[WaitGroup, ...]
    more_groups: int = 0
    no_match: str = ""
