"""The yard that is tortured: consumers that write the ledger, and submitters that ask for all kinds of tasks."""

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from taskyard import RetryPolicy, Yard, current_run
from taskyard.ports.store import Store
from taskyard.testing.faults import Faults
from taskyard.testing.ledger import Ledger

RECOVER_ALWAYS = 1_000_000
"""Every run may be the one that is killed; how often a task is recovered is another test's question."""


def store_of(folder: Path) -> str:
    return f"sqlite:///{folder / 'work.db'}"


def ledger_of(folder: Path) -> Ledger:
    return Ledger(folder / "ledger")


def make_yard(folder: Path, ledger: Ledger, faults: Faults | None = None, *, store: Store | None = None) -> Yard:
    """A yard on the folder's store whose tasks keep the ledger and pass the fault points of a run."""
    faults = faults or Faults()
    yard = Yard(store or store_of(folder), max_running=16, threads=4)
    yard.define_queue("default", auto_recover=RECOVER_ALWAYS)
    again = RetryPolicy(max_retries=RECOVER_ALWAYS, first_s=0.01, factor=1.0)

    @yard.consumer(concurrent_count=8, retry=again)
    async def breathe(ms: float, fails: int = 0, child_ms: float | None = None) -> int:
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

    @yard.consumer(concurrent_count=4, retry=again)
    def chew(ms: float) -> int:
        run = current_run()
        with ledger.run(run):
            faults.passing("run.began")
            until = time.monotonic() + ms / 500
            while time.monotonic() < until and not run.cancelled:
                time.sleep(0.001)
            faults.passing("run.ending")
            return run.token

    return yard


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
    yard: Yard, ledger: Ledger, rng: random.Random, *, every_s: float, until: Callable[[], bool]
) -> None:
    """Submit one by one and a batch now and then, writing each acknowledgement into the ledger."""
    while not until():
        name, args, options = draw(rng)
        if rng.random() < 0.1:
            for handle in await yard.submit_many(name, [args] * rng.randint(2, 5), **options):
                ledger.acknowledged(handle.uuid)
        else:
            ledger.acknowledged((await yard.submit(name, args, **options)).uuid)
        await asyncio.sleep(rng.expovariate(1 / every_s))
