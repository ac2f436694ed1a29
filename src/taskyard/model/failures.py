"""Dead letters: failed tasks, and what they have in common."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

import msgspec

from taskyard.model.settle import QUARANTINE_AFTER
from taskyard.model.state import TaskState
from taskyard.model.task import TaskRecord


def is_quarantined(record: TaskRecord) -> bool:
    """Whether it was failed for good because it took its workers down."""
    return record.state is TaskState.FAILED and record.crashes >= QUARANTINE_AFTER


class FailureGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Failed tasks of one source with one class of error; those in quarantine are a group of their own. `uuid`,
    `message` and `newest_at` are of one that failed last."""

    error: str
    consumer: str
    is_quarantined: bool
    count: int
    newest_at: datetime
    uuid: str
    message: str


def group_failures(records: Iterable[TaskRecord], limit: int) -> list[FailureGroup]:
    """The largest groups first, and of two alike the one that grew last."""
    groups: dict[tuple[str, str, bool], tuple[int, TaskRecord]] = {}
    for record in records:
        if record.state is TaskState.FAILED:
            key = "" if record.error is None else record.error.type, record.consumer, is_quarantined(record)
            count, newest = groups.get(key, (0, record))
            groups[key] = count + 1, max(newest, record, key=_ended_at)
    found = [
        FailureGroup(
            error=error,
            consumer=source,
            is_quarantined=quarantined,
            count=count,
            newest_at=_ended_at(newest),
            uuid=newest.uuid,
            message="" if newest.error is None else newest.error.text,
        )
        for (error, source, quarantined), (count, newest) in groups.items()
    ]
    found.sort(key=lambda group: (-group.count, -group.newest_at.timestamp()))
    return found[:limit]


def _ended_at(record: TaskRecord) -> datetime:
    assert record.finished_at is not None
    return record.finished_at
