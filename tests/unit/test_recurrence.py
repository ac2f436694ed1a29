"""When a rule fires: cron against an oracle that looks at every minute, intervals against arithmetic."""

import random
from bisect import bisect_right
from collections import defaultdict
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from itertools import pairwise
from zoneinfo import ZoneInfo, available_timezones

import msgspec
import pytest
from cronsim import CronSim
from hypothesis import given
from hypothesis import strategies as st

from taskyard.errors import InvalidInput
from taskyard.model.cron import ALIASES
from taskyard.model.recurrence import (
    TICK,
    Cron,
    Every,
    Rule,
    count_fires,
    describe,
    find_last_fire,
    fires_between,
    next_fires,
)
from taskyard.model.task import FIRST, LAST
from tests.unit.cron_oracle import EXPRESSIONS, NaiveCron, changes, differs, minutes_of, windows
from tests.unit.cron_strings import draw
from tests.unit.strategies import moments

YEAR = 2026

BERLIN = "Europe/Berlin"

# Where clocks leap over the last hour of a day, over midnight, go back over midnight, and change by half an hour.
ELSEWHERE = ("America/Nuuk", "Africa/Cairo", "America/Havana", "Australia/Lord_Howe")


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).astimezone(UTC)


@lru_cache
def zones_alike() -> tuple[str, ...]:
    """One zone for each way in which clocks are set and changed this year."""
    alike: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for name in sorted(available_timezones()):
        zone = ZoneInfo(name)
        at = [datetime(YEAR, 1, 1, tzinfo=UTC), *changes(zone, YEAR)]
        alike[tuple((moment, moment.astimezone(zone).utcoffset()) for moment in at)].append(name)
    return tuple(names[0] for names in alike.values())


# --- cron against the oracle ------------------------------------------------------------------------------------------


@pytest.mark.spec("SCH-21")
def test_cron_fires_when_the_oracle_says():
    """Around every change of clocks this year, in every way that zones change them, every expression fires exactly
    when an oracle says that looks at every minute."""
    zones = [ZoneInfo(name) for name in zones_alike()]
    looked = [(zone, minutes_of(zone, begin, end)) for zone in zones for begin, end in windows(zone, YEAR)]
    assert len(looked) > 60  # there are that many, or the zones were not found
    told = (differs(expression, zone.key, minutes) for zone, minutes in looked for expression in EXPRESSIONS)
    assert [difference for difference in told if difference] == []


@st.composite
def fields(draw: st.DrawFn, least: int, most: int) -> str:
    """A field of an expression, with all the forms that a field can have."""
    number = st.integers(least, most)
    terms = []
    for _ in range(draw(st.integers(1, 3))):
        first, second, step = draw(number), draw(number), draw(st.integers(1, most))
        span = f"{min(first, second)}-{max(first, second)}"
        terms.append(draw(st.sampled_from(["*", f"*/{step}", str(first), span, f"{span}/{step}", f"{first}/{step}"])))
    return ",".join(terms)


expressions = st.tuples(fields(0, 59), fields(0, 23), fields(1, 28), st.just("*"), fields(0, 6)).map(" ".join)

zones = st.sampled_from(
    [BERLIN, "America/New_York", "Australia/Lord_Howe", "Africa/Cairo", "America/Havana", "America/Nuuk",
     "Antarctica/Troll", "Asia/Kolkata", "Africa/Casablanca", "UTC"]
)  # fmt: skip


CHANGE = 28 * 60
minutes_asked = st.integers(CHANGE - 150, CHANGE + 150) | st.integers(4 * 60, 50 * 60)


@lru_cache
def minutes_around(zone: str, window: int) -> list[tuple[datetime, datetime]]:
    begin, end = windows(ZoneInfo(zone), YEAR)[window % len(windows(ZoneInfo(zone), YEAR))]
    return minutes_of(ZoneInfo(zone), begin, end)


@pytest.mark.spec("SCH-21")
@given(expressions, zones, st.integers(0, 1), minutes_asked, st.integers(0, 59))
def test_cron_gives_the_same_from_wherever_one_asks(expression: str, zone: str, window: int, minute: int, second: int):
    """Any expression, asked from any second around a change, goes on exactly as the oracle does; and counting or
    looking for the last agrees with walking through."""
    rule = Cron(expression, zone)
    minutes = minutes_around(zone, window)
    asked, end = minutes[minute][0] + timedelta(seconds=second), minutes[-1][0]
    expected = [at for at in NaiveCron(expression).fires(minutes) if at > asked]
    assert list(fires_between(rule, after=asked, until=end)) == expected
    assert count_fires(rule, after=asked, until=end) == len(expected)
    assert find_last_fire(rule, after=asked, until=end) == (expected[-1] if expected else None)


