"""The recovery ladder: which rung comes next, and when."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskyard.errors import InvalidInput
from taskyard.model.device_recovery import (
    NextStep,
    Recovery,
    RecoverySettings,
    RecoveryStep,
    after_down,
    after_restart,
    after_run,
    after_try,
    after_up,
    next_step,
)

S = RecoverySettings(
    first_s=1, most_s=10, reconnect_s=60, app_restarts=1, restarts=2, stable_s=600, lost_runs=3, give_up_s=3600
)
BEGAN = 1000.0
FRESH = Recovery.begin(BEGAN)


def tried(**fields: object) -> Recovery:
    return msgspec.structs.replace(FRESH, **{"tries": 5, "tried_mono": BEGAN + 55, **fields})


@pytest.mark.spec("DEV-11")
@pytest.mark.parametrize(
    ("outage", "now_mono", "step", "at_mono"),
    [
        pytest.param(FRESH, BEGAN, RecoveryStep.RECONNECT, 0.0, id="at-once-at-first"),
        pytest.param(tried(tries=1, tried_mono=BEGAN), BEGAN, RecoveryStep.RECONNECT, BEGAN + 1, id="then-a-pause"),
        pytest.param(tried(tries=3, tried_mono=BEGAN + 3), BEGAN + 3, RecoveryStep.RECONNECT, BEGAN + 7, id="doubled"),
        pytest.param(tried(tries=90), BEGAN + 55, RecoveryStep.RECONNECT, BEGAN + 65, id="never-more-than-most_s"),
        pytest.param(tried(), BEGAN + 60, RecoveryStep.RESTART, BEGAN + 60, id="unreachable-no-app-restart"),
        pytest.param(
            tried(is_reachable=True), BEGAN + 59, RecoveryStep.RECONNECT, BEGAN + 65, id="a-rung-has-its-time"
        ),
        pytest.param(tried(is_reachable=True), BEGAN + 60, RecoveryStep.RESTART_APP, BEGAN + 60, id="sick-app-first"),
        pytest.param(
            tried(is_reachable=True, app_restarts=1), BEGAN + 60, RecoveryStep.RESTART, BEGAN + 60, id="then-device"
        ),
        pytest.param(
            tried(is_reachable=True, app_restarts=1, restarts=2),
            BEGAN + 60,
            RecoveryStep.QUARANTINE,
            BEGAN + 60,
            id="then-quarantine",
        ),
        pytest.param(
            tried(restarts=2), BEGAN + 60, RecoveryStep.RECONNECT, BEGAN + 65, id="unplugged-is-not-restarted-again"
        ),
        pytest.param(
            tried(restarts=2), BEGAN + 3600, RecoveryStep.QUARANTINE, BEGAN + 3600, id="unplugged-for-very-long"
        ),
        pytest.param(
            tried(is_reachable=True, rung_mono=BEGAN + 3590),
            BEGAN + 3600,
            RecoveryStep.QUARANTINE,
            BEGAN + 3600,
            id="very-long-whatever-it-is",
        ),
        pytest.param(
            tried(tries=0, rung_mono=BEGAN - 60), BEGAN, RecoveryStep.RECONNECT, BEGAN + 55, id="a-try-on-every-rung"
        ),
    ],
)
def test_the_next_step(outage: Recovery, now_mono: float, step: RecoveryStep, at_mono: float) -> None:
    """Reconnect, restart the app, restart the device, quarantine: each when the rung before has had its time."""
    assert next_step(outage, S, now_mono=now_mono, jitter=0.0) == NextStep(step, at_mono)


def test_jitter_only_shortens_a_pause() -> None:
    """With jitter the next try comes up to a quarter earlier, never later: the bound of an outage holds."""
    times = [next_step(tried(tries=2), S, now_mono=BEGAN + 56, jitter=jitter).at_mono for jitter in (0.0, 0.5, 1.0)]
    assert times == [BEGAN + 57, BEGAN + 56.75, BEGAN + 56.5]


def test_without_an_end_an_unplugged_device_is_tried_for_ever() -> None:
    """With `give_up_s=None` a device that cannot be reached is never quarantined."""
    settings = msgspec.structs.replace(S, give_up_s=None)
    assert next_step(tried(restarts=2), settings, now_mono=BEGAN + 1e8, jitter=0).step is RecoveryStep.RECONNECT


def test_a_device_that_is_plugged_in_may_boot() -> None:
    """A device that could not be reached and now can gets the time of a rung before anything is restarted."""
    late = after_try(tried(restarts=2), tried_mono=BEGAN + 1000, is_reachable=True)
    assert late.rung_mono == BEGAN + 1000
    assert next_step(late, S, now_mono=BEGAN + 1001, jitter=0).step is RecoveryStep.RECONNECT


def test_restarts_are_counted_until_the_device_is_stable() -> None:
    """One that comes back for a moment has no new restarts; one that was up for `stable_s` has."""
    restarted = after_restart(tried(), RecoveryStep.RESTART, now_mono=BEGAN + 100)
    up = after_up(restarted, now_mono=BEGAN + 110)
    assert after_down(up, S, now_mono=BEGAN + 709).restarts == 1
    assert after_down(up, S, now_mono=BEGAN + 710).restarts == 0


def test_a_device_that_only_runs_find_lost_is_sick() -> None:
    """After `lost_runs` in a row the next rung is a restart, though health checks pass; a good run in between ends the
    row."""
    up = after_up(FRESH, now_mono=BEGAN)
    for was_lost in (True, True, False, True, True):
        up = after_run(up, was_lost=was_lost)
    assert next_step(after_down(up, S, now_mono=BEGAN), S, now_mono=BEGAN, jitter=0).step is RecoveryStep.RECONNECT
    up = after_run(up, was_lost=True)
    assert next_step(after_down(up, S, now_mono=BEGAN), S, now_mono=BEGAN, jitter=0).step is RecoveryStep.RESTART_APP


@pytest.mark.parametrize("field", ["first_s", "most_s", "reconnect_s", "stable_s", "give_up_s"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "5"])
def test_settings_are_checked(field: str, value: object) -> None:
    """A time that is none is refused by name."""
    with pytest.raises(InvalidInput, match=field):
        RecoverySettings(**{field: value})  # type: ignore[arg-type]


def test_counts_are_checked() -> None:
    """A number of restarts that is none is refused by name, as is a first pause beyond the longest."""
    for fields in ({"restarts": -1}, {"app_restarts": 1.5}, {"lost_runs": 0}, {"first_s": 11}):
        with pytest.raises(InvalidInput, match=next(iter(fields))):
            RecoverySettings(**fields)


ANSWERS = st.lists(st.sampled_from(["up", "sick", "gone"]), min_size=1, max_size=60)
LADDERS = st.builds(
    RecoverySettings,
    reconnect_s=st.floats(0.5, 100),
    app_restarts=st.integers(0, 3),
    restarts=st.integers(0, 3),
    stable_s=st.floats(1, 1000),
    give_up_s=st.floats(100, 5000),
)


@pytest.mark.spec("DEV-11")
@given(
    settings=LADDERS,
    answers=ANSWERS,
    took_s=st.lists(st.floats(0, 30), min_size=1, max_size=8),
    jitter=st.floats(0, 1),
)
def test_every_outage_ends(settings: RecoverySettings, answers: list[str], took_s: list[float], jitter: float) -> None:
    """Whatever the device answers, an outage ends in up or quarantined, within `give_up_s` and one more step, and no
    restart is made that is not allowed."""
    now, outage = 0.0, Recovery.begin(0.0)
    made = {RecoveryStep.RESTART_APP: 0, RecoveryStep.RESTART: 0}
    for turn in range(100_000):
        plan = next_step(outage, settings, now_mono=now, jitter=jitter)
        now = max(now, plan.at_mono)
        if plan.step is RecoveryStep.QUARANTINE:
            break
        began, now = now, now + took_s[turn % len(took_s)]
        if plan.step is not RecoveryStep.RECONNECT:
            made[plan.step] += 1
            outage = after_restart(outage, plan.step, now_mono=now)
            continue
        answer = answers[min(turn, len(answers) - 1)]
        if answer == "up":
            break
        outage = after_try(outage, tried_mono=began, is_reachable=answer == "sick")
    else:
        pytest.fail("the outage did not end")
    assert made[RecoveryStep.RESTART_APP] <= settings.app_restarts
    assert made[RecoveryStep.RESTART] <= settings.restarts
    assert now <= 5000 + settings.most_s + 2 * max(took_s) + settings.most_s


@given(
    pauses=st.lists(st.floats(0, 50), min_size=1, max_size=40),
    settings=LADDERS.filter(lambda settings: settings.stable_s > 60),
)
def test_a_device_that_flaps_is_not_restarted_for_ever(pauses: list[float], settings: RecoverySettings) -> None:
    """One that is up for less than `stable_s` each time gets no more restarts than one outage may have."""
    now, recovery, made = 0.0, Recovery.begin(0.0), 0
    for up_s in pauses:
        for _ in range(10_000):
            plan = next_step(recovery, settings, now_mono=now, jitter=0)
            now = max(now, plan.at_mono)
            if plan.step is RecoveryStep.QUARANTINE:
                return
            if plan.step is not RecoveryStep.RECONNECT:
                made += plan.step is RecoveryStep.RESTART
                recovery = after_restart(recovery, plan.step, now_mono=now)
                break  # it is up after a restart, and only then
            recovery = after_try(recovery, tried_mono=now, is_reachable=False)
        recovery = after_up(recovery, now_mono=now)
        now += up_s
        recovery = after_down(recovery, settings, now_mono=now)
    assert made <= settings.restarts
