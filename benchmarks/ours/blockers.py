"""Claims while blocked tasks are freed, beside the same claims where nothing else goes on, at the store's own port; and
starts while they are freed through a yard, beside starts while as many tasks run that nothing had blocked.

Both stores hold as many tasks, of a consumer that no claim asks for: which task a claim finds does not depend on them.
In one store they are blocked. They are freed as a node frees them (`unblock_all`). Some blockers are freed in a row,
while claims are made; then as many claims are made in the other store, so that other load of the machine affects both.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import uvloop

from benchmarks.ours.places import own_copy, persisted, url_of
from benchmarks.ours.stores import a_record, joined, timed_claim
from benchmarks.ours.submitting import SLOTS
from benchmarks.reading import Reading, percentile
from taskyard import Yard
from taskyard.model.blocker import Blocker
from taskyard.model.command import Block, Command
from taskyard.model.limits import Demand
from taskyard.model.state import TaskState
from taskyard.model.task import TaskRecord
from taskyard.ports.clock import SystemClock
from taskyard.ports.store import Add, Store
from taskyard.queueing.blockers import unblock_all

AT_ONCE = 20
"""Of those that wait, so many run at once: slots for others are free."""
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


# --- through a yard ---------------------------------------------------------------------------------------------------


class FullDisks:
    """An admission check: a task is blocked while the disk that it requires is full."""

    kinds = ("disk",)

    def __init__(self, disks: Iterable[str]) -> None:
        self._full = set(disks)
        self._freed: Callable[[str, str], None] = lambda kind, detail: None
        self.looks = 0

    async def check(self, record: TaskRecord) -> Blocker | None:
        self.looks += 1
        disk = record.requirements.get("disk")
        return Blocker("disk", disk) if disk in self._full else None

    def connect(self, freed: Callable[[str, str], None]) -> Callable[[], None]:
        self._freed = freed
        return lambda: None

    def free(self, disk: str) -> None:
        self._full.discard(disk)
        self._freed("disk", disk)


def starts(folder: Path, waiting: int, blockers: int, freed: int, dsn: str | None = None) -> Reading:
    """p99 of submit to start of one task after another while `freed` of the disks are freed, each of which lets its
    tasks run; and `also` of as many starts while as many tasks run that wait for no disk. `looks` counts the checks
    before the first disk was freed."""
    return uvloop.run(_starts(url_of(folder, dsn), waiting, blockers, freed))


async def _starts(url: str, waiting: int, blockers: int, freed: int) -> Reading:
    disks = [_disk(number).detail for number in range(blockers)]
    each = waiting // blockers
    check = FullDisks(disks)
    yard = Yard(url, max_running=SLOTS, admission=[check])
    work = _Work(yard)
    times: dict[str, list[float]] = {"freed": [], "unblocked": []}
    async with yard:
        for disk in disks:
            await work.waiting.options(requires={"disk": disk}).submit_many([{}] * each)
        while (await yard.store.count()).get(("default", TaskState.BLOCKED), 0) < blockers:  # noqa: ASYNC110
            await asyncio.sleep(PAUSE_S)
        looks = check.looks
        for disk in disks[:freed]:
            check.free(disk)
            await work.time_starts(each, times["freed"])
            await work.waiting.submit_many([{}] * each)
            await work.time_starts(each, times["unblocked"])
        counts = await yard.store.count()
    also = {
        "without": percentile(times["unblocked"], 99),
        "p50": percentile(times["freed"], 50),
        "p50_without": percentile(times["unblocked"], 50),
        "looks": looks,
    }
    given = waiting + freed * each + work.added
    return Reading(percentile(times["freed"], 99), given=given, held=sum(counts.values()), also=also)


class _Work:
    """Tasks that wait for disks, and others that are submitted one by one meanwhile."""

    def __init__(self, yard: Yard) -> None:
        self.waiting = yard.consumer(name=WAITING, concurrency=AT_ONCE)(self._run)
        self._other = yard.consumer(name=ASKED_FOR, queue="others")(self._start)
        self._done = self.added = 0
        self._started_at = 0.0

    async def _run(self) -> None:
        self._done += 1

    async def _start(self) -> None:
        self._started_at = time.perf_counter()

    async def time_starts(self, count: int, times: list[float]) -> None:
        """Submit other tasks, one after the other, until `count` of those that waited have run."""
        until = self._done + count
        while self._done < until:
            began = time.perf_counter()
            handle = await self._other.submit()
            await handle.result()
            times.append(self._started_at - began)
            self.added += 1
