"""Every scenario by name, in the order in which they are run and reported."""

from collections.abc import Callable

from benchmarks.contest import Settings
from benchmarks.finding import Finding
from benchmarks.scenarios import backlog, batch, clients, drain, idle, importing, lateness, memory, processes

Scenario = Callable[[Settings], list[Finding]]

SCENARIOS: dict[str, Scenario] = {
    "memory": memory.run,
    "drain": drain.run,
    "clients": clients.run,
    "batch": batch.run,
    "idle": idle.run,
    "lateness": lateness.run,
    "backlog": backlog.run,
    "import": importing.run,
    "calls": processes.calls,
    "parallel": processes.parallel,
    "large": processes.large,
    "hung": processes.hung,
    "lag": processes.lag,
    "crashes": processes.crashes,
}
