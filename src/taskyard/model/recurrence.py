"""When a recurring rule fires: cron expressions in a time zone, and fixed intervals.

Owns the meaning of a rule; how an expression is read is in `cron`. It knows nothing of schedules and tasks, nor what
time it is; it reads nothing but the database of time zones. Fire times are moments in UTC between 1970 and the year
9000; each is given once, in order, and which ones there are does not depend on where one begins to ask.

An expression is read by cronsim; its walk through time is not used, because it loses fires where clocks change by half
an hour, or at a quarter to, and adds one where they leap over midnight. What holds there is what Debian's cron does. An
expression whose minute and hour begin with anything but `*` names times of the day: one that the clocks leap over fires
at the leap (once, if there are several), and one that comes twice fires the first time. Every other expression follows
real time: what is leapt over does not fire, and what comes twice fires twice.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any

import msgspec

from taskyard.errors import InvalidInput
from taskyard.model.cron import DAY, get_zone, normalize, parse_cron, to_midnight
from taskyard.model.given import LONGEST_S
from taskyard.model.task import FIRST, LAST, aware

if TYPE_CHECKING:
    from zoneinfo import ZoneInfo

LEAST_S = 1.0
"""What should happen more often is one task that loops, not a row in a store for each time."""

TICK = timedelta(microseconds=1)


class Cron(msgspec.Struct, frozen=True, tag="cron"):
    """Fires when the clocks of `zone` show what `expression` says: five fields, or an alias such as `@daily`."""

    expression: str
    zone: str = "UTC"

    def __post_init__(self) -> None:
        expression = normalize(self.expression)
        parse_cron(expression)
        get_zone(self.zone)
        msgspec.structs.force_setattr(self, "expression", expression)


class Every(msgspec.Struct, frozen=True, tag="every"):
    """Fires every so many `seconds` of real time, in both directions from `anchor`, which is one of the fire times. By
    default that is the beginning of 1970, so that every 900 seconds is at 00, 15, 30 and 45 minutes past the hour."""

    seconds: float
    anchor: datetime = FIRST

    def __post_init__(self) -> None:
        seconds: Any = self.seconds
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not LEAST_S <= seconds < LONGEST_S:
            raise InvalidInput(
                f"must be a number from {LEAST_S:g} to 1e9", field="seconds of an interval", given=seconds
            )
        if not isinstance(self.anchor, datetime):
            raise InvalidInput("must be a datetime with a time zone", field="anchor", given=self.anchor)
        anchor = aware("anchor", self.anchor)
        if not FIRST <= anchor < LAST:
            raise InvalidInput("must be between the years 1970 and 9000", field="anchor", given=anchor)
        msgspec.structs.force_setattr(self, "seconds", float(seconds))
        msgspec.structs.force_setattr(self, "anchor", anchor)

    @property
    def period(self) -> timedelta:
        return timedelta(seconds=self.seconds)

    def number(self, at: datetime) -> int:
        """How many periods after the anchor the last fire time up to `at` is."""
        return (at - self.anchor) // self.period


Rule = Cron | Every


# --- fire times -------------------------------------------------------------------------------------------------------


def fires(rule: Rule, *, after: datetime) -> Iterator[datetime]:
    """The fire times later than `after`, each computed when it is asked for."""
    after = _within(after)
    found = _cron_fires(rule, after) if isinstance(rule, Cron) else _interval_fires(rule, after)
    return takewhile(lambda at: at < LAST, found)


def next_fires(rule: Rule, *, after: datetime, count: int) -> list[datetime]:
    """The first `count` fire times later than `after`."""
    return list(islice(fires(rule, after=after), count))


def fires_between(rule: Rule, *, after: datetime, until: datetime) -> Iterator[datetime]:
    """The fire times later than `after`, up to and with `until`."""
    return takewhile(lambda at: at <= until, fires(rule, after=after))


def count_fires(rule: Rule, *, after: datetime, until: datetime) -> int:
    """How many `fires_between` would give, at the price of a look at each day between."""
    after, until = _within(after), _within(until)
    if until <= after:
        return 0
    if isinstance(rule, Every):
        return rule.number(until) - rule.number(after)
    return sum(_count_by_day(rule, after, until))


def find_last_fire(rule: Rule, *, after: datetime, until: datetime) -> datetime | None:
    """The latest that `fires_between` would give."""
    after, until = _within(after), _within(until)
    if isinstance(rule, Every):
        last = rule.anchor + rule.number(until) * rule.period
        return last if last > after else None
    span = timedelta(hours=1)
    while True:
        # Backwards in steps that double: a rule that fires often is found in the first, and a rare one has few.
        begin = max(after, until - span)
        found = deque(fires_between(rule, after=begin, until=until), maxlen=1)
        if found or begin == after:
            return found.pop() if found else None
        span *= 2


def _within(at: datetime) -> datetime:
    return min(max(at, FIRST - TICK), LAST)


def _interval_fires(rule: Every, after: datetime) -> Iterator[datetime]:
    at = rule.anchor + (rule.number(after) + 1) * rule.period
    while True:
        yield at
        at += rule.period


# --- cron -------------------------------------------------------------------------------------------------------------


def _cron_fires(rule: Cron, after: datetime) -> Iterator[datetime]:
    parsed, zone = parse_cron(rule.expression), get_zone(rule.zone)
    begin = after.astimezone(zone)
    # What the clocks show between here and a change may come a second time after it.
    back = timedelta() if parsed.is_fixed else max(timedelta(), _offset(after, zone) - _offset(after + DAY, zone))
    again: deque[datetime] = deque()
    for wall in parsed.walls(after=begin.replace(tzinfo=None) - back, last=LAST.date()):
        early, late = _offsets(wall, zone)
        if early < late:  # the clocks leap over it
            if not parsed.is_fixed:
                continue
            at = _leap(wall, early, late, zone)
        else:
            at = _to_utc(wall, early)
        while again and again[0] < at:
            second = again.popleft()
            if second > after:
                after = second
                yield second
        if at > after:
            after = at
            yield at
        if early > late and not parsed.is_fixed:
            again.append(_to_utc(wall, late))


def _offset(at: datetime, zone: ZoneInfo) -> timedelta:
    return at.astimezone(zone).utcoffset() or timedelta()


def _offsets(wall: datetime, zone: ZoneInfo) -> tuple[timedelta, timedelta]:
    """From UTC, the first and the second time that the clocks show `wall`; the first is smaller if they never do."""
    early, late = wall.replace(tzinfo=zone).utcoffset(), wall.replace(tzinfo=zone, fold=1).utcoffset()
    return early or timedelta(), late or timedelta()


def _to_utc(wall: datetime, offset: timedelta) -> datetime:
    return (wall - offset).replace(tzinfo=UTC)


def _leap(wall: datetime, early: timedelta, late: timedelta, zone: ZoneInfo) -> datetime:
    """The moment at which the clocks leap over `wall`."""
    begin = _to_utc(wall, late)
    seconds = range((late - early) // timedelta(seconds=1) + 1)
    leapt = bisect_left(seconds, True, key=lambda s: _offset(begin + timedelta(seconds=s), zone) != early)
    return begin + timedelta(seconds=leapt)


def _count_by_day(rule: Cron, after: datetime, until: datetime) -> Iterator[int]:
    """The number of fires of each day. Only around a change of the clocks they are walked through."""
    if until - after < timedelta(hours=1):
        yield sum(1 for _ in fires_between(rule, after=after, until=until))
        return
    parsed, zone = parse_cron(rule.expression), get_zone(rule.zone)
    # A clock set back at midnight shows the day before once more: one day further on either side is far enough.
    day = after.astimezone(zone).date() - DAY
    before, here = _offsets(to_midnight(day - DAY), zone), _offsets(to_midnight(day), zone)
    while True:
        following = _offsets(to_midnight(day + DAY), zone)
        first = max(after, _to_utc(to_midnight(day), here[0]) - TICK)
        last = min(until, _to_utc(to_midnight(day + DAY), following[0]) - TICK)
        if first >= until:
            return
        if first < last and before == here == following and here[0] == here[1]:
            shown = (at.replace(tzinfo=None) + here[0] for at in (first, last))
            yield parsed.count_on(day, after=next(shown), until=next(shown))
        elif first < last:
            yield sum(1 for _ in fires_between(rule, after=first, until=last))
        day, before, here = day + DAY, here, following


# --- words ------------------------------------------------------------------------------------------------------------

_UNITS = (("day", 86_400), ("hour", 3_600), ("minute", 60), ("second", 1))

_STEP = re.compile(r"\*/(\d{1,2}) \* \* \* \*")


def describe(rule: Rule) -> str:
    """The rule in words: "at 04:30 on Monday, Europe/Berlin"; "every 15 minutes"."""
    if isinstance(rule, Cron):
        step = _STEP.fullmatch(rule.expression)
        if step and 60 % int(step[1]) == 0:
            return f"{_describe_interval(int(step[1]) * 60)}, {rule.zone}"
        words = parse_cron(rule.expression).explain()
        return f"{words[0].lower()}{words[1:]}, {rule.zone}"
    words = _describe_interval(rule.seconds)
    if (rule.anchor - FIRST) % rule.period:
        words += f", one of them at {rule.anchor:%Y-%m-%d %H:%M:%S} UTC"
    return words


def _describe_interval(seconds: float) -> str:
    for unit, size in _UNITS:
        if seconds == size:
            return f"every {unit}"
        if seconds % size == 0:
            return f"every {seconds / size:,.0f} {unit}s"
    return f"every {seconds:,g} seconds"
