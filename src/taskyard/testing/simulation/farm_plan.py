"""What a seed of the farm stands for: its size, its nodes, and how often what goes wrong."""

from __future__ import annotations

import random
from typing import NamedTuple

from taskyard.testing.simulation.network import FAIR, Weather

ROLES = ("eu", "us", "asia")

WEATHERS = (
    FAIR,
    Weather(refused=0.003, unknown=0.003, slow=0.01, slow_s=0.3, hint_lost=0.02),
    Weather(refused=0.01, unknown=0.01, slow=0.02, slow_s=0.5, hint_lost=0.1),
    Weather(unknown=0.005, slow=0.1, slow_s=0.1),
    Weather(unknown=0.002, deadly=0.0002),
)


class FarmSize(NamedTuple):
    devices: int = 50
    accounts: int = 500
    tasks: int = 20_000
    """Tasks that are accepted before the calm."""


FULL = FarmSize()


class Job(NamedTuple):
    """What the code of a task does: it takes `s` seconds and ends in this way; asked to stop, it ignores that for
    `stubborn_s`."""

    how: str
    s: float
    stubborn_s: float


class FarmPlan(NamedTuple):
    """The pauses are means, in seconds: between two kills or stops of a process, between two failures of any device,
    between two orders of people, between two cancels."""

    size: FarmSize
    nodes: int
    clients: int
    is_bucketed: bool
    heartbeat_s: float
    auto_recover: int
    quarantine_after: int | None
    weather: Weather
    lateness_s: float
    waiting: int
    """So many tasks wait, about, as long as people enqueue."""
    mean_s: float
    """How long the code of a task takes."""
    death_pause_s: float
    failure_pause_s: float
    order_pause_s: float
    cancel_pause_s: float
    broken: int
    """So many devices fail for good."""


def draw_farm(rng: random.Random, size: FarmSize) -> FarmPlan:
    trouble = rng.choice((0.3, 1.0, 1.0, 3.0))
    return FarmPlan(
        size=size,
        nodes=rng.choice((2, 3, 3, 4)),
        clients=rng.choice((1, 2)),
        is_bucketed=rng.random() < 0.5,
        heartbeat_s=rng.choice((2.0, 5.0, 10.0)),
        auto_recover=rng.choice((1, 1, 2)),
        quarantine_after=rng.choice((None, 3)),
        weather=rng.choice(WEATHERS),
        lateness_s=rng.choice((0.0, 0.001, 0.01)),
        waiting=rng.choice((20, size.devices, 3 * size.devices)),
        mean_s=rng.choice((0.3, 1.0, 3.0)),
        death_pause_s=30.0 / trouble,
        failure_pause_s=50.0 / size.devices / trouble,
        order_pause_s=5.0 / trouble,
        cancel_pause_s=8.0 / trouble,
        broken=min(rng.choice((0, 0, 1, 2)), size.devices // 10),
    )


def draw_job(rng: random.Random, mean_s: float) -> Job:
    how = rng.choices(("ok", "raise", "lost", "long"), (0.9, 0.07, 0.01, 0.005))[0]
    stubborn_s = rng.random() * rng.choice((0.5, 5.0, 30.0)) if rng.random() < 0.05 else 0.0
    return Job(how, rng.random() * 2 * mean_s if how != "long" else 60.0, stubborn_s)
