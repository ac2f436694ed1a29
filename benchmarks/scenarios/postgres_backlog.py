"""PostgreSQL: a million tasks queued, nine in ten where nothing may start, and somebody else's transaction open.

The backlog is that of the same scenario on SQLite. As long as the foreign transaction is open, nothing that changed
since can be cleared away; what may start has to be found all the same, as fast as when nothing else waits.
"""

from benchmarks.bars import BARS
from benchmarks.contest import Settings
from benchmarks.finding import Finding
from benchmarks.postgres import Place, place
from benchmarks.reading import Reading, Unit
from benchmarks.sides import Side, read_in_turn

EMPTY, WATCHED, UNWATCHED = "empty", "queued, a foreign transaction", "queued, no foreign transaction"


def run(settings: Settings) -> list[Finding]:
    if settings.without_ours:
        return []
    many = settings.pick(full=1_000_000, quick=100_000)
    work: dict[str, object] = {
        "work": settings.pick(full=50_000, quick=10_000),
        "claims": settings.pick(full=2_000, quick=500),
    }
    with place() as server:
        filled = _filled(server, many)
        sides = [
            _side(server, EMPTY, None, {"queued": 0, "is_watched": False, **work}),
            _side(server, WATCHED, filled, {"queued": many, "is_watched": True, **work}),
            _side(server, UNWATCHED, filled, {"queued": many, "is_watched": False, **work}),
        ]
        readings = read_in_turn(sides, rounds=settings.rounds)
    return _judge(f"{many:,}", readings)


def _filled(server: Place, count: int) -> str:
    """A database with the backlog, which every reading takes a copy of."""
    dsn = server.databases.make()
    Side(f"filling with {count:,}", "benchmarks.ours.backlog:fill", {"dsn": dsn, "count": count}).read()
    server.databases.execute("VACUUM (ANALYZE)", dsn)
    return dsn


def _side(server: Place, name: str, template: str | None, arguments: dict[str, object]) -> Side:
    return server.side(name, "benchmarks.ours.backlog:work_and_claim", arguments, template=template)


def _judge(many: str, readings: dict[str, list[Reading]]) -> list[Finding]:
    def p99(name: str) -> list[float]:
        return [reading.value for reading in readings[name]]

    def rate(name: str) -> list[float]:
        return [reading.also["rate"] for reading in readings[name]]

    title = f"PostgreSQL: {many} queued, 90 % at their limits, a foreign transaction"
    claim_bar, rate_bar = BARS["pg_claim", EMPTY], BARS["pg_backlog", EMPTY]
    return [
        Finding(f"{title}: claim, p99", EMPTY, Unit.SECONDS, p99(WATCHED), p99(EMPTY), claim_bar),
        Finding(f"{title}: claim, p99", "without it", Unit.SECONDS, p99(WATCHED), p99(UNWATCHED), None),
        Finding(f"{title}: worked off", EMPTY, Unit.RATE, rate(WATCHED), rate(EMPTY), rate_bar),
        Finding(f"{title}: worked off", "without it", Unit.RATE, rate(WATCHED), rate(UNWATCHED), None),
    ]
