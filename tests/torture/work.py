"""The yard that is tortured: consumers that write the ledger, and submitters that ask for all kinds of tasks."""

import asyncio
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from taskyard import RetryPolicy, StoreError, Yard, current_run
from taskyard.ports.clock import SystemClock
from taskyard.ports.store import Store
from taskyard.stores.postgres import PostgresStore
from taskyard.testing.faults import Faults
from taskyard.testing.ledger import DYING_S, Ledger

RECOVER_ALWAYS = 1_000_000
"""Every run may be the one that is killed; how often a task is recovered is another test's question."""

AGAIN = RetryPolicy(max_retries=RECOVER_ALWAYS, first_s=0.01, factor=1.0)


LEASE_S = 2.0
"""On PostgreSQL, unless the folder says otherwise. The lease of every day is 15 s: most trials would only wait."""

ALONE = "alone"
"""A queue that runs one task at a time, over all nodes; and the consumer of its tasks."""


def address_of(folder: Path) -> Path:
    """The file in which the address of a database stands, for a folder whose store is not a file of its own."""
    return folder / "address"


def lease_of(folder: Path) -> Path:
    """The file in which another lease stands."""
    return folder / "lease"


def store_of(folder: Path) -> str | Store:
    if address_of(folder).exists():
        lease_s = float(lease_of(folder).read_text()) if lease_of(folder).exists() else LEASE_S
        return PostgresStore(address_of(folder).read_text(), clock=SystemClock(), lease_s=lease_s)
    return f"sqlite:///{folder / 'work.db'}"


def ledger_of(folder: Path, *, dying_s: float = DYING_S) -> Ledger:
    return Ledger(folder / "ledger", dying_s=dying_s)


def make_yard(folder: Path, ledger: Ledger, faults: Faults | None = None, *, store: Store | None = None) -> Yard:
    """A yard on the folder's store whose tasks keep the ledger and pass the fault points of a run."""
    yard = Yard(store or store_of(folder), max_running=16, threads=4)
    yard.define_queue("default", auto_recover=RECOVER_ALWAYS)
    yard.define_queue(ALONE, auto_recover=RECOVER_ALWAYS, concurrency=1)
    _add_work(yard, ledger, faults or Faults())
    _add_guards(yard, ledger, folder)
    _add_races(yard, ledger)
    return yard


def _add_work(yard: Yard, ledger: Ledger, faults: Faults) -> None:
    @yard.consumer(concurrency=8, retry=AGAIN)
    async def breathe(ms: float, fails: int = 0, child_ms: float | None = None, parent: int = 0, pad: str = "") -> int:
        run = current_run()
        with ledger.run(run):
            faults.passing("run.began")
            await asyncio.sleep(ms / 1000)
            if child_ms is not None:
                handle = await yard.submit("breathe", {"ms": child_ms})
                ledger.acknowledged(handle.uuid)
            faults.passing("run.middle")
            await asyncio.sleep(ms / 1000)
            if run.attempt <= fails:
                raise OSError("not yet")
            faults.passing("run.ending")
            return run.token

    @yard.consumer(concurrency=4, retry=AGAIN)
    def chew(ms: float) -> int:
        run = current_run()
        with ledger.run(run):
            faults.passing("run.began")
            until = time.monotonic() + ms / 500
            while time.monotonic() < until and not run.cancelled:
                time.sleep(0.001)
            faults.passing("run.ending")
            return run.token

    @yard.consumer(name=ALONE, queue=ALONE, concurrency=4, retry=AGAIN)
    async def alone(ms: float) -> int:
        run = current_run()
        with ledger.run(run):
            await asyncio.sleep(ms / 1000)
            return run.token


def _add_guards(yard: Yard, ledger: Ledger, folder: Path) -> None:
    """Consumers that wait at a gate, then do all that only the present run of a task may do. A gate is a file: of its
    name for everybody, or with a process's id after it for that process alone."""

    def is_open(gate: str) -> bool:
        return (folder / gate).exists() or (folder / f"{gate}-{os.getpid()}").exists()

    @yard.consumer(concurrency=4, retry=AGAIN)
    async def guard(gate: str) -> int:
        run = current_run()
        with ledger.run(run):
            while not is_open(gate):  # noqa: ASYNC110  # another process opens it
                await asyncio.sleep(0.002)
            run.progress(0.5, f"by {run.token}")
            run.note(f"by {run.token}")
            await yard.submit("breathe", {"ms": 0.0, "parent": run.token})
            return run.token

    @yard.consumer(concurrency=4, retry=AGAIN)
    def guard_in_thread(gate: str) -> int:
        run = current_run()
        with ledger.run(run):
            while not is_open(gate):
                time.sleep(0.002)
            run.progress(0.5, f"by {run.token}")
            run.note(f"by {run.token}")
            with yard.blocking() as sync:
                sync.submit("breathe", {"ms": 0.0, "parent": run.token})
            return run.token


def _add_races(yard: Yard, ledger: Ledger) -> None:
    @yard.consumer(concurrency=16, retry=AGAIN)
    async def race(ms: float, mood: str) -> int:
        """Ends after a while, and takes a cancel as its mood is."""
        run = current_run()
        with ledger.run(run):
            try:
                await asyncio.sleep(ms / 1000)
            except asyncio.CancelledError:
                if mood == "deaf":
                    return run.token
                if mood == "stubborn":
                    raise OSError("again, please") from None
                raise
            if mood == "flaky":
                raise OSError("not yet")
            if mood == "failing":
                raise ValueError("never")
            return run.token


MOODS = ("plain", "plain", "deaf", "stubborn", "flaky", "failing")


def draw(rng: random.Random) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """A task as a submitter might ask for it: consumer, arguments, options."""
    options: dict[str, Any] = {}
    if rng.random() < 0.2:
        options["key"] = rng.choice(["red", "green", "blue"])
    if rng.random() < 0.2:
        options["priority"] = rng.choice(["high", "low"])
    if rng.random() < 0.2:
        options["delay_s"] = rng.random() / 20
    ms = rng.expovariate(1 / 5)
    if rng.random() < 0.2:
        return "chew", {"ms": ms}, options
    args: dict[str, Any] = {"ms": ms}
    if rng.random() < 0.1:
        args["fails"] = 1
    if rng.random() < 0.15:
        args["child_ms"] = rng.expovariate(1 / 5)
    return "breathe", args, options


async def submit_for_ever(
    yard: Yard, ledger: Ledger, rng: random.Random, *, every_s: float, until: Callable[[], bool], patient: bool = False
) -> None:
    """Submit one by one and a batch now and then, writing each acknowledgement into the ledger. Who is patient goes on
    when the store did not answer."""
    while not until():
        name, args, options = draw(rng)
        count = rng.randint(2, 5) if rng.random() < 0.1 else 1
        try:
            for handle in await yard.submit_many(name, [args] * count, **options):
                ledger.acknowledged(handle.uuid)
        except StoreError:
            if not patient:
                raise
        await asyncio.sleep(rng.expovariate(1 / every_s))
