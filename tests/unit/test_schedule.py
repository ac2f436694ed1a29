"""Which fire times become tasks: missed ones, overlap, pauses, clocks that step."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskyard.errors import InvalidInput, NaiveDatetime
from taskyard.model.fire_times import upcoming
from taskyard.model.firing import AT_ONCE, Fire, FireKind, Plan, backfill, due, expected, jitter, uncount
from taskyard.model.order import Priority
from taskyard.model.recurrence import TICK, Cron, Every, count_fires, fires_between
from taskyard.model.retry import RetryPolicy
from taskyard.model.schedule import LEAST_GRACE_S, Missed, Overlap, Schedule
from taskyard.model.schedule_state import ScheduleState, amend, forget, is_ahead, pause, resume, rewind

NOON = datetime(2026, 11, 16, 12, tzinfo=UTC)

HOUR = timedelta(hours=1)


def hourly(**fields: Any) -> Schedule:
    return Schedule(**{"name": "report", "rule": Every(3600), "consumer": "report", "overlap": Overlap.ALLOW, **fields})


def at(text: str) -> datetime:
    return datetime.fromisoformat(f"2026-11-16T{text}+00:00")


def fired(plan: Plan) -> list[str]:
    return [f"{fire.fire_at:%H:%M} {fire.kind}" for fire in plan.fires]


def counts(state: ScheduleState) -> tuple[int, int, int]:
    return state.fired, state.missed, state.skipped


BEGUN = ScheduleState.begin(NOON)


# --- on time ----------------------------------------------------------------------------------------------------------


@pytest.mark.spec("SCH-21")
def test_nothing_happens_before_its_time():
    """Before a fire time nothing is planned but the next look, and the state is the very one that was given."""
    plan = due(hourly(), BEGUN, now=at("12:59:59.999999"), is_busy=False)
    assert plan.state is BEGUN
    assert plan == Plan(state=BEGUN, look_at=at("13:00"))


@pytest.mark.spec("SCH-21")
def test_a_fire_time_becomes_a_task_when_it_comes():
    """At its time it is fired once, and the next look is at the next one."""
    plan = due(hourly(), BEGUN, now=at("13:00"), is_busy=False)
    assert plan.fires == (Fire(fire_at=at("13:00"), due_at=at("13:00"), kind=FireKind.ON_TIME),)
    assert plan.look_at == at("14:00")
    assert counts(plan.state) == (1, 0, 0)
    again = due(hourly(), plan.state, now=at("13:00"), is_busy=False)
    assert again == Plan(state=plan.state, look_at=at("14:00"))


def test_a_schedule_does_not_fire_for_the_time_before_it_was_made():
    """What lies before its beginning is neither fired nor missed, nor the very moment."""
    assert due(hourly(missed=Missed.ALL), BEGUN, now=at("12:00"), is_busy=False).fires == ()


# --- missed -----------------------------------------------------------------------------------------------------------


@pytest.mark.spec("SCH-21")
@pytest.mark.parametrize(
    ("missed", "now", "expected", "count"),
    [
        ("skip", "15:01", ["15:00 on time"], 2),
        ("skip", "15:01:00.1", [], 3),
        ("once", "15:01", ["15:00 on time"], 2),
        ("once", "15:30", ["15:00 caught up"], 2),
        ("all", "15:01", ["13:00 caught up", "14:00 caught up", "15:00 on time"], 0),
        ("all", "15:30", ["13:00 caught up", "14:00 caught up", "15:00 caught up"], 0),
    ],
)
def test_missed_fires(missed: str, now: str, expected: list[str], count: int):
    """After a time in which nobody looked, the policy says which of the fires that are late are made up for."""
    plan = due(hourly(missed=missed), BEGUN, now=at(now), is_busy=False)
    assert fired(plan) == expected
    assert counts(plan.state) == (len(expected), count, 0)
    assert plan.look_at == at("16:00")
    assert due(hourly(missed=missed), plan.state, now=at(now), is_busy=False).state is plan.state


@pytest.mark.spec("SCH-21")
@pytest.mark.parametrize(
    ("missed", "expected"),
    [("skip", []), ("once", ["17:00 caught up"]), ("all", ["16:00 caught up", "17:00 caught up"])],
)
def test_nothing_is_made_up_for_that_is_older_than_the_window(missed: str, expected: list[str]):
    """Only fires within `catch_up_s` are made up for, the others are missed."""
    plan = due(hourly(missed=missed, catch_up_s=5400), BEGUN, now=at("17:30"), is_busy=False)
    assert fired(plan) == expected
    assert counts(plan.state) == (len(expected), 5 - len(expected), 0)
    assert due(hourly(missed=missed, catch_up_s=60), BEGUN, now=at("17:30"), is_busy=False).fires == ()


@pytest.mark.parametrize("missed", Missed)
def test_grace_is_for_who_is_a_little_late(missed: Missed):
    """Within `grace_s` several fires are all on time, whatever is done about missed ones."""
    plan = due(hourly(missed=missed, grace_s=7200), BEGUN, now=at("15:00"), is_busy=False)
    assert fired(plan) == ["13:00 on time", "14:00 on time", "15:00 on time"]


@pytest.mark.spec("SCH-21")
@pytest.mark.parametrize("overlap", [Overlap.ALLOW, Overlap.SKIP])
def test_a_long_catch_up_comes_in_batches(overlap: Overlap):
    """However much is to be made up for, one plan holds a bounded part of it, and the next look goes on at once."""
    schedule = hourly(
        rule=Every(1), missed=Missed.ALL, overlap=overlap, end_at=NOON + timedelta(seconds=2 * AT_ONCE + 2)
    )
    state, seen, looks, now = BEGUN, [], 0, NOON + HOUR
    while True:
        plan = due(schedule, state, now=now, is_busy=bool(looks))
        state, looks = plan.state, looks + 1
        seen += [fire.fire_at for fire in plan.fires]
        if plan.look_at != now:
            break
        assert len(plan.fires) == AT_ONCE
    assert seen == [NOON + timedelta(seconds=n + 1) for n in range(2 * AT_ONCE + 1)]
    assert looks == 3


# --- overlap ----------------------------------------------------------------------------------------------------------


@pytest.mark.spec("SCH-21")
@pytest.mark.parametrize(
    ("overlap", "is_busy", "expected", "cancels"),
    [
        (Overlap.SKIP, False, ["13:00 on time"], False),
        (Overlap.SKIP, True, [], False),
        (Overlap.BUFFER, False, ["13:00 on time"], False),
        (Overlap.BUFFER, True, [], False),
        (Overlap.ALLOW, True, ["13:00 on time"], False),
        (Overlap.CANCEL, True, ["13:00 on time"], True),
        (Overlap.CANCEL, False, ["13:00 on time"], False),
    ],
)
def test_overlap(overlap: Overlap, is_busy: bool, expected: list[str], cancels: bool):
    """While the task of an earlier fire has not ended, the policy says what becomes of the next."""
    plan = due(hourly(overlap=overlap), BEGUN, now=at("13:00"), is_busy=is_busy)
    assert fired(plan) == expected
    assert plan.cancels == cancels
    is_kept = overlap is Overlap.BUFFER and is_busy
    assert plan.state.buffered_at == (at("13:00") if is_kept else None)
    assert counts(plan.state) == (len(expected), 0, 1 - len(expected) - is_kept)


@pytest.mark.spec("SCH-21")
def test_one_fire_is_kept_back_and_fires_when_the_task_has_ended():
    """The first is kept, those that follow are skipped, and it is fired as soon as nothing is in its way."""
    schedule = hourly(overlap=Overlap.BUFFER)
    state = due(schedule, BEGUN, now=at("13:00"), is_busy=True).state
    state = due(schedule, state, now=at("14:00"), is_busy=True).state
    assert state.buffered_at == at("13:00")
    assert counts(state) == (0, 0, 1)
    plan = due(schedule, state, now=at("14:20"), is_busy=False)
    assert fired(plan) == ["13:00 buffered"]
    assert plan.state.buffered_at is None
    assert counts(plan.state) == (1, 0, 1)
    assert plan.look_at == at("15:00")


@pytest.mark.spec("SCH-21")
def test_what_was_kept_back_goes_first():
    """When the kept one is fired at the time of the next, that one is kept in turn."""
    schedule = hourly(overlap=Overlap.BUFFER)
    state = due(schedule, BEGUN, now=at("13:00"), is_busy=True).state
    plan = due(schedule, state, now=at("14:00"), is_busy=False)
    assert fired(plan) == ["13:00 buffered"]
    assert plan.state.buffered_at == at("14:00")


@pytest.mark.spec("SCH-21")
@pytest.mark.parametrize(
    ("overlap", "expected", "kept", "skipped"),
    [
        (Overlap.SKIP, ["13:00 on time"], None, 2),
        (Overlap.BUFFER, ["13:00 on time"], "14:00", 1),
        (Overlap.CANCEL, ["15:00 on time"], None, 2),
    ],
)
def test_fires_of_one_look_overlap_each_other(overlap: Overlap, expected: list[str], kept: str | None, skipped: int):
    """What is fired at once counts as running already for the next of it."""
    plan = due(hourly(overlap=overlap, grace_s=10**5), BEGUN, now=at("15:30"), is_busy=False)
    assert fired(plan) == expected
    assert plan.state.buffered_at == (at(kept) if kept else None)
    assert counts(plan.state) == (1, 0, skipped)
    assert not plan.cancels


@pytest.mark.spec("SCH-21")
@pytest.mark.parametrize("is_busy", [False, True])
@pytest.mark.parametrize(
    ("overlap", "expected", "kept", "skipped"),
    [
        (Overlap.SKIP, ["13:00 caught up", "14:00 caught up"], None, 1),
        (Overlap.BUFFER, ["13:00 caught up", "14:00 caught up"], "15:00", 0),
        (Overlap.ALLOW, ["13:00 caught up", "14:00 caught up", "15:00 on time"], None, 0),
        (Overlap.CANCEL, ["15:00 on time"], None, 2),
    ],
)
def test_all_that_was_missed_is_made_up_for(
    overlap: Overlap, expected: list[str], kept: str | None, skipped: int, is_busy: bool
):
    """With `all`, each missed fire becomes a task, save where the next would cancel it; what is on time overlaps
    them."""
    plan = due(hourly(overlap=overlap, missed=Missed.ALL), BEGUN, now=at("15:00"), is_busy=is_busy)
    assert fired(plan) == expected
    assert plan.state.buffered_at == (at(kept) if kept else None)
    assert counts(plan.state) == (len(expected), 0, skipped)


# --- pause, resume, other rules ---------------------------------------------------------------------------------------


@pytest.mark.spec("SCH-21")
@pytest.mark.parametrize("missed", Missed)
def test_what_comes_due_in_a_pause_is_skipped(missed: Missed):
    """Paused, nothing fires; resumed, it goes on with the next, and nothing of the pause is made up for."""
    schedule = hourly(missed=missed)
    paused = pause(BEGUN, now=at("12:10"), note="the moon is full")
    assert (paused.paused_at, paused.note) == (at("12:10"), "the moon is full")
    plan = due(schedule, paused, now=at("14:30"), is_busy=False)
    assert plan.fires == ()
    assert plan.look_at is None
    state = resume(schedule, plan.state, now=at("15:30"))
    assert (state.paused_at, state.note) == (None, "")
    assert counts(state) == (0, 0, 3)
    assert due(schedule, state, now=at("15:30"), is_busy=False) == Plan(state=state, look_at=at("16:00"))


def test_a_second_pause_changes_the_note_alone():
    """Since when it is paused stays, and so does everything if one resumes what is not paused. Resumed, it is handled
    up to then, also if nothing has come due: a clock that is set back does not show it what lies before."""
    paused = pause(pause(BEGUN, now=at("12:10")), now=at("12:20"), note="still")
    assert (paused.paused_at, paused.note) == (at("12:10"), "still")
    assert resume(hourly(), BEGUN, now=at("14:00")) is BEGUN
    assert resume(hourly(), pause(BEGUN, now=at("12:10")), now=at("12:40")).watermark_at == at("12:40")
    for wrong in ("x" * 1000, "\0", 5):
        with pytest.raises(InvalidInput, match="note"):
            pause(BEGUN, now=NOON, note=wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="by must be a string"):
        pause(BEGUN, now=NOON, by=5)  # type: ignore[arg-type]


def test_what_is_kept_back_waits_for_the_end_of_a_pause():
    """A fire that was kept back before the pause is fired after it."""
    schedule = hourly(overlap=Overlap.BUFFER)
    state = pause(due(schedule, BEGUN, now=at("13:00"), is_busy=True).state, now=at("13:10"))
    plan = due(schedule, state, now=at("13:20"), is_busy=False)
    assert plan.fires == ()
    plan = due(schedule, resume(schedule, plan.state, now=at("13:30")), now=at("13:30"), is_busy=False)
    assert fired(plan) == ["13:00 buffered"]


@pytest.mark.parametrize("is_busy", [False, True])
def test_what_is_kept_back_for_too_long_is_missed(is_busy: bool):
    """A fire that waits for a task is not made up for when it is older than `catch_up_s`; nor does time go back."""
    schedule = hourly(overlap=Overlap.BUFFER, catch_up_s=7200)
    state = due(schedule, BEGUN, now=at("13:00"), is_busy=True).state
    plan = due(schedule, state, now=at("15:00:00.000001"), is_busy=is_busy)
    assert fired(plan) == ([] if is_busy else ["15:00 on time"])
    assert plan.state.buffered_at == (at("15:00") if is_busy else None)
    assert sum(counts(plan.state)) + is_busy == 3
    ahead = msgspec.structs.replace(state, watermark_at=at("20:00"))
    plan = due(schedule, ahead, now=at("19:00"), is_busy=is_busy)
    assert (plan.fires, plan.state.watermark_at, counts(plan.state)) == ((), at("20:00"), (0, 1, 0))


def test_another_rule_counts_from_now_on():
    """A schedule that is given another rule does not fire for times at which it had the old one; those are skipped."""
    old = hourly(overlap=Overlap.BUFFER)
    state = due(old, BEGUN, now=at("13:00"), is_busy=True).state
    assert counts(amend(old, state, now=at("15:40"))) == (0, 0, 3)
    assert amend(old, state, now=at("12:40")).watermark_at == at("13:00")
    state = amend(None, state, now=at("13:40"))
    plan = due(hourly(rule=Cron("*/10 * * * *"), missed=Missed.ALL), state, now=at("13:51"), is_busy=False)
    assert fired(plan) == ["13:50 on time"]
    assert counts(plan.state) == (1, 0, 1)


# --- bounds -----------------------------------------------------------------------------------------------------------


@pytest.mark.spec("SCH-21")
def test_a_schedule_fires_from_its_start_and_before_its_end():
    """The start is part of it, the end is not; outside nothing is fired nor missed, and after the end it is over."""
    schedule = hourly(start_at=at("14:00"), end_at=at("16:00"), missed=Missed.ALL)
    assert due(schedule, BEGUN, now=at("13:00"), is_busy=False) == Plan(state=BEGUN, look_at=at("14:00"))
    plan = due(schedule, BEGUN, now=at("18:00"), is_busy=False)
    assert fired(plan) == ["14:00 caught up", "15:00 caught up"]
    assert plan.look_at is None
    assert counts(plan.state) == (2, 0, 0)
    assert upcoming(schedule, after=NOON, count=5) == [at("14:00"), at("15:00")]


# --- clocks -----------------------------------------------------------------------------------------------------------


@pytest.mark.spec("SCH-21")
@pytest.mark.parametrize("step", [timedelta(hours=-1), timedelta(days=-1)], ids=str)
def test_a_clock_set_back_fires_nothing_twice(step: timedelta):
    """Times that were handled do not come again; the next look is at the first that was not."""
    state = due(hourly(), BEGUN, now=at("13:00"), is_busy=False).state
    plan = due(hourly(missed=Missed.ALL), state, now=at("13:10") + step, is_busy=False)
    assert plan == Plan(state=state, look_at=at("14:00"))
    assert fired(due(hourly(), state, now=at("14:00"), is_busy=False)) == ["14:00 on time"]


def test_a_clock_that_was_far_ahead_can_be_made_good():
    """After a rewind it fires from now on, rather than when the wrong clock's time has come."""
    ahead = due(hourly(), BEGUN, now=NOON + timedelta(days=3650), is_busy=False).state
    assert due(hourly(), ahead, now=at("13:00"), is_busy=False).fires == ()
    state = rewind(ahead, now=at("12:30"))
    assert fired(due(hourly(), state, now=at("13:00"), is_busy=False)) == ["13:00 on time"]
    assert rewind(BEGUN, now=at("13:00")) == BEGUN


