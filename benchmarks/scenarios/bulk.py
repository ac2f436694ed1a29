"""Every store: what is left of the throughput of submits and runs while 100,000 other tasks are held or released at one
person's word, in the same process."""

from benchmarks.bars import BARS
from benchmarks.contest import Settings
from benchmarks.finding import Finding
from benchmarks.postgres import place
from benchmarks.reading import Unit
from benchmarks.sides import Side, read_in_turn

TARGET = "benchmarks.ours.bulk:work_meanwhile"
MATCHING = 100_000
AGAINST = "without it"


def run(settings: Settings) -> list[Finding]:
    if settings.without_ours:
        return []
    work: dict[str, object] = {"matching": MATCHING, "passes": settings.pick(full=2, quick=1)}
    with place() as server:
        sides = [
            Side("memory", TARGET, {**work, "dsn": "memory://"}),
            Side("SQLite, FULL", TARGET, work),
            server.side("PostgreSQL", TARGET, work),
        ]
        readings = read_in_turn(sides, rounds=settings.rounds)
    bar = BARS["bulk", AGAINST]
    return [
        Finding(
            f"{name}: submit → run → result, while {MATCHING:,} others are changed",
            AGAINST,
            Unit.RATE,
            [reading.value for reading in read],
            [reading.also["without"] for reading in read],
            bar,
        )
        for name, read in readings.items()
    ]
