"""SQLite at full durability: a queue of no-op tasks is emptied, results kept."""

from benchmarks.contest import Contest, Settings
from benchmarks.finding import Finding
from benchmarks.reading import Unit
from benchmarks.sides import Side
from benchmarks.trials import fastest

HUEY = "benchmarks.peers.huey_sqlite:drain"
HUEY_WORKERS: list[dict[str, object]] = [
    {"worker_type": worker_type, "workers": workers} for worker_type in ("thread", "process") for workers in (1, 2)
]


def run(settings: Settings) -> list[Finding]:
    count = settings.pick(full=20_000, quick=5_000)
    tried = settings.pick(full=4_000, quick=1_500)
    workers = fastest(lambda setting: Side("huey", HUEY, {"count": tried, **setting}), HUEY_WORKERS)
    contest = Contest(
        "drain",
        "SQLite, FULL: drain of queued no-op tasks, results kept",
        Unit.RATE,
        ours=Side("taskyard", "benchmarks.ours.running:drain", {"count": count}),
        others=[
            Side("huey", HUEY, {"count": count, **workers}),
            Side("raw claim 100 + complete 100", "benchmarks.limits.raw_sqlite:drain", {"count": count}),
        ],
    )
    return contest.hold(settings)
