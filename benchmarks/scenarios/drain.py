"""SQLite at full durability: a queue of no-op tasks is emptied, results kept."""

import sys

from benchmarks.contest import Contest, Settings
from benchmarks.finding import Finding
from benchmarks.reading import Unit
from benchmarks.sides import Side

HUEY = "benchmarks.peers.huey_sqlite:drain"
HUEY_WORKERS = [("thread", 1), ("thread", 2), ("process", 1), ("process", 2)]


def run(settings: Settings) -> list[Finding]:
    count = settings.pick(full=20_000, quick=5_000)
    contest = Contest(
        "drain",
        "SQLite, FULL: drain of queued no-op tasks, results kept",
        Unit.RATE,
        ours=Side("taskyard", "benchmarks.ours:drain", {"count": count}),
        others=[
            Side("huey", HUEY, {"count": count, **_fastest_huey(settings.pick(full=4_000, quick=1_500))}),
            Side("raw claim 100 + complete 100", "benchmarks.limits.raw_sqlite:drain", {"count": count}),
        ],
    )
    return contest.hold(settings)


def _fastest_huey(count: int) -> dict[str, object]:
    """The workers with which huey is fastest here: tried, not assumed."""
    settings: list[dict[str, object]] = [
        {"worker_type": worker_type, "workers": workers} for worker_type, workers in HUEY_WORKERS
    ]
    rates = [Side("huey", HUEY, {"count": count, **tried}).read().value for tried in settings]
    rate, fastest = max(zip(rates, settings, strict=True), key=lambda pair: pair[0])
    print(f"    huey is fastest with {fastest}: {rate:,.0f}/s", file=sys.stderr, flush=True)
    return fastest
