"""Schedules that make a task for each of many items: what items may be, and which fire times fire."""

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from taskyard.errors import InvalidInput
from taskyard.model.each import (
    LARGEST_LIST,
    MOST_ITEMS,
    Each,
    EncodedItem,
    ScheduleItem,
    check_items,
    decode_items,
    encode_items,
    name_of,
)
from taskyard.model.firing import OVERDUE, due, overdue_since
from taskyard.model.recurrence import Every
from taskyard.model.schedule import Missed, Overlap, Schedule
from taskyard.model.schedule_state import LONGEST_RETRY, RETRY, ScheduleState, fail, pause, recover, resume

NOON = datetime(2026, 11, 16, 12, tzinfo=UTC)
HOUR, MINUTE, SECOND = timedelta(hours=1), timedelta(minutes=1), timedelta(seconds=1)
BEGUN = ScheduleState.begin(NOON)


def hourly(**fields: Any) -> Schedule:
    each = Each(items="[]")
    return Schedule(**{"name": "daily", "rule": Every(3600), "consumer": "visit", "each": each, **fields})


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("abc", "a list of dicts"),
        (7, "a list of dicts"),
        ({"a": 1}, "a list of dicts"),
        ([1], "item 0 must be a dict"),
        ([{}, None], "item 1 must be a dict"),
        ([{}] * (MOST_ITEMS + 1), "10,001 items are more than 10,000"),
        (range(10**6), "a list of dicts"),
        (iter([{}]), "a list of dicts"),
    ],
)
def test_what_is_no_list_of_items_is_refused(given: Any, problem: str) -> None:
    """What a list or a function may give is a list of dicts of arguments, and not too long."""
    with pytest.raises(InvalidInput, match=problem):
        check_items(given)


def test_items_are_dicts_or_schedule_items() -> None:
    """Both may stand in one list, which may be empty."""
    own = ScheduleItem({"a": 2}, key="k")
    assert check_items([{"a": 1}, own]) == [ScheduleItem({"a": 1}), own]
    assert check_items(()) == []
    for wrong in ({"args": 5}, {"key": 5}, {"key": ""}):
        with pytest.raises(InvalidInput):
            ScheduleItem(**wrong)


def test_encoded_items_come_back() -> None:
    """What is stored of a list is what was encoded, also when the schedule has been through a store."""
    items = [EncodedItem(msgspec.Raw(b'{"a":1}'), "k"), EncodedItem(msgspec.Raw(b"{}"))]
    schedule = hourly(each=Each(items=encode_items(items), count=2))
    again = msgspec.json.decode(msgspec.json.encode(schedule), type=Schedule)
    assert again == schedule
    assert again.each is not None
    assert [(bytes(item.args), item.key) for item in decode_items(again.each)] == [(b'{"a":1}', "k"), (b"{}", None)]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"items": "[]", "function": "f"},
        {"function": "f", "timeout_s": float("nan")},
        {"function": "f", "timeout_s": 0},
        {"function": "f", "dedupe_scope": "window"},
        {"function": "f", "dedupe_scope": 3},
        {"items": " " * (LARGEST_LIST + 1)},
    ],
)
def test_where_items_come_from_is_checked(fields: dict[str, Any]) -> None:
    """A list or a function, not both and not neither, within its bounds."""
    with pytest.raises(InvalidInput):
        Each(**fields)


def test_a_function_is_known_by_its_name() -> None:
    """Also one that is an object with `__call__`; the module is no part of it."""

    class Accounts:
        def __call__(self) -> list[Any]:
            return []

    assert name_of(check_items) == "check_items"
    assert name_of(Accounts()).endswith("Accounts")


# --- which fire times fire --------------------------------------------------------------------------------------------


@pytest.mark.spec("SCH-21")
def test_an_item_that_runs_does_not_hold_up_the_others() -> None:
    """With `skip` a fire time fires although tasks of the one before have not ended: the store skips item by item."""
    plan = due(hourly(), BEGUN, now=NOON + HOUR, is_busy=True)
    assert [fire.fire_at for fire in plan.fires] == [NOON + HOUR]
    assert not plan.cancels
    assert (plan.state.fired, plan.state.skipped) == (1, 0)


@pytest.mark.spec("SCH-21")
def test_of_fire_times_that_come_together_one_fires() -> None:
    """With `skip` the items of the second one would all be skipped: it is skipped as a whole."""
    plan = due(hourly(rule=Every(10)), BEGUN, now=NOON + 30 * SECOND, is_busy=True)
    assert len(plan.fires) == 1
    assert (plan.state.fired, plan.state.skipped) == (1, 2)


