"""A hundred thousand tasks that a hundred blockers keep from starting, and that are freed blocker by blocker.

Each blocker lets its own thousand go, which is checked, and no other. The claims of other tasks that are made meanwhile
are held against those in a store that has as many tasks, none of them blocked, and where nothing else goes on.

The second reading goes through a yard with an admission check: a disk is freed, its tasks run, and other tasks are
submitted meanwhile. Their starts are held against those while as many tasks run that no disk had blocked.
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
YARD = "through a yard"
WITHOUT = "without"


def on_sqlite(settings: Settings) -> list[Finding]:
    if settings.without_ours:
        return []
    with scratch_folder() as folder:
        dsns = {name: f"sqlite:///{Path(folder) / name}.db" for name in BLOCKED_BY}
        _fill(dsns)
        sides = [
            Side(SQLITE, f"{OURS}:claims", {**_work(settings), **dsns}),
            Side(YARD, f"{OURS}:starts", _through_yard(settings)),
        ]
        readings = read_in_turn(sides, rounds=settings.rounds)
    return _judge("blockers", SQLITE, readings)


def on_postgres(settings: Settings) -> list[Finding]:
    if settings.without_ours:
        return []
    with place() as server:
        dsns = {name: server.databases.make() for name in BLOCKED_BY}
        _fill(dsns)
        for dsn in dsns.values():
            server.databases.execute("VACUUM (ANALYZE)", dsn)
        sides = [
            server.side_with(POSTGRES, f"{OURS}:claims", _work(settings), templates=dsns),
            server.side(YARD, f"{OURS}:starts", _through_yard(settings)),
        ]
        readings = read_in_turn(sides, rounds=settings.rounds)
    return _judge("pg_blockers", POSTGRES, readings)


def _work(settings: Settings) -> dict[str, object]:
    return {"waiting": WAITING, "blockers": BLOCKERS, "freed": settings.pick(full=BLOCKERS, quick=50)}


def _through_yard(settings: Settings) -> dict[str, object]:
    return {"waiting": WAITING, "blockers": BLOCKERS, "freed": settings.pick(full=50, quick=20)}


def _fill(dsns: dict[str, str]) -> None:
    """A store of each kind, which every reading takes a copy of."""
    for name, dsn in dsns.items():
        arguments = {"dsn": dsn, "waiting": WAITING, "blockers": BLOCKED_BY[name]}
        Side(f"filling, {name}", f"{OURS}:fill", arguments).read()


def _judge(key: str, store: str, readings: dict[str, list[Reading]]) -> list[Finding]:
    def also(what: str, side: str = store) -> list[float]:
        return [reading.also[what] for reading in readings[side]]

    free, claims = format_value(median(also("free")), Unit.SECONDS), median(also("claims"))
    print(f"    one blocker is freed in {free}, p50; {claims:,.0f} claims meanwhile", file=sys.stderr, flush=True)
    looks = max(also("looks", YARD))
    print(f"    a yard looked at {looks:,.0f} of the {WAITING:,} before a disk was free", file=sys.stderr, flush=True)
    title = f"{store}: {WAITING:,} blocked by {BLOCKERS}, freed one by one"
    found = []
    for side, what in ((store, "claim of another"), (YARD, "start of another, through a yard")):
        p99 = [reading.value for reading in readings[side]]
        bar = BARS[key, WITHOUT]
        found += [
            Finding(f"{title}: {what}, p99", WITHOUT, Unit.SECONDS, p99, also("without", side), bar),
            Finding(f"{title}: {what}, p50", WITHOUT, Unit.SECONDS, also("p50", side), also("p50_without", side), None),
        ]
    return found
