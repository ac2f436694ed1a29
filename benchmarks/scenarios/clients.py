"""SQLite at full durability: 64 clients submit one by one, each acknowledged after the commit that holds its task."""

from benchmarks.contest import Contest, Settings
from benchmarks.finding import Finding
from benchmarks.reading import Unit
from benchmarks.sides import Side

CLIENTS = 64


def run(settings: Settings) -> list[Finding]:
    count = CLIENTS * settings.pick(full=300, quick=100)
    return Contest(
        "clients",
        f"SQLite, FULL: {CLIENTS} clients submitting one by one",
        Unit.RATE,
        ours=Side("taskyard", "benchmarks.ours.submitting:clients", {"count": count, "clients": CLIENTS}),
        others=[
            Side(
                "raw insert, one per commit",
                "benchmarks.limits.raw_sqlite:insert_one_by_one",
                {"count": settings.pick(full=6_000, quick=3_000)},
            )
        ],
    ).hold(settings)
