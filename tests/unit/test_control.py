"""What people say about a queue, decided."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskyard.model.event import EventKind
from taskyard.model.notes import AuditStamp
from taskyard.model.queue import (
    UNTOUCHED,
    Pause,
    QueueCommand,
    QueueControl,
    QueueSettings,
    QueueState,
    Resume,
    SetConcurrency,
    StopAfterCurrent,
    drained,
    rooms,
    steer,
    told_as,
)
from taskyard.testing.samples import NOON, seconds

commands = st.one_of(
    st.builds(Pause, st.sampled_from(["", "x"])),
    st.just(Resume()),
    st.builds(StopAfterCurrent, st.sampled_from(["", "x"])),
    st.builds(SetConcurrency, st.sampled_from([None, 1, 5])),
)


def said(*commands: QueueCommand, running: int = 0) -> QueueControl:
    control = UNTOUCHED
    for n, command in enumerate(commands):
        control = steer(control, command, by=f"p{n}", now=NOON + seconds(n), running=running)
    return control


@pytest.mark.spec("QUE-10")
@pytest.mark.parametrize(
    ("commands", "running", "state"),
    [
        ([StopAfterCurrent()], 0, QueueState.PAUSED),
        ([StopAfterCurrent()], 2, QueueState.STOPPING),
        ([StopAfterCurrent(), Pause()], 2, QueueState.PAUSED),
        ([Pause(), StopAfterCurrent("x")], 2, QueueState.STOPPING),
        ([Pause(), StopAfterCurrent("x")], 0, QueueState.PAUSED),
        ([StopAfterCurrent(), Resume()], 2, QueueState.RUNNING),
        ([Pause(), Resume()], 2, QueueState.RUNNING),
    ],
)
def test_a_queue_is_what_was_said_last(commands: list[QueueCommand], running: int, state: QueueState):
    """A stop is stopping while something runs, a pause is a pause at once, and a resume takes back either."""
    assert said(*commands, running=running).state is state


@given(st.lists(commands, max_size=8), commands, st.integers(0, 2))
def test_a_word_said_twice_changes_nothing(before: list[QueueCommand], command: QueueCommand, running: int):
    """The second time the answer is the very same, so that who said it first is remembered, and nothing is told."""
    once = said(*before, command, running=running)
    twice = steer(once, command, by="late", now=NOON + seconds(60), running=running)
    assert twice is once
    assert told_as(once, twice) is None


@given(st.lists(commands, max_size=8), commands, st.integers(0, 2))
def test_whatever_changes_is_told(before: list[QueueCommand], command: QueueCommand, running: int):
    """A change has one event, which names it."""
    old = said(*before, running=running)
    new = steer(old, command, by="x", now=NOON + seconds(60), running=running)
    kind = told_as(old, new)
    assert (kind is None) == (old == new)
    if isinstance(command, SetConcurrency):
        assert kind in {None, EventKind.QUEUE_CHANGED}
        assert (new.state, new.state_set) == (old.state, old.state_set)
    elif kind is not None:
        assert kind == {"running": "queue_resumed", "stopping": "queue_stopping", "paused": "queue_paused"}[new.state]


def test_a_drained_queue_is_paused_by_the_same_word():
    """Who asked for the stop, when and why, stays."""
    stopping = said(StopAfterCurrent("deploy"), running=1)
    assert drained(stopping) == QueueControl(state=QueueState.PAUSED, state_set=AuditStamp("p0", NOON, "deploy"))
    assert told_as(stopping, drained(stopping)) is EventKind.QUEUE_PAUSED


def test_what_people_say_goes_before_the_rules():
    """A queue that is not running has no room; a limit set by hand stands in the place of that of the code."""
    queues = {name: QueueSettings(name=name, concurrency=5) for name in "abcd"}
    controls = {
        "b": QueueControl(state=QueueState.PAUSED),
        "c": QueueControl(concurrency=2),
        "e": QueueControl(state=QueueState.STOPPING, concurrency=9),
        "f": QueueControl(concurrency=3),
        "g": QueueControl(),
    }
    assert rooms(queues, controls, {"a": 1, "c": 1}) == {"a": 4, "b": 0, "c": 1, "d": 5, "e": 0, "f": 3}
