"""How a cron expression and the name of a time zone are read, and refused. What they mean is in `recurrence`."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from datetime import date, datetime, time, timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from taskyard.errors import InvalidInput, quote

if TYPE_CHECKING:
    from zoneinfo import ZoneInfo

    from cronsim import CronSim

LONGEST_EXPRESSION = 200

ALIASES = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}

FIELDS = {
    "minute": "0-59",
    "hour": "0-23",
    "day-of-month": "1-31, or L for the last",
    "month": "1-12 or JAN-DEC",
    "day-of-week": "0-7 or SUN-SAT, 0 and 7 being Sunday",
}

DAY = timedelta(days=1)

_ANY_DAY = datetime(2000, 1, 1)  # noqa: DTZ001 - cronsim wants to know where to begin, and is not asked to walk


class CronTimes(NamedTuple):
    """What an expression says, without a zone: dates, and the times of such a day. All that is shown on clocks is naive
    here. `is_fixed`: it names times of the day, rather than how often."""

    days: CronSim
    times: tuple[timedelta, ...]
    is_fixed: bool

    def is_on(self, day: date) -> bool:
        return day.month in self.days.months and self.days.match_day(day)

    def dates(self, day: date, last: date) -> Iterator[date]:
        while day <= last:
            if self.is_on(day):
                yield day
            elif day.month not in self.days.months:
                day = (day.replace(day=1) + 32 * DAY).replace(day=1)
                continue
            day += DAY

    def walls(self, *, after: datetime, last: date) -> Iterator[datetime]:
        """What the clocks show when it fires, in the order of the calendar."""
        first = after.date()
        for day in self.dates(first, last):
            midnight = to_midnight(day)
            for at in self.times if day > first else self.times[bisect_right(self.times, after - midnight) :]:
                yield midnight + at

    def count_on(self, day: date, *, after: datetime, until: datetime) -> int:
        """How many of `walls` are on one day, later than `after` and up to `until`."""
        if not self.is_on(day):
            return 0
        midnight = to_midnight(day)
        return bisect_right(self.times, until - midnight) - bisect_right(self.times, after - midnight)

    def explain(self) -> str:
        """In words, with 21th and the like mended."""
        return _ORDINAL.sub(lambda found: found[1] + _ENDINGS[found[2]], self.days.explain())


_ORDINAL, _ENDINGS = re.compile(r"\b([2-9])([123])th\b"), {"1": "1st", "2": "2nd", "3": "3rd"}


def to_midnight(day: date) -> datetime:
    return datetime.combine(day, time())


def normalize(expression: Any) -> str:
    """One blank between fields, no matter what was there."""
    if not isinstance(expression, str) or not expression.strip():
        raise InvalidInput(f"a cron expression must be a text such as '30 4 * * MON', not {quote(expression)}")
    if len(expression) > LONGEST_EXPRESSION or not expression.isascii():
        raise InvalidInput(
            f"a cron expression must be plain ASCII of at most {LONGEST_EXPRESSION} characters, not {quote(expression)}"
        )
    text: str = " ".join(expression.split())
    return text.lower() if text.startswith("@") else text


@lru_cache(maxsize=1024)
def parse_cron(expression: str) -> CronTimes:
    from cronsim import CronSim, CronSimError

    text = _expand(expression)
    fields = text.split()
    if len(fields) != len(FIELDS):
        raise InvalidInput(_wrong_number(expression, len(fields)))
    try:
        days = CronSim(_ONE.sub(_only, text), _ANY_DAY)
    except CronSimError as exc:
        raise InvalidInput(_wrong_field(expression, fields, str(exc))) from None
    times = tuple(timedelta(hours=h, minutes=m) for h in sorted(days.hours) for m in sorted(days.minutes))
    found = CronTimes(days, times, is_fixed=not fields[0].startswith("*") and not fields[1].startswith("*"))
    # The days of the year and of the week come together in every way within 28 years of one century.
    if next(found.dates(date(2000, 1, 1), date(2027, 12, 31)), None) is None:
        raise InvalidInput(f"cron expression {quote(expression)} never fires: there is no such day in any year")
    return found


def _expand(expression: str) -> str:
    if not expression.startswith("@"):
        return expression
    if expression in ALIASES:
        return ALIASES[expression]
    hint = f"known are {', '.join(ALIASES)}"
    if expression == "@reboot":
        hint = "a schedule outlives the machines it runs on; submit a task where your program starts"
    elif expression.startswith("@every"):
        hint = "an interval is no expression: write Every(seconds), on the command line --every TIME"
    raise InvalidInput(f"cron expression {quote(expression)} is not known here: {hint}")


_ONE = re.compile(r"(?<![^,\s])(\w+)-(\w+)/0*[1-9]\d*(?=[,\s]|$)")


def _only(found: re.Match[str]) -> str:
    """5-5/2 is 5, which cronsim takes for 5/2."""
    return found[1] if found[1].lstrip("0").upper() == found[2].lstrip("0").upper() else found[0]


def _wrong_number(expression: str, n: int) -> str:
    text = f"cron expression {quote(expression)} has {n} field{'s' * (n != 1)}, not 5: {', '.join(FIELDS)}"
    if n in (6, 7):
        text += ". There is none for seconds or years; for what comes more often than once a minute use Every(seconds)"
    return text


def _wrong_field(expression: str, fields: list[str], why: str) -> str:
    from cronsim import CronSim, CronSimError

    name = why.removeprefix("Bad ")
    if name == "day-of-month":
        try:
            CronSim(" ".join([*fields[:3], "*", fields[4]]), _ANY_DAY)
        except CronSimError:
            pass
        else:
            return f"cron expression {quote(expression)} never fires: its months have no such day"
    given = fields[list(FIELDS).index(name)]
    hint = "; write * for ?" if "?" in given else ""
    return (
        f"cron expression {quote(expression)}: {quote(given)} is no {name}. "
        f"That is {FIELDS[name]}; * for all, and 1,5 or 1-5 or */5 for several{hint}"
    )


# --- zones ------------------------------------------------------------------------------------------------------------

_ZONE = re.compile(r"(?!localtime|posix|right/)[A-Za-z][\w+-]{0,31}(/[\w+-]{1,31}){0,2}", re.ASCII)
"""Also leaves out what differs from machine to machine, or counts leap seconds."""


@lru_cache(maxsize=1)
def _known_zones() -> list[str]:
    from zoneinfo import available_timezones

    return sorted(filter(_ZONE.fullmatch, available_timezones()))


def get_zone(name: Any) -> ZoneInfo:
    from difflib import get_close_matches
    from zoneinfo import ZoneInfo

    if isinstance(name, str) and _ZONE.fullmatch(name):
        try:
            return ZoneInfo(name)
        except (KeyError, ValueError, OSError):  # not there; not a zone; a folder
            pass
    text = f"zone {quote(name)} is not a name in the database of time zones, such as 'Europe/Berlin'"
    near = get_close_matches(name, _known_zones(), n=1) if isinstance(name, str) and len(name) < 100 else []
    raise InvalidInput(f"{text}; did you mean {near[0]!r}?" if near else text)
