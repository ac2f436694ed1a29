"""A simulation of several nodes on one store, in one thread, in virtual time, from one seed.

The engine is the real one and so is the core of the store; the event loop, the clocks, the network between nodes and
store and the deaths of processes are simulated. A seed replays exactly: `simulate(42)` twice gives the same trace.
"""

from __future__ import annotations

import gc
import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from taskyard.testing.simulation.guards import draw_guards
from taskyard.testing.simulation.history import End, History
from taskyard.testing.simulation.judge import judge_history
from taskyard.testing.simulation.loop import VirtualLoop
from taskyard.testing.simulation.plan import draw_plan
from taskyard.testing.simulation.world import World

__all__ = ["Simulated", "simulate"]


class Simulated(msgspec.Struct, frozen=True):
    """What became of a seed: what is wrong (nothing, if all is well), and one value for all that happened."""

    seed: int
    faults: list[str]
    trace: str
    history: History
    end: End


def simulate(seed: int) -> Simulated:
    with _quietly():
        return _simulate(seed)


def _simulate(seed: int) -> Simulated:
    plan = draw_plan(random.Random(seed))
    rng = random.Random(seed + 1)
    loop = VirtualLoop(rng, lateness_s=plan.lateness_s)
    try:
        world = World(loop, plan, rng, draw_guards(seed))
        end = loop.run_until_complete(world.run())
        faults = judge_history(world.history, end)
        trace = world.history.digest(loop.steps, loop.time(), rng.random())
        world.history.is_closed = True
    finally:
        loop.close()
    return Simulated(seed, faults, trace, world.history, end)


@contextmanager
def _quietly() -> Iterator[None]:
    """Outages and deaths are the point here: the engine need not tell of them. Nor need the collector look before the
    end. What it is to find then are thousands of asyncio tasks; who makes many simulations collects now and then."""
    log = logging.getLogger("taskyard")
    before, collects = log.level, gc.isenabled()
    log.setLevel(logging.CRITICAL + 1)
    gc.disable()
    try:
        yield
    finally:
        log.setLevel(before)
        if collects:
            gc.enable()
