"""P1: the server dies with everything it had in memory, again and again. What it acknowledged is there afterwards."""

import random
import time
from pathlib import Path

from tests.torture.figures import Figures
from tests.torture.postgres.site import crash, open_site
from tests.torture.postgres.spread import spread
from tests.torture.procs import Troop
from tests.torture.verdict import drain_and_judge
from tests.torture.work import ledger_of

SUBMITTERS = 2

LAZY = ("wal_writer_delay=10s",)
"""Nobody else writes what a transaction should have written itself."""


def run(where: Path, *, trials: int, seed: int) -> Figures:
    figures = spread(run_part, where, trials=trials, seed=seed)
    figures.note = figures.told()
    return figures


def run_part(where: Path, *, trials: int, seed: int, mutation: str = "") -> Figures:
    rng = random.Random(seed)
    figures = Figures("P1 PostgreSQL is killed", 0)
    with open_site(where, settings=LAZY) as site:
        folder = site.make_folder()
        ledger = ledger_of(folder)
        troop = Troop(folder, ledger)
        with troop.gathered():
            while figures.trials < trials:
                _fill(troop, rng, mutation)
                time.sleep(0.2 + rng.random() * 0.5)
                crash(site.server)
                for child in list(troop.living):
                    troop.kill(child)
                site.server.start()
                figures.trials += 1
        ledger.close()
        faults, stored = drain_and_judge(folder)
    figures.failures += troop.failures + faults
    figures.counts["tasks"] = len(stored)
    return figures


def _fill(troop: Troop, rng: random.Random, mutation: str) -> None:
    """Those that submit, and a node, unless it would hide what is looked for by writing for all."""
    roles = ["submit"] * SUBMITTERS + ["work"] * (not mutation)
    new = [troop.start(role, mutation=mutation, every_s=0.005, patient=1, seed=rng.getrandbits(32)) for role in roles]
    for child in new:
        child.await_ready()