@pytest.mark.parametrize("missed", Missed)
@pytest.mark.parametrize("ahead", [timedelta(), timedelta(seconds=1), 3 * HOUR, 26 * HOUR], ids=str)
def test_what_is_expected_is_what_fires(missed: Missed, ahead: timedelta):
    """Also after a clock that was ahead: of the times that are still to come those become tasks that are announced, by
    whoever looks on time, and the store has no row of them yet."""
    schedule, now = hourly(missed=missed), at("12:59:59.5")
    wrong = due(schedule, BEGUN, now=now + ahead, is_busy=False)
    state, rows = wrong.state, {fire.fire_at for fire in wrong.fires}
    announced = expected(schedule, state, now=now, count=30, fired={row for row in rows if row > now})
    while len(announced) > len(made := sorted(rows - {fire.fire_at for fire in wrong.fires})):
        state = rewind(state, now=now) if is_ahead(state, now=now) else state
        plan = due(schedule, state, now=now, is_busy=False)
        state, rows = plan.state, rows | {fire.fire_at for fire in plan.fires}
        assert plan.look_at is not None
        now = plan.look_at
    assert announced == made
    assert expected(schedule, pause(state, now=now), now=now, count=30) == []


def test_nothing_is_decided_again_of_which_the_store_knows_no_more():
    """A rewind goes back to the last fire time that was forgotten, and no further; that is never an earlier one."""
    ahead = forget(ScheduleState(watermark_at=at("20:00")), at("14:00"))
    assert rewind(ahead, now=at("12:30")).watermark_at == at("14:00")
    assert rewind(ahead, now=at("15:00")).watermark_at == at("15:00")
    assert forget(ahead, at("13:00")) is forget(ahead, None) is ahead
    assert forget(ahead, at("16:00")).forgotten_at == at("16:00")


