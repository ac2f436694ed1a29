"""P20: many runs fail at one instant; when, and how often, each is tried again."""

import asyncio
from collections import Counter
from pathlib import Path

from taskyard import RetryPolicy, TaskState, Yard
from taskyard.testing.clock import ManualClock
from tests.torture.figures import Figures

MAX_RETRIES = 2

STEP_S = 0.05

PEAK_TO_STEADY = 1.5


def run(_folder: Path, *, trials: int, seed: int) -> Figures:
    """`trials` tasks, all of which fail with every run, each wave of them while the clock stands still."""
    return asyncio.run(_storm(trials))


async def _storm(tasks: int) -> Figures:
    figures = Figures("P20 retries of what fails at once", tasks)
    clock = ManualClock()
    yard = Yard("memory://", clock=clock, keep_s=None)
    runs: Counter[str] = Counter()
    began: list[float] = []
    all_failed = asyncio.Event()

    @yard.consumer(concurrency=100, retry=RetryPolicy(max_retries=MAX_RETRIES))
    async def fail(n: int) -> None:
        runs[str(n)] += 1
        if runs[str(n)] > 1:
            began.append(clock.monotonic())
        elif len(runs) == tasks:
            all_failed.set()
        raise ConnectionError("down")

    async with yard:
        await yard.submit_many("fail", [{"n": n} for n in range(tasks)])
        await all_failed.wait()  # the clock stands still: to the tasks, all of this is one instant
        while (await yard.store.count()).get(("default", TaskState.FAILED), 0) < tasks:
            clock.advance(STEP_S)
            for _ in range(20):
                await asyncio.sleep(0)
    _judge(figures, runs, began)
    return figures


def _judge(figures: Figures, runs: Counter[str], began: list[float]) -> None:
    for name, n in runs.items():
        if n != MAX_RETRIES + 1:
            figures.failures.append(f"task {name} ran {n} times, not {MAX_RETRIES + 1}")
    steady = len(began) / (max(began) - min(began))
    peak = max(Counter(int(at) for at in began).values())
    if peak > PEAK_TO_STEADY * steady:
        figures.failures.append(f"{peak} retries in one second, where {steady:.0f} are steady")
    figures.note = f"{len(began):,} retries, steady {steady:.0f}/s, peak {peak}/s, {peak / steady:.2f} times that"
