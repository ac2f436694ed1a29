"""P1 and P19 on PostgreSQL: the trials of the store on disk, with processes killed at named points and at random."""

from pathlib import Path

from taskyard.testing.postgres import Databases
from tests.torture import dedupe, kills
from tests.torture.figures import Figures
from tests.torture.postgres.site import open_site


def run_kills(where: Path, *, trials: int, seed: int, databases: Databases | None = None) -> Figures:
    with open_site(where, databases=databases) as site:
        return kills.run_rounds(
            "P1 PostgreSQL: kill -9 at any instant", lambda _: site.make_folder(), trials=trials, seed=seed
        )


def run_dedupe(where: Path, *, trials: int, seed: int, databases: Databases | None = None) -> Figures:
    with open_site(where, databases=databases) as site:
        figures = dedupe.run(site.make_folder(), trials=trials, seed=seed)
    figures.promise = f"PostgreSQL: {figures.promise}"
    return figures
