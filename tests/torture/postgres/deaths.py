"""P4 on PostgreSQL: a node is killed at a random moment, and what it ran is started elsewhere within the lease and 5 s.
Nothing is lost, and nothing of the dead is committed."""

import random
import time
from functools import partial
from pathlib import Path

from taskyard.testing.postgres import Databases
from tests.torture.figures import Figures, percentile
from tests.torture.postgres.crew import NODES, Crew, await_
from tests.torture.postgres.site import open_site
from tests.torture.postgres.spread import spread
from tests.torture.procs import Child
from tests.torture.verdict import drain_and_judge
from tests.torture.work import LEASE_S

LIMIT_S = LEASE_S + 5.0
BACKLOG = 24


def run(where: Path, *, trials: int, seed: int, mutation: str = "") -> Figures:
    figures = spread(partial(run_part, mutation=mutation), where, trials=trials, seed=seed)
    if percentile(figures.took, 0.99) > LIMIT_S:
        figures.failures.append(f"of a hundred tasks more than one took longer than {LIMIT_S:g} s to be taken up again")
    figures.note = f"{NODES} nodes, lease {LEASE_S:g} s: {figures.told()}"
    return figures


def run_part(where: Path, *, trials: int, seed: int, databases: Databases | None = None, mutation: str = "") -> Figures:
    figures = Figures("P4 PostgreSQL: a dead node's tasks run elsewhere", 0)
    with open_site(where, databases=databases) as site:
        folder = site.make_folder()
        crew = Crew(folder, random.Random(seed), mutation=mutation)
        with crew.gathered():
            while figures.trials < trials:
                crew.top_up(BACKLOG)
                time.sleep(crew.rng.random() * 0.5)
                figures.took += _kill_one(crew)
                figures.trials += 1
                crew.fill()
        faults, stored = drain_and_judge(folder)
    figures.failures += crew.troop.failures + faults
    figures.counts["tasks"] = len(stored)
    return figures


def _kill_one(crew: Crew) -> list[float]:
    """How long each task that it ran took to be started elsewhere."""
    victim: Child = await_(lambda: _busy(crew), "a node that runs something")
    killed = time.monotonic()
    crew.troop.kill(victim)
    again = [await_(partial(crew.seen.find_next, run), "its next run") for run in crew.seen.left_by(victim.pid)]
    return [run.at_mono - killed for run in again]


def _busy(crew: Crew) -> Child | None:
    nodes = [child for child in crew.nodes() if crew.seen.held_by(child.pid)]
    return crew.rng.choice(nodes) if nodes else None