@pytest.mark.spec("SCH-21")
@pytest.mark.parametrize("slow", [timedelta(minutes=10), timedelta(hours=20)], ids=str)
@pytest.mark.parametrize("begun", ["added", "resumed", "changed"])
def test_a_slow_clock_goes_back_no_further_than_a_schedule_was_begun(begun: str, slow: timedelta):
    """Nor behind its resume, or another rule; seen by a clock that is right, nothing of before is made up for, and
    nothing is counted."""
    state, now = BEGUN, at("13:40")
    if begun == "added":
        state = ScheduleState.begin(now)
    elif begun == "resumed":
        state = resume(hourly(), pause(state, now=at("12:10")), now=now)
    else:
        state = amend(hourly(), state, now=now)
    minutely = hourly(rule=Every(60), missed=Missed.ALL)
    state = rewind(state, now=now - slow)
    plan = due(minutely, state, now=now + timedelta(seconds=30), is_busy=False)
    assert (plan.fires, plan.state) == ((), state)
    state = due(minutely, state, now=at("13:43"), is_busy=False).state
    assert fired(due(minutely, rewind(state, now=now - slow), now=at("13:44"), is_busy=False)) == ["13:44 on time"]


def test_what_was_decided_is_not_decided_again_for_a_clock_that_was_set_back_for_a_while():
    """What was skipped or missed then does not fire now, and is not counted a second time."""
    schedule = hourly(rule=Every(60), missed=Missed.ALL, overlap=Overlap.SKIP)
    state = due(schedule, BEGUN, now=at("12:01"), is_busy=True).state
    state = due(schedule, state, now=at("12:02"), is_busy=True).state
    assert counts(state) == (0, 0, 2)
    plan = due(schedule, rewind(state, now=NOON - HOUR), now=at("12:02:30"), is_busy=False)
    assert (plan.fires, counts(plan.state)) == ((), (0, 0, 2))
    assert resume(schedule, pause(plan.state, now=at("12:02:40")), now=at("12:03")).skipped == 3
    plan = due(schedule, plan.state, now=at("12:03"), is_busy=False)
    assert (fired(plan), plan.state.max_watermark_at) == (["12:03 on time"], None)


