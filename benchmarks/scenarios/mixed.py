"""Every store: a claim from 100,000 tasks in 3 priorities, with 1,000 keys and of 50 sources, nine in ten of them where
nothing may start, beside the same claim from as many plain ones: of one source and priority, without keys.

Of those nine, half wait in 22 sources that are at their limit, half in 23 others for one of 900 keys that are taken. A
claim of one task is what a node asks for when a run has ended, one of a hundred what it asks for when it comes up.
"""

from collections.abc import Iterator

from benchmarks.bars import BARS
from benchmarks.contest import Settings
from benchmarks.finding import Finding
from benchmarks.postgres import Place, place
from benchmarks.reading import Reading, Unit
from benchmarks.sides import Side, read_in_turn

OURS = "benchmarks.ours.mixed"
KINDS = ("mixed", "plain")
QUEUED = 100_000
SIZES = {1: "one", 100: "100"}
PLAIN = "plain"


def run(settings: Settings) -> list[Finding]:
    if settings.without_ours:
        return []
    turns = settings.pick(full=500, quick=200)
    with place() as server:
        filled = {kind: _filled(server, kind) for kind in KINDS}
        sides = [side for size in SIZES for side in _sides(server, filled, size, turns)]
        readings = read_in_turn(sides, rounds=settings.rounds)
    return [finding for name, read in readings.items() for finding in _judge(name, read)]


def _filled(server: Place, kind: str) -> str:
    """A database with the backlog, which every reading takes a copy of."""
    dsn = server.databases.make()
    Side(f"filling, {kind}", f"{OURS}:fill", {"dsn": dsn, "kind": kind, "queued": QUEUED}).read()
    server.databases.execute("VACUUM (ANALYZE)", dsn)
    return dsn


def _sides(server: Place, filled: dict[str, str], size: int, turns: int) -> list[Side]:
    target, what = f"{OURS}:claims", f"claim of {SIZES[size]}"
    work: dict[str, object] = {"queued": QUEUED, "size": size, "turns": turns}
    return [
        Side(f"memory: {what}", target, {**work, **dict.fromkeys(KINDS, "memory://")}),
        Side(f"SQLite, FULL: {what}", target, work),
        server.side_with(f"PostgreSQL: {what}", target, work, templates=filled),
    ]


def _judge(name: str, readings: list[Reading]) -> Iterator[Finding]:
    title = f"{name}, {QUEUED:,} mixed, 90 % at their limits, p50"
    mixed, plain = [reading.value for reading in readings], [reading.also["plain"] for reading in readings]
    yield Finding(title, PLAIN, Unit.SECONDS, mixed, plain, BARS["claims_mixed", PLAIN])
    # In memory it is the same as by the clock, less what it costs to ask for it; PostgreSQL works in another process.
    if name.startswith("SQLite"):
        mixed, plain = ([reading.also[which] for reading in readings] for which in ("cpu", "plain_cpu"))
        yield Finding(f"{title}, processor time", PLAIN, Unit.SECONDS, mixed, plain, None)
