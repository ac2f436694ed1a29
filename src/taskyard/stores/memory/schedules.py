"""Schedules in memory: verbs of the core, and of the port over it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

import msgspec

from taskyard.model.audit import AuditEntry
from taskyard.model.schedule import Schedule
from taskyard.model.schedule_state import ScheduleState, forget
from taskyard.model.state import ENDED
from taskyard.model.task import TaskRecord, new_uuid
from taskyard.ports.schedules import KEEP_FIRES, Fired, FireRow, FireTasks, ScheduleStatus
from taskyard.ports.store import Applied
from taskyard.stores.schedules import Fires, cancel_for, choose_new, correct, count_asked, make_add, rows_of

if TYPE_CHECKING:
    from taskyard.model.command import Cancel
    from taskyard.stores.memory.core import MemoryCore


class ScheduleBook:
    """What is known of schedules. `is_pending` tells whether a task has not ended."""

    def __init__(self, is_pending: Callable[[str], bool]) -> None:
        self._is_pending = is_pending
        self._known: dict[str, ScheduleStatus] = {}
        self._rows: defaultdict[str, dict[datetime, FireRow]] = defaultdict(dict)
        """By fire time, in the order in which they came."""
        self._open: defaultdict[str, dict[str, datetime]] = defaultdict(dict)
        """Tasks that had not ended when their schedule last fired, with their fire times."""

    def put(self, status: ScheduleStatus, version: str | None) -> bool:
        found = self._known.get(status.name)
        if (None if found is None else found.version) != version:
            return False
        self._known[status.name] = status
        return True

    def drop(self, name: str) -> bool:
        self._rows.pop(name, None)
        self._open.pop(name, None)
        return self._known.pop(name, None) is not None

    def find(self, name: str) -> ScheduleStatus | None:
        found = self._known.get(name)
        return None if found is None else msgspec.structs.replace(found, is_busy=self._is_busy(name))

    def names(self) -> list[str]:
        return sorted(self._known)

    def rows(self, name: str, limit: int) -> list[FireRow]:
        return list(islice(reversed(self._rows[name].values()), limit)) if name in self._rows else []

    def close_ended(self, name: str) -> list[str]:
        """Those of its tasks that have not ended; the others are not asked for again."""
        pending = self._pending(name)
        self._open[name] = pending
        return list(pending)

    def _is_busy(self, name: str) -> bool:
        return any(map(self._is_pending, self._open.get(name, ())))

    def _pending(self, name: str) -> dict[str, datetime]:
        return {uuid: at for uuid, at in self._open.get(name, {}).items() if self._is_pending(uuid)}

    def has_row(self, name: str, fire_at: datetime) -> bool:
        return fire_at in self._rows[name]

    def note(self, name: str, row: FireRow, made: Sequence[str]) -> None:
        self._rows[name][row.fire_at] = row
        self._open[name].update(dict.fromkeys(made, row.fire_at))

    def save(self, name: str, state: ScheduleState) -> None:
        state = forget(state, self._trim(name, state))
        self._known[name] = msgspec.structs.replace(self._known[name], state=state, version=new_uuid())

    def _trim(self, name: str, state: ScheduleState) -> datetime | None:
        """The last of the fire times that are forgotten, if any are."""
        rows, pending = self._rows[name], set(self._open[name].values())
        oldest = list(islice(rows.values(), max(0, len(rows) - KEEP_FIRES)))
        spare = [row.fire_at for row in oldest if row.fire_at <= state.watermark_at and row.fire_at not in pending]
        for at in spare:
            del rows[at]
        return max(spare, default=None)


class ScheduleVerbs:
    """The part of the store that keeps schedules."""

    _core: MemoryCore

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
        status = ScheduleStatus(
            name=schedule.name, schedule=schedule, state=state, version=new_uuid(), by=by, from_code=from_code
        )
        is_put = self._core.schedules.put(status, version)
        self._core.audit.note(audit, 1, int(is_put))
        self._tell()
        return is_put

    async def drop_schedule(self, name: str, *, audit: AuditEntry | None = None) -> bool:
        is_dropped = self._core.schedules.drop(name)
        self._core.audit.note(audit, 1, int(is_dropped))
        self._tell()
        return is_dropped

    async def schedules(self, name: str | None = None) -> list[ScheduleStatus]:
        book = self._core.schedules
        return [found for one in (book.names() if name is None else [name]) if (found := book.find(one)) is not None]

    async def list_fires(self, name: str, *, limit: int = 20) -> list[FireRow]:
        return self._core.schedules.rows(name, limit)

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
        fired = fire(self._core, name, version, state, fires, cancels)
        if fired is not None:
            self._core.audit.note(audit, count_asked(fires) if fires else 1, len(fired.made) if fires else 1)
        self._tell()
        return fired

    def _tell(self) -> None:
        raise NotImplementedError


def fire(core: MemoryCore, name: str, version: str, state: ScheduleState, fires: Fires, cancels: bool) -> Fired | None:
    book = core.schedules
    found = book.find(name)
    if found is None or found.version != version:
        return None
    new = choose_new(fires, partial(book.has_row, name))
    added = core.add(make_add(new))
    if isinstance(added, Exception):
        raise added
    pending = book.close_ended(name)
    canceled = _cancel(core, pending, cancel_for(name)) if cancels else []
    noted = rows_of(new, added)
    for row, made in noted:
        book.note(name, row, made)
    rows = [row for row, _ in noted]
    book.save(name, correct(state, fires, {row.fire_at for row in rows}))
    return Fired([uuid for _, made in noted for uuid in made], canceled, rows)


def _cancel(core: MemoryCore, uuids: Sequence[str], command: Cancel) -> list[str]:
    applied: list[Applied] = core.apply(uuids, command)
    return [one.uuid for one in applied if one.record is not None]


def is_pending(record: TaskRecord | None) -> bool:
    return record is not None and record.state not in ENDED
