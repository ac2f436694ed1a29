"""SQLite at full durability: how late 10,000 tasks start that are due at random moments within 5 s."""

from benchmarks.contest import Contest, Settings
from benchmarks.finding import Finding
from benchmarks.reading import Unit
from benchmarks.sides import Side

COUNT, WITHIN_S = 10_000, 5.0


def run(settings: Settings) -> list[Finding]:
    work: dict[str, object] = {"count": COUNT, "within_s": WITHIN_S}
    return Contest(
        "lateness",
        f"SQLite, FULL: lateness of {COUNT:,} tasks due within {WITHIN_S:.0f} s, p99",
        Unit.SECONDS,
        ours=Side("taskyard", "benchmarks.ours.running:lateness", work),
        others=[Side("call_at + one raw commit", "benchmarks.limits.timers:call_at_and_commit", work)],
    ).hold(settings)
