"""Requests about tasks, commands on them, and receipts: what became of a command."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from taskyard.application.documents import Document, ErrorDocument, Request
from taskyard.application.queue_order_documents import TaskPlace
from taskyard.application.task_documents import PriorityName, TaskDocument, WhyDocument
from taskyard.model.retry import RetryPolicy
from taskyard.model.state import TaskState
from taskyard.model.task import Dedupe, DedupeScope, OnFailure
from taskyard.options import TaskOptions

OPTIONS = (
    "priority", "delay_s", "schedule_at", "queue", "key", "timeout_s", "retry", "dedupe", "dedupe_key", "dedupe_scope",
    "dedupe_window_s", "on_failure", "bucket", "title", "labels", "requires", "trace",
)  # fmt: skip
"""The fields of a `SubmitRequest` that are options of the task; None is as the consumer has it."""


class SubmitRequest(Request, frozen=True, kw_only=True):
    """A task to submit. `args_text` has the text of arguments that were typed: where the consumer wants a string,
    `path=2030` is one. `after` are refs of the tasks that must complete first. The options are those of
    `yard.submit`."""

    consumer: str
    args: dict[str, Any] = {}
    args_text: dict[str, str] = {}
    after: tuple[str, ...] = ()
    priority: PriorityName | None = None
    delay_s: float | None = None
    schedule_at: datetime | None = None
    queue: str | None = None
    key: str | None = None
    timeout_s: float | None = None
    retry: RetryPolicy | None = None
    dedupe: Dedupe | None = None
    dedupe_key: str | None = None
    dedupe_scope: DedupeScope | None = None
    dedupe_window_s: float | None = None
    on_failure: OnFailure | None = None
    bucket: str | None = None
    title: str | None = None
    labels: dict[str, str] | None = None
    requires: dict[str, str] | None = None
    trace: str | None = None

    def __post_init__(self) -> None:
        self.options(submitted_by="")

    def options(self, *, submitted_by: str) -> TaskOptions:
        """The options, checked; without `after`, whose refs only a store can resolve."""
        given = {name: value for name in OPTIONS if (value := getattr(self, name)) is not None}
        return TaskOptions.of(**given, submitted_by=submitted_by)


class SubmitReceipt(TaskDocument, frozen=True, kw_only=True):
    """The task that now stands for what was asked. `is_new` is false if the submit was merged into an existing task;
    then `window_ends_at` is when its dedupe window ends, if it has one. `is_served`: a live node has the
    consumer. `is_checked`: its code, or the schema that it has published, has checked the arguments.
    `known_queues` is set if the queue that was asked for is none of them: it has no rules, no other tasks and no
    consumer."""

    is_new: bool
    window_ends_at: datetime | None
    is_served: bool
    is_checked: bool
    known_queues: tuple[str, ...] | None = None


# --- what became of commands -----------------------------------------------------------------------------------------


class CommandReceipt(Document, frozen=True, kw_only=True):
    """What became of a command on one task: the task after it, or the error that kept it from being carried out.
    `why` is set if the command cannot take effect soon: the node that runs the task is silent. `place` is where the
    task stands in its queue after a command that moved it, if it is one of the first 1,000."""

    ref: str
    ok: bool
    task: TaskDocument | None = None
    error: ErrorDocument | None = None
    why: WhyDocument | None = None
    place: TaskPlace | None = None


class BulkReport(Document, frozen=True, kw_only=True):
    """What became of all tasks that match, so far. `matched` were found, `moved` of them changed, `changed_meanwhile`
    no longer match; `unfit` counts by code those that the command does not fit, and `reasons` has a sentence for each
    code. `quarantined` tasks were left out from the start, because they crashed their workers.

    The last report of a command that did not come to its end is `interrupted`; then `is_uncertain` says that the
    store has not answered the last request, so that more may have changed than is counted."""

    matched: int = 0
    moved: int = 0
    changed_meanwhile: int = 0
    unfit: dict[str, int] = {}
    reasons: dict[str, str] = {}
    quarantined: int = 0
    dry_run: bool = False
    interrupted: bool = False
    is_uncertain: bool = False

    @property
    def fitting(self) -> int:
        """The matching tasks that the command fits: after a dry run, how many it would change."""
        return self.matched - sum(self.unfit.values())

    @property
    def refused(self) -> int:
        return self.changed_meanwhile + sum(self.unfit.values())


class RerunReport(BulkReport, frozen=True, kw_only=True):
    """The same where new tasks were made of those that match: `made` are their ids, oldest first. `run_again` were left
    out, because new tasks were made of them before."""

    run_again: int = 0
    made: tuple[str, ...] = ()


class PruneReport(Document, frozen=True, kw_only=True):
    """How many tasks had finished before `before`, and how many of them were forgotten."""

    matched: int
    pruned: int
    before: datetime
    dry_run: bool


# --- groups -----------------------------------------------------------------------------------------------------------


class GroupDocument(Document, frozen=True, kw_only=True):
    """A group: how many tasks it has, how many have finished and how many of those completed, and its tasks, those that
    have not completed first. `summary` is the task that runs after all others; it is not counted."""

    group: str
    total: int
    finished: int
    completed: int
    states: dict[TaskState, int]
    summary: TaskDocument | None
    tasks: tuple[TaskDocument, ...]


class GroupReceipt(Document, frozen=True, kw_only=True):
    """How many tasks of a group a command has changed, and the states of all of them after it."""

    group: str
    changed: int
    states: dict[TaskState, int]
