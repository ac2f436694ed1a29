"""P15, in short: somebody's transaction stays open while tasks run. Work goes on, and who waits for it hears."""

import random
import time
from pathlib import Path

from taskyard.testing.postgres import Databases
from tests.torture.figures import Figures
from tests.torture.postgres.crew import Crew
from tests.torture.postgres.site import open_site
from tests.torture.verdict import drain_and_judge

A_ROUND = 200
SHARE = 0.5
"""Of the throughput without the foreign transaction."""


def run(where: Path, *, trials: int, seed: int, databases: Databases | None = None) -> Figures:
    """`trials` tasks without it, and as many with."""
    figures = Figures("P15 PostgreSQL: a foreign transaction stays open", 0)
    with open_site(where, databases=databases) as site:
        folder = site.make_folder()
        crew = Crew(folder, random.Random(seed), nodes=2)
        with crew.gathered():
            _drain(crew, A_ROUND)
            alone = _drain(crew, trials)
            with crew.holding("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM taskyard.task"):
                beside = _drain(crew, trials)
        faults, _ = drain_and_judge(folder)
    figures.trials = 2 * trials
    figures.failures += crew.troop.failures + faults
    figures.note = f"{alone:.0f} tasks a second without, {beside:.0f} with"
    if beside < SHARE * alone:
        figures.failures.append(figures.note)
    return figures


def _drain(crew: Crew, tasks: int) -> float:
    """Tasks a second, until the client has all results."""
    began = time.monotonic()
    for _ in range(0, tasks, A_ROUND):
        crew.await_all(crew.submit_many("breathe", [{"ms": 0.0}] * A_ROUND))
    return tasks / (time.monotonic() - began)
