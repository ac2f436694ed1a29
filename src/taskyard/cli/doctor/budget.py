"""The budget: how much CPU and memory a process started here may use, who says so, and how many workers that makes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from taskyard.cli.doctor.finding import Finding, warning
from taskyard.cli.text import size
from taskyard.resources.cgroup import ROOT
from taskyard.resources.cpu import CpuBudget, cpu_budget
from taskyard.resources.memory import find_memory_high, memory_budget
from taskyard.resources.workers import CPU_WORKERS, WorkerCounts, find_cpu_override, worker_counts


def budget(environ: Mapping[str, str], *, root: Path = ROOT, allowed: CpuBudget | None = None) -> Iterator[Finding]:
    machine = cpu_budget(root=root, allowed=allowed)
    yield _cpu(cpu_budget(find_cpu_override(environ), root=root, allowed=allowed), machine)
    yield from _memory(root)
    yield from _workers(environ, machine.cores)


def _cpu(found: CpuBudget, machine: CpuBudget) -> Finding:
    text = f"{found.cores} usable {'core' if found.cores == 1 else 'cores'}: {found.source}"
    if found != machine:
        text += f"; without it {machine.cores}: {machine.source}"
    return Finding("cpu", text, data={"cpus": found.cpus, "cores": found.cores, "source": found.source})


def _memory(root: Path) -> Iterator[Finding]:
    found, high = memory_budget(root=root), find_memory_high(root=root)
    if found is None:
        yield Finding("memory", "this system does not tell how much there is", data={"memory_bytes": None})
    else:
        data = {"memory_bytes": found.bytes, "source": found.source}
        yield Finding("memory", f"{size(found.bytes)}: {found.source}", data=data)
    if high is not None and (found is None or high.bytes < found.bytes):
        data = {"high_bytes": high.bytes, "source": high.source}
        yield Finding("memory.high", f"slowed down above {size(high.bytes)}: {high.source}", data=data)


def _workers(environ: Mapping[str, str], cores: int) -> Iterator[Finding]:
    complaints: list[str] = []
    counts = worker_counts(environ, cores=cores, warn=complaints.append)
    yield _counted(counts, cores)
    for complaint in complaints:
        yield warning("pool sizes", complaint, "correct the variable, or leave it out")


def _counted(counts: WorkerCounts, cores: int) -> Finding:
    text = f"{counts.cpu} for CPU work ({counts.cpu_source}), {counts.io} for I/O ({counts.io_source})"
    data = {
        "cpu_workers": counts.cpu, "cpu_source": counts.cpu_source,
        "io_workers": counts.io, "io_source": counts.io_source,
    }  # fmt: skip
    if counts.cpu > cores:
        advice = f"lower {CPU_WORKERS}: more workers than the {cores} usable here only take turns"
        return warning("pool sizes", text, advice, **data)
    return Finding("pool sizes", text, data=data)
