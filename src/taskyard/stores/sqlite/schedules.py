"""Schedules in the SQLite store: part of a transaction, what is read, and the port over both."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import apsw

from taskyard.model.audit import AuditEntry
from taskyard.model.firing import Fire, FireKind
from taskyard.model.schedule import Schedule
from taskyard.model.schedule_state import ScheduleState, forget
from taskyard.model.task import TaskRecord, new_uuid
from taskyard.ports.schedules import KEEP_FIRES, Fired, FireRow, ScheduleStatus
from taskyard.ports.store import Add
from taskyard.stores.records import from_us, to_us
from taskyard.stores.schedules import Fires, cancel_for, correct, read_status, to_text
from taskyard.stores.sqlite.audit import note

if TYPE_CHECKING:
    from taskyard.stores.sqlite.core import SqliteCore

T = TypeVar("T")

_PENDING = "EXISTS (SELECT 1 FROM task WHERE task.uuid = fire.task AND task.finished_at IS NULL)"


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
        self._conn.execute(
            f"UPDATE fire SET is_finished = 1 WHERE schedule = ? AND is_finished = 0 AND NOT {_PENDING}", (name,)
        )
        pending: Any = self._conn.execute(
            "SELECT task FROM fire WHERE schedule = ? AND is_finished = 0 ORDER BY id", (name,)
        )
        earlier = [uuid for (uuid,) in pending.fetchall()] if cancels else []
        made: dict[datetime, TaskRecord] = {}
        for fire, record in fires:
            if self._note(name, fire, record.uuid):
                made[fire.fire_at] = record
        if made:
            self._core.add_plainly(Add(list(made.values())))
        applied = self._core.apply(earlier, cancel_for(name)) if earlier else []
        state = forget(correct(state, fires, made), self._trim(name, state))
        self._conn.execute(
            "UPDATE schedule SET state = ?, version = ? WHERE name = ?", (to_text(state), new_uuid(), name)
        )
        note(self._conn, audit, len(fires) or 1, len(made) if fires else 1)
        canceled = [one.uuid for one in applied if one.record is not None]
        return Fired([record.uuid for record in made.values()], canceled)

    def _version(self, name: str) -> str | None:
        found: Any = self._conn.execute("SELECT version FROM schedule WHERE name = ?", (name,)).get
        return None if found is None else str(found)

    def _note(self, name: str, fire: Fire, task: str) -> bool:
        """Whether the fire time had no task yet."""
        noted: Any = self._conn.execute(
            "INSERT INTO fire (schedule, fire_at, task, kind) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING RETURNING 1",
            (name, to_us(fire.fire_at), task, str(fire.kind)),
        ).get
        return noted is not None

    def _trim(self, name: str, state: ScheduleState) -> datetime | None:
        """The last of the fire times that are forgotten, if any are."""
        gone: Any = self._conn.execute(
            "DELETE FROM fire WHERE schedule = ?1 AND is_finished = 1 AND fire_at <= ?2 AND id <= "
            "(SELECT id FROM fire WHERE schedule = ?1 ORDER BY id DESC LIMIT 1 OFFSET ?3) RETURNING fire_at",
            (name, to_us(state.watermark_at), KEEP_FIRES),
        )
        return max((from_us(at) for (at,) in gone.fetchall()), default=None)


# --- reading ----------------------------------------------------------------------------------------------------------


def read_schedules(conn: apsw.Connection, name: str | None = None) -> list[ScheduleStatus]:
    rows: Any = conn.execute(
        "SELECT name, definition, state, version, actor, from_code, "
        f"EXISTS (SELECT 1 FROM fire WHERE fire.schedule = schedule.name AND is_finished = 0 AND {_PENDING}) "
        f"FROM schedule {'' if name is None else 'WHERE name = ?'} ORDER BY name",
        () if name is None else (name,),
    )
    return [
        read_status(one, definition, state, version=version, by=by, from_code=bool(from_code), is_busy=bool(is_busy))
        for one, definition, state, version, by, from_code, is_busy in rows
    ]


def read_fires(conn: apsw.Connection, name: str, limit: int) -> list[FireRow]:
    rows: Any = conn.execute(
        "SELECT fire_at, task, kind FROM fire WHERE schedule = ? ORDER BY id DESC LIMIT ?", (name, limit)
    )
    return [FireRow(fire_at=from_us(at), task=task, kind=FireKind(kind)) for at, task, kind in rows]


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
        fires: Sequence[tuple[Fire, TaskRecord]] = (),
        cancels: bool = False,
        audit: AuditEntry | None = None,
    ) -> Fired | None:
        fire = partial(self._core.schedules.fire, name, version, state, fires=fires, cancels=cancels, audit=audit)
        return await self._write(fire)