@pytest.mark.spec("SCH-21")
@pytest.mark.parametrize(
    ("overlap", "fired", "buffered", "cancels"),
    [("buffer", 0, 1, False), ("cancel", 1, 0, True), ("allow", 1, 0, False)],
)
def test_the_other_policies_are_about_the_fire_as_a_whole(
    overlap: str, fired: int, buffered: int, cancels: bool
) -> None:
    """`buffer` waits for all tasks of the one before, `cancel` cancels all of them, `allow` makes a task for each."""
    plan = due(hourly(overlap=overlap), BEGUN, now=NOON + HOUR, is_busy=True)
    assert (len(plan.fires), int(plan.state.buffered_at is not None), plan.cancels) == (fired, buffered, cancels)


@pytest.mark.spec("SCH-21")
def test_many_missed_fire_times_come_one_by_one() -> None:
    """A plan has one fire time with its thousands of items; the rest comes in the looks that follow at once."""
    schedule = hourly(missed=Missed.ALL, overlap=Overlap.ALLOW)
    state, fired, looks = BEGUN, [], 0
    now = NOON + 5 * HOUR
    while looks < 20:
        plan = due(schedule, state, now=now, is_busy=False)
        if plan.state is state:
            break
        assert len(plan.fires) == 1
        fired += [fire.fire_at for fire in plan.fires]
        state, looks = plan.state, looks + 1
    assert fired == [NOON + n * HOUR for n in range(1, 6)]
    assert state.fired == 5


# --- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.spec("SCH-21")
def test_a_fire_that_failed_is_tried_again_later_and_later() -> None:
    """Until then nothing fires, and nothing is decided; then it fires, late, and the failure counts no more."""
    now = NOON + HOUR
    state = fail(BEGUN, now=now, problem="no database")
    assert (state.failed, state.retries, state.problem, state.retry_at) == (1, 1, "no database", now + RETRY)
    plan = due(hourly(), state, now=now + RETRY - SECOND, is_busy=False)
    assert plan.state is state
    assert plan.look_at == now + RETRY
    again = fail(state, now=now + RETRY, problem="no database")
    assert again.retry_at == now + 3 * RETRY
    plan = due(hourly(), again, now=now + 3 * RETRY, is_busy=False)
    assert [fire.fire_at for fire in plan.fires] == [now]
    assert (plan.state.failed, plan.state.retries, plan.state.problem, plan.state.retry_at) == (2, 0, "", None)


@pytest.mark.spec("SCH-21")
def test_the_pause_after_failures_has_a_bound() -> None:
    """However often it fails, the next try is not further away than that."""
    state = BEGUN
    for _ in range(2000):
        state = fail(state, now=NOON, problem="x")
    assert state.retry_at == NOON + LONGEST_RETRY


@pytest.mark.spec("SCH-21")
def test_a_fire_that_fails_for_too_long_is_missed() -> None:
    """As `missed` says of any that is late; why it failed stays to be seen until one fires."""
    schedule = hourly(missed=Missed.SKIP)
    state = fail(BEGUN, now=NOON + HOUR, problem="no database")
    plan = due(schedule, state, now=NOON + HOUR + 5 * MINUTE, is_busy=False)
    assert plan.fires == ()
    assert (plan.state.missed, plan.state.problem, plan.state.retry_at) == (1, "no database", None)
    plan = due(schedule, plan.state, now=NOON + 2 * HOUR, is_busy=False)
    assert len(plan.fires) == 1
    assert plan.state.problem == ""


def test_a_retry_that_a_wrong_clock_has_set_is_not_waited_for() -> None:
    """A clock that was years ahead when a fire failed does not keep the schedule from firing."""
    state = fail(BEGUN, now=NOON + 1000 * HOUR, problem="x")
    assert len(due(hourly(), state, now=NOON + HOUR, is_busy=False).fires) == 1


def test_resuming_and_changing_a_schedule_forgets_its_failure() -> None:
    """A person who resumes it wants it to fire now."""
    state = resume(hourly(), pause(fail(BEGUN, now=NOON, problem="x"), now=NOON), now=NOON + SECOND)
    assert (state.retry_at, state.problem, state.failed) == (None, "", 1)
    assert recover(BEGUN) is BEGUN


def test_a_fire_time_that_nobody_fires_is_overdue() -> None:
    """After a while, unless the schedule is paused or has failed."""
    now = NOON + HOUR + OVERDUE
    assert overdue_since(hourly(), BEGUN, now=now - SECOND) is None
    assert overdue_since(hourly(), BEGUN, now=now) == NOON + HOUR
    assert overdue_since(hourly(), pause(BEGUN, now=NOON), now=now) is None
    assert overdue_since(hourly(), fail(BEGUN, now=NOON, problem="x"), now=now) is None
