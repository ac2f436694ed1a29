"""P7: random histories of all that can be asked of a store, by two nodes and two handles: no illegal state, no lost
task, order and limits kept, and the same answers as the store in memory. A seed replays exactly."""

import logging
import multiprocessing
import os
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from taskyard.testing.postgres import FAST, Databases, Server
from tests.stateful.histories import STEPS, check_seed
from tests.stateful.machine import StoreMachine
from tests.stateful.memory import MemoryMachine
from tests.stateful.postgres import postgres_machine
from tests.torture.figures import Figures

CHUNK = 100
"""Histories of one seed. The next hundred have the next seed, so that a failure is replayed in minutes."""

STORES = ("memory", "sqlite", "postgres")


def run(_folder: Path, *, trials: int, seed: int, store: str) -> Figures:
    figures = Figures(f"P7 {store}: legal histories of {STEPS} steps", 0)
    shares = [min(CHUNK, trials - done) for done in range(0, trials, CHUNK)]
    with _server(store) as url, _pool(len(shares)) as pool:
        part = partial(run_part, store=store, url=url)
        figures.add(pool.map(part, range(seed, seed + len(shares)), shares))
    figures.note = ", ".join(f"{count:,} {what}" for what, count in sorted(figures.counts.items()))
    return figures


def run_part(seed: int, trials: int, *, store: str, url: str | None) -> Figures:
    """The histories of one seed, in this process."""
    logging.getLogger("taskyard").setLevel(logging.CRITICAL)
    figures = Figures("", trials)
    StoreMachine.seen.clear()
    with _machine(store, url) as machine:
        try:
            check_seed(seed, trials, machine=machine)
        except Exception as exc:
            replay = f"python -m tests.torture histories-{store} SEED={seed} TRIALS={trials}"
            figures.failures.append(f"{''.join(traceback.format_exception(exc))}(replay: {replay})")
    figures.counts.update(StoreMachine.seen)
    return figures


@contextmanager
def _server(store: str) -> Iterator[str | None]:
    """One for all processes; what a crash of the machine would lose is of no interest here."""
    if store != "postgres":
        yield None
        return
    server = Server(settings=FAST)
    try:
        server.start()
        yield server.url
    finally:
        server.stop()


def _pool(shares: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(min(shares, os.cpu_count() or 1), mp_context=multiprocessing.get_context("spawn"))


@contextmanager
def _machine(store: str, url: str | None) -> Iterator[type[StoreMachine]]:
    if url is None:
        yield {"memory": MemoryMachine, "sqlite": StoreMachine}[store]
        return
    databases = Databases(url)
    try:
        yield postgres_machine(databases)
    finally:
        databases.close()
