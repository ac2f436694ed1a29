"""What was asked, and the JSON it is kept as."""

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskyard.errors import InvalidInput, NaiveDatetime, NotJson
from taskyard.model.task import Task, aware, to_json
from taskyard.testing.samples import NOON, a_record
from tests.unit.strategies import json_objects, json_values

zones = st.timezones() | st.integers(-1439, 1439).map(lambda m: timezone(timedelta(minutes=m)))
anywhere = st.datetimes(datetime(1971, 1, 1), datetime(2099, 1, 1), timezones=zones)  # noqa: DTZ001 - bounds


@pytest.mark.spec("SCH-02")
@given(json_objects, anywhere, st.text(min_size=1))
def test_a_task_round_trips_through_its_dict(args: dict[str, object], at: datetime, source: str):
    """`from_dict(to_dict())` is the same task, also by way of JSON text, in any time zone, whatever its clocks do."""
    task = Task(source=source, args=args, schedule_at=at)
    assert Task.from_dict(task.to_dict()) == task
    assert Task.from_dict(json.loads(json.dumps(task.to_dict()))) == task


@pytest.mark.spec("SCH-02")
def test_a_task_is_due_now_unless_it_says_otherwise():
    """The default time is now, aware; ids are made up and differ."""
    before = datetime.now(UTC)
    one, two = Task("fetch"), Task("fetch")
    assert before <= one.schedule_at <= two.schedule_at <= datetime.now(UTC)
    assert one.schedule_at.tzinfo is not None
    assert one.uuid != two.uuid
    assert one.args == {}
    assert one.args is not two.args


@pytest.mark.spec("SCH-02")
def test_a_naive_time_is_refused():
    """A time without a zone is refused with an error that names the field and says what to write."""
    naive = datetime(2026, 1, 1)  # noqa: DTZ001 - the point
    with pytest.raises(NaiveDatetime, match=r"schedule_at 2026-01-01 00:00:00 has no time zone; write .*timezone.utc"):
        Task("fetch", schedule_at=naive)
    with pytest.raises(NaiveDatetime):
        Task.from_dict({**Task("fetch").to_dict(), "schedule_at": "2026-01-01T00:00:00"})
    with pytest.raises(NaiveDatetime, match="due_at"):
        aware("due_at", naive)


@pytest.mark.spec("SCH-05")
@given(anywhere, anywhere)
def test_times_compare_as_moments(a: datetime, b: datetime):
    """Whatever zones two times are written in, they compare as the moments they are, in UTC."""
    at_a, at_b = aware("a", a), aware("b", b)
    assert at_a.tzinfo is at_b.tzinfo is UTC
    assert at_a.timestamp() == a.timestamp()
    assert (Task("x", schedule_at=a).schedule_at < Task("x", schedule_at=b).schedule_at) == (at_a < at_b)


@pytest.mark.spec("SCH-05")
def test_the_two_hours_of_a_fall_back_are_an_hour_apart():
    """When clocks are set back, the first and the second 02:30 are different moments, in order."""
    first = datetime(2026, 10, 25, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"))
    second = first.replace(fold=1)
    one, two = (Task("x", schedule_at=at).schedule_at for at in (first, second))
    assert two - one == timedelta(hours=1)


@pytest.mark.spec("SCH-25")
def test_a_task_cannot_be_changed():
    """The fields of a task cannot be set."""
    task = Task("fetch", {"url": "u"})
    for field in ("source", "args", "schedule_at", "uuid"):
        with pytest.raises(AttributeError):
            setattr(task, field, None)


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        ({"uuid": ...}, "'uuid' is missing"),
        ({"args": ...}, "'args' is missing"),
        ({"source": ...}, "'source' is missing"),
        ({"schedule_at": ...}, "'schedule_at' is missing"),
        ({"schedule_at": "tomorrow"}, "tomorrow"),
        ({"schedule_at": None}, "wrong value"),
        ({"args": [1]}, "must be a dict, not list"),
        ({"source": 7}, "source"),
    ],
    ids=str,
)
def test_a_dict_that_is_no_task_is_refused(change: dict[str, object], hint: str):
    """What is missing or wrong in a task's dict is named."""
    data = {k: v for k, v in {**Task("fetch").to_dict(), **change}.items() if v is not ...}
    with pytest.raises(InvalidInput, match=hint):
        Task.from_dict(data)


def test_a_record_knows_its_task():
    """The task of a record has its arguments decoded and the time it is due."""
    record = a_record(args='{"url":"u"}')
    assert record.task == Task("fetch", {"url": "u"}, NOON, record.uuid)


def test_a_copy_of_a_record_is_apart():
    """A copied record is equal, and changing it leaves the first alone."""
    record = a_record()
    other = copy.copy(record)
    assert other == record
    other.attempt = 9
    assert record.attempt == 0


@given(json_values)
def test_what_is_json_comes_back(value: object):
    """Every JSON value is kept as text that reads as the same value, here and in the standard library."""
    text = to_json("args", value)
    assert msgspec.json.decode(text) == value
    assert json.loads(text) == value


@dataclass
class Point:
    x: float


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("wrap", [lambda n: n, lambda n: {"a": [None, (1, n)]}, Point])
def test_numbers_that_json_lacks_are_refused(number: float, wrap: Callable[[float], object]):
    """NaN and the infinities are refused wherever they are; null itself is kept."""
    with pytest.raises(NotJson, match=r"NaN or an infinite number.* give None or a text"):
        to_json("result", wrap(number))
    assert to_json("result", {"a": [None, 1.5], "b": "null"}) == '{"a":[null,1.5],"b":"null"}'


def _endless() -> list[object]:
    endless: list[object] = []
    endless.append(endless)
    return endless


@pytest.mark.parametrize(
    "value",
    [object(), lambda: 0, 1j, {(1, 2): 3}, "\ud800", _endless()],
    ids=["object", "function", "complex", "tuple-key", "half-a-character", "endless"],
)
def test_what_is_not_json_is_refused(value: object):
    """A value that JSON cannot hold is refused with what it was and what to use instead."""
    with pytest.raises(NotJson, match=r"result cannot be written as JSON .* use dicts") as refused:
        to_json("result", value)
    assert refused.value.what == "result"
