"""The memory budget: how many bytes this process and its workers may hold, and what sets the bound.

Past the limit of a group the kernel kills somebody in it, however much memory the machine has. The smallest bound
counts. Files are read below `root`, so that a recorded tree can stand for a machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from taskyard.resources.cgroup import ROOT, Group, list_groups, read_text

NO_LIMIT = 1 << 60
"""Version 1 has no word for "none" and writes the largest number it knows, a little below 2^63."""


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """`source` says in words what sets the bound."""

    bytes: int
    source: str


def memory_budget(override: MemoryBudget | None = None, *, root: Path = ROOT) -> MemoryBudget | None:
    """The smallest of physical memory, the limit of every group around this process, and `override`. None where nothing
    tells."""
    bounds = [*_physical(root), *_limits(root, ("memory.max", "memory.limit_in_bytes"), "cgroup limit")]
    if override is not None:
        bounds.append(override)
    return _smallest(bounds)


def find_memory_high(*, root: Path = ROOT) -> MemoryBudget | None:
    """The smallest `memory.high` around this process. Above it nothing is killed, but all that allocates is slowed down
    to a crawl."""
    return _smallest(list(_limits(root, ("memory.high",), "memory.high")))


def _smallest(bounds: Sequence[MemoryBudget]) -> MemoryBudget | None:
    return min(bounds, key=lambda bound: bound.bytes, default=None)


def _physical(root: Path) -> Iterator[MemoryBudget]:
    for line in read_text(root / "proc/meminfo").split("\n"):
        name, _, rest = line.partition(":")
        kilobytes = _find_number(rest.removesuffix("kB").strip())
        if name == "MemTotal" and kilobytes is not None:
            yield MemoryBudget(kilobytes * 1024, "physical memory")


def _limits(root: Path, files: Sequence[str], what: str) -> Iterator[MemoryBudget]:
    for group in list_groups("memory", root):
        limit = _find_limit(group, files)
        if limit is not None:
            yield MemoryBudget(limit, f"{what} in {group.name}")


def _find_limit(group: Group, files: Sequence[str]) -> int | None:
    limits = (_find_number(group.read(file)) for file in files)
    return next((limit for limit in limits if limit is not None and limit < NO_LIMIT), None)


def _find_number(text: str) -> int | None:
    """None for what is no number, such as `max`, and for 0: no process lives on nothing."""
    try:
        return max(0, int(text)) or None
    except ValueError:
        return None
