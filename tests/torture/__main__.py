"""`python -m tests.torture [NAME …] [SEED=n] [TRIALS=n] [FULL=1]`: breaks promises on purpose, and prints the figures
reached.

`SEED=n` repeats the choices of an earlier run (the timing of processes stays its own), `FULL=1` raises the counts to
those the promises speak of, `TRIALS=n` sets them. All three may also come with the environment. Exits 1 if any trial
failed.
"""

import logging
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tests.torture import (
    cancels,
    cron,
    dedupe,
    devices,
    fencing,
    full,
    histories,
    images,
    kills,
    leaders,
    orders,
    rescue,
    simulation,
    stops,
    storm,
    syscalls,
    timeouts,
)
from tests.torture.figures import Figures
from tests.torture.postgres import (
    clients,
    crashes,
    deaths,
    foreign,
    hints,
    limits,
    outages,
    pauses,
    verdicts,
    versions,
    walks,
)
from tests.torture.zygote import Zygote


class Scenario(NamedTuple):
    """`trials` by default, `full` with FULL=1; both are at most: there are only so many system calls."""

    run: Callable[..., Figures]
    trials: int
    full: int


SCENARIOS: dict[str, Scenario] = {
    "kills": Scenario(kills.run, 500, 10_000),
    "syscalls": Scenario(syscalls.run_kills, 1_000, 1_000),
    "images": Scenario(images.run, 1_000, 5_000),
    "control": Scenario(images.run_control, 100, 500),
    "fencing": Scenario(fencing.run, 50, 2_000),
    "rescue": Scenario(rescue.run, 50, 1_000),
    "errors": Scenario(syscalls.run_errors, 1_000, 1_000),
    "full": Scenario(full.run, 100, 500),
    "stops": Scenario(stops.run, 100, 1_000),
    "cancels": Scenario(cancels.run_in_one, 1_000, 5_000),
    "cancels-between": Scenario(cancels.run_in_two, 1_000, 5_000),
    "dedupe": Scenario(dedupe.run, 200, 1_000),
    "storm": Scenario(storm.run, 50_000, 50_000),
    "cron": Scenario(cron.run_zones, 15_000, 50_000),
    "cron-strings": Scenario(cron.run_strings, 100_000, 1_000_000),
    "leaders": Scenario(leaders.run, 300, 1_000),
    "orders": Scenario(orders.run, 200, 2_000),
    "timeouts": Scenario(timeouts.run, 1_000, 10_000),
    "pg-kills": Scenario(clients.run_kills, 500, 10_000),
    "pg-crashes": Scenario(crashes.run, 100, 1_000),
    "pg-pauses": Scenario(pauses.run, 200, 2_000),
    "pg-verdicts": Scenario(verdicts.run, 20, 200),
    "pg-deaths": Scenario(deaths.run, 200, 1_000),
    "pg-parted": Scenario(partial(deaths.run, mutation="part-every-turn"), 100, 1_000),
    **{f"pg-{way}": Scenario(partial(outages.run, way=way), 20, 200) for way in outages.WAYS},
    "pg-deaf": Scenario(hints.run_deaf, 100, 500),
    "pg-cancels": Scenario(hints.run_cancels, 100, 1_000),
    "pg-foreign": Scenario(foreign.run, 5_000, 50_000),
    "pg-dedupe": Scenario(clients.run_dedupe, 100, 1_000),
    "pg-leaders": Scenario(leaders.run_postgres, 300, 1_000),
    "pg-limits": Scenario(limits.run, 2_000, 20_000),
    "pg-versions": Scenario(versions.run, 1, 5),
    "pg-walks": Scenario(walks.run, 300, 10_000),
    **{
        f"histories-{store}": Scenario(partial(histories.run, store=store), 3_000, 100_000)
        for store in histories.STORES
    },
    "simulation": Scenario(simulation.run, 20_000, 100_000),
    "devices": Scenario(devices.run, 200, 1_000),
}


def main(words: list[str]) -> int:
    names = [word for word in words if "=" not in word]
    given = dict(os.environ) | dict(word.split("=", 1) for word in words if "=" in word)
    unknown = [name for name in names if name not in SCENARIOS]
    if unknown:
        print(f"no such scenario: {', '.join(unknown)}; there are {', '.join(SCENARIOS)}", file=sys.stderr)
        return 2
    logging.getLogger("taskyard").setLevel(logging.CRITICAL)  # deaths and retries are the point here
    is_full = given.get("FULL", "") not in ("", "0")
    trials = int(given.get("TRIALS") or 0)
    seed = int(given.get("SEED") or random.SystemRandom().getrandbits(31))
    print(f"SEED={seed}", flush=True)
    try:
        rows = [_run(name, trials or _trials(name, is_full), seed) for name in names or SCENARIOS]
    finally:
        Zygote.end()
    print(f"\n{table(rows)}\n\nSEED={seed}")
    failed = [failure for row in rows for failure in row.failures]
    for failure in failed[:50]:
        print(failure, file=sys.stderr)
    return 1 if failed else 0


def _trials(name: str, is_full: bool) -> int:
    scenario = SCENARIOS[name]
    return scenario.full if is_full else scenario.trials


def _run(name: str, trials: int, seed: int) -> Figures:
    began = time.monotonic()
    where = Path(tempfile.mkdtemp(prefix=f"torture-{name}-"))
    figures = SCENARIOS[name].run(where, trials=trials, seed=seed)
    left = f"what they left is in {where}" if figures.failures else ""  # a ledger tells how it came
    if not left:
        shutil.rmtree(where)
    figures.note = "; ".join(filter(None, [figures.note, left, f"{time.monotonic() - began:.0f} s"]))
    print(f"{name}: {figures.trials} trials, {len(figures.failures)} failures, {figures.note}", flush=True)
    return figures


def table(rows: list[Figures]) -> str:
    cells = [("promise", "trials", "failures", "note")]
    cells += [(row.promise, f"{row.trials:,}", f"{len(row.failures):,}", row.note) for row in rows]
    widths = [max(len(line[column]) for line in cells) for column in range(3)]
    lines = [
        f"| {promise:{widths[0]}} | {trials:>{widths[1]}} | {failures:>{widths[2]}} | {note} |"
        for promise, trials, failures, note in cells
    ]
    rule = f"|{'-' * (widths[0] + 2)}|{'-' * (widths[1] + 1)}:|{'-' * (widths[2] + 1)}:|---|"
    return "\n".join([lines[0], rule, *lines[1:]])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
