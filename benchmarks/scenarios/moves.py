"""Every store: what it costs to steer one task among a million that are queued, beside the same among a thousand.

Start now, move and change priority are the p50 of tasks drawn from the whole queue. Moves between the same two
neighbours are the mean of all: now and then one of them has to make room for the next ones, and the others share in
that. The store in memory holds a hundred thousand: a million records would say more about the machine's memory.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from benchmarks.bars import BARS
from benchmarks.contest import Settings
from benchmarks.finding import Finding
from benchmarks.postgres import Place, place
from benchmarks.reading import Reading, Unit
from benchmarks.sides import Side, read_in_turn, scratch_folder

OURS = "benchmarks.ours.moving"
TURNS = 200
FEW = 1_000
IN_MEMORY = 100_000
AGAINST = f"{FEW:,} queued"
MEMORY, SQLITE, POSTGRES = "memory", "SQLite, FULL", "PostgreSQL"


def run(settings: Settings) -> list[Finding]:
    if settings.without_ours:
        return []
    many = settings.pick(full=1_000_000, quick=100_000)
    between = settings.pick(full=10_000, quick=2_000)
    work: dict[str, object] = {"turns": TURNS, "between": between, "sizes": {"few": FEW, "many": many}}
    with ExitStack() as stack:
        folder, server = Path(stack.enter_context(scratch_folder())), stack.enter_context(place())
        readings = read_in_turn([_memory(work), _files(folder, work), _server(server, work)], rounds=settings.rounds)
    queued = {MEMORY: IN_MEMORY, SQLITE: many, POSTGRES: many}
    return [
        finding
        for name, read in readings.items()
        for finding in _judge(f"{name}: {queued[name]:,} queued", f"{between:,} moves", read)
    ]


def _memory(work: dict[str, object]) -> Side:
    dsns: dict[str, object] = dict.fromkeys(("few", "many"), "memory://")
    return Side(MEMORY, f"{OURS}:steer", {**work, **dsns, "sizes": {"few": FEW, "many": IN_MEMORY}})


def _files(folder: Path, work: dict[str, object]) -> Side:
    dsns = {name: f"sqlite:///{folder / name}.db" for name in ("few", "many")}
    _fill(dsns, work)
    return Side(SQLITE, f"{OURS}:steer", {**work, **dsns})


def _server(server: Place, work: dict[str, object]) -> Side:
    dsns = {name: server.databases.make() for name in ("few", "many")}
    _fill(dsns, work)
    for dsn in dsns.values():
        server.databases.execute("VACUUM (ANALYZE)", dsn)
    return server.side_with(POSTGRES, f"{OURS}:steer", work, templates=dsns)


def _fill(dsns: dict[str, str], work: dict[str, object]) -> None:
    for name, dsn in dsns.items():
        Side(f"filling, {name}", f"{OURS}:fill", {"dsn": dsn, "name": name, "sizes": work["sizes"]}).read()


def _judge(title: str, moves: str, readings: list[Reading]) -> Iterator[Finding]:
    names = {
        "start now": "start now, p50",
        "move": "move, p50",
        "priority": "change priority, p50",
        "between": f"{moves} between the same two neighbours, mean",
    }
    for what, words in names.items():
        many, few = ([reading.also[f"{what} {size}"] for reading in readings] for size in ("many", "few"))
        yield Finding(f"{title}: {words}", AGAINST, Unit.SECONDS, many, few, BARS["moves", AGAINST])
