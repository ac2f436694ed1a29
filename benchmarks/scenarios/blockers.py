"""A hundred thousand tasks that a hundred blockers keep from starting, and that are freed blocker by blocker.

Each blocker lets its own thousand go, which is checked, and no other. The claims of other tasks that are made meanwhile
are held against those in a store that has as many tasks, none of them blocked, and where nothing else goes on.
"""

import sys
from pathlib import Path
from statistics import median

from benchmarks.bars import BARS
from benchmarks.contest import Settings
from benchmarks.finding import Finding
from benchmarks.postgres import place
from benchmarks.reading import Reading, Unit, format_value
from benchmarks.sides import Side, read_in_turn, scratch_folder

OURS = "benchmarks.ours.blockers"
WAITING, BLOCKERS = 100_000, 100
BLOCKED_BY = {"blocked": BLOCKERS, "queued": 0}
SQLITE, POSTGRES = "SQLite, FULL", "PostgreSQL"
WITHOUT = "without"


def on_sqlite(settings: Settings) -> list[Finding]:
    if settings.without_ours:
        return []
    with scratch_folder() as folder:
        dsns = {name: f"sqlite:///{Path(folder) / name}.db" for name in BLOCKED_BY}
        _fill(dsns)
        sides = [Side(SQLITE, f"{OURS}:claims", {**_work(settings), **dsns})]
        readings = read_in_turn(sides, rounds=settings.rounds)
    return _judge("blockers", SQLITE, readings[SQLITE])


def on_postgres(settings: Settings) -> list[Finding]:
    if settings.without_ours:
        return []
    with place() as server:
        dsns = {name: server.databases.make() for name in BLOCKED_BY}
        _fill(dsns)
        for dsn in dsns.values():
            server.databases.execute("VACUUM (ANALYZE)", dsn)
        sides = [server.side_with(POSTGRES, f"{OURS}:claims", _work(settings), templates=dsns)]
        readings = read_in_turn(sides, rounds=settings.rounds)
    return _judge("pg_blockers", POSTGRES, readings[POSTGRES])


def _work(settings: Settings) -> dict[str, object]:
    return {"waiting": WAITING, "blockers": BLOCKERS, "freed": settings.pick(full=BLOCKERS, quick=50)}


def _fill(dsns: dict[str, str]) -> None:
    """A store of each kind, which every reading takes a copy of."""
    for name, dsn in dsns.items():
        arguments = {"dsn": dsn, "waiting": WAITING, "blockers": BLOCKED_BY[name]}
        Side(f"filling, {name}", f"{OURS}:fill", arguments).read()


def _judge(key: str, store: str, readings: list[Reading]) -> list[Finding]:
    def also(what: str) -> list[float]:
        return [reading.also[what] for reading in readings]

    free, claims = format_value(median(also("free")), Unit.SECONDS), median(also("claims"))
    print(f"    one blocker is freed in {free}, p50; {claims:,.0f} claims meanwhile", file=sys.stderr, flush=True)
    title = f"{store}: {WAITING:,} blocked by {BLOCKERS}, freed one by one: claim of another"
    p99 = [reading.value for reading in readings]
    return [
        Finding(f"{title}, p99", WITHOUT, Unit.SECONDS, p99, also("without"), BARS[key, WITHOUT]),
        Finding(f"{title}, p50", WITHOUT, Unit.SECONDS, also("p50"), also("p50_without"), None),
    ]
