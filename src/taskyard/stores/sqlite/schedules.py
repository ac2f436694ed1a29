"""Schedules in the SQLite store: part of a transaction, what is read, and the port over both."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import apsw

from taskyard.model.audit import AuditEntry
from taskyard.model.firing import FireKind
from taskyard.model.schedule import Schedule
from taskyard.model.schedule_state import ScheduleState, forget
from taskyard.model.task import new_uuid
from taskyard.ports.schedules import KEEP_FIRES, Fired, FireRow, FireTasks, ScheduleStatus
from taskyard.stores.records import from_us, to_us
from taskyard.stores.schedules import (
    Fires,
    cancel_for,
    choose_new,
    correct,
    count_asked,
    make_add,
    read_status,
    rows_of,
    to_text,
)
from taskyard.stores.sqlite.audit import note

if TYPE_CHECKING:
    from taskyard.stores.sqlite.core import SqliteCore

T = TypeVar("T")

_PENDING = "EXISTS (SELECT 1 FROM task WHERE task.uuid = fire_task.task AND task.finished_at IS NULL)"


# --- in a transaction -------------------------------------------------------------------------------------------------


class ScheduleWrites:
    """What a transaction can do with schedules."""

    def __init__(self, core: SqliteCore, conn: apsw.Connection) -> None:
        self._core, self._conn = core, conn

    def put(
        self,
        schedule: Schedule,
        state: ScheduleState,
        *,
        version: str | None,
        by: str,
        from_code: bool,
        audit: AuditEntry | None,
    ) -> bool:
        if self._version(schedule.name) != version:
            return False
        self._conn.execute(
            "INSERT OR REPLACE INTO schedule VALUES (?, ?, ?, ?, ?, ?)",
            (schedule.name, to_text(schedule), to_text(state), new_uuid(), by, int(from_code)),
        )
        note(self._conn, audit, 1, 1)
        return True

    def drop(self, name: str, audit: AuditEntry | None) -> bool:
        self._conn.execute("DELETE FROM fire_task WHERE schedule = ?", (name,))
        self._conn.execute("DELETE FROM fire WHERE schedule = ?", (name,))
        dropped: Any = self._conn.execute("DELETE FROM schedule WHERE name = ? RETURNING 1", (name,)).get
        note(self._conn, audit, 1, int(dropped is not None))
        return dropped is not None

    def fire(
        self,
        name: str,
        version: str,
        state: ScheduleState,
        *,
        fires: Fires,
        cancels: bool,
        audit: AuditEntry | None,
    ) -> Fired | None:
        if self._version(name) != version:
            return None
        self._conn.execute(f"DELETE FROM fire_task WHERE schedule = ? AND NOT {_PENDING}", (name,))
        pending: Any = self._conn.execute("SELECT task FROM fire_task WHERE schedule = ? ORDER BY fire, task", (name,))
        earlier = [uuid for (uuid,) in pending.fetchall()] if cancels else []
        new = choose_new(fires, partial(self._has_row, name))
        noted = rows_of(new, self._core.add_plainly(make_add(new)) if new else [])
        for row, made in noted:
            self._note(name, row, made)
        rows = [row for row, _ in noted]
        applied = self._core.apply(earlier, cancel_for(name)) if earlier else []
        state = forget(correct(state, fires, {row.fire_at for row in rows}), self._trim(name, state))
        self._conn.execute(
            "UPDATE schedule SET state = ?, version = ? WHERE name = ?", (to_text(state), new_uuid(), name)
        )
        uuids = [uuid for _, made in noted for uuid in made]
        note(self._conn, audit, count_asked(fires) if fires else 1, len(uuids) if fires else 1)
        return Fired(uuids, [one.uuid for one in applied if one.record is not None], rows)

    def _version(self, name: str) -> str | None:
        found: Any = self._conn.execute("SELECT version FROM schedule WHERE name = ?", (name,)).get
        return None if found is None else str(found)

    def _has_row(self, name: str, fire_at: datetime) -> bool:
        """Whether this fire time has fired already."""
        found: Any = self._conn.execute(
            "SELECT 1 FROM fire WHERE schedule = ? AND fire_at = ?", (name, to_us(fire_at))
        ).get
        return found is not None

    def _note(self, name: str, row: FireRow, made: Sequence[str]) -> None:
        values = name, to_us(row.fire_at), row.task, str(row.kind), row.made, row.skipped
        fire: Any = self._conn.execute(
            "INSERT INTO fire (schedule, fire_at, task, kind, made, skipped) VALUES (?, ?, ?, ?, ?, ?) RETURNING id",
            values,
        ).get
        self._conn.executemany("INSERT INTO fire_task VALUES (?, ?, ?)", [(name, fire, uuid) for uuid in made])

    def _trim(self, name: str, state: ScheduleState) -> datetime | None:
        """The last of the fire times that are forgotten, if any are."""
        gone: Any = self._conn.execute(
            "DELETE FROM fire WHERE schedule = ?1 AND fire_at <= ?2 "
            "AND id NOT IN (SELECT fire FROM fire_task WHERE schedule = ?1) AND id <= "
            "(SELECT id FROM fire WHERE schedule = ?1 ORDER BY id DESC LIMIT 1 OFFSET ?3) RETURNING fire_at",
            (name, to_us(state.watermark_at), KEEP_FIRES),
        )
        return max((from_us(at) for (at,) in gone.fetchall()), default=None)


# --- reading ----------------------------------------------------------------------------------------------------------


def read_schedules(conn: apsw.Connection, name: str | None = None) -> list[ScheduleStatus]:
    rows: Any = conn.execute(
        "SELECT name, definition, state, version, actor, from_code, "
        f"EXISTS (SELECT 1 FROM fire_task WHERE fire_task.schedule = schedule.name AND {_PENDING}) "
        f"FROM schedule {'' if name is None else 'WHERE name = ?'} ORDER BY name",
        () if name is None else (name,),
    )
    return [
        read_status(one, definition, state, version=version, by=by, from_code=bool(from_code), is_busy=bool(is_busy))
        for one, definition, state, version, by, from_code, is_busy in rows
    ]


def read_fires(conn: apsw.Connection, name: str, limit: int) -> list[FireRow]:
    rows: Any = conn.execute(
        "SELECT fire_at, task, kind, made, skipped FROM fire WHERE schedule = ? ORDER BY id DESC LIMIT ?", (name, limit)
    )
    return [
        FireRow(fire_at=from_us(at), task=task, kind=FireKind(kind), made=made, skipped=skipped)
        for at, task, kind, made, skipped in rows
    ]


# --- the port ---------------------------------------------------------------------------------------------------------


class ScheduleVerbs:
    """The part of the store that keeps schedules."""

    _core: SqliteCore

    @abstractmethod
    def _write(self, run: Callable[[], T], peek: Callable[[], T | None] | None = None) -> Awaitable[T]: ...

    @abstractmethod
    async def _look(self, run: Callable[[apsw.Connection], T]) -> T: ...

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
        put = partial(self._core.schedules.put, schedule, state, version=version, by=by, from_code=from_code)
        return await self._write(partial(put, audit=audit))

    async def drop_schedule(self, name: str, *, audit: AuditEntry | None = None) -> bool:
        return await self._write(partial(self._core.schedules.drop, name, audit))

    async def schedules(self, name: str | None = None) -> list[ScheduleStatus]:
        return await self._look(partial(read_schedules, name=name))

    async def list_fires(self, name: str, *, limit: int = 20) -> list[FireRow]:
        return await self._look(partial(read_fires, name=name, limit=limit))

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
        fire = partial(self._core.schedules.fire, name, version, state, fires=fires, cancels=cancels, audit=audit)
        return await self._write(fire)
