"""`yard.schedules`: what recurs, as code defines it and people steer it.

Whatever is asked is decided here on what the store has, and carried out if that is still so; else decided again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from taskyard.errors import (
    BatchTooLarge,
    InvalidInput,
    ScheduleExists,
    StoreUnavailable,
    UnknownSchedule,
    quote,
    shorten,
)
from taskyard.handle import ConsumerFunction, TaskHandle
from taskyard.model.audit import CODE, AuditEntry, TargetKind, make_entry
from taskyard.model.each import Each, ScheduleItem, check_items, check_scope, encode_items, name_of
from taskyard.model.firing import Fire, FireKind, backfill, expected
from taskyard.model.given import check_count, check_name, check_timeout
from taskyard.model.kinds import checked_verbs
from taskyard.model.recurrence import TICK, Cron, Every, Rule
from taskyard.model.schedule import Schedule
from taskyard.model.schedule_state import ScheduleState, amend, is_unsure, pause, recover, resume
from taskyard.model.task import DedupeScope, to_json
from taskyard.options import MAX_BATCH, check_size, named
from taskyard.ports.consumer import Consumer
from taskyard.ports.schedules import KEEP_FIRES, UNREAD, Fired, FireRow, FireTasks, ScheduleStatus, ScheduleStore
from taskyard.ports.store import Store
from taskyard.scheduling.items import ItemFunction, ItemLister, Items, encode, make_tasks

if TYPE_CHECKING:
    from taskyard.yard import Yard

log = logging.getLogger("taskyard")

TRIES = 100
"""How often a change is decided anew because the schedule has changed meanwhile: it fires once a second at most."""

OF_ITEMS = ("each", "each_timeout_s", "dedupe_scope")
"""Settings about the items of a schedule."""

ListsItems = Sequence[Mapping[str, Any] | ScheduleItem] | Callable[[], Any]

RECENT = 100
"""Fire times of which the last by hand is looked for."""

_GIVEN_APART = ("name", "rule", "consumer", "args", "each")

SETTINGS = tuple(name for name in Schedule.__struct_fields__ if name not in _GIVEN_APART)

PACE = ("rule", "missed", "catch_up_s", "grace_s", "overlap", "start_at", "end_at")
"""What says when a schedule fires. If it changes, what was due before is not made up for by the new one's measure."""

Decide = Callable[[ScheduleStatus, datetime], tuple[ScheduleState, Sequence[Fire]]]


