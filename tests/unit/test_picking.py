"""Whose turn it is: fair priorities, strict lines and buckets, one at a time or many at once."""

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskyard.model.fairness import NO_FAIRNESS_STATE, Fairness, FairnessState, Patience
from taskyard.model.limits import Demand, Quota
from taskyard.model.picking import ByPriority, InTurn, Level, Offer, RoundRobin, pick
from taskyard.testing.samples import NOON, seconds


class Waiting(NamedTuple):
    """A task, as drawn."""

    position: int
    queue: str
    consumer: str
    priority: int
    due_at: datetime
    bucket: str
    can_start: bool

    @property
    def id(self) -> int:
        return self.position

    @property
    def lane(self) -> str:
        return self.consumer


class ListFeed:
    def __init__(self, tasks: list[Waiting]) -> None:
        self._tasks = sorted(tasks, reverse=True)

    def first(self) -> Waiting | None:
        return self._tasks[-1] if self._tasks else None

    def take(self) -> None:
        self._tasks.pop()


PATIENCE = Patience(2, seconds(60))
QUEUES = ("by priority", "in turn", "in buckets")
Remembered = dict[str, FairnessState]


def offers(tasks: list[Waiting], turns: Remembered, quota: Quota) -> list[Offer[Waiting]]:
    def feed(keep: Callable[[Waiting], bool]) -> ListFeed:
        return ListFeed([task for task in tasks if keep(task)])

    lanes = sorted({(t.consumer, t.priority) for t in tasks if t.queue == QUEUES[0] and t.can_start})
    lanes = [lane for lane in lanes if quota.is_open(QUEUES[0], lane[0])]
    buckets = sorted({t.bucket for t in tasks if t.queue == QUEUES[2]})
    lines = [(name, feed(lambda t, name=name: t.queue == QUEUES[2] and t.bucket == name)) for name in buckets]  # type: ignore[misc]
    levels: dict[int, Level[Waiting]] = {}
    for source, priority in lanes:
        own = [
            t for t in tasks if t.queue == QUEUES[0] and t.can_start and (t.consumer, t.priority) == (source, priority)
        ]
        first, *following = own
        levels.setdefault(priority, []).append((first.position, first.id, first, iter(following)))
    known = [turns.get(queue, NO_FAIRNESS_STATE) for queue in QUEUES]
    return [
        ByPriority(QUEUES[0], known[0], PATIENCE, levels, quota=quota, now=NOON),
        InTurn(QUEUES[1], known[1], feed(lambda t: t.queue == QUEUES[1]), quota=quota),
        RoundRobin(QUEUES[2], known[2], lines, quota=quota),
    ]


def one_start(
    heads: dict[int, datetime], turns: FairnessState, patience: Patience, now: datetime
) -> tuple[int, FairnessState]:
    fairness = Fairness(turns, patience, now)
    level, _ = fairness.choose(heads)
    fairness.note(1, level, heads)
    return level, fairness.turns


tasks = st.lists(
    st.tuples(
        st.sampled_from(QUEUES),
        st.sampled_from("ab"),
        st.integers(0, 2),
        st.sampled_from([NOON - seconds(s) for s in (0, 59, 60, 61, 600)]),
        st.sampled_from("xyz"),
        st.sampled_from([True] * 5 + [False]),
    ),
    max_size=40,
).map(lambda drawn: [Waiting(n, *fields) for n, fields in enumerate(drawn)])
demands = st.builds(Demand, st.integers(0, 30), st.dictionaries(st.sampled_from("ab"), st.integers(0, 15)), st.just(2))
remembered = st.builds(
    FairnessState,
    st.tuples(st.just(0), st.integers(0, 3), st.integers(0, 3)),
    st.tuples(st.none(), *[st.sampled_from([None, NOON - seconds(70), NOON - seconds(10)])] * 2),
    st.sampled_from([None, "w", "x", "y", "z"]),
)


def served(
    waiting: list[Waiting], demand: Demand, turns: Remembered, room: dict[str, int]
) -> tuple[list[Waiting], Remembered]:
    quota = Quota(demand, room)
    made = offers(waiting, turns, quota)
    picked = pick(made, quota)
    return picked, {offer.queue: offer.turns for offer in made}