def test_a_schedule_that_was_begun_by_a_clock_years_ahead_is_made_good():
    """It fires from now on, and not when that clock's time has come; a day is what a slow clock is believed of."""
    ahead = ScheduleState.begin(NOON + timedelta(days=3650))
    state = rewind(ahead, now=at("12:30"))
    assert (state.watermark_at, state.active_since) == (at("12:30"), at("12:30"))
    assert fired(due(hourly(), state, now=at("13:00"), is_busy=False)) == ["13:00 on time"]
    assert rewind(BEGUN, now=NOON - timedelta(days=1)) == BEGUN


def test_a_fire_that_was_there_already_is_not_counted():
    """Only what the rule fires is: what a person fires was never counted."""
    state = ScheduleState(watermark_at=NOON, fired=5)
    fires = [Fire(fire_at=NOON, due_at=NOON, kind=kind) for kind in FireKind]
    assert uncount(state, fires).fired == 2
    assert uncount(state, ()) is state


rules = st.sampled_from(
    [
        Every(60),
        Every(3600),
        Every(5000),
        Cron("*/7 * * * *"),
        Cron("30 2 * * *", "Europe/Berlin"),
        Cron("0 */5 * * *", "Asia/Kolkata"),
    ]
)
spans = st.sampled_from([0, 60, 3600, 86_400, 604_800])
schedules = st.builds(
    hourly,
    rule=rules,
    missed=st.sampled_from(Missed),
    overlap=st.sampled_from(Overlap),
    catch_up_s=spans,
    grace_s=st.sampled_from([LEAST_GRACE_S, 60, 3600]),
    start_at=st.none() | st.just(NOON + HOUR),
    end_at=st.none() | st.just(NOON + 30 * HOUR),
)
steps = st.sampled_from([timedelta(days=1), HOUR, -HOUR, timedelta(days=-1)]) | st.timedeltas(
    timedelta(0), timedelta(hours=3)
)
looks = st.lists(
    st.tuples(steps, st.booleans(), st.sampled_from(["look", "look", "look", "pause", "resume"])), max_size=30
)


