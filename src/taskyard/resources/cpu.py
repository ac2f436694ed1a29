"""The CPU budget: how many CPUs this process may keep busy, and what sets the bound.

The number of CPUs in the machine says little: a process may be pinned to some of them, and a container's quota gives it
a share of their time. The smallest bound counts. Files are read below `root`, so that a recorded tree can stand for a
machine.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from taskyard.resources.cgroup import ROOT, Group, list_groups

UNKNOWN_CPUS = 4
"""What is assumed where nothing tells."""

DEFAULT_PERIOD_US = 100_000
"""The kernel's own, where `cpu.max` names a quota alone."""

_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


@dataclass(frozen=True, slots=True)
class CpuBudget:
    """`cpus` need not be whole: a quota can be 1.5. `source` says in words what sets it."""

    cpus: float
    source: str

    @property
    def cores(self) -> int:
        """Whole cores to plan with, at least 1. What is left of a quota of 1.5 is not one more: two busy workers would
        use it up before its period ends, and then everything stands still until the next, the event loop as well."""
        return max(1, math.floor(self.cpus))


def cpu_budget(override: CpuBudget | None = None, *, root: Path = ROOT, allowed: CpuBudget | None = None) -> CpuBudget:
    """The smallest of what the scheduler allows, the quota and the CPU set of every group around this process, and
    `override`."""
    bounds = [allowed or allowed_cpus(), *_quotas(root), *_cpu_sets(root)]
    if override is not None:
        bounds.append(override)
    return min(bounds, key=lambda bound: bound.cpus)


def allowed_cpus() -> CpuBudget:
    """The CPUs that the calling thread may run on; where the system does not tell, those of the machine."""
    try:
        count = len(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        return _machine_cpus()
    return CpuBudget(count, f"affinity of {_describe(count)}")


def _machine_cpus() -> CpuBudget:
    count = os.cpu_count()
    if count is None:
        return CpuBudget(UNKNOWN_CPUS, f"number of CPUs unknown, taken as {UNKNOWN_CPUS}")
    return CpuBudget(count, f"machine of {_describe(count)}")


def _quotas(root: Path) -> Iterator[CpuBudget]:
    for group in list_groups("cpu", root):
        cpus = _find_quota(group)
        if cpus is not None:
            yield CpuBudget(cpus, f"cgroup quota of {_describe(cpus)} in {group.name}")


def _find_quota(group: Group) -> float | None:
    """In CPUs: microseconds of run time for each period of so many. `max` and -1 mean that there is none."""
    quota, _, period = group.read("cpu.max").partition(" ")
    if not quota:
        quota, period = group.read("cpu.cfs_quota_us"), group.read("cpu.cfs_period_us")
    try:
        run_us, period_us = int(quota), int(period or DEFAULT_PERIOD_US)
        return run_us / period_us if run_us > 0 and period_us > 0 else None
    except (ValueError, OverflowError):
        return None


def _cpu_sets(root: Path) -> Iterator[CpuBudget]:
    for group in list_groups("cpuset", root):
        names = ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus")
        count = count_cpus(next(filter(None, map(group.read, names)), ""))
        if count:
            yield CpuBudget(count, f"cpuset of {_describe(count)} in {group.name}")


def count_cpus(text: str) -> int:
    """How many CPUs a list such as `0-3,8` names; 0 if it is none."""
    found = [_RANGE.fullmatch(part) for part in text.split(",")]
    sizes = [int(one[2] or one[1]) - int(one[1]) + 1 for one in found if one is not None]
    return sum(sizes) if len(sizes) == len(found) and min(sizes) > 0 else 0


def _describe(cpus: float) -> str:
    return f"{round(cpus, 3):g} {'CPU' if cpus == 1 else 'CPUs'}"
