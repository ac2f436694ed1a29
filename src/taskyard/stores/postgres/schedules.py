"""Schedules in the PostgreSQL store.

What is to be canceled is decided on what was read without a lock, as every command is; the one call that carries out
all of it does so only if that is still so. Where it is not for a while, because others run those tasks, it is fired
first, and they are canceled right after.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any

import asyncpg
import msgspec

from taskyard.errors import InvalidInput, NotOpen, StoreError, SubmitPending
from taskyard.model.audit import AuditEntry
from taskyard.model.command import Asked, Command
from taskyard.model.firing import COUNTED, FireKind
from taskyard.model.schedule import Schedule
from taskyard.model.schedule_state import ScheduleState
from taskyard.model.task import Dedupe, new_uuid
from taskyard.model.task_filter import ALL_TASKS, TaskFilter
from taskyard.ports.clock import Clock
from taskyard.ports.schedules import KEEP_FIRES, Fired, FireRow, FireTasks, ScheduleStatus
from taskyard.ports.store import Applied
from taskyard.stores.postgres import commands, within
from taskyard.stores.postgres.audit import encode_entry
from taskyard.stores.postgres.connection import Connection
from taskyard.stores.postgres.constants import INSERT_BLOCKED
from taskyard.stores.postgres.database import Database
from taskyard.stores.postgres.errors import busy
from taskyard.stores.postgres.patience import TRIES, give_way
from taskyard.stores.postgres.rows import clean, find_unstorable
from taskyard.stores.postgres.turn import Turn
from taskyard.stores.schedules import Fires, cancel_for, choose_new, correct, make_add, read_status, to_text

log = logging.getLogger("taskyard")

FIRE = f"CALL taskyard.fire_1({', '.join(f'${n}' for n in range(1, 23))}, NULL, NULL, NULL)"

_PENDING = (
    "SELECT FROM taskyard.fire_task AS f JOIN taskyard.task AS t ON t.uuid = ANY (ARRAY[f.task]) "
    "WHERE f.schedule = s.name"
)


WHOLE_TRIES = 5
"""How often it is tried to fire and to cancel in one transaction. Of many tasks that others run meanwhile, one has
changed each time."""

NO_BONDS = commands.Bonds({}, {})
"""A cancel is not held back by any."""


class _ChangedMeanwhile(Exception):
    """One of the tasks to cancel is not what it was: nothing has happened."""


class ScheduleVerbs:
    """The part of the store that keeps schedules."""

    url: str
    _clock: Clock
    _db: Database

    @abstractmethod
    async def apply(
        self,
        uuids: Sequence[str],
        command: Command,
        *,
        by: str = "",
        where: TaskFilter = ALL_TASKS,
        audit: AuditEntry | None = None,
    ) -> list[Applied]: ...

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
        entry = encode_entry(audit)
        values = (schedule.name, to_text(schedule), to_text(state), new_uuid(), by, from_code)
        if any(clean(text) != text for text in (schedule.name, by)):
            raise InvalidInput("the name of the schedule, or who puts it there, has characters that cannot be stored")
        async with self._db.asked():
            if version is None:
                sql = "INSERT INTO taskyard.schedule VALUES ($1, $2, $3, $4, $5, $6) ON CONFLICT DO NOTHING RETURNING 1"
                row = await self._db.write(_noted(sql, 7), *values, entry)
            else:
                sql = (
                    "UPDATE taskyard.schedule SET definition = $2, state = $3, version = $4, actor = $5, "
                    "from_code = $6 WHERE name = $1 AND version = $7 RETURNING 1"
                )
                row = await self._db.write(_noted(sql, 8), *values, version, entry)
            self._db.hints.tell()
            return row is not None

    async def drop_schedule(self, name: str, *, audit: AuditEntry | None = None) -> bool:
        if clean(name) != name:
            return False
        async with self._db.asked():
            row = await self._db.write("SELECT taskyard.drop_schedule_1($1, $2)", name, encode_entry(audit))
            self._db.hints.tell()
            return bool(row[0])

    async def schedules(self, name: str | None = None) -> list[ScheduleStatus]:
        if name is not None and clean(name) != name:
            return []
        return await self._db.ask(partial(read_schedules, name=name))

    async def list_fires(self, name: str, *, limit: int = 20) -> list[FireRow]:
        if clean(name) != name:
            return []
        return await self._db.ask(partial(_read_fires, name=name, limit=limit))

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
        if clean(name) != name:
            return None
        fires = choose_new(fires, lambda fire_at: False)
        async with self._db.asked():
            if not cancels:
                return await self._fire(name, version, state, fires, self._decided(name), audit)
            # What is to be canceled may have changed each time it comes to it: then it is decided anew.
            for n in range(WHOLE_TRIES):
                if n > 1:
                    await give_way(n)
                decided = await self._decide(name)
                with suppress(_ChangedMeanwhile):
                    return await self._fire(name, version, state, fires, decided, audit)
            earlier = await self._db.read(partial(_read_pending, name=name))
            fired = await self._fire(name, version, state, fires, self._decided(name), audit)
            if fired is None:
                return None
            return msgspec.structs.replace(fired, canceled=await self._cancel_each(name, earlier))

    async def _fire(
        self,
        name: str,
        version: str,
        state: ScheduleState,
        fires: Fires,
        decided: commands.Decided,
        audit: AuditEntry | None,
    ) -> Fired | None:
        changes = *_changes(decided), encode_entry(audit)
        while True:
            asked = (name, version, new_uuid(), to_text(state), state.watermark_at, KEEP_FIRES, _encode(fires))
            row = await self._write_fire(*asked, *await self._tasks(fires), *changes)
            match row["outcome"]:
                case "done":
                    self._db.hints.tell()
                    return Fired(list(row["made"]), _uuids(decided.applied), _rows(row["fired"]))
                case "stale":
                    return None
                case "changed":
                    raise _ChangedMeanwhile
                case "fired":
                    state = correct(state, fires, {fires[int(n) - 1].fire.fire_at for n in row["made"]})
                    fires = [fires[int(n) - 1] for n in row["made"]]
                case wrong:
                    if msgspec.json.decode(wrong).get("why") == "busy":
                        raise SubmitPending
                    raise InvalidInput(f"the tasks of a schedule cannot be stored: {wrong}")

    async def _write_fire(self, *arguments: Any) -> Any:
        for n in range(TRIES):
            if n > 1:
                await give_way(n)
            try:
                return await self._db.write(FIRE, *arguments)
            except (StoreError, InvalidInput) as error:
                cause = error.__cause__
                if getattr(cause, "sqlstate", None) == INSERT_BLOCKED:
                    raise SubmitPending from error
                if not isinstance(cause, asyncpg.UniqueViolationError):
                    raise
        raise busy(self.url)

    async def _tasks(self, fires: Fires) -> tuple[Any, ...]:
        """The tasks, for `submit_1`, or, if some of them may be there already, for `submit_checked`."""
        add = make_add(fires)
        if add.dedupe is Dedupe.ALLOW:
            return within.encode(add, await self._db.find_where()), None, None, None, None, None
        for record in add.records:
            if (why := find_unstorable(record)) is not None:
                raise InvalidInput(f"task {record.uuid} cannot be stored: {why}")
        turn = Turn("", self._clock.now(), (), [make_add([one]) for one in fires], (), None)
        turn.is_careful = True
        _, _, queues, _, _, _, adds, uuids, args, columns, _, _ = turn.arguments()
        return None, queues, adds, uuids, args, columns

    async def _cancel_each(self, name: str, earlier: Sequence[str]) -> list[str]:
        """Those that changed time and again, when what comes after them was fired: it happened, whatever becomes of
        this. If it fails, the next fire cancels them."""
        try:
            return _uuids(await self.apply(earlier, cancel_for(name)))
        except (StoreError, NotOpen) as error:
            log.warning("schedule %s has fired, and its earlier tasks are not canceled yet: %s", name, error)
            return []

    def _decided(self, name: str) -> commands.Decided:
        return commands.Decided(self._cancel(name), ALL_TASKS, NO_BONDS)

    def _cancel(self, name: str) -> Asked:
        return Asked(command=cancel_for(name), now=self._clock.now(), by="")

    async def _decide(self, name: str) -> commands.Decided:
        """What it means for the tasks that have not ended."""
        uuids = await self._db.read(partial(_read_pending, name=name))
        found = await self._db.read(partial(commands.read, uuids=uuids))
        decided = self._decided(name)
        for uuid in uuids:
            decided.decide(uuid, found.get(uuid))
        return decided


def _noted(sql: str, parameter: int) -> str:
    """The same statement with its audit entry, which is this parameter."""
    return f"WITH done AS ({sql}) SELECT taskyard.note_audit_1(${parameter}, 1, 1) FROM done"


def _uuids(applied: Sequence[Applied]) -> list[str]:
    return [one.uuid for one in applied if one.record is not None]


def _encode(fires: Fires) -> str:
    rows = [
        {
            "fire_at": one.fire.fire_at,
            "kind": one.fire.kind,
            "counts": one.fire.kind in COUNTED,
            "tasks": [record.uuid for record in one.records],
            "skipped": one.skipped,
        }
        for one in fires
    ]
    return msgspec.json.encode(rows).decode()


def _rows(text: str | None) -> list[FireRow]:
    rows = msgspec.json.decode(text or "[]", type=list[tuple[datetime, str, FireKind, int, int]])
    return [
        FireRow(fire_at=at.astimezone(UTC), task=task, kind=kind, made=made, skipped=skipped)
        for at, task, kind, made, skipped in rows
    ]


def _changes(decided: commands.Decided) -> tuple[Any, ...]:
    queues, changes, *events, now = decided.arguments()
    return queues, None if decided.changes_nothing else changes, *events, now


async def read_schedules(conn: Connection, name: str | None = None) -> list[ScheduleStatus]:
    rows = await conn.fetch(
        f"SELECT name, definition, state, version, actor, from_code, EXISTS ({_PENDING}) "
        "FROM taskyard.schedule AS s WHERE $1::text IS NULL OR name = $1 ORDER BY name",
        name,
    )
    return [
        read_status(one, definition, state, version=version, by=by, from_code=from_code, is_busy=is_busy)
        for one, definition, state, version, by, from_code, is_busy in rows
    ]


async def _read_fires(conn: Connection, name: str, limit: int) -> list[FireRow]:
    rows = await conn.fetch(
        "SELECT fire_at, task, kind, made, skipped FROM taskyard.fire WHERE schedule = $1 ORDER BY id DESC LIMIT $2",
        name,
        limit,
    )
    return [
        FireRow(fire_at=at, task=task, kind=FireKind(kind), made=made, skipped=skipped)
        for at, task, kind, made, skipped in rows
    ]


async def _read_pending(conn: Connection, name: str) -> list[str]:
    rows = await conn.fetch(
        "SELECT f.task FROM taskyard.fire_task AS f JOIN taskyard.task AS t ON t.uuid = ANY (ARRAY[f.task]) "
        "WHERE f.schedule = $1 ORDER BY f.fire, f.task",
        name,
    )
    return [uuid for (uuid,) in rows]