@pytest.mark.spec("SCH-21")
@given(schedules, looks)
def test_every_fire_time_is_decided_exactly_once(schedule: Schedule, looks: Sequence[tuple[timedelta, bool, str]]):
    """Whatever the policies are, however the clock steps, and with pauses: none is fired twice, and each up to where it
    has come is fired, missed, skipped or kept back."""
    state, now, seen = BEGUN, NOON, []
    for step, is_busy, what in looks:
        now += step
        if what == "pause":
            state = pause(state, now=now)
        elif what == "resume":
            state = resume(schedule, state, now=now)
        else:
            plan = due(schedule, state, now=now, is_busy=is_busy)
            seen += [fire.fire_at for fire in plan.fires]
            assert plan.state.watermark_at >= state.watermark_at
            assert plan.look_at is None or plan.look_at >= now
            assert all(fire.fire_at <= fire.due_at for fire in plan.fires)
            state = plan.state
    first, last = (schedule.start_at or NOON + TICK) - TICK, (schedule.end_at or state.watermark_at + TICK) - TICK
    in_bounds = count_fires(schedule.rule, after=first, until=min(last, state.watermark_at))
    assert len(seen) == len(set(seen)) == state.fired
    assert sum(counts(state)) + (state.buffered_at is not None) == in_bounds


