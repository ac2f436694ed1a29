"""Claims from a queue in which everything is mixed, beside the same claims from a plain one.

Both queues hold as many tasks, in a store of their own, in this process. They are asked in turn, a claim of each after
the other, so that whatever else the machine does is in the way of both. After each claim, which is timed, as many tasks
are completed and added again as were claimed, which is not: both queues stay as they were.
"""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.ours.stores import a_record, completion, joined, pending_in
from benchmarks.reading import Reading, percentile
from taskyard.model.limits import Demand
from taskyard.model.order import Priority
from taskyard.model.task import Claim, TaskRecord
from taskyard.ports.store import Add, Store

FULL_SOURCES = [f"full-{number}" for number in range(22)]
KEYED_SOURCES = [f"keyed-{number}" for number in range(23)]
FREE_SOURCES = [f"free-{number}" for number in range(5)]
TAKEN_KEYS = [f"taken-{number}" for number in range(900)]
FREE_KEYS = [f"free-{number}" for number in range(100)]
PRIORITIES = list(Priority)
PLAIN = "plain"
FILL_AT_ONCE = 1_000


@dataclass(frozen=True, slots=True)
class Queue:
    """A store with a backlog of one kind, `make` being one more of those that may start, and the times its claims
    took: by the clock, and of this process's processor time."""

    store: Store
    node: str
    make: Callable[[], TaskRecord]
    demand: Demand
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    async def claim(self) -> list[Claim]:
        began_cpu, began = time.process_time(), time.perf_counter()
        turned = await self.store.turn(self.node, demand=self.demand)
        self.wall.append(time.perf_counter() - began)
        self.cpu.append(time.process_time() - began_cpu)
        if len(turned.claims) != self.demand.total:
            raise RuntimeError(f"{len(turned.claims)} tasks were claimed, not {self.demand.total}")
        return turned.claims

    async def replace(self, claims: list[Claim]) -> None:
        fresh = [self.make() for _ in claims]
        await self.store.turn(self.node, settles=[completion(claim) for claim in claims], adds=[Add(fresh)])


def fill(folder: Path, dsn: str, kind: str, queued: int) -> Reading:
    return asyncio.run(_fill_apart(dsn, kind, queued))


async def _fill_apart(dsn: str, kind: str, queued: int) -> Reading:
    async with joined(dsn) as (store, node):
        began = time.perf_counter()
        await _fill(store, node, kind, queued)
        return Reading(queued / (time.perf_counter() - began), given=queued, held=await pending_in(store))


async def _fill(store: Store, node: str, kind: str, queued: int) -> None:
    """As far as it is not filled already."""
    for first in range(await pending_in(store), queued, FILL_AT_ONCE):
        numbers = range(first, first + FILL_AT_ONCE)
        records = [_mixed(number) if kind == "mixed" else _plain() for number in numbers]
        await store.turn(node, adds=[Add(records)])


def claims(
    folder: Path, queued: int, size: int, turns: int, mixed: str | None = None, plain: str | None = None
) -> Reading:
    """p50 of a turn that claims `size` tasks of the mixed queue, and `also` of the plain one; there, too, the processor
    time of both. The stores are those at the addresses, or files."""
    mixed, plain = (given or f"sqlite:///{folder / kind}.db" for kind, given in (("mixed", mixed), ("plain", plain)))
    return asyncio.run(_claims(mixed, plain, queued, size, turns))


async def _claims(mixed: str, plain: str, queued: int, size: int, turns: int) -> Reading:
    rng = random.Random(size)
    async with joined(mixed) as one, joined(plain) as other:
        await _fill(*one, "mixed", queued)
        await _fill(*other, "plain", queued)
        queues = [
            Queue(*one, lambda: _startable(rng), _room(size)),
            Queue(*other, _plain, Demand(size, {PLAIN: size})),
        ]
        await _take_up_limits(queues[0])
        for number in range(turns):
            for queue in queues[:: 1 if number % 2 else -1]:
                await queue.replace(await queue.claim())
        held = sum([await pending_in(queue.store) for queue in queues])
    ours, plainly = queues
    also = {
        "plain": percentile(plainly.wall, 50),
        "cpu": percentile(ours.cpu, 50),
        "plain_cpu": percentile(plainly.cpu, 50),
    }
    return Reading(percentile(ours.wall, 50), given=2 * queued, held=held, also=also)


def _plain() -> TaskRecord:
    return a_record(PLAIN)


def _mixed(number: int) -> TaskRecord:
    """45 % in sources that will be at their limit, 45 % behind keys that will be taken, and 10 % that may start, as far
    as their own keys let them; each in all priorities."""
    share, turn = number % 20, number // 20
    priority = PRIORITIES[turn % 3]
    if share < 9:
        return a_record(FULL_SOURCES[(turn * 9 + share) % len(FULL_SOURCES)], priority=priority)
    if share < 18:
        taken = TAKEN_KEYS[(turn * 9 + share) % len(TAKEN_KEYS)]
        return a_record(KEYED_SOURCES[(turn * 7 + share) % len(KEYED_SOURCES)], priority=priority, key=taken)
    key = FREE_KEYS[turn % len(FREE_KEYS)] if share == 18 else None
    return a_record(FREE_SOURCES[(turn * 3 + share) % len(FREE_SOURCES)], priority=priority, key=key)


def _startable(rng: random.Random) -> TaskRecord:
    key = rng.choice(FREE_KEYS) if rng.random() < 0.5 else None
    return a_record(rng.choice(FREE_SOURCES), priority=rng.choice(PRIORITIES), key=key)


async def _take_up_limits(queue: Queue) -> None:
    """One running task of every full source and of every taken key; no demand asks for the full sources afterwards."""
    room = {**dict.fromkeys(FULL_SOURCES, 1), **dict.fromkeys(KEYED_SOURCES, len(TAKEN_KEYS))}
    wanted = len(FULL_SOURCES) + len(TAKEN_KEYS)
    turned = await queue.store.turn(queue.node, demand=Demand(wanted, room))
    if len(turned.claims) != wanted:
        raise RuntimeError(f"{len(turned.claims)} limits were taken up, not {wanted}")


def _room(total: int) -> Demand:
    open_sources = dict.fromkeys([*KEYED_SOURCES, *FREE_SOURCES], total)
    return Demand(total, {**dict.fromkeys(FULL_SOURCES, 0), **open_sources})
