"""P15, in short: somebody's transaction stays open while tasks run. Work goes on, and who waits for it hears.

The transaction has written: readers of events must tell it from the turns of nodes. One of those seems to wait for its
queue all the time, as with many nodes some always do.
"""

import random
import time
from pathlib import Path

from taskyard.stores.postgres.constants import Lock
from taskyard.testing.postgres import Databases
from tests.torture.figures import Figures
from tests.torture.postgres.crew import Crew
from tests.torture.postgres.site import open_site
from tests.torture.verdict import drain_and_judge

A_ROUND = 200
SHARE = 0.5
"""Of the throughput without the foreign transaction."""
HEARD_S = 5.0
"""Until somebody who waits has heard of a result, while all nodes are busy."""
OPEN = (
    "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM taskyard.task;"
    "CREATE TEMPORARY TABLE of_mine AS SELECT pg_current_xact_id()"
)
WAITING = f"BEGIN; SELECT pg_advisory_xact_lock_shared({Lock.EVENTS}, 0)"


def run(where: Path, *, trials: int, seed: int, databases: Databases | None = None) -> Figures:
    """`trials` tasks without it, as many with, and as many while single ones are waited for."""
    figures = Figures("P15 PostgreSQL: a foreign transaction stays open", 0)
    with open_site(where, databases=databases) as site:
        folder = site.make_folder()
        crew = Crew(folder, random.Random(seed))
        with crew.gathered():
            _drain(crew, A_ROUND)
            alone = _drain(crew, trials)
            with crew.holding(OPEN), crew.holding(WAITING):
                beside = _drain(crew, trials)
                figures.took = _probe(crew, trials)
        faults, _ = drain_and_judge(folder)
    figures.trials = 3 * trials
    figures.failures += crew.troop.failures + faults
    figures.note = f"{alone:.0f} tasks a second without, {beside:.0f} with"
    if beside < SHARE * alone:
        figures.failures.append(figures.note)
    if max(figures.took) > HEARD_S:
        figures.failures.append(f"a result was heard of after {max(figures.took):.1f} s")
    return figures


def _drain(crew: Crew, tasks: int) -> float:
    """Tasks a second, until the client has all results."""
    began = time.monotonic()
    for _ in range(0, tasks, A_ROUND):
        crew.await_all(crew.submit_many("breathe", [{"ms": 0.0}] * A_ROUND))
    return tasks / (time.monotonic() - began)


def _probe(crew: Crew, tasks: int) -> list[float]:
    """How long it took each time until a result was heard of, while so many others ran."""
    batch: list[dict[str, object]] = [{"ms": 5.0}] * (tasks // 2)
    busy = [*crew.submit_many("breathe", batch), *crew.submit_many("breathe", batch, queue="other")]
    took: list[float] = []
    while crew.unfinished() or not took:
        began = time.monotonic()
        crew.await_all([crew.submit("breathe", {"ms": 0.0}, priority="high")])
        took.append(time.monotonic() - began)
    crew.await_all(busy)
    return took
