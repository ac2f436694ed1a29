"""A queue that runs one task at a time runs one at a time, over all nodes, and whatever dies meanwhile."""

import random
import time
from pathlib import Path

import msgspec

from taskyard.testing.ledger import judge
from taskyard.testing.postgres import Databases
from tests.torture.figures import Figures
from tests.torture.postgres.crew import Crew, await_
from tests.torture.postgres.mutations import mutate
from tests.torture.postgres.site import open_site
from tests.torture.verdict import drain_and_judge
from tests.torture.work import ALONE

NODES = 4
A_ROUND = 100
"""Tasks between two kills."""


def run(where: Path, *, trials: int, seed: int, databases: Databases | None = None, mutation: str = "") -> Figures:
    figures = Figures(f"PostgreSQL: a queue with concurrency 1, {NODES} nodes", 0)
    with open_site(where, databases=databases) as site:
        folder = site.make_folder()
        if mutation:
            mutate(site, folder, mutation)
        crew = Crew(folder, random.Random(seed), nodes=NODES)
        with crew.gathered():
            while figures.trials < trials:
                _round(crew, min(A_ROUND, trials - figures.trials))
                figures.trials += min(A_ROUND, trials - figures.trials)
        faults, stored = drain_and_judge(folder, drain_s=1.0)
    # The checker knows of keys, of which there may be one at a time: here the whole queue is one.
    as_keyed = [msgspec.structs.replace(entry, key=ALONE) for entry in crew.seen.entries]
    figures.failures += crew.troop.failures + faults + judge(as_keyed, stored)
    figures.note = f"{crew.troop.kills} nodes killed meanwhile"
    return figures


def _round(crew: Crew, tasks: int) -> None:
    crew.submit_many(ALONE, [{"ms": crew.rng.random() * 4} for _ in range(tasks)])
    time.sleep(crew.rng.random() * 0.2)
    crew.troop.kill(crew.rng.choice(crew.nodes()))
    crew.fill()
    await_(lambda: crew.unfinished() == 0, "that all tasks end")
    crew.seen.read()