@pytest.mark.spec("SCH-21")
@given(schedules, looks)
def test_nothing_fires_of_before_a_schedule_was_begun(schedule: Schedule, looks: Sequence[tuple[timedelta, bool, str]]):
    """However often a clock is set and the schedule sent back: all that fires is later than its last beginning."""
    state, now = BEGUN, NOON
    for step, is_busy, what in looks:
        now = max(now + step, NOON - timedelta(hours=20))
        if what == "pause":
            state = pause(state, now=now)
        elif what == "resume":
            state = resume(schedule, state, now=now)
        else:
            state = rewind(state, now=now)
            plan = due(schedule, state, now=now, is_busy=is_busy)
            new = [fire.fire_at for fire in plan.fires if fire.kind is not FireKind.BUFFERED]
            state = plan.state
            assert state.active_since is not None
            assert all(fire_at > state.active_since for fire_at in new)


@pytest.mark.spec("SCH-21")
@given(rules, st.lists(steps, min_size=1, max_size=30))
def test_no_fire_is_lost_where_all_are_made_up_for(rule: Every | Cron, walk: list[timedelta]):
    """With `all` and a long window, exactly the fire times up to the furthest the clock has shown are fired, in order,
    through steps and suspends."""
    schedule = hourly(rule=rule, missed=Missed.ALL, catch_up_s=10**8)
    state, now, furthest, seen = BEGUN, NOON, NOON, []
    for step in walk:
        now += step
        furthest = max(now, furthest)
        while True:
            plan = due(schedule, state, now=now, is_busy=True)
            state = plan.state
            seen += [fire.fire_at for fire in plan.fires]
            if plan.look_at != now or not plan.fires:
                break
    assert seen == list(fires_between(rule, after=NOON, until=furthest))


