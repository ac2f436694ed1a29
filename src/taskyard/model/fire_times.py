"""The fire times of a schedule: those of its rule, from its `start_at` on and before its `end_at`.

A span is later than `after`, up to and with `until`.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from taskyard.model.recurrence import TICK, count_fires, find_last_fire, fires_between, next_fires
from taskyard.model.schedule import Schedule
from taskyard.model.task import LAST


def upcoming(schedule: Schedule, *, after: datetime, count: int) -> list[datetime]:
    """The next fire times within the schedule's bounds."""
    first, last = bounds(schedule, after, LAST)
    return [at for at in next_fires(schedule.rule, after=first, count=count) if at <= last]


def between(schedule: Schedule, after: datetime, until: datetime) -> Iterator[datetime]:
    first, last = bounds(schedule, after, until)
    return fires_between(schedule.rule, after=first, until=last)


def count(schedule: Schedule, after: datetime, until: datetime) -> int:
    first, last = bounds(schedule, after, until)
    return count_fires(schedule.rule, after=first, until=last)


def find_last(schedule: Schedule, after: datetime, until: datetime) -> datetime | None:
    first, last = bounds(schedule, after, until)
    return find_last_fire(schedule.rule, after=first, until=last) if first < last else None


def find_next(schedule: Schedule, after: datetime) -> datetime | None:
    return next(iter(upcoming(schedule, after=after, count=1)), None)


def bounds(schedule: Schedule, after: datetime, until: datetime) -> tuple[datetime, datetime]:
    """The part of a span in which the schedule may fire; there is none if it ends where it begins, or before."""
    if schedule.start_at is not None:
        after = max(after, schedule.start_at - TICK)
    if schedule.end_at is not None:
        until = min(until, schedule.end_at - TICK)
    return after, until