@checked_verbs
class Schedules:
    """Schedules of a yard's store. What the yard's code defines is put there when it is opened with its workers; what
    is added later stays until it is removed. Every yard that serves the consumer can fire it; each fire time becomes
    one task."""

    def __init__(self, yard: Yard) -> None:
        self._yard = yard
        self._defined: dict[str, Schedule] = {}
        self.functions: dict[str, ItemFunction] = {}
        """The functions that list the items of schedules, by the names of those."""
        self._items = ItemLister(self.functions, clock=yard._clock, max_bytes=yard._max_payload_bytes)

    # --- in code ------------------------------------------------------------------------------------------------------

    def define(
        self,
        name: str,
        rule: Rule | str | float | timedelta,
        consumer: str | ConsumerFunction[..., Any],
        args: Mapping[str, Any] | None = None,
        *,
        zone: str | None = None,
        **settings: Any,
    ) -> Schedule:
        """A schedule that belongs to this code; before the yard is opened. `rule` is a cron expression, seen in `zone`
        (UTC), or an interval in seconds. `settings` as in `Schedule`: queue, priority, key, timeout_s, retry, missed,
        catch_up_s, grace_s, overlap, jitter_s, start_at, end_at, requires.

        With `each`, it makes a task for each item at a fire time: `each` is a list of dicts of arguments, or of
        `ScheduleItem`, or a function, asynchronous or not, that returns one within `each_timeout_s` (30). With
        `overlap="skip"` an item is skipped while the same work is there, as `dedupe_scope` says ("pending")."""
        if self._yard.is_open:
            raise InvalidInput(f"define the schedule {quote(name)} before the yard is opened, or add it: schedules.add")
        if _check(name) in self._defined:
            raise ScheduleExists(name, "two of one consumer need names: @yard.schedule(…, name='…')")
        schedule = self.make(name, rule, self._find(consumer), args, zone=zone, **settings)
        self._keep_function(schedule, settings.get("each"))
        self._defined[schedule.name] = schedule
        return schedule

    async def register(self, store: Store, now: datetime) -> None:
        """Put what code has defined into the store."""
        for schedule in self._defined.values():
            await put(keeper(store), schedule, now=now, by=CODE, from_code=True)

    # --- at run time --------------------------------------------------------------------------------------------------

    async def add(
        self,
        /,
        name: str,
        rule: Rule | str | float | timedelta,
        consumer: str | ConsumerFunction[..., Any],
        args: Mapping[str, Any] | None = None,
        *,
        zone: str | None = None,
        by: str = CODE,
        **settings: Any,
    ) -> ScheduleStatus:
        """The same at run time, while the yard is open: a new schedule, or another definition for one that was added
        before. One that is defined in code is changed there."""
        schedule = self.make(name, rule, self._find(consumer), args, zone=zone, **settings)
        self._keep_function(schedule, settings.get("each"))
        return await self.put(schedule, by=by)

    async def put(self, schedule: Schedule, *, by: str = CODE, replace: bool = True) -> ScheduleStatus:
        """`add` for a schedule that is checked already."""
        if not isinstance(schedule, Schedule):
            raise InvalidInput(f"a schedule to put must be a Schedule, not {quote(schedule)}; see add")
        by = check_name("by", by)
        now = self._yard.now()
        audit = make_entry(by, "put_schedule", TargetKind.SCHEDULE, schedule.name, now=now)
        await put(self._store, schedule, now=now, by=by, replace=replace, audit=audit)
        self._yard._engine.look_at_schedules()
        return await self.get(schedule.name)

    async def remove(self, name: str, *, by: str = CODE) -> None:
        """It fires no more and is forgotten; its tasks stay. One that code defines is back when that code starts."""
        audit = self._entry("remove_schedule", _check(name), by)
        if not await self._store.drop_schedule(name, audit=audit):
            raise UnknownSchedule(name)

    async def pause(self, name: str, *, note: str = "", by: str = CODE) -> ScheduleStatus:
        """It fires nothing until it is resumed; also after restarts. `by` is who asks."""
        by = check_name("by", by)
        audit = self._entry("pause_schedule", name, by, reason=note)
        await self._change(name, lambda status, now: (pause(status.state, now=now, note=note, by=by), ()), audit)
        return await self.get(name)

    async def resume(self, name: str, *, by: str = CODE) -> ScheduleStatus:
        """It fires again, from now on: what came due meanwhile is skipped."""
        audit = self._entry("resume_schedule", name, by)
        await self._change(name, lambda status, now: (resume(definition(status), status.state, now=now), ()), audit)
        return await self.get(name)

    async def run_now(self, name: str, *, by: str = CODE) -> TaskHandle:
        """One task of it now, whatever its rule, its overlap policy or a pause say; when it fires next stays as it
        is. A schedule with items makes many: see `run_each`."""
        if definition(await self.get(name)).each is not None:
            raise InvalidInput(
                f"schedule {quote(name)} makes a task for each of its items", hint="await schedules.run_each(name)"
            )
        made = await self.run_each(name, by=by)
        if not made.tasks:
            raise InvalidInput(f"schedule {quote(name)} made no task: its account is queued, busy or quarantined")
        return made.tasks[0]

    async def run_each(self, name: str, *, by: str = CODE) -> ScheduleRun:
        """The same for a schedule with items: a task for each of them now. An item whose work is there already, as its
        `dedupe_scope` says, is skipped. Raises `ItemsFailed` if its items cannot be listed here."""
        taken: datetime | None = None
        audit = self._entry("run_schedule", name, by)

        def decide(status: ScheduleStatus, now: datetime) -> tuple[ScheduleState, Sequence[Fire]]:
            return status.state, [Fire.by_hand(now, taken)]

        while not (fired := await self._change(name, decide, audit)).rows:
            # Two people at the same microsecond, or on a clock that stands still: the later one has another.
            rows = await self.list_fires(name, limit=RECENT)
            by_hand = [row.fire_at for row in rows if row.kind is FireKind.BY_HAND]
            taken = max([*by_hand, self._yard.now() if taken is None else taken + TICK])
        return ScheduleRun(self._handles(fired), fired.skipped)

    async def backfill(
        self,
        name: str,
        start: datetime,
        end: datetime,
        *,
        limit: int = 1_000,
        again: bool = False,
        by: str = CODE,
    ) -> list[TaskHandle]:
        """A task for each of its fire times from `start` on and before `end` that has had none, due at once; `start_at`
        and `end_at` of the schedule bound it here as well. Of each
        schedule the last 2,000 fire times are known: a range that reaches back to others, which may have had theirs, is
        refused unless `again` says that they may fire twice. A schedule with items makes a task for each, unless the
        same work is there already: with `overlap="skip"` the second of two fire times makes none."""

        def decide(status: ScheduleStatus, now: datetime) -> tuple[ScheduleState, Sequence[Fire]]:
            schedule, since = definition(status), None if again else status.state.forgotten_at
            return status.state, backfill(schedule, start=start, end=end, now=now, limit=limit, known_since=since)

        details = {"start": str(start), "end": str(end)} | ({"again": True} if again else {})
        fired = await self._change(name, decide, self._entry("backfill_schedule", name, by, details=details))
        return self._handles(fired)

    # --- looking ------------------------------------------------------------------------------------------------------

    async def get(self, name: str) -> ScheduleStatus:
        found = await self._store.schedules(_check(name))
        if not found:
            raise UnknownSchedule(name)
        return found[0]

    async def list_all(self) -> list[ScheduleStatus]:
        """All of them by name, with their counters: `status.state.fired`, `.missed`, `.skipped`."""
        return await self._store.schedules()

    async def list_fires(self, name: str, *, limit: int = 20) -> list[FireRow]:
        """The last fire times that became tasks, newest first."""
        await self.get(name)
        return await self._store.list_fires(name, limit=check_count("limit", limit, least=1))

    async def next_fires(self, status: ScheduleStatus, *, count: int = 5) -> list[datetime]:
        """When it fires next, in UTC: none while it is paused, nor before it was begun, by the clock of who did. What a
        clock that was ahead has fired already does not fire again."""
        check_count("count", count, least=0)
        if status.schedule is None:
            return []
        now, fired = self._yard.now(), set[datetime]()
        if is_unsure(status.state, now=now):
            fired = {row.fire_at for row in await self._store.list_fires(status.name, limit=KEEP_FIRES)}
        fired = {at for at in fired if at > now}
        return expected(status.schedule, status.state, now=now, count=count, fired=fired)

    # --- how ----------------------------------------------------------------------------------------------------------

    @property
    def _store(self) -> ScheduleStore:
        return keeper(self._yard.store)

    def _find(self, consumer: str | ConsumerFunction[..., Any]) -> Consumer:
        if isinstance(consumer, ConsumerFunction):
            return consumer.consumer
        return self._yard._get_consumer(check_name("consumer", consumer))

    def make(
        self,
        name: str,
        rule: Rule | str | float | timedelta,
        consumer: Consumer,
        args: Mapping[str, Any] | None = None,
        *,
        zone: str | None = None,
        each: ListsItems | None = None,
        each_timeout_s: float | None = None,
        dedupe_scope: DedupeScope | str | None = None,
        **settings: Any,
    ) -> Schedule:
        """A schedule as it is kept; what is wrong with it is raised here."""
        unknown = settings.keys() - set(SETTINGS)
        if unknown:
            names = ", ".join(map(shorten, sorted(unknown)))
            raise InvalidInput(
                f"unknown setting {names} of a schedule; known are zone, {', '.join((*SETTINGS, *OF_ITEMS))}"
            )
        args = named(consumer.name, {} if args is None else args)
        if each is None:
            if each_timeout_s is not None or dedupe_scope is not None:
                field = "each_timeout_s" if each_timeout_s is not None else "dedupe_scope"
                raise InvalidInput("has no effect without {each}", field=field, fields=("each",))
            text = self._yard._encode(consumer, args)
        else:
            settings["each"] = self._make_each(consumer, args, each, each_timeout_s, dedupe_scope)
            text = to_json("args", args)
            check_size(consumer.name, text, self._yard._max_payload_bytes)
        schedule = Schedule(name=name, rule=make_rule(rule, zone), consumer=consumer.name, args=text, **settings)
        if each is not None and consumer.account and not schedule.skips_items:
            raise InvalidInput(
                f"must be 'skip' for accounts: one that is queued or busy gets no other task of {consumer.name!r}",
                field="overlap",
                given=schedule.overlap.value,
            )
        if dedupe_scope is not None and not schedule.skips_items:
            raise InvalidInput(
                f"has no effect with {{overlap}}={schedule.overlap.value!r}", field="dedupe_scope", fields=("overlap",)
            )
        if consumer.timeout_s is not None and (schedule.timeout_s or 0.0) > consumer.timeout_s:
            raise InvalidInput(
                f"{schedule.timeout_s:g} is longer than the {consumer.timeout_s:g} s that {consumer.name!r} allows",
                field="timeout_s",
            )
        return schedule

    def _entry(
        self, command: str, name: str, by: str, *, reason: str = "", details: dict[str, Any] | None = None
    ) -> AuditEntry | None:
        by, now = check_name("by", by), self._yard.now()
        return make_entry(by, command, TargetKind.SCHEDULE, name, now=now, reason=reason, details=details)

    async def _change(self, name: str, decide: Decide, audit: AuditEntry | None) -> Fired:
        """Carry out what `decide` says of the schedule as it is."""
        listed: tuple[Schedule, Items] | None = None
        for _ in range(TRIES):
            status, now = await self.get(name), self._yard.now()
            if status.state is UNREAD:
                raise InvalidInput(_UNREADABLE.format(quote(name), status.problem))
            state, fires = decide(status, now)
            tasks: list[FireTasks] = []
            if fires:
                schedule = definition(status)
                consumer = self._yard._get_consumer(schedule.consumer)
                if schedule.each is not None and (listed is None or listed[0] != schedule):
                    listed = schedule, await self._items.list_items(schedule, consumer)
                items = None if schedule.each is None or listed is None else listed[1]
                if items is not None and len(items) * len(fires) > MAX_BATCH:
                    raise BatchTooLarge(MAX_BATCH)
                tasks = await make_tasks(schedule, consumer, fires, items, now=now)
            records = [record for one in tasks for record in one.records]
            self._yard._note_unserved(records)
            send = partial(self._store.fire, name, version=status.version, state=state, fires=tasks, audit=audit)
            fired = await self._yard._engine.fire(name, records, send)
            if fired is not None:
                self._yard._engine.look_at_schedules()
                return fired
        raise StoreUnavailable(_NO_REST.format(quote(name)))

    def _handles(self, fired: Fired) -> list[TaskHandle]:
        return [TaskHandle(self._yard, uuid) for uuid in fired.made]

    def _keep_function(self, schedule: Schedule, each: Any) -> None:
        if schedule.each is not None and schedule.each.function:
            self.functions[schedule.name] = ItemFunction(schedule.each.function, each)

    def _make_each(
        self, consumer: Consumer, args: Mapping[str, Any], each: Any, timeout_s: float | None, scope: Any
    ) -> Each:
        settings: dict[str, Any] = {} if scope is None else {"dedupe_scope": check_scope(scope)}
        if callable(each):
            if timeout_s is not None:
                settings["timeout_s"] = check_timeout(timeout_s, field="each_timeout_s")
            return Each(function=name_of(each), **settings)
        if timeout_s is not None:
            raise InvalidInput("has no effect on a list", field="each_timeout_s", fields=("each",))
        items = encode(consumer, args, check_items(each), max_bytes=self._yard._max_payload_bytes)
        return Each(items=encode_items(items), count=len(items), **settings)


