"""P18: a cancel at the moment of the finish is honoured, refused or reported; it is never swallowed."""

import asyncio
import random
from collections import Counter
from pathlib import Path

from taskyard import TaskRecord, TaskState, Yard
from taskyard.errors import CommandRefused
from taskyard.model.state import ENDED
from taskyard.testing.ledger import Ledger, judge, read_store
from tests.torture.figures import Figures
from tests.torture.procs import Troop
from tests.torture.work import MOODS, ledger_of, make_yard

AT_ONCE = 25


async def _race(yard: Yard, ledger: Ledger, rng: random.Random) -> tuple[str, str]:
    """Submit a task and cancel it about when it ends; its uuid, and what the canceller was told."""
    ms = rng.expovariate(1 / 10)
    handle = await yard.submit("race", {"ms": ms, "mood": rng.choice(MOODS)})
    ledger.acknowledged(handle.uuid)
    await asyncio.sleep(rng.random() * 2 * (ms + 5) / 1000)
    while True:
        try:
            record = await handle.cancel()
        except CommandRefused as refused:
            return handle.uuid, f"refused: {refused.state}"
        if record.state is TaskState.CANCELED:
            return handle.uuid, "canceled"
        if record.state is TaskState.RUNNING and record.cancel is not None:
            return handle.uuid, "asked"
        return handle.uuid, f"answered with a record that is {record.state}"


def is_swallowed(told: str, record: TaskRecord) -> bool:
    """Whether the canceller was told something that did not come true, and the record does not say so either."""
    if told.startswith("refused: "):
        return record.state not in ENDED or record.state != told.removeprefix("refused: ")
    if record.state is TaskState.CANCELED:
        return told not in ("canceled", "asked")
    return told != "asked" or record.state not in ENDED or record.cancel is None


async def _races(yard: Yard, ledger: Ledger, *, trials: int, rng: random.Random, figures: Figures) -> None:
    slots = asyncio.Semaphore(AT_ONCE)
    ends: Counter[str] = Counter()

    async def one() -> None:
        async with slots:
            uuid, told = await _race(yard, ledger, rng)
            async with asyncio.timeout(30):
                outcome = await yard._engine.outcome(uuid)
        record = await yard.handle(uuid).record()
        if is_swallowed(told, record) or outcome.state != record.state:
            figures.failures.append(
                f"task {uuid}: told {told!r}, is {record.state} ({record.remarks!r}), {record.args}"
            )
        ends[f"{told.partition(':')[0]} → {record.state}"] += 1

    await asyncio.gather(*(one() for _ in range(trials)))
    figures.trials = trials
    figures.failures += judge(ledger.entries(), await read_store(yard.store))
    figures.note = ", ".join(f"{end} {count}" for end, count in ends.most_common())


def run_in_one(where: Path, *, trials: int, seed: int) -> Figures:
    """Canceller and worker are one process."""
    figures = Figures("P18 cancel × finish, one process", 0)
    ledger = ledger_of(where)

    async def play() -> None:
        async with make_yard(where, ledger) as yard:
            await _races(yard, ledger, trials=trials, rng=random.Random(seed), figures=figures)

    asyncio.run(play())
    ledger.close()
    return figures


def run_in_two(where: Path, *, trials: int, seed: int) -> Figures:
    """The canceller is a process of its own."""
    figures = Figures("P18 cancel × finish, two processes", 0)
    ledger = ledger_of(where)
    troop = Troop(where, ledger)

    async def play() -> None:
        async with make_yard(where, ledger).client() as yard:
            await _races(yard, ledger, trials=trials, rng=random.Random(seed), figures=figures)

    with troop.gathered():
        troop.start("work", ready=True)
        asyncio.run(play())
    ledger.close()
    return figures
