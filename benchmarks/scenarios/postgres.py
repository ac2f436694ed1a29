"""PostgreSQL at default durability: the same questions as on SQLite, beside the peers that use it and beside the bare
driver. A peer counts what its tables say is done. Every side runs with the setting that was fastest for it a moment
before: PgQueuer takes 1,000 jobs at a time, and ours may run as many.
"""

from benchmarks.contest import Contest, Settings, hold_together
from benchmarks.finding import Finding
from benchmarks.postgres import Place, place
from benchmarks.reading import Unit
from benchmarks.sides import Side
from benchmarks.trials import Arguments, fastest

RAW = "benchmarks.limits.raw_postgres"
PGQUEUER = "benchmarks.peers.pgqueuer_postgres"
PROCRASTINATE = "benchmarks.peers.procrastinate_postgres"

CLIENTS = 16
SIZE = 1_000
# All sides pause as long before each attempt: a disk and a core that were left alone answer later.
GAP_S = 0.002

PGQUEUER_DRAINS: list[Arguments] = [{"connections": connections} for connections in (1, 4)]
PROCRASTINATE_DRAINS: list[Arguments] = [
    {"workers": workers, "concurrency": concurrency} for workers, concurrency in ((1, 10), (8, 2), (8, 4), (16, 2))
]
OUR_DRAINS: list[Arguments] = [{"slots": slots} for slots in (200, 1_000, 2_000)]
PRODUCERS: list[Arguments] = [{"connections": connections} for connections in (1, 4, 16)]


def drain(settings: Settings) -> list[Finding]:
    """A queue of no-op tasks is emptied by one node, results kept."""
    work: Arguments = {"count": settings.pick(full=40_000, quick=10_000)}
    # One row at a time: a tenth of the work takes it longer than the others need for all of it.
    less: Arguments = {"count": settings.pick(full=3_000, quick=1_000)}
    with place() as server:
        return Contest(
            "pg_drain",
            "PostgreSQL: drain of queued no-op tasks, results kept",
            Unit.RATE,
            ours=_at_its_best(server, "taskyard", "benchmarks.ours.running:drain", work, OUR_DRAINS),
            others=[
                _at_its_best(server, "PgQueuer", f"{PGQUEUER}:drain", work, PGQUEUER_DRAINS),
                _at_its_best(server, "Procrastinate", f"{PROCRASTINATE}:drain", less, PROCRASTINATE_DRAINS),
                server.side("raw claim 100 + complete 100", f"{RAW}:drain", work),
            ],
        ).hold(settings)


def clients(settings: Settings) -> list[Finding]:
    """Clients of one process submit one by one, each acknowledged after the commit that holds its task."""
    work: Arguments = {"count": CLIENTS * settings.pick(full=500, quick=150), "clients": CLIENTS}
    with place() as server:
        return Contest(
            "pg_clients",
            f"PostgreSQL: {CLIENTS} clients submitting one by one",
            Unit.RATE,
            ours=server.side("taskyard", "benchmarks.ours.submitting:clients", work),
            others=[
                _at_its_best(server, "PgQueuer", f"{PGQUEUER}:clients", work, PRODUCERS),
                _at_its_best(server, "Procrastinate", f"{PROCRASTINATE}:clients", work, PRODUCERS),
                server.side("raw insert, 16 connections", f"{RAW}:insert_one_by_one", work),
            ],
        ).hold(settings)


def batch(settings: Settings) -> list[Finding]:
    """`submit_many` of 1,000 against 1,000 rows made and inserted by one statement."""
    work: Arguments = {"batches": settings.pick(full=50, quick=20), "size": SIZE}
    with place() as server:
        return Contest(
            "pg_batch",
            f"PostgreSQL: `submit_many` of {SIZE:,}",
            Unit.RATE,
            ours=server.side("taskyard", "benchmarks.ours.submitting:batch", work),
            others=[
                server.side("PgQueuer", f"{PGQUEUER}:batch", work),
                server.side("Procrastinate", f"{PROCRASTINATE}:batch", work),
                server.side("raw unnest of 1,000", f"{RAW}:insert_batches", work),
                server.side("the same, rows ready-made", f"{RAW}:insert_ready_batches", work),
            ],
        ).hold(settings)


def idle(settings: Settings) -> list[Finding]:
    """From submit to the first line of the task, with nothing else to do: in another process, which has to be told, and
    on the yard that was asked, which knows."""
    work: Arguments = {"count": settings.pick(full=1_000, quick=300), "gap_s": GAP_S}
    title = "PostgreSQL: submit → started, idle, p50"
    with place() as server:
        raw = server.side("raw NOTIFY + one raw claim", f"{RAW}:notify_and_claim", work)
        raw_between = server.side(
            "raw NOTIFY + one raw claim, two processes", "benchmarks.limits.raw_listener:notify_and_claim", work
        )
        between = server.side("taskyard, two processes", "benchmarks.ours.nodes:idle", work)
        within = server.side("taskyard", "benchmarks.ours.running:idle", work)
        contests = [
            Contest("pg_idle", f"{title}, in another process", Unit.SECONDS, between, [raw_between]),
            Contest("pg_idle", f"{title}, on the same yard", Unit.SECONDS, within, [raw]),
        ]
        return hold_together(contests, settings)


def _at_its_best(server: Place, name: str, target: str, work: Arguments, settings: list[Arguments]) -> Side:
    setting = fastest(lambda tried: server.side(name, target, {**work, **tried}), settings)
    return server.side(name, target, {**work, **setting})
