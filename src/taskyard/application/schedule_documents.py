"""Requests and documents of schedules."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from taskyard.application.documents import Document, Request
from taskyard.application.task_documents import PriorityName
from taskyard.model.firing import FireKind
from taskyard.model.recurrence import Rule
from taskyard.model.retry import RetryPolicy
from taskyard.model.schedule import Missed, Overlap, Schedule
from taskyard.model.state import TaskState
from taskyard.model.task import DedupeScope
from taskyard.schedules import make_rule

ScheduleStateName = Literal["active", "paused", "over", "unreadable"]

SETTINGS = (
    "queue", "priority", "key", "timeout_s", "retry", "missed", "catch_up_s", "grace_s", "overlap", "jitter_s",
    "start_at", "end_at", "requires",
)  # fmt: skip
"""The fields of a `ScheduleRequest` that are settings of the schedule; None is the default."""


class ScheduleRequest(Request, frozen=True, kw_only=True):
    """A schedule to add. `rule` is a cron expression, seen in the time zone `zone` (UTC), or an interval in seconds.
    `args_text` is as in a `SubmitRequest`; the settings are those of `yard.schedules.add`."""

    name: str
    rule: str | float
    consumer: str
    args: dict[str, Any] = {}
    args_text: dict[str, str] = {}
    zone: str | None = None
    queue: str | None = None
    priority: PriorityName | None = None
    key: str | None = None
    timeout_s: float | None = None
    retry: RetryPolicy | None = None
    missed: Missed | None = None
    catch_up_s: float | None = None
    grace_s: float | None = None
    overlap: Overlap | None = None
    jitter_s: float | None = None
    start_at: datetime | None = None
    end_at: datetime | None = None
    requires: dict[str, str] | None = None

    def __post_init__(self) -> None:
        Schedule(name=self.name, rule=make_rule(self.rule, self.zone), consumer=self.consumer, **self.settings())

    def settings(self) -> dict[str, Any]:
        return {name: value for name in SETTINGS if (value := getattr(self, name)) is not None}


class ScheduleCounts(Document, frozen=True, kw_only=True):
    """Fire times so far. `failed` is how often the tasks of one could not be made, and were tried again later."""

    fired: int
    missed: int
    skipped: int
    failed: int = 0


class EachDocument(Document, frozen=True, kw_only=True):
    """Where the items of a schedule come from: a stored list of `count` items, or the `function` of a program, which
    has `timeout_s` seconds. An item is skipped while the same work is there, as `dedupe_scope` says."""

    count: int
    function: str
    timeout_s: float
    dedupe_scope: DedupeScope


class LastFire(Document, frozen=True, kw_only=True):
    """The last fire of a schedule with items: how many tasks it made, and how many items were skipped."""

    fire_at: datetime
    kind: FireKind
    made: int
    skipped: int


class ScheduleDocument(Document, frozen=True, kw_only=True):
    """A schedule. `next` are its next fire times. `has_open_task`: a task of it has not finished; `buffered_at` is the
    fire time that waits for that. Fire times up to `watermark_at` are decided. `by` has put it there; `from_code`: a
    program does so whenever it starts. If it cannot be read here, `problem` says why and the settings are None; it also
    says why the last fire has failed, which is tried again at `retry_at`, or that no process fires what is due.
    `rule_text` is the rule in words. With `each` it makes a task for each of many items; `last` is its last fire."""

    name: str
    state: ScheduleStateName
    next: tuple[datetime, ...]
    counts: ScheduleCounts
    has_open_task: bool
    buffered_at: datetime | None
    paused_at: datetime | None
    paused_by: str
    note: str
    watermark_at: datetime
    by: str
    from_code: bool
    problem: str
    rule: Rule | None = None
    rule_text: str = ""
    consumer: str | None = None
    args: Any = None
    queue: str | None = None
    priority: PriorityName | None = None
    key: str | None = None
    timeout_s: float | None = None
    retry: RetryPolicy | None = None
    missed: Missed | None = None
    catch_up_s: float | None = None
    grace_s: float | None = None
    overlap: Overlap | None = None
    jitter_s: float | None = None
    start_at: datetime | None = None
    end_at: datetime | None = None
    requires: dict[str, str] | None = None
    retry_at: datetime | None = None
    each: EachDocument | None = None
    last: LastFire | None = None


class FireDocument(Document, frozen=True, kw_only=True):
    """A fire time that became a task, and where the task stands; None if the task is forgotten. Of a schedule with
    items, `task` is the first of the tasks `made`; `skipped` items made none."""

    fire_at: datetime
    kind: FireKind
    task: str
    state: TaskState | None
    made: int = 1
    skipped: int = 0


class ScheduleDetail(ScheduleDocument, frozen=True, kw_only=True):
    """A schedule with its last fire times, newest first."""

    fires: tuple[FireDocument, ...] = ()


class RemovedSchedule(Document, frozen=True, kw_only=True):
    """A schedule that was removed. If it is `from_code`, its program adds it again at its next start."""

    name: str
    removed: bool
    from_code: bool


class ScheduleTasks(Document, frozen=True, kw_only=True):
    """The ids of tasks that a call made of a schedule. `skipped` is the number of its items that made none."""

    name: str
    tasks: tuple[str, ...]
    skipped: int = 0
