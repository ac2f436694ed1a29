"""Claims while blocked tasks are freed, beside the same claims where nothing else goes on, at the store's own port.

Both stores hold as many tasks, of a consumer that no claim asks for: which task a claim finds does not depend on them.
In one store they are blocked. They are freed as a node frees them (`unblock_all`). Some blockers are freed in a row,
while claims are made; then as many claims are made in the other store, so that other load of the machine affects both.
"""

import asyncio
import time
from pathlib import Path

from benchmarks.ours.places import own_copy, persisted
from benchmarks.ours.stores import a_record, joined, timed_claim
from benchmarks.reading import Reading, percentile
from taskyard.model.blocker import Blocker
from taskyard.model.command import Block, Command
from taskyard.model.limits import Demand
from taskyard.model.state import TaskState
from taskyard.ports.clock import SystemClock
from taskyard.ports.store import Add, Store
from taskyard.queueing.blockers import unblock_all

WAITING, ASKED_FOR = "waiting", "asked-for"
ROOM = Demand(1, {ASKED_FOR: 1})
FILL_AT_ONCE = 1_000
FREED_IN_A_ROW = 10
PAUSE_S = 0.1
"""What the one store has left to be written is written then, and not at the cost of the other."""
NOT_STARTED = (TaskState.QUEUED, TaskState.BLOCKED)


def fill(folder: Path, dsn: str, waiting: int, blockers: int) -> Reading:
    """Tasks that wait for as many blockers, in turn; of 0 they are queued."""
    return asyncio.run(_fill(dsn, waiting, blockers))


async def _fill(dsn: str, waiting: int, blockers: int) -> Reading:
    began = time.perf_counter()
    uuids: list[str] = []
    async with joined(dsn) as (store, node):
        for first in range(0, waiting, FILL_AT_ONCE):
            records = [a_record(WAITING) for _ in range(min(FILL_AT_ONCE, waiting - first))]
            await store.turn(node, adds=[Add(records)])
            uuids += (record.uuid for record in records)
        for number in range(blockers):
            disk = _disk(number)
            await _apply(store, uuids[number::blockers], Block(disk.kind, disk.detail))
    held = await persisted(dsn, TaskState.BLOCKED if blockers else TaskState.QUEUED)
    return Reading(waiting / (time.perf_counter() - began), given=waiting, held=held)


def _disk(number: int) -> Blocker:
    return Blocker("disk", f"/disk-{number}")


async def _apply(store: Store, uuids: list[str], command: Command) -> None:
    for applied in await store.apply(uuids, command):
        if applied.refused is not None:
            raise applied.refused


def claims(folder: Path, blocked: str, queued: str, waiting: int, blockers: int, freed: int) -> Reading:
    """p99 of a turn that claims one task while `freed` of the blockers are freed, and `also` of as many claims without
    that; there, too, the p50 of both, of what it takes to free one, and how many claims were made meanwhile."""
    return asyncio.run(_claims(own_copy(folder, blocked), own_copy(folder, queued), waiting, blockers, freed))


async def _claims(blocked: str, queued: str, waiting: int, blockers: int, freed: int) -> Reading:
    times: list[float] = []
    times_without: list[float] = []
    frees: list[float] = []
    async with joined(blocked) as (store, node), joined(queued) as other:
        await _check(store, waiting, range(blockers), blockers)
        for number in range(freed):
            freeing = asyncio.create_task(_timed_free(store, _disk(number)))
            while not freeing.done():
                times.append(await timed_claim(store, node, ASKED_FOR, ROOM))
            frees.append(await freeing)
            await _check(store, waiting, range(number + 1, blockers), blockers)
            if (number + 1) % FREED_IN_A_ROW == 0 or number + 1 == freed:
                await asyncio.sleep(PAUSE_S)
                while len(times_without) < len(times):
                    times_without.append(await timed_claim(*other, ASKED_FOR, ROOM))
    held = await persisted(blocked, *NOT_STARTED) + await persisted(queued, *NOT_STARTED)
    also = {
        "without": percentile(times_without, 99),
        "p50": percentile(times, 50),
        "p50_without": percentile(times_without, 50),
        "free": percentile(frees, 50),
        "claims": len(times),
    }
    return Reading(percentile(times, 99), given=2 * waiting, held=held, also=also)


async def _timed_free(store: Store, blocker: Blocker) -> float:
    began = time.perf_counter()
    await unblock_all(store, blocker.key, by="", clock=SystemClock(), unblocked=lambda: None)
    return time.perf_counter() - began


async def _check(store: Store, waiting: int, left: range, blockers: int) -> None:
    """Those that wait for what is left are blocked, all of them, and all others are queued."""
    found = {group.key: group.count for group in await store.list_blockers()}
    if found != {_disk(number).key: waiting // blockers for number in left}:
        raise RuntimeError(f"{len(left)} blockers should be left, not these: {found}")
    counts = await store.count()
    states = {state: counts.get(("default", state), 0) for state in NOT_STARTED}
    blocked = len(left) * waiting // blockers
    if states != {TaskState.QUEUED: waiting - blocked, TaskState.BLOCKED: blocked}:
        raise RuntimeError(f"{blocked:,} of {waiting:,} should be blocked: {states}")