@pytest.mark.spec("SCH-21")
@given(rules, st.sampled_from(Missed), st.integers(1, 40))
def test_who_looks_when_told_misses_nothing(rule: Every | Cron, missed: Missed, n: int):
    """A node that looks exactly when the plan before has said fires every time, on time, whatever the policy."""
    schedule = hourly(rule=rule, missed=missed, grace_s=LEAST_GRACE_S)
    plan, seen = due(schedule, BEGUN, now=NOON, is_busy=False), []
    for _ in range(n):
        assert plan.look_at is not None
        now = plan.look_at
        plan = due(schedule, plan.state, now=now, is_busy=False)
        assert [(fire.fire_at, fire.kind) for fire in plan.fires] == [(now, FireKind.ON_TIME)]
        seen.append(now)
    assert seen == list(fires_between(rule, after=NOON, until=seen[-1]))
    assert counts(plan.state) == (n, 0, 0)


# --- jitter -----------------------------------------------------------------------------------------------------------


@pytest.mark.spec("SCH-21")
def test_jitter_spreads_and_is_the_same_everywhere():
    """The lot depends on the schedule and the fire time alone, lies within `jitter_s`, and uses all of it."""
    schedule = hourly(jitter_s=600)
    assert jitter(schedule, at("13:00")) == timedelta(seconds=360, microseconds=205192)  # on every machine
    drawn = [jitter(schedule, NOON + n * HOUR).total_seconds() for n in range(2_000)]
    assert 0 <= min(drawn) < 10
    assert 590 < max(drawn) < 600
    assert 280 < sum(drawn) / len(drawn) < 320
    assert jitter(hourly(jitter_s=600, name="other"), at("13:00")) != jitter(schedule, at("13:00"))
    (fire,) = due(schedule, BEGUN, now=at("13:00"), is_busy=False).fires
    assert (fire.fire_at, fire.due_at) == (at("13:00"), at("13:00") + jitter(schedule, at("13:00")))


# --- backfill ---------------------------------------------------------------------------------------------------------


@pytest.mark.spec("SCH-21")
def test_a_backfill_takes_every_fire_time_of_a_range():
    """From its start on and before its end, all due now."""
    made = backfill(hourly(), start=at("02:00"), end=at("05:00"), now=at("12:34"))
    assert [fire.fire_at for fire in made] == [at("02:00"), at("03:00"), at("04:00")]
    assert {(fire.due_at, fire.kind) for fire in made} == {(at("12:34"), FireKind.BACKFILL)}


@pytest.mark.spec("SCH-21")
def test_a_backfill_stays_within_the_bounds_of_the_schedule():
    """What lies before `start_at`, or from `end_at` on, is no time of the schedule; a range with none of its times is
    refused."""
    schedule = hourly(start_at=at("03:00"), end_at=at("05:00"))
    made = backfill(schedule, start=at("01:00"), end=at("08:00"), now=NOON, limit=2)
    assert [fire.fire_at for fire in made] == [at("03:00"), at("04:00")]
    for start, end in (("01:00", "03:00"), ("05:00", "08:00")):
        with pytest.raises(InvalidInput, match="within the bounds of the schedule"):
            backfill(schedule, start=at(start), end=at(end), now=NOON)


@pytest.mark.spec("SCH-21")
@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"start": at("05:00"), "end": at("05:00")}, "a later end"),
        ({"start": at("05:00"), "end": at("12:01")}, "in the future"),
        ({"start": at("05:00") - timedelta(days=3650), "end": at("05:00")}, "87,600 fire times"),
        ({"start": datetime(2026, 1, 1), "end": at("05:00")}, "time zone"),  # noqa: DTZ001 - naive
        ({"start": at("04:00"), "end": at("05:00"), "limit": 0}, "limit"),
        ({"start": datetime.min.replace(tzinfo=UTC), "end": at("05:00")}, "between the years 1970 and 9000"),
        ({"start": at("04:00"), "end": "now"}, "end must be a datetime"),
        ({"start": at("04:00"), "end": at("05:00"), "known_since": at("04:00")}, "not known any more"),
    ],
)
def test_a_backfill_that_makes_no_sense_is_refused(asked: dict[str, Any], said: str):
    """A range is past and not too long: nothing is left out silently."""
    with pytest.raises(InvalidInput, match=said):
        backfill(hourly(), now=NOON, **asked)


