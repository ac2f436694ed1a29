"""P8: the real engine on a simulated network, clock and event loop. A seed replays exactly."""

import gc
import multiprocessing
import os
import traceback
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from taskyard.testing.simulation import simulate
from tests.torture.figures import Figures

CHUNK = 100


def run(_folder: Path, *, trials: int, seed: int) -> Figures:
    """The seeds from `seed` on. One alone is told in full."""
    figures = Figures("P8 simulated histories are linearizable", trials)
    if trials == 1:
        figures.failures = check(seed, is_told=True)
        return figures
    chunks = [range(first, min(first + CHUNK, seed + trials)) for first in range(seed, seed + trials, CHUNK)]
    seen: Counter[str] = Counter()
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=spawn) as pool:
        for failures, counts in pool.map(run_seeds, chunks):
            figures.failures += failures
            seen.update(counts)
    figures.note = ", ".join(f"{count:,} {what}" for what, count in sorted(seen.items()))
    return figures


def run_seeds(seeds: Iterable[int]) -> tuple[list[str], Counter[str]]:
    """What is wrong with these, and how much has happened in them."""
    failures: list[str] = []
    seen: Counter[str] = Counter()
    for seed in seeds:
        failures += check(seed, seen)
    gc.collect()
    return failures, seen


def check(seed: int, seen: Counter[str] | None = None, *, is_told: bool = False) -> list[str]:
    try:
        simulated = simulate(seed)
    except Exception as exc:
        return [f"seed {seed}: {''.join(traceback.format_exception(exc))}{_replay(seed)}"]
    history = simulated.history
    if is_told:
        print("\n".join(history.lines), f"\ntrace {simulated.trace}")
    if seen is not None:
        seen.update(tasks=len(simulated.end.stored), runs=len(history.starts), deaths=len(history.gone))
        seen["nodes given up"] += len(history.expired)
    return [f"seed {seed}: {fault}{_replay(seed)}" for fault in simulated.faults]


def _replay(seed: int) -> str:
    return f" (replay: python -m tests.torture simulation SEED={seed} TRIALS=1)"
