"""A simulated farm: fifty devices that fail, nodes that die, twenty thousand tasks. A seed replays exactly."""

import gc
import multiprocessing
import os
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from taskyard.testing.simulation.farm import simulate_farm
from taskyard.testing.simulation.farm_plan import FULL, FarmSize
from tests.torture.figures import Figures


def run(_folder: Path, *, trials: int, seed: int) -> Figures:
    """The seeds from `seed` on. One alone is told in full."""
    figures = Figures("devices: order strict, no account twice, nothing stuck", trials)
    if trials == 1:
        figures.failures = check(seed, tell=print)
        return figures
    seen: Counter[str] = Counter()
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=spawn, max_tasks_per_child=1) as pool:
        for failures, counts in pool.map(run_seeds, [[one] for one in range(seed, seed + trials)]):
            figures.failures += failures
            seen.update(counts)
    figures.note = ", ".join(f"{count:,} {what}" for what, count in sorted(seen.items()))
    return figures


def run_seeds(seeds: Iterable[int], size: FarmSize = FULL) -> tuple[list[str], Counter[str]]:
    """What is wrong with these, and how much has happened in them."""
    failures: list[str] = []
    seen: Counter[str] = Counter()
    for seed in seeds:
        failures += check(seed, size, seen)
        gc.collect()
    return failures, seen


def check(
    seed: int,
    size: FarmSize = FULL,
    seen: Counter[str] | None = None,
    *,
    tell: Callable[[str], None] | None = None,
) -> list[str]:
    try:
        farm = simulate_farm(seed, size, tell=tell)
    except Exception as exc:
        return [f"seed {seed}: {''.join(traceback.format_exception(exc))}{_replay(seed)}"]
    history = farm.history
    if seen is not None:
        seen.update(
            tasks=len(farm.end.records),
            runs=len(history.executions),
            deaths=len(history.gone),
            failures=sum(map(len, history.outages.values())),
            refusals=sum(one.answer is False for one in history.enqueued),
        )
        seen["taken back"] += sum(record.recoveries for record in farm.end.records.values())
    return [f"seed {seed}: {fault}{_replay(seed)}" for fault in farm.faults]


def _replay(seed: int) -> str:
    return f" (replay: python -m tests.torture devices SEED={seed} TRIALS=1)"
