"""PostgreSQL: four nodes on one server, each a process. Whatever they do, no task runs twice and no limit is passed:
a side that breaks either has no reading.
"""

from benchmarks.contest import Contest, Settings, hold_together
from benchmarks.finding import Finding
from benchmarks.postgres import Place, place
from benchmarks.reading import Unit
from benchmarks.sides import Side

NODES = 4
# Long enough that two nodes which both believe that it is their turn are seen at it.
WORK_S = 0.001


def run(settings: Settings) -> list[Finding]:
    if settings.without_ours:
        return []
    many = settings.pick(full=60_000, quick=20_000)
    few = settings.pick(full=2_000, quick=500)
    with place() as server:
        contests = [
            Contest(
                "pg_nodes",
                f"PostgreSQL: {NODES} nodes drain one queue",
                Unit.RATE,
                ours=_side(server, f"{NODES} nodes", NODES, count=many, concurrency=None, work_s=0.0),
                others=[_side(server, "one node", 1, count=many, concurrency=None, work_s=0.0)],
            ),
            Contest(
                "pg_nodes",
                "PostgreSQL: the same, 1 ms each, queue concurrency 1, never exceeded",
                Unit.RATE,
                ours=_side(server, f"{NODES} nodes, one at a time", NODES, count=few, concurrency=1, work_s=WORK_S),
                others=[_side(server, "one node, one at a time", 1, count=few, concurrency=1, work_s=WORK_S)],
            ),
        ]
        return hold_together(contests, settings)


def _side(server: Place, name: str, nodes: int, **work: object) -> Side:
    return server.side(name, "benchmarks.ours.nodes:drain", {"nodes": nodes, **work})
