"""Every scenario by name, in the order in which they are run and reported."""

from collections.abc import Callable

from benchmarks.contest import Settings
from benchmarks.finding import Finding
from benchmarks.scenarios import (
    adb,
    backlog,
    batch,
    blockers,
    bulk,
    clients,
    devices,
    drain,
    idle,
    importing,
    lateness,
    memory,
    mixed,
    moves,
    nodes,
    postgres,
    postgres_backlog,
    processes,
)

Scenario = Callable[[Settings], list[Finding]]

SCENARIOS: dict[str, Scenario] = {
    "memory": memory.run,
    "drain": drain.run,
    "clients": clients.run,
    "batch": batch.run,
    "idle": idle.run,
    "lateness": lateness.run,
    "backlog": backlog.run,
    "pg_drain": postgres.drain,
    "pg_clients": postgres.clients,
    "pg_batch": postgres.batch,
    "pg_idle": postgres.idle,
    "pg_nodes": nodes.run,
    "pg_backlog": postgres_backlog.run,
    "claims_mixed": mixed.run,
    "moves": moves.run,
    "bulk": bulk.run,
    "blockers": blockers.on_sqlite,
    "pg_blockers": blockers.on_postgres,
    "import": importing.run,
    "calls": processes.calls,
    "parallel": processes.parallel,
    "large": processes.large,
    "hung": processes.hung,
    "lag": processes.lag,
    "crashes": processes.crashes,
    "device_hang": devices.hang,
    "device_outage": devices.outage,
    "device_start": devices.start,
    "device_farm": devices.farm,
    "device_drain": devices.drain,
    "adb": adb.run,
}
