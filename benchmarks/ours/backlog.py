"""A large backlog, at the store's own port: what a claim costs when most of what waits may not start."""

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg

from benchmarks.ours.places import persisted
from benchmarks.ours.stores import PENDING, a_record, completion, joined, pending_in, timed_claim
from benchmarks.reading import Reading, percentile
from taskyard.model.limits import Demand
from taskyard.model.task import Claim, TaskRecord
from taskyard.ports.store import Add, Store

FULL_SOURCES = [f"full-{number}" for number in range(50)]
FREE_SOURCES = [f"free-{number}" for number in range(10)]
KEYED_SOURCE = "keyed"
TAKEN_KEYS = [f"key-{number}" for number in range(100)]
FILL_AT_ONCE = 1_000
WORKED_AT_ONCE = 100


def fill(folder: Path, dsn: str, count: int) -> Reading:
    """45 % in sources that will be at their limit, 45 % behind keys that will be taken, 10 % free to start."""
    return asyncio.run(_fill(dsn, count))


async def _fill(dsn: str, count: int) -> Reading:
    began = time.perf_counter()
    async with joined(dsn) as (store, node):
        for first in range(0, count, FILL_AT_ONCE):
            records = [_waiting(number) for number in range(first, min(count, first + FILL_AT_ONCE))]
            await store.turn(node, adds=[Add(records)])
    elapsed = time.perf_counter() - began
    return Reading(count / elapsed, given=count, held=await persisted(dsn, *PENDING))


def _waiting(number: int) -> TaskRecord:
    share, turn = number % 20, number // 20
    if share < 9:
        return a_record(FULL_SOURCES[(turn * 9 + share) % len(FULL_SOURCES)])
    if share < 18:
        return a_record(KEYED_SOURCE, key=TAKEN_KEYS[(turn * 9 + share) % len(TAKEN_KEYS)])
    return a_record(FREE_SOURCES[(turn * 2 + share) % len(FREE_SOURCES)])


def claim(folder: Path, dsn: str, queued: int, claims: int) -> Reading:
    """p99 of a turn that claims one task, when all that is not free is at its limit."""
    return asyncio.run(_claim(dsn, queued, claims))


async def _claim(dsn: str, queued: int, claims: int) -> Reading:
    async with _backlogged(dsn, queued) as (store, node, pending):
        times = [await timed_claim(store, node, random.choice(FREE_SOURCES), ROOM) for _ in range(claims)]
        resident = _resident_bytes()
    held = await persisted(dsn, *PENDING)
    return Reading(percentile(times, 99), given=pending, held=held, also={"resident_bytes": resident})


def work_and_claim(folder: Path, dsn: str, queued: int, work: int, claims: int, is_watched: bool) -> Reading:
    """Works `work` tasks off, and takes the p99 of single claims after that: from a table that saw as many changes,
    none of which can be cleared away while somebody else still looks at what was there before."""
    return asyncio.run(_work_and_claim(dsn, queued, work, claims, is_watched))


async def _work_and_claim(dsn: str, queued: int, work: int, claims: int, is_watched: bool) -> Reading:
    async with _backlogged(dsn, queued) as (store, node, pending), _foreign_snapshot(dsn, is_watched):
        began = time.perf_counter()
        await _work_off(store, node, work)
        rate = work / (time.perf_counter() - began)
        times = [await timed_claim(store, node, random.choice(FREE_SOURCES), ROOM) for _ in range(claims)]
    held = await persisted(dsn, *PENDING)
    return Reading(percentile(times, 99), given=pending, held=held, also={"rate": rate})


@asynccontextmanager
async def _foreign_snapshot(dsn: str, is_watched: bool) -> AsyncIterator[None]:
    """Somebody's transaction, open all the while: it reads once, and what it might read again has to be kept for it."""
    if not is_watched:
        yield
        return
    stranger = await asyncpg.connect(dsn)
    async with stranger.transaction(isolation="repeatable_read"):
        await stranger.fetchval("SELECT count(*) FROM pg_class")
        yield
    await stranger.close()


@asynccontextmanager
async def _backlogged(dsn: str, queued: int) -> AsyncIterator[tuple[Store, str, int]]:
    async with joined(dsn) as (store, node):
        pending = await pending_in(store)
        if pending < queued:
            raise RuntimeError(f"{pending:,} tasks wait, not {queued:,}")
        await _take_up_limits(store, node)
        yield store, node, pending


async def _work_off(store: Store, node: str, count: int) -> None:
    """As many are added as are completed: the backlog stays as it was."""
    claims: list[Claim] = []
    for _ in range(count // WORKED_AT_ONCE):
        fresh = [a_record(random.choice(FREE_SOURCES)) for _ in range(WORKED_AT_ONCE)]
        settles = [completion(claim) for claim in claims]
        turned = await store.turn(node, settles=settles, adds=[Add(fresh)], demand=MUCH_ROOM)
        claims = turned.claims
        if len(claims) != WORKED_AT_ONCE:
            raise RuntimeError(f"{len(claims)} tasks were claimed, not {WORKED_AT_ONCE}")
    await store.turn(node, settles=[completion(claim) for claim in claims])


async def _take_up_limits(store: Store, node: str) -> None:
    """One running task of every full source and of every key; from here on no demand asks for the full sources."""
    room = {**dict.fromkeys(FULL_SOURCES, 1), KEYED_SOURCE: len(TAKEN_KEYS)}
    await store.turn(node, demand=Demand(total=sum(room.values()), per_lane=room))


def _room(total: int) -> Demand:
    sources = {**dict.fromkeys(FULL_SOURCES, 0), KEYED_SOURCE: total, **dict.fromkeys(FREE_SOURCES, total)}
    return Demand(total=total, per_lane=sources)


ROOM, MUCH_ROOM = _room(1), _room(WORKED_AT_ONCE)


def _resident_bytes() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return float(pages * os.sysconf("SC_PAGE_SIZE"))
