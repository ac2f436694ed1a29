"""The loop that fires schedules: it looks when the next one is due, asks the pure rules what to do, and has the store
do it. What was decided on something that has changed meanwhile is not done, and decided again.

The times are on the wall clock, which may step; waiting is done on the monotonic one, never for longer than `LOOK_S`.
With no schedules it waits for a hint and uses no timer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from taskyard.errors import ItemsFailed, StoreError, SubmitPending, UnknownConsumer
from taskyard.model.firing import Plan, due
from taskyard.model.schedule import Schedule
from taskyard.model.schedule_state import fail, is_ahead, rewind
from taskyard.model.task import TaskRecord
from taskyard.ports.clock import Clock
from taskyard.ports.consumer import Consumer
from taskyard.ports.schedules import Fired, FireTasks, ScheduleStatus, ScheduleStore
from taskyard.ports.sink import NO_SINKS, ScheduleFired, SchedulesChecked, Sinks
from taskyard.scheduling.items import ItemLister, describe, make_tasks

log = logging.getLogger("taskyard")

LOOK_S = 2.5
"""A clock that was set is noticed within this; and so is a store that is back."""

DEPUTY_S = 2.0
"""Who does not lead fires what has been due for so long: by then the leader is gone, or stopped."""

EARLY_S = 0.01
"""A timer may ring this much too early."""

HINTED_S = 0.5
"""Looks that hints lead to are this far apart: where others work, there is one with every commit of theirs."""

PENDING_S = 1.0
"""How long after it was found that somebody's open transaction has the same work it is tried again."""

SHARE = 20
"""And as many times as far as a look takes: with very many schedules, a look takes its time."""

Leads = Callable[[str], bool]

FireInside = Callable[[str, Sequence[TaskRecord], Callable[[], Awaitable[Fired | None]]], Awaitable[Fired | None]]


