"""How many workers: from the cores, unless the environment says otherwise. A variable that is empty or 0 leaves it to
the default; one that makes no sense does so too, with a warning."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from taskyard.resources.cpu import CpuBudget, cpu_budget
from taskyard.resources.environment import Warn, find_number, warn_as

CPU_WORKERS = "CPU_EXECUTOR_WORKERS"
IO_WORKERS = "IO_EXECUTOR_WORKERS"
MAX_WORKERS = "EXECUTOR_GLOBAL_MAX_WORKERS"

IO_PER_CORE, IO_AT_MOST = 5, 20
"""Threads that wait need no core of their own, but each takes memory."""

log_warning = warn_as("ExecutorManager")


@dataclass(frozen=True, slots=True)
class WorkerCounts:
    """The size of each pool, and in words what sets it."""

    cpu: int
    io: int
    cpu_source: str
    io_source: str


def count_workers() -> WorkerCounts:
    """For this process, by its CPU budget and its environment as they are now."""
    return worker_counts(os.environ, cores=cpu_budget().cores)


def worker_counts(environ: Mapping[str, str], *, cores: int, warn: Warn = log_warning) -> WorkerCounts:
    """`cores` are those this process may use. `warn` hears of each variable that is not used."""
    cpu, cpu_source = _cpu_workers(environ, cores, warn)
    io = _find_count(environ, IO_WORKERS, warn)
    if io is not None:
        return WorkerCounts(cpu, io, cpu_source, IO_WORKERS)
    io = min(cores * IO_PER_CORE, IO_AT_MOST)
    return WorkerCounts(cpu, io, cpu_source, f"cores * {IO_PER_CORE}, at most {IO_AT_MOST}")


def _cpu_workers(environ: Mapping[str, str], cores: int, warn: Warn) -> tuple[int, str]:
    # One core is left to the process that hands out the work and to its event loop.
    count, source = (cores - 1, "cores - 1") if cores > 1 else (1, "the only core")
    asked = _find_count(environ, CPU_WORKERS, warn)
    if asked is not None:
        count, source = asked, CPU_WORKERS
    cap = _find_count(environ, MAX_WORKERS, warn)
    if cap is not None and cap < count:
        count, source = cap, MAX_WORKERS
    return count, source


def find_cpu_override(environ: Mapping[str, str]) -> CpuBudget | None:
    """The bound that `CPU_EXECUTOR_WORKERS` sets to the CPU budget: so many workers keep no more CPUs busy."""
    asked = _find_count(environ, CPU_WORKERS, lambda _: None)
    return None if asked is None else CpuBudget(asked, CPU_WORKERS)


def _find_count(environ: Mapping[str, str], name: str, warn: Warn) -> int | None:
    return find_number(environ, name, least=0, warn=warn) or None  # 0 leaves it to the default
