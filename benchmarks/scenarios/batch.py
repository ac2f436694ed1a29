"""SQLite at full durability: `submit_many` of 1,000 against 1,000 rows made and inserted in one transaction.

The raw side makes what a submit has to make at least, an id and the arguments as JSON, and inserts it into a
realistic table: twelve columns, a primary key and one secondary index. A second raw side has its rows ready-made;
it shows the database alone and carries no bar.
"""

from benchmarks.contest import Contest, Settings
from benchmarks.finding import Finding
from benchmarks.reading import Unit
from benchmarks.sides import Side

SIZE = 1_000


def run(settings: Settings) -> list[Finding]:
    work: dict[str, object] = {"batches": settings.pick(full=50, quick=20), "size": SIZE}
    return Contest(
        "batch",
        f"SQLite, FULL: `submit_many` of {SIZE:,}",
        Unit.RATE,
        ours=Side("taskyard", "benchmarks.ours.submitting:batch", work),
        others=[
            Side("raw insert, 1,000 per commit", "benchmarks.limits.raw_sqlite:insert_batches", work),
            Side("the same, rows ready-made", "benchmarks.limits.raw_sqlite:insert_ready_batches", work),
        ],
    ).hold(settings)