@pytest.mark.spec("SCH-21")
@pytest.mark.parametrize("zone", [BERLIN, *ELSEWHERE])
@pytest.mark.parametrize("window", [0, 1], ids=["first", "second"])
def test_cron_goes_on_from_any_minute_around_a_change(zone: str, window: int):
    """Asked from one hour before a change to one hour after it, every expression goes on with what the oracle says
    comes next: also with an hour that has begun once and will begin again."""
    minutes = minutes_around(zone, window)
    for expression in EXPRESSIONS:
        rule, expected = Cron(expression, zone), NaiveCron(expression).fires(minutes)
        for asked, _ in minutes[CHANGE - 65 : CHANGE + 65 : 10]:
            following = expected[bisect_right(expected, asked) :][:2]
            assert next_fires(rule, after=asked, count=2)[: len(following)] == following, expression


@pytest.mark.spec("SCH-21")
@pytest.mark.parametrize(
    "expression", ["0 0 29 2 *", "0 12 L * *", "0 0 LW * *", "0 0 * 2 MON#5", "1 1 * * 5L", "0 9 13 * 5"]
)
def test_rare_days_are_cronsims(expression: str):
    """Where no clock changes, the days far ahead are those that cronsim finds by its own walk."""
    theirs = CronSim(expression, datetime(YEAR, 1, 1, tzinfo=UTC))
    assert next_fires(Cron(expression), after=datetime(YEAR, 1, 1, tzinfo=UTC), count=5) == [
        next(theirs) for _ in range(5)
    ]


@pytest.mark.spec("SCH-21")
@pytest.mark.parametrize(
    ("expression", "day", "expected"),
    [
        # In Berlin: from 02:00 to 03:00 on the 29th of March, from 03:00 to 02:00 on the 25th of October.
        pytest.param("30 2 * * *", "2026-03-29", ["03:00+02:00"], id="leapt over, fires at the leap"),
        pytest.param("0,30 2 * * *", "2026-03-29", ["03:00+02:00"], id="twice leapt over, fires once"),
        pytest.param("30 2,3 * * *", "2026-03-29", ["03:00+02:00", "03:30+02:00"], id="leapt over, and one after"),
        pytest.param("30 */2 * * *", "2026-03-29", ["00:30+01:00", "04:30+02:00"], id="real time, leapt over"),
        pytest.param("30 2 * * *", "2026-10-25", ["02:30+02:00"], id="comes twice, fires the first time"),
        pytest.param("0 2-3,*/9 * * *", "2026-10-25", ["00:00+02:00", "02:00+02:00", "03:00+01:00"], id="not first"),
        pytest.param("0 */1 * * *", "2026-10-25", ["00:00+02:00", "01:00+02:00", "02:00+02:00", "02:00+01:00",
                     "03:00+01:00"], id="real time, comes twice"),
    ],
)  # fmt: skip
def test_clocks_that_change(expression: str, day: str, expected: list[str]):
    """A time of the day fires once on every day, whatever the clocks do; what is more frequent follows real time."""
    begin, end = utc(f"{day}T00:00{'+01:00' if '-03-' in day else '+02:00'}"), utc(f"{day}T03:59Z") - timedelta(hours=1)
    fired = fires_between(Cron(expression, BERLIN), after=begin - TICK, until=end + timedelta(minutes=1))
    assert list(fired)[: len(expected)] == [utc(f"{day}T{at}") for at in expected]


# --- intervals --------------------------------------------------------------------------------------------------------

intervals = st.builds(
    Every,
    st.integers(1, 10**8) | st.floats(1, 1e8),
    st.datetimes(datetime(1971, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC)),  # noqa: DTZ001 - bounds
)


@pytest.mark.spec("SCH-21")
@given(intervals, moments)
def test_an_interval_keeps_its_distance_from_the_anchor(rule: Every, after: datetime):
    """Fire times are whole periods from the anchor, however far it is away, the first within one period."""
    first, second = next_fires(rule, after=after, count=2)
    assert after < first <= after + rule.period
    assert second - first == rule.period
    assert (first - rule.anchor) % rule.period == timedelta()


