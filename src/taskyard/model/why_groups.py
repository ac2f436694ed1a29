"""Why many tasks wait: their reasons, added up by value."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime

import msgspec

from taskyard.model.state import TaskState
from taskyard.model.task import TaskRecord
from taskyard.model.why import Reason, Why

EXPLAINED = 10_000
"""Tasks that are explained one by one. Of more, so many are drawn."""

DRAWN_AT_ONCE = 100
"""Tasks of a sample that are read together: those that follow one another."""

WAITING = (
    TaskState.CREATED,
    TaskState.SCHEDULED,
    TaskState.QUEUED,
    TaskState.BLOCKED,
    TaskState.RETRYING,
    TaskState.PAUSED,
)


class WaitGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Tasks of one queue that wait for the same: `reason` and `subject` as in `Why`. `count` is how many, of a sample
    as many as it stands for. `uuid` is the one that has waited longest, `text` and `remedy` are what is said of it;
    `blocker` is the task in its way, if it is one. `consumer` is theirs, if they have only one. `since` is from when
    the first has waited for this, `until` when the first goes on by itself."""

    reason: Reason
    subject: str
    queue: str
    consumer: str | None
    count: int
    uuid: str
    text: str
    remedy: str
    since: datetime | None = None
    until: datetime | None = None
    blocker: str | None = None


class WaitSummary(msgspec.Struct, frozen=True, kw_only=True):
    """All tasks that wait and match: `total` of them, in groups, the largest first. Where they are more than 10,000,
    `explained` of them were drawn from all over, and the counts of the groups are estimates."""

    total: int
    explained: int
    groups: Sequence[WaitGroup]

    @property
    def is_sampled(self) -> bool:
        return self.explained < self.total


class WaitTally:
    """Groups that grow."""

    def __init__(self) -> None:
        self._groups: dict[tuple[Reason, str, str], WaitGroup] = {}
        self.explained = 0

    def add(self, explained: Iterable[tuple[TaskRecord, Why | None]]) -> None:
        for record, why in explained:
            if why is not None:
                self.explained += 1
                self._add(record, why)

    def _add(self, record: TaskRecord, why: Why) -> None:
        name = (why.reason, record.queue, why.subject)
        one = WaitGroup(
            reason=why.reason,
            subject=why.subject,
            queue=record.queue,
            consumer=record.consumer,
            count=1,
            uuid=record.uuid,
            text=why.text,
            remedy=why.remedy,
            since=why.since,
            until=why.until,
            blocker=why.blocker,
        )
        known = self._groups.get(name)
        self._groups[name] = one if known is None else _join(known, one)

    def summary(self, total: int) -> WaitSummary:
        """For `total` tasks: if fewer were explained, each of those stands for several."""
        groups = list(self._groups.values())
        if 0 < self.explained < total:
            share = total / self.explained
            groups = [msgspec.structs.replace(one, count=max(1, round(one.count * share))) for one in groups]
        groups.sort(key=lambda one: (-one.count, one.queue, one.reason, one.subject))
        return WaitSummary(total=total, explained=self.explained, groups=groups)


def _join(one: WaitGroup, other: WaitGroup) -> WaitGroup:
    is_first = other.since is None or (one.since is not None and one.since <= other.since)
    longest = one if is_first else other
    return msgspec.structs.replace(
        longest,
        count=one.count + other.count,
        consumer=one.consumer if one.consumer == other.consumer else None,
        until=min(filter(None, (one.until, other.until)), default=None),
    )
