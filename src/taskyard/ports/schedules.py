"""What a store keeps of recurring schedules, and the one transaction in which fire times become tasks.

What is to be done is decided by whoever asks, with the pure rules of `model.firing`; a store only carries it out, and
only if the schedule is still as it was when that was decided.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple, Protocol, runtime_checkable

import msgspec

from taskyard.model.audit import AuditEntry
from taskyard.model.firing import Fire, FireKind
from taskyard.model.schedule import Schedule
from taskyard.model.schedule_state import ScheduleState
from taskyard.model.task import FIRST, TaskRecord

KEEP_FIRES = 2_000
"""Rows (schedule, fire time) that are kept of each schedule at least: how far back a second task is kept out."""

UNREAD = ScheduleState.begin(FIRST)
"""Stands for a state that cannot be read here. Whoever puts the schedule anew writes one that can."""


class ScheduleStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule as the store knows it. `version` changes with everything that is written of it. `is_busy`: a task that
    it has fired, or a person by it, had not ended when it last fired, and still has not. `schedule` is None if it
    or its state cannot be read here, and `problem` says why: a newer program wrote it, or this machine lacks its time
    zone; the others are read all the same. `by` is who has put it there, and `from_code` that a program does so
    whenever it starts."""

    name: str
    schedule: Schedule | None
    state: ScheduleState
    version: str
    is_busy: bool = False
    by: str = ""
    from_code: bool = False
    problem: str = ""


class FireRow(msgspec.Struct, frozen=True, kw_only=True):
    """A fire time that has become a task, or many, and why. `task` is the first of the `made`, empty if there is none.
    `skipped` is the number of items that made no task."""

    fire_at: datetime
    task: str
    kind: FireKind
    made: int = 1
    skipped: int = 0


class FireTasks(NamedTuple):
    """A fire time and its tasks: one, or one for each item. A task with a dedupe slot is skipped if the same work is
    there. `skipped` more items make no task, which was known before the store was asked."""

    fire: Fire
    records: Sequence[TaskRecord]
    skipped: int = 0


class Fired(msgspec.Struct, frozen=True):
    """The tasks that were made, and those that were canceled, or asked to stop, for them. `rows` are the fire times
    that are new, in the order in which they were asked for."""

    made: list[str]
    canceled: list[str] = []
    rows: list[FireRow] = []

    @property
    def skipped(self) -> int:
        """Items that made no task."""
        return sum(row.skipped for row in self.rows)


@runtime_checkable
class ScheduleStore(Protocol):
    """A store that keeps schedules. Every verb is one transaction. It writes its `audit` entry, if it is given one and
    changes something: with the number of tasks asked for and made, or else 1."""

    async def put_schedule(
        self,
        schedule: Schedule,
        state: ScheduleState,
        *,
        version: str | None,
        by: str,
        from_code: bool = False,
        audit: AuditEntry | None = None,
    ) -> bool:
        """Write the schedule and its state if its version is still that one, or, with None, if there is none of that
        name; whether it was. What it has fired stays known."""
        ...

    async def drop_schedule(self, name: str, *, audit: AuditEntry | None = None) -> bool:
        """Forget the schedule and its fire times; whether there was one. Its tasks stay."""
        ...

    async def schedules(self, name: str | None = None) -> list[ScheduleStatus]:
        """All of them by name, or the one of this name, if there is."""
        ...

    async def list_fires(self, name: str, *, limit: int = 20) -> list[FireRow]:
        """The last fire times that became tasks, in the order in which they did, newest first."""
        ...

    async def fire(
        self,
        name: str,
        *,
        version: str,
        state: ScheduleState,
        fires: Sequence[FireTasks] = (),
        cancels: bool = False,
        audit: AuditEntry | None = None,
    ) -> Fired | None:
        """If the schedule's version is still that one: add the tasks of each fire time that has none yet, queued in the
        order of their due times, at the latest by the next turn; cancel the earlier ones that have not ended, if so
        asked; and write the state. Otherwise nothing, and None. If others change those all the time, a store may cancel
        them right after the transaction; what a crash then leaves, the next fire cancels.

        A task that has a dedupe slot is not added, but skipped and counted, if the same work is there, or comes before
        it in this call. `SubmitPending` if somebody's open transaction holds such a slot; then nothing has happened.

        A fire time that was fired already makes no other task, whatever the version, and is not counted as fired. Of
        each schedule the last `KEEP_FIRES` fire times are known for certain, all whose tasks have not ended, and all
        after the state's `watermark_at`."""
        ...