@given(intervals, moments, st.integers(0, 50), st.floats(0, 1))
def test_an_interval_is_counted_as_it_is_walked(rule: Every, after: datetime, periods: int, share: float):
    """Counting and looking for the last agree with walking through."""
    until = after + periods * rule.period + share * rule.period
    walked = list(fires_between(rule, after=after, until=until))
    assert count_fires(rule, after=after, until=until) == len(walked)
    assert find_last_fire(rule, after=after, until=until) == (walked[-1] if walked else None)


def test_an_interval_is_aligned_by_default():
    """Without an anchor every 15 minutes is at the quarters of an hour."""
    assert next_fires(Every(900), after=utc("2026-11-16T05:07Z"), count=2) == [
        utc("2026-11-16T05:15Z"),
        utc("2026-11-16T05:30Z"),
    ]


# --- both -------------------------------------------------------------------------------------------------------------

RULES: list[Rule] = [
    Every(3600),
    Every(86_400.5),
    *(Cron(text, BERLIN) for text in EXPRESSIONS[1:]),
    *(Cron(text, zone) for zone in ELSEWHERE for text in ("30 23 * * *", "15 0 * * *", "*/20 * * * *")),
]


@pytest.mark.parametrize("rule", RULES, ids=describe)
def test_long_times_are_counted_right(rule: Rule):
    """Over more than a year, with the changes of clocks in it, counting gives what walking through gives."""
    after, until = utc("2026-02-03T04:05:06Z"), utc("2027-04-03T02:01Z")
    walked = list(fires_between(rule, after=after, until=until))
    chosen = random.Random(1)
    cuts = [after + (until - after) * chosen.random() for _ in range(40)]
    for first, last in pairwise(cuts):
        first, last = min(first, last), max(first, last)
        expected = bisect_right(walked, last) - bisect_right(walked, first)
        assert count_fires(rule, after=first, until=last) == expected
    assert count_fires(rule, after=until, until=after) == 0


@pytest.mark.parametrize("rule", RULES[:4], ids=describe)
@pytest.mark.parametrize("after", [FIRST.replace(year=1), LAST.replace(year=9999)], ids=["the first", "the last"])
def test_the_ends_of_time_are_only_the_ends(rule: Rule, after: datetime):
    """Asked from the first or the last moment there is, a rule gives what lies within its bounds, or nothing."""
    found = next_fires(rule, after=after, count=2)
    assert all(FIRST <= at < LAST for at in found)
    assert len(found) == (0 if after > LAST else 2)
    assert count_fires(rule, after=after, until=after) == 0


def test_a_rule_survives_a_store():
    """A rule comes out of JSON as it went in."""
    for rule in RULES:
        assert msgspec.json.decode(msgspec.json.encode(rule), type=Cron | Every) == rule


# --- words ------------------------------------------------------------------------------------------------------------


@pytest.mark.spec("SCH-21")
@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (Cron("30 4 * * MON", BERLIN), "at 04:30 on Monday, Europe/Berlin"),
        (Cron("@daily"), "at 00:00 every day, UTC"),
        (Cron("0 0 22,31 * *"), "at 00:00 on the 22nd and the 31st day of month, UTC"),
        (Cron("*/15 * * * *"), "every 15 minutes, UTC"),
        (Cron("*/25 * * * *"), "every 25th minute of every hour, UTC"),
        (Every(1), "every second"),
        (Every(900), "every 15 minutes"),
        (Every(5400), "every 90 minutes"),
        (Every(604_800), "every 7 days"),
        (Every(2.5), "every 2.5 seconds"),
        (Every(3600, utc("2026-11-16T00:20Z")), "every hour, one of them at 2026-11-16 00:20:00 UTC"),
    ],
    ids=repr,
)
def test_a_rule_in_words(rule: Rule, words: str):
    """People can read when it fires."""
    assert describe(rule) == words


@pytest.mark.parametrize(
    ("odd", "plain"), [("5-5/2 * * * *", "5 * * * *"), ("0 0 * * mon-MON/3,05-5/1", "0 0 * * 1,5")]
)
def test_a_range_of_one_with_a_step_is_one(odd: str, plain: str):
    """A step leads nowhere in a range that ends where it begins."""
    after = utc("2026-03-27T12:00Z")
    assert next_fires(Cron(odd), after=after, count=9) == next_fires(Cron(plain), after=after, count=9)


