"""The tasks of one queue while a forecast is played: which of them may start, in their lanes, lines and keys."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime

from taskyard.model.fairness import FairnessState
from taskyard.model.limits import Quota
from taskyard.model.picking import ByPriority, InTurn, Level, Offer, RoundRobin
from taskyard.model.queue import QueueOrder, QueueSettings
from taskyard.model.state import QUEUED, RUNNING, TaskState
from taskyard.model.task import TaskRecord
from taskyard.model.why import line_of


class Keys:
    """Which tasks with a key may start: the first that fit under its limit (`per_key`)."""

    def __init__(self, records: Sequence[TaskRecord], settings: QueueSettings) -> None:
        self._per_key, self._is_strict = settings.per_key, settings.is_strict
        self._waiting: dict[str, list[TaskRecord]] = {}
        self._holding: Counter[str] = Counter()
        for record in records:
            if record.key is not None and record.state in (RUNNING, TaskState.RETRYING):
                self._holding[record.key] += 1
            elif record.key is not None and record.state is QUEUED:
                insort(self._waiting.setdefault(record.key, []), record, key=self._turn_of)

    def _turn_of(self, record: TaskRecord) -> tuple[int, int, int]:
        return 0 if self._is_strict else record.priority, record.position, record.id

    def start(self, record: TaskRecord) -> None:
        if record.key is not None:
            self._waiting[record.key].remove(record)
            self._holding[record.key] += 1

    def end(self, record: TaskRecord) -> list[TaskRecord]:
        """It ends; the tasks that may start now, or may no longer."""
        if record.key is None:
            return []
        self._holding[record.key] -= 1
        return self._repark(record.key)

    def add(self, record: TaskRecord) -> list[TaskRecord]:
        """It joins those that are queued; the same. If it was tried before, it has held the key until now."""
        assert record.key is not None
        if record.state is TaskState.RETRYING:
            self._holding[record.key] -= 1
        record.is_parked = True
        insort(self._waiting.setdefault(record.key, []), record, key=self._turn_of)
        return self._repark(record.key)

    def work_s(self, medians: Mapping[str, float]) -> Iterator[float]:
        """For each key, the seconds that its waiting tasks take at least."""
        for records in self._waiting.values():
            yield sum(medians.get(record.consumer, 0.0) for record in records) / self._per_key

    def _repark(self, key: str) -> list[TaskRecord]:
        free = self._per_key - self._holding[key]
        changed = []
        for n, record in enumerate(self._waiting.get(key, ())):
            if record.is_parked != (n >= free):
                record.is_parked = n >= free
                changed.append(record)
        return changed


class Waiting:
    """The queued tasks in their lanes, or in their lines where places alone count."""

    def __init__(self, settings: QueueSettings, line_ends: Mapping[str, int]) -> None:
        self._settings, self._line_ends = settings, line_ends
        self.lanes: dict[tuple[int, str], list[TaskRecord]] = {}
        self.lines: dict[str, list[TaskRecord]] = {}

    def add(self, record: TaskRecord) -> None:
        line = line_of(record, self._settings)
        if line is not None:
            if record.position > self._line_ends.get(line, record.position):
                return  # those in between were not read
            insort(self.lines.setdefault(line, []), record, key=_place)
        elif record.can_start:
            insort(self.lanes.setdefault((record.priority, record.lane), []), record, key=_place)

    def reparked(self, record: TaskRecord) -> None:
        """Its key was freed, or is taken again."""
        if self._settings.is_strict:
            return  # it stands in line all the while
        if record.can_start:
            self.add(record)
        elif record in (lane := self.lanes.get((record.priority, record.lane), [])):
            lane.remove(record)

    def offer(self, turns: FairnessState, quota: Quota, now: datetime) -> Offer[TaskRecord]:
        """What the queue would start now."""
        queue = self._settings.name
        match self._settings.order:
            case QueueOrder.FIFO:
                return InTurn(queue, turns, _Feed(self.lines.setdefault("", [])), quota=quota)
            case QueueOrder.BUCKETS:
                lines = [(name, _Feed(line)) for name, line in sorted(self.lines.items())]
                return RoundRobin(queue, turns, lines, quota=quota)
        levels: dict[int, Level[TaskRecord]] = {}
        for (priority, lane), records in self.lanes.items():
            if records and quota.is_open(queue, lane):
                rest: Iterator[TaskRecord] = iter(records)
                first = next(rest)
                levels.setdefault(priority, []).append((first.position, first.id, first, rest))
        return ByPriority(queue, turns, self._settings.patience, levels, quota=quota, now=now)

    def remove(self, picked: Sequence[TaskRecord]) -> None:
        """They have started: of a lane always its first ones. A line loses them as they are picked."""
        for lane, count in Counter((record.priority, record.lane) for record in picked).items():
            if not self._settings.is_strict:
                del self.lanes[lane][:count]

    def pass_obstacles(self) -> None:
        """Let all stand aside that hold up others and will not start by themselves."""
        for line in self.lines.values():
            line[:] = [record for record in line if record.state is QUEUED]

    def unpark(self) -> None:
        for record in (record for line in self.lines.values() for record in line):
            record.is_parked = False


class _Feed:
    """One line, whether its tasks can start or not."""

    def __init__(self, line: list[TaskRecord]) -> None:
        self._line = line

    def first(self) -> TaskRecord | None:
        return self._line[0] if self._line else None

    def take(self) -> None:
        del self._line[0]


def _place(record: TaskRecord) -> tuple[int, int]:
    return record.position, record.id
