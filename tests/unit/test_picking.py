"""Whose turn it is: fair priorities, strict lines and buckets, one at a time or many at once."""

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskyard.model.fairness import NO_TURNS, Patience, Turns, choose, note_start
from taskyard.model.limits import Demand, Quota
from taskyard.model.picking import ByPriority, Head, InTurn, Offer, RoundRobin, pick
from taskyard.testing.samples import NOON, seconds


class Waiting(NamedTuple):
    """A task, as drawn. `n` is its place."""

    n: int
    queue: str
    source: str
    priority: int
    due_at: datetime
    bucket: str
    can_start: bool


class ListFeed:
    def __init__(self, tasks: list[Waiting]) -> None:
        self._tasks = sorted(tasks, reverse=True)

    def first(self) -> Head | None:
        if not self._tasks:
            return None
        task = self._tasks[-1]
        return Head(task.priority, task.n, task.n, task.source, task.due_at, task.can_start)

    def take(self) -> Waiting:
        return self._tasks.pop()


PATIENCE = Patience(2, seconds(60))
QUEUES = ("by priority", "in turn", "in buckets")
Remembered = dict[str, Turns]


def offers(tasks: list[Waiting], turns: Remembered, quota: Quota) -> list[Offer[Waiting]]:
    def feed(keep: Callable[[Waiting], bool]) -> ListFeed:
        return ListFeed([task for task in tasks if keep(task)])

    lanes = sorted({(t.source, t.priority) for t in tasks if t.queue == QUEUES[0] and t.can_start})
    buckets = sorted({t.bucket for t in tasks if t.queue == QUEUES[2]})
    feeds = [
        feed(lambda t, lane=lane: t.queue == QUEUES[0] and t.can_start and (t.source, t.priority) == lane)  # type: ignore[misc]
        for lane in lanes
    ]
    lines = [(name, feed(lambda t, name=name: t.queue == QUEUES[2] and t.bucket == name)) for name in buckets]  # type: ignore[misc]
    known = [turns.get(queue, NO_TURNS) for queue in QUEUES]
    return [
        ByPriority(QUEUES[0], known[0], PATIENCE, feeds, quota=quota, now=NOON),
        InTurn(QUEUES[1], known[1], feed(lambda t: t.queue == QUEUES[1]), quota=quota),
        RoundRobin(QUEUES[2], known[2], lines, quota=quota),
    ]


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
    Turns,
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
        sources = {source: n - sum(t.source == source for t in singles) for source, n in demand.sources.items()}
        others = demand.others - sum(t.source not in demand.sources for t in singles)
        used = sum(t.queue == QUEUES[0] for t in singles)
        one, turns = served(rest, Demand(1, sources, others), turns, {QUEUES[0]: room - used})
        if not one:
            break
        singles += one
        left.admit(one[0].queue, one[0].source)
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
    lanes = {(t.source, t.priority) for t in waiting if t.queue == QUEUES[0]}
    for lane in lanes:
        line = [t for t in waiting if t.queue == QUEUES[0] and t.can_start and (t.source, t.priority) == lane]
        taken = [t for t in picked if t in line]
        assert taken == line[: len(taken)]


@pytest.mark.spec("QUE-08")
@given(st.lists(st.integers(0, 2), min_size=1, max_size=80), st.integers(1, 8))
def test_no_priority_waits_for_more_starts_than_its_patience(arrivals, after):
    """However tasks keep coming, between two starts of a priority that always has one, at most so many higher ones
    start, and one for every other priority that is let in."""
    patience, turns, waited = Patience(after, None), NO_TURNS, {1: 0, 2: 0}
    for arriving in arrivals:
        heads = dict.fromkeys({arriving, 1, 2}, NOON)
        level = choose(heads, turns, patience, NOON)
        turns = note_start(level, heads, turns, patience, NOON)
        waited = {p: 0 if p == level else n + (level < p) for p, n in waited.items()}
        assert max(waited.values()) <= after + 1


@pytest.mark.spec("QUE-08")
@pytest.mark.parametrize("age_s", [60, 6_000, 600_000])
def test_a_long_backlog_does_not_turn_the_order_round(age_s):
    """A level whose tasks have all waited too long is let in once a wait, not before everybody else."""
    patience, turns = Patience(None, timedelta(seconds=60)), NO_TURNS
    started = []
    for second in range(120):
        now = NOON + seconds(second)
        heads = {0: now, 2: NOON - seconds(age_s)}
        level = choose(heads, turns, patience, now)
        turns = note_start(level, heads, turns, patience, now)
        started.append(level)
    assert [n for n, level in enumerate(started) if level == 2] == [0, 60]


def test_endless_patience_remembers_nothing():
    """A queue without patience rules never has anything to write down."""
    heads = {0: NOON, 1: NOON - timedelta(days=9), 2: NOON}
    endless = Patience(None, None)
    assert choose(heads, NO_TURNS, endless, NOON) == 0
    assert note_start(0, heads, NO_TURNS, endless, NOON) is NO_TURNS