@pytest.mark.parametrize("alias", ALIASES)
def test_aliases_are_what_crontab_says(alias: str):
    """An alias is kept as it was written, and fires as what it stands for."""
    rule = Cron(f" {alias.upper()}\n", BERLIN)
    assert rule.expression == alias
    after = utc("2026-03-27T12:00Z")
    assert next_fires(rule, after=after, count=50) == next_fires(Cron(ALIASES[alias], BERLIN), after=after, count=50)


# --- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.spec("SCH-21")
@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("", "such as '30 4"),
        (5, "such as '30 4"),
        ("* * * *", "has 4 fields, not 5"),
        ("0 0 12 * * ? *", "none for seconds or years"),
        ("* * * * * *", "use Every"),
        ("61 * * * *", "'61' is no minute"),
        ("* 24 * * *", "'24' is no hour"),
        ("* * 0 * *", "'0' is no day-of-month"),
        ("* * * FOO *", "'FOO' is no month"),
        ("* * * * FRI-MON", "'FRI-MON' is no day-of-week"),
        ("*/0 * * * *", "is no minute"),
        ("5-5/0 * * * *", "is no minute"),
        ("1-5-5/2 * * * *", "is no minute"),
        ("0 0 ? * 1", r"write \* for \?"),
        ("0 0 30 2 *", "never fires"),
        ("0 0 31 2,4,6 *", "never fires"),
        ("* * */20 * 1L", "never fires"),
        ("@reboot", "where your program starts"),
        ("@every 5m", "Every"),
        ("@noon", "known are @hourly"),
        ("*" * 10_000, "at most 200"),
        ("0 0 * * ſun", "plain ASCII"),
        ("0 0 * * \0", "is no day-of-week"),
    ],
)
def test_a_wrong_expression_is_refused_in_words(expression, said: str):
    """What cannot be a rule, or would never fire, is refused with a hint."""
    with pytest.raises(InvalidInput, match=said):
        Cron(expression)


@pytest.mark.spec("SCH-21")
@pytest.mark.parametrize(
    "zone",
    ["Europe/Berln", "europe/berlin", "America", "localtime", "right/UTC", "posix/UTC", "../UTC", "/etc/localtime",
     "", "a" * 10_000, "Europe/\0", "\ud800", None, 1],
    ids=lambda zone: repr(zone)[:20],
)  # fmt: skip
def test_a_zone_that_is_not_the_same_everywhere_is_refused(zone):
    """Only a name from the database of time zones is one: no path, no folder, nothing of one machine."""
    with pytest.raises(InvalidInput, match="database of time zones"):
        Cron("@daily", zone)


def test_a_zone_that_is_nearly_right_is_named():
    """A slip of the pen is told with what was meant."""
    with pytest.raises(InvalidInput, match="did you mean 'Europe/Berlin'"):
        Cron("@daily", "Europe/Berln")


@pytest.mark.spec("SCH-21")
@pytest.mark.parametrize("seconds", [0, -1, 0.5, True, "60", None, float("nan"), float("inf"), 1e12, 10**400])
def test_a_wrong_interval_is_refused(seconds):
    """An interval is a number of seconds that time goes on by."""
    with pytest.raises(InvalidInput, match="seconds of an interval"):
        Every(seconds)


@pytest.mark.parametrize("anchor", [datetime(2026, 1, 1), "now", datetime(1, 1, 1, tzinfo=UTC)])  # noqa: DTZ001 - naive
def test_a_wrong_anchor_is_refused(anchor):
    """An anchor is a moment of our times."""
    with pytest.raises(InvalidInput):
        Every(60, anchor)


@pytest.mark.spec("SCH-21")
def test_any_text_is_a_rule_or_refused():
    """Whatever is written, it is a rule that fires and can be told, or refused; never anything else."""
    chosen = random.Random(YEAR)
    good = 0
    for _ in range(2_000):
        text = draw(chosen)
        try:
            rule = Cron(text, BERLIN)
        except InvalidInput:
            continue
        good += 1
        assert len(next_fires(rule, after=utc("2026-11-16T05:00Z"), count=2)) == 2, text
        assert describe(rule), text
    assert good > 200  # or it would show nothing
