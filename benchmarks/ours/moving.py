"""Steering single tasks of a long queue beside those of a short one, each in a store of its own, in this process.

The stores are asked in turn, the same command after the other, so that whatever else the machine does is in the way of
both. Which tasks are moved, and where to, is drawn: the same number of times in both, from the whole of each.
"""

import asyncio
import random
import time
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import mean

import msgspec

from benchmarks.ours.places import own_copy
from benchmarks.ours.stores import a_record, joined, pending_in
from benchmarks.reading import Reading, percentile
from taskyard.model.command import Command, MoveAfter, SetPriority, StartNow
from taskyard.model.order import Priority
from taskyard.ports.store import Add, Store

FILL_AT_ONCE = 1_000

Asked = tuple[str, Command]
"""A task, and what is asked of it."""


def fill(folder: Path, dsn: str, name: str, sizes: dict[str, int]) -> Reading:
    return asyncio.run(_fill_apart(dsn, sizes[name]))


async def _fill_apart(dsn: str, queued: int) -> Reading:
    async with joined(dsn) as (store, node):
        began = time.perf_counter()
        await _fill(store, node, queued)
        return Reading(queued / (time.perf_counter() - began), given=queued, held=await pending_in(store))


async def _fill(store: Store, node: str, queued: int) -> None:
    """As far as it is not filled already."""
    for first in range(await pending_in(store), queued, FILL_AT_ONCE):
        numbers = range(first, min(first + FILL_AT_ONCE, queued))
        records = [msgspec.structs.replace(a_record("plain"), uuid=_uuid(number)) for number in numbers]
        await store.turn(node, adds=[Add(records)])


def _uuid(number: int) -> str:
    return f"00000000-0000-7000-8000-{number:012d}"


def steer(folder: Path, few: str, many: str, sizes: dict[str, int], turns: int, between: int) -> Reading:
    """The p50 of each command over `turns`, and the mean of `between` moves to the same spot, by its name and the name
    of the store, `few` or `many`. The stores are those at the addresses; of files, copies."""
    return asyncio.run(_steer({"few": own_copy(folder, few), "many": own_copy(folder, many)}, sizes, turns, between))


async def _steer(dsns: dict[str, str], sizes: dict[str, int], turns: int, between: int) -> Reading:
    times: dict[str, list[float]] = {}
    async with AsyncExitStack() as stack:
        stores: dict[str, Store] = {}
        for name, dsn in dsns.items():
            store, node = await stack.enter_async_context(joined(dsn))
            await _fill(store, node, sizes[name])
            stores[name] = store
        for what, asked in _asked(sizes, turns, between).items():
            for number in range(len(asked["few"])):
                for name in ("few", "many") if number % 2 else ("many", "few"):
                    await _timed(stores[name], *asked[name][number], what=f"{what} {name}", times=times)
        held = sum([await pending_in(store) for store in stores.values()])
    also = {name: mean(taken) if "between" in name else percentile(taken, 50) for name, taken in times.items()}
    return Reading(also["move many"], given=sum(sizes.values()), held=held, also=also)


def _asked(sizes: dict[str, int], turns: int, between: int) -> dict[str, dict[str, list[Asked]]]:
    """What is asked of each store, and of which task, by what it is called."""
    rng = random.Random(turns)
    drawn = {name: _in_four([_uuid(n) for n in rng.sample(range(2, size), 4 * turns)]) for name, size in sizes.items()}
    first, others = _uuid(0), sizes["few"] - 2
    same_spot: list[Asked] = [(_uuid(2 + n % others), MoveAfter(first)) for n in range(between)]
    return {
        "start now": {name: [(uuid, StartNow()) for uuid in uuids] for name, (uuids, *_) in drawn.items()},
        "move": {
            name: [(uuid, MoveAfter(to)) for uuid, to in zip(uuids, anchors, strict=True)]
            for name, (_, uuids, anchors, _) in drawn.items()
        },
        "between": dict.fromkeys(sizes, same_spot),
        "priority": {
            name: [(uuid, SetPriority(Priority.HIGH)) for uuid in uuids] for name, (*_, uuids) in drawn.items()
        },
    }


def _in_four(uuids: list[str]) -> tuple[list[str], ...]:
    """No task is drawn twice: what has been moved once would be moved at less, or more, cost."""
    return uuids[0::4], uuids[1::4], uuids[2::4], uuids[3::4]


async def _timed(store: Store, uuid: str, command: Command, *, what: str, times: dict[str, list[float]]) -> None:
    began = time.perf_counter()
    (applied,) = await store.apply([uuid], command)
    elapsed = time.perf_counter() - began
    if applied.refused is not None:
        raise applied.refused
    times.setdefault(what, []).append(elapsed)