class ScheduleRun(NamedTuple):
    """The tasks that a schedule has made, and how many of its items were skipped."""

    tasks: list[TaskHandle]
    skipped: int = 0


_UNREADABLE = "schedule {} cannot be read here: {}"
_NO_REST = "schedule {} changes faster than it can be decided what to do with it"


async def put(
    store: ScheduleStore,
    schedule: Schedule,
    *,
    now: datetime,
    by: str,
    from_code: bool = False,
    replace: bool = True,
    audit: AuditEntry | None = None,
) -> None:
    """Write a definition: a new schedule begins now; one that is the same goes on as it is, and one that fires at other
    times counts from now on."""
    for _ in range(TRIES):
        found = await store.schedules(schedule.name)
        version, state = None, ScheduleState.begin(now)
        if found:
            (old,) = found
            if not replace:
                raise ScheduleExists(schedule.name, "replace it (--replace), remove it first, or take another name")
            if old.from_code and not from_code:
                raise ScheduleExists(schedule.name, "a program defines it whenever it starts: change it there")
            if old.schedule == schedule and old.from_code == from_code:
                return
            version = old.version
            if _has_same_pace(old.schedule, schedule):
                state = recover(old.state)
            else:
                state = amend(old.schedule, old.state, now=now)
        if await store.put_schedule(schedule, state, version=version, by=by, from_code=from_code, audit=audit):
            if from_code and found:
                log.warning("schedule %s is defined anew; if another program defines it too, rename one", schedule.name)
            return
    raise StoreUnavailable(_NO_REST.format(quote(schedule.name)))


def _has_same_pace(old: Schedule | None, new: Schedule) -> bool:
    return old is not None and all(getattr(old, field) == getattr(new, field) for field in PACE)


def make_rule(rule: Rule | str | float | timedelta, zone: str | None = None) -> Rule:
    """A rule as people write it: "30 4 * * MON", "@daily"; 900 or a timedelta for an interval."""
    if isinstance(rule, str):
        return Cron(rule, "UTC" if zone is None else zone)
    if zone is not None:
        raise InvalidInput("goes with a cron expression", field="zone", hint="an interval is the same in every zone")
    if isinstance(rule, Cron | Every):
        return rule
    return Every(rule.total_seconds() if isinstance(rule, timedelta) else rule)


def definition(status: ScheduleStatus) -> Schedule:
    """`InvalidInput` if it cannot be read here."""
    if status.schedule is None:
        raise InvalidInput(_UNREADABLE.format(quote(status.name), status.problem))
    return status.schedule


def _check(name: str) -> str:
    return check_name("the name of a schedule", name)


def keeper(store: Store) -> ScheduleStore:
    if not isinstance(store, ScheduleStore):
        raise InvalidInput(f"a {type(store).__name__} keeps no schedules")
    return store
