"""Recurring schedules: what is asked, as a value that is checked when it is made.

How far one has come is in `schedule_state`, which of its fire times become tasks is decided in `firing`.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Any

import msgspec

from taskyard.errors import InvalidInput, quote
from taskyard.model.each import Each
from taskyard.model.given import (
    LONGEST_S,
    check_labels,
    check_name,
    check_priority,
    check_retry,
    check_text,
    check_timeout,
)
from taskyard.model.order import Priority
from taskyard.model.recurrence import Cron, Every, Rule
from taskyard.model.retry import RetryPolicy
from taskyard.model.task import moment

LONGEST_JITTER_S = 86_400.0

LEAST_GRACE_S = 1.0
"""Where what is late is skipped: nobody looks at the very moment, so with less a schedule would never fire."""


class Missed(StrEnum):
    """What becomes of fire times that nobody was there for, or `grace_s` too late. Older ones than `catch_up_s` are
    never made up for."""

    SKIP = "skip"
    ONCE = "once"
    """One run makes up for all: the latest, unless a fire time that is not late stands in for it."""
    ALL = "all"


class Overlap(StrEnum):
    """What becomes of a fire time while the task of an earlier one has not ended."""

    SKIP = "skip"
    BUFFER = "buffer"
    """One is kept back until then, the others are skipped."""
    ALLOW = "allow"
    CANCEL = "cancel"
    """The earlier one is canceled."""


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """A task for `source`, again and again: `rule` says when, from `start_at` on and before `end_at`. `args` is JSON
    text; `queue`, `timeout_s` and `retry` are as the consumer has them if they are None.

    A fire time is late when `grace_s` have passed (a second at least, where what is late is skipped); `missed` and
    `catch_up_s` say what then. Tasks are due up to
    `jitter_s` after their fire time, by a lot that is the same on every node.

    With `each`, a fire time makes a task for each of many items, and `overlap="skip"` skips each item by itself.
    `requires` are labels that the place of a task must have."""

    name: str
    rule: Rule
    consumer: str
    args: str = "{}"
    queue: str | None = None
    priority: Priority = Priority.NORMAL
    key: str | None = None
    timeout_s: float | None = None
    retry: RetryPolicy | None = None
    missed: Missed = Missed.ONCE
    catch_up_s: float = 86_400.0
    grace_s: float = 60.0
    overlap: Overlap = Overlap.SKIP
    jitter_s: float = 0.0
    start_at: datetime | None = None
    end_at: datetime | None = None
    each: Each | None = None
    requires: dict[str, str] = {}

    def __post_init__(self) -> None:
        check_name("the name of a schedule", self.name)
        if not isinstance(self.rule, Cron | Every):
            raise InvalidInput(
                f"the rule of schedule {quote(self.name)} must be a Cron or an Every, such as "
                f"Cron('30 4 * * MON', 'Europe/Berlin') or Every(900), not {quote(self.rule)}"
            )
        self._check_task()
        self._set(
            missed=_one_of(Missed, "missed", self.missed),
            overlap=_one_of(Overlap, "overlap", self.overlap),
            catch_up_s=_check_span("catch_up_s", self.catch_up_s),
            grace_s=_check_span("grace_s", self.grace_s),
            jitter_s=_check_span("jitter_s", self.jitter_s, most=LONGEST_JITTER_S),
            start_at=_check_bound("start_at", self.start_at),
            end_at=_check_bound("end_at", self.end_at),
        )
        if self.missed is Missed.SKIP and self.grace_s < LEAST_GRACE_S:
            raise InvalidInput(
                f"with {{missed}}='skip' and {{grace_s}}={self.grace_s:g} the schedule would never fire",
                fields=("missed", "grace_s"),
                hint=f"give {{grace_s}} at least {LEAST_GRACE_S:g}",
            )
        if isinstance(self.rule, Every) and self.jitter_s >= self.rule.seconds:
            raise InvalidInput(
                f"must be shorter than the interval, {self.rule.seconds:g} s", field="jitter_s", given=self.jitter_s
            )
        if self.start_at is not None and self.end_at is not None and self.start_at >= self.end_at:
            raise InvalidInput(
                f"{self.end_at} must be later than {{start_at}}, {self.start_at}", field="end_at", fields=("start_at",)
            )

    @property
    def skips_items(self) -> bool:
        """Whether an item whose work is there already is skipped, and nothing else of a fire."""
        return self.each is not None and self.overlap is Overlap.SKIP

    def _check_task(self) -> None:
        check_name("consumer", self.consumer)
        for field, text in (("queue", self.queue), ("key", self.key)):
            if text is not None:
                check_name(field, text)
        self._set(priority=check_priority(self.priority), requires=check_labels(self.requires, field="requires"))
        if self.timeout_s is not None:
            self._set(timeout_s=check_timeout(self.timeout_s))
        if self.retry is not None:
            self._set(retry=check_retry(self.retry))
        if self.each is not None and not isinstance(self.each, Each):
            raise InvalidInput("must be an Each", field="each", given=self.each)
        try:
            msgspec.json.decode(check_text("args", self.args), type=dict[str, Any])
        except (ValueError, RecursionError) as exc:
            raise InvalidInput(f"must be a JSON object as text, not {quote(self.args)}: {exc}", field="args") from None

    def _set(self, **fields: object) -> None:
        for name, value in fields.items():
            msgspec.structs.force_setattr(self, name, value)


def _one_of(kind: type[StrEnum], field: str, value: Any) -> StrEnum:
    try:
        return kind(value)
    except ValueError:
        raise InvalidInput(f"{quote(value)} is not one of {', '.join(kind)}", field=field) from None


def _check_span(field: str, value: Any, *, most: float = LONGEST_S) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise InvalidInput(f"must be a number of seconds from 0 to {most:g}", field=field, given=value)
    return float(value)


def _check_bound(field: str, value: Any) -> datetime | None:
    return None if value is None else check_moment(field, value)


def check_moment(field: str, value: Any, *, hint: str = "") -> datetime:
    """`value` in UTC, if a rule can fire then: nothing that is computed from it leaves the calendar."""
    if not isinstance(value, datetime):
        raise InvalidInput(f"must be a datetime with a time zone{hint}", field=field, given=value)
    return moment(field, value, hint=hint)
