"""Staying awake for the next call: only while it pays."""

import asyncio
import itertools

from taskyard.execution.hosted import HostedWorker
from taskyard.execution.linger import LOOKS, MOST_SKIPPED, Linger
from tests.execution import deeds, misdeeds


class Wire:
    """Something to look at: counts the looks, and has news from the given one on."""

    def __init__(self) -> None:
        self.looks, self.news_at = 0, LOOKS + 1

    def has_news(self) -> bool:
        self.looks += 1
        return self.looks >= self.news_at

    def looks_of(self, linger: Linger) -> int:
        self.looks = 0
        linger.look()
        return self.looks


def test_it_looks_until_there_is_something_to_read():
    """A call that comes soon is found at the look that it is there for, time after time."""
    wire = Wire()
    linger = Linger(wire.has_news)
    wire.news_at = 7
    assert [wire.looks_of(linger) for _ in range(5)] == [7] * 5


def test_looks_in_vain_become_rare():
    """Calls now and then: the times between two lingerings double, up to a limit."""
    wire = Wire()
    linger = Linger(wire.has_news)
    looks = [wire.looks_of(linger) for _ in range(3 * MOST_SKIPPED)]
    lingered = [n for n, count in enumerate(looks) if count]
    assert {looks[n] for n in lingered} == {LOOKS}
    assert [b - a - 1 for a, b in itertools.pairwise(lingered)] == [1, 2, 4, 8, 16, 32, 64, 128, 256]


def test_one_look_that_pays_makes_up_for_those_in_vain():
    """When calls come one after the other again, every look is worth it again."""
    wire = Wire()
    linger = Linger(wire.has_news)
    for _ in range(10):
        linger.look()
    wire.news_at = 1
    looks = [wire.looks_of(linger) for _ in range(20)]
    assert looks[looks.index(1) :] == [1] * (20 - looks.index(1))


async def test_workers_stay_awake_only_for_a_caller_who_is_alone(open_desk, stage, monkeypatch):
    """With several at work, one that looks for its next call would take the CPU from one that runs."""
    told: list[bool] = []
    give = HostedWorker.give

    def listen(worker, call, *, is_alone=False):
        told.append(is_alone)
        give(worker, call, is_alone=is_alone)

    monkeypatch.setattr(HostedWorker, "give", listen)
    desk = open_desk(max_workers=2)
    await desk.value(misdeeds.pid)
    first = desk.begin(deeds.hold, (stage.began, stage.gate))
    await asyncio.to_thread(stage.wait_until_begun)
    await desk.value(misdeeds.pid)
    stage.let_go()
    await first.future
    await desk.value(misdeeds.pid)
    assert told == [True, True, False, True]