class RecurringLoop:
    """`look_for_leader` tells whether this node fires the schedules of a source, or only stands by; `fired` is called
    when there are new tasks. `items` lists the items of schedules that have some. `fire_inside` calls middleware
    around each fire."""

    def __init__(
        self,
        store: ScheduleStore,
        *,
        clock: Clock,
        consumers: Mapping[str, Consumer],
        look_for_leader: Callable[[], Awaitable[Leads]],
        fired: Callable[[], None],
        items: ItemLister,
        fire_inside: FireInside | None = None,
        sinks: Sinks = NO_SINKS,
    ) -> None:
        self._store, self._clock, self._consumers = store, clock, consumers
        self._look_for_leader, self._fired, self._sinks = look_for_leader, fired, sinks
        self._fire_inside, self._items = fire_inside, items
        self._wake = asyncio.Event()
        self._is_asked = False
        self._has_buffered = False
        self._is_away = False
        self._next_at: datetime | None = None
        self._leads: Leads | None = None
        self._looked_mono = self._took_s = 0.0
        self._seen: dict[str, tuple[str, float]] = {}
        """What a deputy leaves to the leader: the version it has seen due, and since when."""
        self._quiet: dict[str, tuple[str, datetime | None]] = {}
        """When schedules are to be looked at again, as long as they are that version: most looks are at these."""
        self._told: dict[str, str] = {}
        """Schedules that cannot be fired here, and why: said once."""

    def look(self) -> None:
        """Look now: a schedule was put, or changed, by this process."""
        self._is_asked = True
        self._wake.set()

    def hint(self) -> None:
        """Something has happened in the store; what, nobody knows."""
        self._wake.set()

    def turned(self) -> None:
        """Tasks of this node may have ended, and what is kept back for one of them may fire. That is said many times a
        second where much runs, and is a hint like others."""
        if self._has_buffered:
            self.hint()

    async def run(self) -> None:
        """Look and fire until cancelled. A store that is away is tried again."""
        try:
            await self._run()
        finally:
            self._items.close()

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            self._is_asked = False
            began = self._clock.monotonic()
            try:
                until_mono = await self.step()
                self._is_away = False
            except StoreError as error:
                if not self._is_away:
                    log.warning("cannot look for schedules that are due: %s", error)
                self._is_away, until_mono = True, began + LOOK_S
            self._looked_mono = self._clock.monotonic()
            self._took_s = self._looked_mono - began
            self._sinks.tell(SchedulesChecked(self._next_at))
            await self._clock.wait(self._wake, until_mono)
            await self._hold_back(until_mono)

    async def _hold_back(self, until_mono: float | None) -> None:
        """Hints come in crowds: some time passes before the next of them is followed, unless it is time anyway."""
        pause = self._looked_mono + max(HINTED_S, SHARE * self._took_s)
        until = pause if until_mono is None else min(pause, until_mono)
        while not self._is_asked and self._clock.monotonic() < until:
            self._wake.clear()
            await self._clock.wait(self._wake, until)

    async def step(self) -> float | None:
        """One look at all schedules; when to look again, on the monotonic clock, None if there are none."""
        statuses = await self._store.schedules()
        self._has_buffered = any(status.state.buffered_at is not None for status in statuses)
        self._forget({status.name for status in statuses})
        now, now_mono = self._clock.now(), self._clock.monotonic()
        looks: list[datetime] = []
        self._leads = None
        for status in statuses:
            if status.state.paused_at is not None:
                continue  # who resumes it counts what was skipped
            if status.schedule is None:
                self._tell(status.name, f"it cannot be read here: {status.problem}")
            elif (look_at := await self._try_to_follow(status.schedule, status, now)) is not None:
                looks.append(look_at)
        self._next_at = min(looks, default=None)
        if not statuses:
            return None
        left_s = LOOK_S if self._next_at is None else (self._next_at - now).total_seconds()
        return now_mono + min(max(0.0, left_s), LOOK_S)

    async def _try_to_follow(self, schedule: Schedule, status: ScheduleStatus, now: datetime) -> datetime | None:
        try:
            return await self._follow(schedule, status, now)
        except StoreError:
            raise
        except Exception as error:  # be it a consumer's code, or ours: the others fire all the same
            self._tell(status.name, str(error) or type(error).__name__)
            return None

    async def _follow(self, schedule: Schedule, status: ScheduleStatus, now: datetime) -> datetime | None:
        """Find out what is to be done about one schedule, and do it; when to look again."""
        state = status.state
        back = rewind(state, now=now) if is_ahead(state, now=now) else state
        if back != state and await self._is_leader(schedule):
            log.warning("schedule %s was handled until %s, which is still to come", status.name, state.watermark_at)
            await self._store.fire(status.name, version=status.version, state=back)
            return now
        version, look_at = self._quiet.get(status.name, ("", None))
        if version == status.version and state.buffered_at is None and (look_at is None or look_at > now):
            return look_at  # whatever the clock does: nothing fires between what is handled and then
        plan = due(schedule, state, now=now, is_busy=status.is_busy)
        if plan.state is state:
            self._quiet[status.name] = status.version, plan.look_at
            self._items.forget(status.name)
            return plan.look_at
        is_leader = await self._is_leader(schedule)
        if not is_leader and not self._is_overdue(status):
            return now + timedelta(seconds=DEPUTY_S)
        return await self._carry_out(schedule, status, plan, now=now, is_leader=is_leader)

    async def _is_leader(self, schedule: Schedule) -> bool:
        if self._leads is None:
            self._leads = await self._look_for_leader()
        return self._leads(schedule.consumer)

    def _is_overdue(self, status: ScheduleStatus) -> bool:
        """Whether the leader has had its time. By the monotonic clock: that of the wall may have been set just now."""
        version, since_mono = self._seen.get(status.name, ("", 0.0))
        if version != status.version:
            self._seen[status.name] = status.version, self._clock.monotonic()
            return False
        return self._clock.monotonic() - since_mono >= DEPUTY_S - EARLY_S

    async def _carry_out(
        self, schedule: Schedule, status: ScheduleStatus, plan: Plan, *, now: datetime, is_leader: bool
    ) -> datetime | None:
        consumer = self._consumers.get(schedule.consumer)
        if consumer is None and plan.fires:
            if not is_leader:
                return None  # others have it
            raise UnknownConsumer(schedule.consumer, self._consumers)
        if plan.fires and not self._items.has_items(schedule):
            self._note_missing_function(schedule)
            return None
        try:
            fired = await self._fire(schedule, status, plan, consumer, now=now)
        except SubmitPending:
            return now + timedelta(seconds=PENDING_S)
        except _StillListing:
            return None
        except StoreError:
            raise
        except Exception as error:
            if schedule.each is None:
                raise
            return await self._note_failure(status, error)
        if fired is None:
            return now  # somebody was first, or has changed it: decided again
        self._told.pop(status.name, None)
        if fired.rows or fired.made:
            self._tell_fired(schedule, fired)
        return plan.look_at

    async def _fire(
        self, schedule: Schedule, status: ScheduleStatus, plan: Plan, consumer: Consumer | None, *, now: datetime
    ) -> Fired | None:
        fires: list[FireTasks] = []
        if consumer is not None and plan.fires:
            items = None
            if schedule.each is not None:
                items = self._items.poll(schedule, consumer, status.version, self.look)
                if items is None:
                    raise _StillListing
            fires = await make_tasks(schedule, consumer, plan.fires, items, now=now)

        async def fire() -> Fired | None:
            return await self._store.fire(
                status.name, version=status.version, state=plan.state, fires=fires, cancels=plan.cancels
            )

        records = [record for one in fires for record in one.records]
        inside = self._fire_inside if records else None
        return await (fire() if inside is None else inside(status.name, records, fire))

    def _tell_fired(self, schedule: Schedule, fired: Fired) -> None:
        self._fired()
        self._sinks.tell(ScheduleFired(fired.made, schedule.name, fired.skipped))
        for row in fired.rows if schedule.each is not None else ():
            text = "schedule %s fired for %s: tasks made: %d, items skipped: %d"
            log.info(text, schedule.name, row.fire_at, row.made, row.skipped)

    async def _note_failure(self, status: ScheduleStatus, error: Exception) -> datetime | None:
        """No task of this fire was made: it is tried again later, by any process."""
        now = self._clock.now()
        why = error.why if isinstance(error, ItemsFailed) else describe(error)
        state = fail(status.state, now=now, problem=why)
        if await self._store.fire(status.name, version=status.version, state=state) is not None:
            log.error("schedule %s could not fire: %s; next try at %s", status.name, why, state.retry_at)
        return state.retry_at

    def _note_missing_function(self, schedule: Schedule) -> None:
        assert schedule.each is not None
        why = f"function {schedule.each.function}"
        if self._told.get(schedule.name) != why:
            self._told[schedule.name] = why
            text = "this process does not have the %s of schedule %s: it waits for a process that defines the schedule"
            log.warning(text, why, schedule.name)

    def _forget(self, names: set[str]) -> None:
        known: dict[str, Any]
        for known in (self._seen, self._quiet, self._told):
            for name in known.keys() - names:
                del known[name]
        self._items.retain(names)

    def _tell(self, name: str, why: str) -> None:
        if self._told.get(name) != why:
            self._told[name] = why
            log.error("schedule %s does not fire: %s", name, why)


class _StillListing(Exception):
    """The items are being listed: the loop is woken when that has ended."""
