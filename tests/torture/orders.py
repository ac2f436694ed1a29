"""QUE-32: a queue starts its tasks in the order that was shown, at the times that were shown."""

import asyncio
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Protocol

from taskyard.model.queue import QueueOrder
from taskyard.ports.store import Store
from taskyard.stores.memory import MemoryStore
from taskyard.stores.postgres import PostgresStore
from taskyard.stores.sqlite import SqliteStore
from taskyard.testing.clock import ManualClock
from taskyard.testing.forecasting import check_seed
from taskyard.testing.postgres import FAST, Databases, Server
from tests.torture.figures import Figures

STORES = ("memory", "sqlite", "postgres")

SEEDS_PER_STORE = 10
"""What earlier seeds have left is looked through in memory."""


class Make(Protocol):
    def __call__(self, *, clock: ManualClock) -> Store: ...


def run(folder: Path, *, trials: int, seed: int) -> Figures:
    """`trials` seeds, each in every order and on every store."""
    figures = Figures("QUE-32 shown order = actual order", 0)
    for name in STORES:
        with _maker(name, folder) as make:
            for first in range(seed, seed + trials, SEEDS_PER_STORE):
                clock = ManualClock()
                seeds = range(first, min(first + SEEDS_PER_STORE, seed + trials))
                asyncio.run(_run(name, make(clock=clock), seeds, clock=clock, figures=figures))
    figures.note = ", ".join(f"{count:,} {what}" for what, count in sorted(figures.counts.items()))
    return figures


async def _run(name: str, store: Store, seeds: range, *, clock: ManualClock, figures: Figures) -> None:
    await store.open()
    try:
        for seed in seeds:
            for order in QueueOrder:
                await _check(name, store, clock, seed, order, figures)
    finally:
        await store.close()


async def _check(name: str, store: Store, clock: ManualClock, seed: int, order: QueueOrder, figures: Figures) -> None:
    figures.trials += 1
    try:
        figures.counts["starts compared"] += await check_seed(store, clock, seed, order)
    except Exception as exc:
        replay = f"python -m tests.torture orders SEED={seed} TRIALS=1"
        told = "".join(traceback.format_exception(exc))
        figures.failures.append(f"{name}, {order}, seed {seed}: {told}(replay: {replay})")


@contextmanager
def _maker(name: str, folder: Path) -> Iterator[Make]:
    """A function that makes an empty store."""
    numbers = count()
    if name == "memory":
        yield MemoryStore
    elif name == "sqlite":
        yield lambda *, clock: SqliteStore(folder / f"{next(numbers)}.db", clock=clock, synchronous="OFF")
    else:
        server = Server(settings=FAST)
        server.start()
        databases = Databases(server.url)
        try:
            yield lambda *, clock: PostgresStore(databases.empty(), clock=clock)
        finally:
            server.stop()
