"""What an inspection of a store answers: plain values, read by a connection that changes nothing. It judges nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from taskyard.model.state import TaskState
from taskyard.model.task import TaskRecord
from taskyard.ports.schedules import ScheduleStatus

RUNNING_AT_MOST = 10_000
"""Running tasks that an inspection reads."""


@dataclass(frozen=True, slots=True)
class StoreActivity:
    """Tasks by queue and state, those that run, the consumers of queued tasks, when the first task that waits for its
    time is due, when the newest change was made, all schedules, and the time by the clock that judges them."""

    counts: Mapping[tuple[str, TaskState], int]
    running: Sequence[TaskRecord]
    waiting_consumers: Sequence[str]
    due_at: datetime | None
    newest_at: datetime | None
    schedules: Sequence[ScheduleStatus]
    now: datetime
