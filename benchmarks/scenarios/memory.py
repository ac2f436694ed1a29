"""In memory: no-op async tasks, submitted, run, their results kept. On uvloop, except huey, which has threads.

Like is held against like. The peers have one submitter, and their clock stops when the last result is kept. The
limit has what a future per submit is for: a client for each task that waits for its result.
"""

from benchmarks.contest import Contest, Settings, hold_together
from benchmarks.finding import Finding
from benchmarks.reading import Unit
from benchmarks.sides import Side


def run(settings: Settings) -> list[Finding]:
    count = settings.pick(full=20_000, quick=10_000)
    by_one = Contest(
        "memory",
        "memory: no-op, submit → run → result kept",
        Unit.RATE,
        ours=Side("taskyard", "benchmarks.ours.running:memory", {"count": count, "clients": "one"}),
        others=[
            Side("taskiq", "benchmarks.peers.taskiq_memory:read", {"count": count}),
            Side("huey", "benchmarks.peers.huey_memory:read", {"count": count}),
            Side("bare loop, one submitter", "benchmarks.limits.bare_loop:read", {"count": count, "clients": "one"}),
        ],
    )
    by_many = Contest(
        "memory",
        "memory: the same, a waiting client per task",
        Unit.RATE,
        ours=Side("taskyard, many", "benchmarks.ours.running:memory", {"count": count, "clients": "many"}),
        others=[Side("bare loop", "benchmarks.limits.bare_loop:read", {"count": count, "clients": "many"})],
    )
    return hold_together([by_one, by_many], settings)
