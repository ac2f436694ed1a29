"""What a seed stands for: how many nodes, what is submitted, what goes wrong when. Drawn before anything runs."""

from __future__ import annotations

import random
from typing import NamedTuple

import msgspec

from taskyard.model.order import Priority
from taskyard.model.queue import QueueSettings
from taskyard.model.retry import RetryPolicy
from taskyard.model.task import Dedupe
from taskyard.testing.simulation.network import FAIR, Weather

WEATHERS = (
    FAIR,
    Weather(refused=0.03, unknown=0.03, slow=0.05, slow_s=0.5, hint_lost=0.1),
    Weather(refused=0.15, unknown=0.15, hint_lost=0.3),
    Weather(unknown=0.3, slow=0.1, slow_s=0.2),
    Weather(slow=0.3, slow_s=3.0, hint_lost=0.5),
    Weather(deadly=0.02, unknown=0.05, slow=0.1, slow_s=0.5),
    Weather(odd=0.1, unknown=0.05),
)

HOUR_S, DAY_S = 3_600.0, 86_400.0

QUICK = RetryPolicy(max_retries=2, first_s=0.2, cap_s=1.0)
"""For tasks that name no policy of their own."""

ENDINGS = ("ok",) * 8 + ("raise", "raise", "give_up", "later", "cancel", "stubborn")


class Act(msgspec.Struct, frozen=True):
    """What one run of a task does: it takes `s` seconds, and then ends in this way. `stubborn` code ends well whoever
    asks it to stop."""

    how: str
    s: float
    reports: bool = False
    submits: bool = False


class Order(NamedTuple):
    """One task to submit: all that is not its id."""

    source: str
    queue: str
    acts: tuple[Act, ...]
    delay_s: float
    priority: int
    key: str | None
    slot: str | None
    timeout_s: float | None
    retry: RetryPolicy | None


class Step(NamedTuple):
    """What happens at a moment: `what` names a method of the world, `which` chooses among whom it could happen to."""

    at_s: float
    what: str
    which: float
    value: float = 0.0
    orders: tuple[Order, ...] = ()
    dedupe: Dedupe = Dedupe.ALLOW


class Plan(NamedTuple):
    nodes: int
    clients: int
    is_prompt: bool
    weather: Weather
    lateness_s: float
    queues: tuple[QueueSettings, ...]
    room: dict[str, int]
    timeouts: dict[str, float | None]
    max_running: int
    skews: tuple[float, ...]
    steps: tuple[Step, ...]


def draw_plan(rng: random.Random) -> Plan:
    queues = (
        QueueSettings(name="default", auto_recover=rng.choice((1, 2)), retry=QUICK),
        QueueSettings(name="narrow", concurrency=rng.choice((1, 1, 2)), auto_recover=1, retry=QUICK),
        QueueSettings(name="keyed", per_key=rng.choice((1, 1, 2)), auto_recover=3, retry=QUICK),
    )
    span_s = rng.choice((3.0, 6.0, 12.0))
    steps = [*_work(rng, span_s), *_trouble(rng, span_s)]
    return Plan(
        nodes=rng.choice((1, 2, 2, 3, 4)),
        clients=rng.choice((0, 1, 1, 2)),
        is_prompt=rng.random() < 0.15,
        weather=rng.choice(WEATHERS),
        lateness_s=rng.choice((0.0, 0.001, 0.05)),
        queues=queues,
        room={"work": rng.choice((1, 2, 4)), "chore": rng.choice((1, 3))},
        timeouts={"work": None, "chore": rng.choice((None, 0.5, 2.0))},
        max_running=rng.choice((1, 3, 100)),
        skews=tuple(rng.choice((0.0, rng.uniform(-0.05, 0.05))) for _ in range(8)),
        steps=tuple(sorted(steps, key=lambda step: step.at_s)),
    )


def _work(rng: random.Random, span_s: float) -> list[Step]:
    steps = []
    for _ in range(rng.randrange(3, 15)):
        count = rng.choice((1, 1, 1, 1, 3))
        dedupe = rng.choice((Dedupe.ALLOW, Dedupe.ALLOW, Dedupe.MERGE, Dedupe.REFUSE))
        orders = tuple(draw_order(rng) for _ in range(count))
        steps.append(Step(rng.random() * span_s * 0.7, "submit", rng.random(), orders=orders, dedupe=dedupe))
    for what, most in (("wait", 8), ("cancel", 5), ("retry", 4), ("prioritize", 3)):
        count = rng.randrange(most)
        steps += [Step(rng.random() * span_s, what, rng.random(), rng.random()) for _ in range(count)]
    return steps


def draw_order(rng: random.Random) -> Order:
    queue = rng.choice(("default", "narrow", "keyed"))
    return Order(
        source=rng.choice(("work", "work", "chore")),
        queue=queue,
        acts=tuple(_draw_act(rng) for _ in range(rng.choice((1, 1, 2, 3)))),
        delay_s=rng.choice((0.0, 0.0, 0.0, rng.random() * 3)),
        priority=rng.choice((Priority.NORMAL, Priority.NORMAL, Priority.HIGH, Priority.LOW)).value,
        key=rng.choice(("a", "b")) if queue == "keyed" else None,
        slot=rng.choice((None, "one", "two")),
        timeout_s=rng.choice((None, None, None, 0.3)),
        retry=rng.choice((None, None, RetryPolicy(max_retries=1, first_s=0.1, jitter=1.0))),
    )


def _draw_act(rng: random.Random) -> Act:
    seconds = rng.choice((0.0, rng.random() * 0.01, rng.random() * 0.3, rng.random() * 3))
    return Act(rng.choice(ENDINGS), seconds, reports=rng.random() < 0.2, submits=rng.random() < 0.2)


def _trouble(rng: random.Random, span_s: float) -> list[Step]:
    kinds = (
        *("kill", "kill", "freeze", "freeze", "stop", "break_off", "end_loop"),
        *("cut_off", "outage", "set_clock", "set_clocks", "drain"),
    )
    steps = []
    for _ in range(rng.choice((0, 1, 2, 4, 8))):
        what = rng.choice(kinds)
        value = rng.choice((rng.random(), rng.random() * 3, rng.random() * 8))
        if what in ("set_clock", "set_clocks"):
            value = rng.choice((HOUR_S, DAY_S, -HOUR_S, -DAY_S, 0.0))
        steps.append(Step(rng.random() * span_s, what, rng.random(), value))
    return steps