@pytest.mark.spec("QUE-08")
@given(tasks, demands, st.tuples(remembered, remembered, remembered), st.integers(0, 10))
def test_many_at_once_are_as_many_one_by_one(waiting, demand, known, room):
    """A batch of n claims takes the same tasks in the same order as n single ones, and remembers the same."""
    turns = dict(zip(QUEUES, known, strict=True))
    batch, after = served(waiting, demand, turns, {QUEUES[0]: room})
    singles: list[Waiting] = []
    left = Quota(demand, {QUEUES[0]: room})
    while left.left > 0:
        rest = [task for task in waiting if task not in singles]
        sources = {source: n - sum(t.consumer == source for t in singles) for source, n in demand.per_lane.items()}
        others = demand.others - sum(t.consumer not in demand.per_lane for t in singles)
        used = sum(t.queue == QUEUES[0] for t in singles)
        one, turns = served(rest, Demand(1, sources, others), turns, {QUEUES[0]: room - used})
        if not one:
            break
        singles += one
        left.admit(one[0].queue, one[0].consumer)
    assert singles == batch
    assert turns == after


@given(tasks, demands)
def test_no_queue_starts_what_its_order_forbids(waiting, demand):
    """In a line nobody overtakes; in buckets nobody overtakes within one; nothing starts that cannot."""
    picked, _ = served(waiting, demand, {}, {})
    assert all(task.can_start for task in picked)
    for queue, bucket in [(QUEUES[1], None), *((QUEUES[2], name) for name in "xyz")]:
        line = [t for t in waiting if t.queue == queue and (bucket is None or t.bucket == bucket)]
        taken = [t for t in picked if t in line]
        assert taken == line[: len(taken)]
    lanes = {(t.consumer, t.priority) for t in waiting if t.queue == QUEUES[0]}
    for lane in lanes:
        line = [t for t in waiting if t.queue == QUEUES[0] and t.can_start and (t.consumer, t.priority) == lane]
        taken = [t for t in picked if t in line]
        assert taken == line[: len(taken)]


@pytest.mark.spec("QUE-08")
@given(st.lists(st.integers(0, 2), min_size=1, max_size=80), st.integers(1, 8))
def test_no_priority_waits_for_more_starts_than_its_patience(arrivals, after):
    """However tasks keep coming, between two starts of a priority that always has one, at most so many higher ones
    start, and one for every other priority that is let in."""
    patience, turns, waited = Patience(after, None), NO_FAIRNESS_STATE, {1: 0, 2: 0}
    for arriving in arrivals:
        heads = dict.fromkeys({arriving, 1, 2}, NOON)
        level, turns = one_start(heads, turns, patience, NOON)
        waited = {p: 0 if p == level else n + (level < p) for p, n in waited.items()}
        assert max(waited.values()) <= after + 1


@pytest.mark.spec("QUE-08")
@pytest.mark.parametrize("age_s", [60, 6_000, 600_000])
def test_a_long_backlog_does_not_turn_the_order_round(age_s):
    """A level whose tasks have all waited too long is let in once a wait, not before everybody else."""
    patience, turns = Patience(None, timedelta(seconds=60)), NO_FAIRNESS_STATE
    started = []
    for second in range(120):
        now = NOON + seconds(second)
        heads = {0: now, 2: NOON - seconds(age_s)}
        level, turns = one_start(heads, turns, patience, now)
        started.append(level)
    assert [n for n, level in enumerate(started) if level == 2] == [0, 60]


def test_endless_patience_remembers_nothing():
    """A queue without patience rules never has anything to write down."""
    heads = {0: NOON, 1: NOON - timedelta(days=9), 2: NOON}
    endless = Patience(None, None)
    fairness = Fairness(NO_FAIRNESS_STATE, endless, NOON)
    assert fairness.choose(heads) == (0, None)
    fairness.note(5, 0, heads)
    assert fairness.turns == NO_FAIRNESS_STATE


@pytest.mark.spec("QUE-08")
@given(
    st.dictionaries(st.integers(0, 2), st.sampled_from([NOON - seconds(s) for s in (0, 59, 60, 600)]), min_size=1),
    remembered,
    st.builds(Patience, st.sampled_from([None, 1, 3]), st.sampled_from([None, seconds(60)])),
)
def test_who_is_chosen_stays_so_for_as_long_as_is_said(heads, turns, patience):
    """Of as many starts in a row, each chosen anew would be the same, and the next one would not."""
    fairness = Fairness(turns, patience, NOON)
    level, most = fairness.choose(heads)
    for _ in range(20 if most is None else most):
        assert fairness.choose(heads)[0] == level
        fairness.note(1, level, heads)
    at_once = Fairness(turns, patience, NOON)
    at_once.note(20 if most is None else most, level, heads)
    assert at_once.turns == fairness.turns
    if most is not None and level == min(heads):
        assert fairness.choose(heads)[0] != level
