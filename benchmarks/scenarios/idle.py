"""SQLite at full durability: from submit to the first line of the task, on a yard with nothing else to do."""

from benchmarks.contest import Contest, Settings
from benchmarks.finding import Finding
from benchmarks.reading import Unit
from benchmarks.sides import Side

# Both sides pause as long before each attempt: a disk and a core that were left alone answer later.
GAP_S = 0.002


def run(settings: Settings) -> list[Finding]:
    work: dict[str, object] = {"count": settings.pick(full=1_000, quick=300), "gap_s": GAP_S}
    return Contest(
        "idle",
        "SQLite, FULL: submit → started, idle yard, p50",
        Unit.SECONDS,
        ours=Side("taskyard", "benchmarks.ours.running:idle", work),
        others=[Side("one raw commit", "benchmarks.limits.raw_sqlite:commit", work)],
    ).hold(settings)
