"""Schedules: what recurs, its next and last fire times, and commands on it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import msgspec

from taskyard.application.calls import YardContext, check_limit
from taskyard.application.errors import AppRequired
from taskyard.application.schedule_documents import (
    EachDocument,
    FireDocument,
    LastFire,
    RemovedSchedule,
    ScheduleCounts,
    ScheduleDetail,
    ScheduleDocument,
    ScheduleRequest,
    ScheduleStateName,
    ScheduleTasks,
)
from taskyard.application.submitting import find_consumer, fit_arguments
from taskyard.application.task_documents import priority_name
from taskyard.model.each import Each
from taskyard.model.firing import overdue_since
from taskyard.model.recurrence import describe
from taskyard.model.redaction import redact
from taskyard.ports.schedules import FireRow, ScheduleStatus

LAST_FIRES = 10
"""Fire times that come with a schedule, the latest."""


class LocalSchedules:
    """`ScheduleCalls` on a yard."""

    def __init__(self, context: YardContext) -> None:
        self._context, self._yard = context, context.yard

    async def list(self) -> tuple[ScheduleDocument, ...]:
        return tuple([await self._document(status) for status in await self._yard.schedules.list_all()])

    async def get(self, name: str, *, next_count: int = 5, reveal: bool = False) -> ScheduleDetail:
        if next_count:
            check_limit(next_count, field="next_count")
        schedules = self._yard.schedules
        status = await schedules.get(name)
        upcoming = await schedules.next_fires(status, count=max(1, next_count))
        rows = await schedules.list_fires(name, limit=LAST_FIRES)
        outcomes = await self._yard.store.outcomes([row.task for row in rows])
        fires = tuple(
            FireDocument(
                fire_at=row.fire_at,
                kind=row.kind,
                task=row.task,
                state=None if outcome is None else outcome.state,
                made=row.made,
                skipped=row.skipped,
            )
            for row, outcome in zip(rows, outcomes, strict=True)
        )
        fields = _fields(status, upcoming, rows[:1], now=self._yard.now(), next_count=next_count, reveal=reveal)
        return ScheduleDetail(**fields, fires=fires)

    async def put(self, request: ScheduleRequest, *, replace: bool = False) -> ScheduleDocument:
        consumer, is_checked = await find_consumer(self._yard, request.consumer)
        args = fit_arguments(consumer, request) if is_checked else request.args
        made = self._yard.schedules.make(
            request.name, request.rule, consumer, args, zone=request.zone, **request.settings()
        )
        return await self._document(await self._yard.schedules.put(made, by=self._context.actor, replace=replace))

    async def pause(self, name: str, *, note: str = "") -> ScheduleDocument:
        return await self._document(await self._yard.schedules.pause(name, note=note, by=self._context.actor))

    async def resume(self, name: str) -> ScheduleDocument:
        return await self._document(await self._yard.schedules.resume(name, by=self._context.actor))

    async def remove(self, name: str) -> RemovedSchedule:
        status = await self._yard.schedules.get(name)
        await self._yard.schedules.remove(name, by=self._context.actor)
        return RemovedSchedule(name=name, removed=True, from_code=status.from_code)

    async def run_now(self, name: str) -> ScheduleTasks:
        await self._check_code(name)
        made = await self._yard.schedules.run_each(name, by=self._context.actor)
        return ScheduleTasks(name=name, tasks=tuple(handle.uuid for handle in made.tasks), skipped=made.skipped)

    async def backfill(
        self, name: str, *, start: datetime, end: datetime, limit: int = 1_000, again: bool = False
    ) -> ScheduleTasks:
        check_limit(limit)
        await self._check_code(name)
        by = self._context.actor
        handles = await self._yard.schedules.backfill(name, start, end, limit=limit, again=again, by=by)
        return ScheduleTasks(name=name, tasks=tuple(handle.uuid for handle in handles))

    async def _check_code(self, name: str) -> None:
        """Queue and arguments of a task that a schedule makes are as the code of its consumer says."""
        schedule = (await self._yard.schedules.get(name)).schedule
        if schedule is not None and not self._yard.consumers:
            raise AppRequired(
                "what the schedule makes depends on its consumer's code",
                fields=("app",),
                hint="name the app with {app} module:yard",
            )

    async def _document(self, status: ScheduleStatus) -> ScheduleDocument:
        schedules, rows = self._yard.schedules, list[FireRow]()
        if status.schedule is not None and status.schedule.each is not None:
            rows = await schedules.list_fires(status.name, limit=1)
        upcoming = await schedules.next_fires(status, count=1)
        return ScheduleDocument(**_fields(status, upcoming, rows, now=self._yard.now()))


def _fields(
    status: ScheduleStatus,
    upcoming: Sequence[datetime],
    rows: Sequence[FireRow],
    *,
    now: datetime,
    next_count: int = 1,
    reveal: bool = False,
) -> dict[str, Any]:
    schedule, state = status.schedule, status.state
    fields: dict[str, Any] = {
        "name": status.name,
        "state": _state_of(status, upcoming),
        "next": tuple(upcoming[:next_count]),
        "counts": ScheduleCounts(fired=state.fired, missed=state.missed, skipped=state.skipped, failed=state.failed),
        "has_open_task": status.is_busy,
        "buffered_at": state.buffered_at,
        "paused_at": state.paused_at,
        "paused_by": state.paused_by,
        "note": state.note,
        "watermark_at": state.watermark_at,
        "by": status.by,
        "from_code": status.from_code,
        "problem": status.problem or state.problem or _overdue_text(status, now),
        "retry_at": state.retry_at,
    }
    if schedule is None:
        return fields
    args = msgspec.json.decode(schedule.args)
    return {
        **fields,
        **msgspec.structs.asdict(schedule),
        "args": args if reveal else redact(args),
        "priority": priority_name(schedule.priority),
        "rule_text": describe(schedule.rule),
        "each": None if schedule.each is None else _each_document(schedule.each),
        "last": None if schedule.each is None or not rows else _last_fire(rows[0]),
    }


def _each_document(each: Each) -> EachDocument:
    return EachDocument(
        count=each.count, function=each.function, timeout_s=each.timeout_s, dedupe_scope=each.dedupe_scope
    )


def _last_fire(row: FireRow) -> LastFire:
    return LastFire(fire_at=row.fire_at, kind=row.kind, made=row.made, skipped=row.skipped)


def _overdue_text(status: ScheduleStatus, now: datetime) -> str:
    """Why nothing fires that is due, where only a process with the function of the items could do so."""
    schedule = status.schedule
    if schedule is None or schedule.each is None or not schedule.each.function:
        return ""
    since = overdue_since(schedule, status.state, now=now)
    if since is None:
        return ""
    function = schedule.each.function
    return f"due since {since:%Y-%m-%d %H:%M:%S} UTC, and no process fires it: run a worker that defines {function}"


def _state_of(status: ScheduleStatus, upcoming: Sequence[datetime]) -> ScheduleStateName:
    if status.schedule is None:
        return "unreadable"
    if status.state.paused_at is not None:
        return "paused"
    return "active" if upcoming else "over"
