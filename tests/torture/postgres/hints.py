"""P14 and cancels between nodes: how soon a node hears of what another process wrote, with its ears and without."""

import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from taskyard.stores.postgres.hints import POLL_S
from taskyard.testing.ledger import Entry, What
from taskyard.testing.postgres import Databases
from tests.torture.figures import Figures
from tests.torture.postgres.crew import Crew, await_
from tests.torture.postgres.site import open_site
from tests.torture.verdict import drain_and_judge

DEAF_LIMIT_S = POLL_S * 1.5 + 0.5
"""The longest interval between two looks, and what a busy machine may add."""

CANCEL_LIMIT_S = 1.0

DEAFEN = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() "
    "AND application_name = 'taskyard' AND state = 'idle' AND (query LIKE 'LISTEN%' OR query = 'SELECT 1')"
)


def run_deaf(where: Path, *, trials: int, seed: int, databases: Databases | None = None) -> Figures:
    """Whoever listens is thrown out again and again, just before something is submitted."""
    figures = Figures("P14 PostgreSQL: listeners are thrown out", 0)

    def trial(crew: Crew) -> float:
        figures.counts["listeners thrown out"] += crew.execute(DEAFEN)
        asked = time.monotonic()
        uuid = crew.submit("breathe", {"ms": 0.0})
        return await_(partial(_find, crew, What.START, uuid), "that it starts").at_mono - asked

    _measure(figures, where, trial, trials=trials, seed=seed, databases=databases, limit_s=DEAF_LIMIT_S)
    if figures.counts["listeners thrown out"] < trials / 10:
        figures.failures.append("hardly anybody was thrown out")
    return figures


def run_cancels(where: Path, *, trials: int, seed: int, databases: Databases | None = None) -> Figures:
    """A task is canceled from another process than the one that runs it."""
    figures = Figures("PostgreSQL: a cancel reaches another node", 0)

    def trial(crew: Crew) -> float:
        uuid = crew.submit("guard", {"gate": "never"})
        await_(partial(_find, crew, What.START, uuid), "that it starts")
        time.sleep(crew.rng.random() * 0.05)
        asked = time.monotonic()
        crew.cancel(uuid)
        return await_(partial(_find, crew, What.END, uuid), "that it is canceled").at_mono - asked

    _measure(figures, where, trial, trials=trials, seed=seed, databases=databases, limit_s=CANCEL_LIMIT_S)
    return figures


def _measure(
    figures: Figures,
    where: Path,
    trial: Callable[[Crew], float],
    *,
    trials: int,
    seed: int,
    databases: Databases | None,
    limit_s: float,
) -> None:
    with open_site(where, databases=databases) as site:
        folder = site.make_folder()
        crew = Crew(folder, random.Random(seed), nodes=2)
        with crew.gathered():
            while figures.trials < trials:
                time.sleep(crew.rng.random() * 0.2)
                figures.took.append(trial(crew))
                figures.trials += 1
        faults, _ = drain_and_judge(folder)
    figures.failures += crew.troop.failures + faults
    figures.failures += [f"took {took:.2f} s, not {limit_s:g} s at most" for took in figures.took if took > limit_s]
    figures.note = figures.told()


def _find(crew: Crew, what: What, uuid: str) -> Entry | None:
    crew.seen.read()
    found = (entry for entry in reversed(crew.seen.entries) if entry.task == uuid and entry.what is what)
    return next(found, None)
