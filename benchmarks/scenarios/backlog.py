"""SQLite at full durability: a million tasks queued, nine in ten of them where nothing may start.

Half of those wait in sources that are at their limit, half behind keys that are taken. What may start has to be
found as fast as among a thousand, and the process must not grow with what waits.
"""

from pathlib import Path

from benchmarks.bars import BARS
from benchmarks.contest import Settings
from benchmarks.finding import Finding
from benchmarks.reading import Reading, Unit
from benchmarks.sides import Side, read_in_turn, scratch_folder

FEW = 1_000


def run(settings: Settings) -> list[Finding]:
    if settings.without_ours:
        return []
    many = settings.pick(full=1_000_000, quick=100_000)
    claims = settings.pick(full=2_000, quick=500)
    with scratch_folder() as folder:
        sides = [_backlog(Path(folder), name, queued, claims) for name, queued in _sizes(many).items()]
        readings = read_in_turn(sides, rounds=settings.rounds)
    return _judge(f"{many:,}", readings)


def _sizes(many: int) -> dict[str, int]:
    return {"empty": 0, f"{FEW:,} queued": FEW, "many": many}


def _backlog(folder: Path, name: str, queued: int, claims: int) -> Side:
    """Fills a store of that size once; every reading is then taken in it, as in one that has been in use."""
    dsn = f"sqlite:///{folder / f'{queued}.db'}"
    if queued:
        Side(f"filling with {queued:,}", "benchmarks.ours.backlog:fill", {"dsn": dsn, "count": queued}).read()
    return Side(name, "benchmarks.ours.backlog:claim", {"dsn": dsn, "queued": queued, "claims": claims})


def _judge(many: str, readings: dict[str, list[Reading]]) -> list[Finding]:
    def p99(name: str) -> list[float]:
        return [reading.value for reading in readings[name]]

    def resident(name: str) -> list[float]:
        return [reading.also["resident_bytes"] for reading in readings[name]]

    few = f"{FEW:,} queued"
    memory_bar, claim_bar = BARS["backlog", "empty"], BARS["claim", few]
    title = f"SQLite, FULL: {many} queued, 90 % at their limits"
    return [
        Finding(f"{title}: resident memory", "empty", Unit.BYTES, resident("many"), resident("empty"), memory_bar),
        Finding(f"{title}: claim, p99", few, Unit.SECONDS, p99("many"), p99(few), claim_bar),
    ]