def test_a_fire_by_hand_is_now():
    """What a person fires is due at once, and is told from what the rule fires."""
    assert Fire.by_hand(NOON) == Fire(fire_at=NOON, due_at=NOON, kind=FireKind.BY_HAND)
    assert Fire.by_hand(NOON, NOON) == Fire(fire_at=NOON + TICK, due_at=NOON, kind=FireKind.BY_HAND)
    assert Fire.by_hand(NOON, NOON - HOUR) == Fire.by_hand(NOON)


# --- the value itself -------------------------------------------------------------------------------------------------


def test_a_schedule_survives_a_store():
    """A schedule and its state come out of JSON as they went in, with moments in UTC and words made values."""
    given_ = hourly(
        rule=Cron("@daily", "Europe/Berlin"),
        priority="high",
        missed="all",
        overlap="cancel",
        retry=RetryPolicy(max_retries=1),
        start_at=datetime.fromisoformat("2026-11-16T12:00+05:00"),
        args='{"a": 1}',
    )
    assert (given_.priority, given_.missed, given_.overlap) == (Priority.HIGH, Missed.ALL, Overlap.CANCEL)
    assert given_.start_at is not None
    assert given_.start_at.tzinfo is UTC
    assert msgspec.json.decode(msgspec.json.encode(given_), type=Schedule) == given_
    state = pause(due(given_, BEGUN, now=NOON + 12 * HOUR, is_busy=False).state, now=NOON, note="x")
    assert msgspec.json.decode(msgspec.json.encode(state), type=ScheduleState) == state


@pytest.mark.spec("SCH-21")
@pytest.mark.parametrize(
    "wrong",
    [
        {"name": ""},
        {"name": "x" * 1000},
        {"name": "a\0"},
        {"rule": "@daily"},
        {"consumer": None},
        {"queue": ""},
        {"key": 5},
        {"priority": "urgent"},
        {"timeout_s": -1},
        {"retry": 3},
        {"missed": "never"},
        {"overlap": None},
        {"catch_up_s": -1},
        {"catch_up_s": float("nan")},
        {"grace_s": "60"},
        {"grace_s": True},
        {"grace_s": 0, "missed": "skip"},
        {"grace_s": 0.9, "missed": "skip"},
        {"jitter_s": 3600},
        {"jitter_s": 1e6, "rule": Cron("@weekly")},
        {"start_at": "tomorrow"},
        {"start_at": NOON, "end_at": NOON},
        {"start_at": datetime.min.replace(tzinfo=UTC)},
        {"start_at": datetime.min.replace(tzinfo=timezone(HOUR))},
        {"end_at": datetime.max.replace(tzinfo=UTC)},
        {"end_at": datetime.max.replace(tzinfo=timezone(-HOUR))},
        {"args": "[]"},
        {"args": "{"},
        {"args": {}},
        {"args": "[" * 10_000},
        {"args": "\ud800"},
    ],
    ids=lambda wrong: repr(wrong)[:40],
)
def test_a_schedule_that_makes_no_sense_is_refused(wrong: dict[str, Any]):
    """Whatever cannot be stored or followed is refused with a word on what is wrong."""
    with pytest.raises(InvalidInput):
        hourly(**wrong)


def test_a_bound_without_a_zone_is_refused():
    """A moment without a time zone has no single meaning."""
    with pytest.raises(NaiveDatetime):
        hourly(end_at=datetime(2026, 1, 1))  # noqa: DTZ001 - naive


@pytest.mark.parametrize("overlap", Overlap)
@pytest.mark.parametrize("missed", Missed)
def test_a_year_without_a_look_is_decided_at_once(missed: Missed, overlap: Overlap):
    """However long nobody has looked at a schedule that fires every second, one look does not walk through it all."""
    schedule = hourly(rule=Every(1), missed=missed, overlap=overlap, catch_up_s=10**8)
    plan = due(schedule, BEGUN, now=NOON + timedelta(days=365), is_busy=False)
    assert len(plan.fires) <= AT_ONCE
    if missed is not Missed.ALL or overlap is Overlap.CANCEL:
        assert sum(counts(plan.state)) + (plan.state.buffered_at is not None) == 365 * 86_400
