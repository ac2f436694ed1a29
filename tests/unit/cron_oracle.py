"""Cron as naively as can be, to hold the real one against: look at every minute, and at what the clocks show then.

Its own reading of expressions, its own idea of clock changes, nothing shared with what it judges.
"""

from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo

from taskyard.model.recurrence import Cron, fires_between

MINUTE, DAY = timedelta(minutes=1), timedelta(days=1)

BEFORE = timedelta(hours=4)

DAYS = ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")
MONTHS = ("", "JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC")

EXPRESSIONS = (
    "* * * * *",
    "*/15 * * * *",
    "40 * * * *",
    "0 */2 * * *",
    "0 */3 * * SUN",
    "*/10 2 * * *",
    "* 0 * * SUN",
    "30 2 * * *",
    "0 0 * * *",
    "0 1 * * *",
    "15 1-3 * * *",
    "0,30 0-4 * * *",
    "0-59 23 * * *",
    "5 0 * * SUN,FRI",
    "59 23 L * *",
    "30 2 8-14 * SUN",
    "0 3 */2 * *",
)

Minutes = list[tuple[datetime, datetime]]
"""Moments, and what the clocks of one zone show then."""


class NaiveCron:
    def __init__(self, expression: str) -> None:
        minute, hour, day, month, weekday = expression.split()
        self.minutes, self.hours = numbers(minute, 0, 59), numbers(hour, 0, 23)
        self.months = numbers(month, 1, 12, MONTHS)
        self.day, self.weekday = day, weekday
        self.is_fixed = not minute.startswith("*") and not hour.startswith("*")
        self._dates: dict[date, bool] = {}

    def shows(self, wall: datetime) -> bool:
        if wall.minute not in self.minutes or wall.hour not in self.hours:
            return False
        day = wall.date()
        if day not in self._dates:
            self._dates[day] = self._is_on(day)
        return self._dates[day]

    def _is_on(self, day: date) -> bool:
        by_date = (day + DAY).day == 1 if self.day == "L" else day.day in numbers(self.day, 1, 31)
        by_weekday = {day.isoweekday(), day.isoweekday() % 7} & numbers(self.weekday, 0, 7, DAYS)
        needs_both = self.day.startswith("*") or self.weekday.startswith("*")
        is_on = (by_date and by_weekday) if needs_both else (by_date or by_weekday)
        return day.month in self.months and bool(is_on)

    def fires(self, minutes: Minutes) -> list[datetime]:
        """When it fires within these minutes. They must begin earlier than what is asked for by more than clocks are
        ever set back."""
        if not self.is_fixed:
            return [at for at, wall in minutes if self.shows(wall)]
        fired, seen = [], set()
        expected = minutes[0][1]
        for at, wall in minutes:
            leapt = []
            while expected < wall:
                leapt.append(expected)
                expected += MINUTE
            if (wall not in seen and self.shows(wall)) or any(map(self.shows, leapt)):
                fired.append(at)
            seen.add(wall)
            expected = wall + MINUTE
        return fired


def numbers(field: str, least: int, most: int, names: tuple[str, ...] = ()) -> set[int]:
    found: set[int] = set()
    for term in field.split(","):
        span, _, step = term.partition("/")
        first, _, last = span.partition("-")
        if span == "*":
            low, high = least, most
        else:
            low = names.index(first) if first in names else int(first)
            high = (names.index(last) if last in names else int(last)) if last else (most if step else low)
        found.update(range(low, high + 1, int(step or 1)))
    return found


def differs(expression: str, name: str, minutes: Minutes) -> str | None:
    """What the real one does otherwise within these minutes, in words."""
    asked, end = minutes[0][0] + BEFORE, minutes[-1][0]
    expected = {at for at in NaiveCron(expression).fires(minutes) if at > asked}
    fired = list(fires_between(Cron(expression, name), after=asked, until=end))
    if fired == sorted(expected):
        return None
    return f"{expression} in {name}: {expected.symmetric_difference(fired) or 'not in order'}"


def minutes_of(zone: ZoneInfo, begin: datetime, end: datetime) -> Minutes:
    moments = (begin + n * MINUTE for n in range((end - begin) // MINUTE))
    return [(at, at.astimezone(zone).replace(tzinfo=None)) for at in moments]


def changes(zone: ZoneInfo, year: int) -> Iterator[datetime]:
    """The moments of a year at which the clocks of a zone are changed, to the minute."""
    begin = datetime(year, 1, 1, tzinfo=UTC)
    while begin.year == year:
        end = begin + DAY
        if begin.astimezone(zone).utcoffset() != end.astimezone(zone).utcoffset():
            inside = (begin + n * MINUTE for n in range(1, 1441))
            yield next(at for at in inside if at.astimezone(zone).utcoffset() != begin.astimezone(zone).utcoffset())
        begin = end


def windows(zone: ZoneInfo, year: int) -> list[tuple[datetime, datetime]]:
    """What of a year to look at: two days around each change, or around its last midnight if there is none; and before
    that as much as clocks are ever set back, which is not to be asked for."""
    around = list(changes(zone, year)) or [datetime(year + 1, 1, 1, tzinfo=UTC)]
    return [(at - DAY - BEFORE, at + DAY) for at in around]
