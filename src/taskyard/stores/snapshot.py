"""What every store does alike to read a queue for a forecast: gather tasks, share out counts, and find medians."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median

from taskyard.model.blocker import split_lane
from taskyard.model.queue_order import (
    COUNTED,
    FEWEST_READ,
    PARTS_READ,
    RUNS_COUNTED,
    RUNS_NEEDED,
    RUNS_READ,
    RUNS_SEARCHED,
)
from taskyard.model.state import QUEUED
from taskyard.model.task import TaskRecord


class Read:
    """The tasks of a snapshot as they are read, each once: what was read first counts."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.records: dict[int, TaskRecord] = {}
        self.line_ends: dict[str, int] = {}
        self.cuts: set[int] = set()

    def share(self, parts: int, wanted: int | None = None) -> int:
        """How many tasks are read of each of so many parts: all that are wanted, if the parts are few."""
        return min(self.limit if wanted is None else wanted, max(FEWEST_READ, PARTS_READ // max(1, parts)))

    def add(self, records: Iterable[TaskRecord]) -> None:
        for record in records:
            self.records.setdefault(record.id, record)

    def add_part(self, records: Sequence[TaskRecord], share: int) -> None:
        """The first tasks of a lane, a line or a key, in its order; if they fill its share, there may be more."""
        self.add(records)
        queued = [record.id for record in records if record.state is QUEUED]
        if len(records) >= share and queued:
            self.cuts.add(queued[-1])

    def add_line(self, name: str, records: Sequence[TaskRecord], share: int) -> None:
        self.add_part(records, share)
        if len(records) >= share:
            self.line_ends[name] = records[-1].position

    def find_keys(self) -> list[str]:
        return sorted({record.key for record in self.records.values() if record.key is not None})


def count_consumers(lanes: Mapping[str, int], total: int) -> dict[str, int]:
    """How many of `total` tasks each consumer has, by those that were counted of each lane, at most `COUNTED`. The rest
    is shared out among the lanes with more."""
    counted = Counter[str]()
    for lane, count in lanes.items():
        counted[split_lane(lane)[0]] += count
    rest = total - counted.total()
    full = [split_lane(lane)[0] for lane, count in lanes.items() if count >= COUNTED] or list(counted)
    for n, consumer in enumerate(full if rest > 0 else ()):
        counted[consumer] += rest // len(full) + (n < rest % len(full))
    return dict(+counted)


def search_run_medians(
    read: Callable[[Sequence[str], int], Iterable[tuple[str, float]]], consumers: Sequence[str]
) -> dict[str, float]:
    """The medians of these consumers. `read` gives their runs among so many tasks that finished last, the latest first.
    Consumers with too few of them are searched for further back."""
    found: dict[str, float] = {}
    for limit in (RUNS_READ, RUNS_SEARCHED):
        if missing := [consumer for consumer in consumers if consumer not in found]:
            found |= find_run_medians(read(missing, limit), missing)
    return found


def find_run_medians(runs: Iterable[tuple[str, float]], consumers: Sequence[str]) -> dict[str, float]:
    """The medians of these consumers, of runs and their seconds, the latest first."""
    seconds: dict[str, list[float]] = {consumer: [] for consumer in consumers}
    for consumer, run_s in runs:
        if (known := seconds.get(consumer)) is not None and len(known) < RUNS_COUNTED:
            known.append(run_s)
    return {consumer: median(known) for consumer, known in seconds.items() if len(known) >= RUNS_NEEDED}
