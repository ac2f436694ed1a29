"""The pure decision which fire times of a schedule become tasks now.

Nothing here writes: that a fire time becomes one task, whoever decides it, is the store's unique row (schedule, fire
time).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from datetime import datetime, timedelta
from enum import StrEnum
from itertools import islice

import msgspec

from taskyard.errors import InvalidInput
from taskyard.model import fire_times
from taskyard.model.given import check_count
from taskyard.model.recurrence import TICK, count_fires, fires_between
from taskyard.model.schedule import Missed, Overlap, Schedule, check_moment
from taskyard.model.schedule_state import (
    ScheduleState,
    ahead,
    decided_until,
    is_ahead,
    is_held,
    recover,
    rewind,
    skip,
)
from taskyard.model.task import FIRST

AT_ONCE = 100
"""Fires of one plan: what is left of a long catch-up comes in the next looks, in batches that a store takes. A schedule
with items has one fire in a batch."""


OVERDUE = timedelta(seconds=15)
"""Later than a leader and its deputies need, and the function of the items in most cases."""


class FireKind(StrEnum):
    """Why there is a task for a fire time."""

    ON_TIME = "on time"
    CAUGHT_UP = "caught up"
    BUFFERED = "buffered"
    BY_HAND = "by hand"
    BACKFILL = "backfill"


COUNTED = frozenset({FireKind.ON_TIME, FireKind.CAUGHT_UP, FireKind.BUFFERED})
"""What the rule has fired, and no person."""


class Fire(msgspec.Struct, frozen=True, kw_only=True):
    """One task to make, or one for each item: `fire_at` is what the rule says, and with the schedule's name unique;
    `due_at` when it may start."""

    fire_at: datetime
    due_at: datetime
    kind: FireKind

    @classmethod
    def by_hand(cls, now: datetime, taken: datetime | None = None) -> Fire:
        """One that is due now. Its fire time is a later one than `taken`."""
        return cls(fire_at=now if taken is None else max(now, taken + TICK), due_at=now, kind=FireKind.BY_HAND)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to do now, in one transaction: make the tasks of `fires`, cancel what has not ended of earlier ones if
    `cancels`, and write `state` (the very one that was given, if nothing has changed). Then look again at `look_at`,
    and, while a fire is buffered, when a task of this schedule ends. None is never: it is over, or paused."""

    state: ScheduleState
    look_at: datetime | None
    fires: tuple[Fire, ...] = ()
    cancels: bool = False


# --- what is due ------------------------------------------------------------------------------------------------------


def due(schedule: Schedule, state: ScheduleState, *, now: datetime, is_busy: bool) -> Plan:
    """What is to be done at `now`. `is_busy`: a task of an earlier fire has not ended. Where each item is skipped by
    itself, that is no reason not to fire: the store decides item by item."""
    if state.paused_at is not None:
        return Plan(state=skip(schedule, state, now), look_at=None)
    if is_held(state, now=now):
        return Plan(state=state, look_at=state.retry_at)
    is_busy = is_busy and not schedule.skips_items
    fires: list[Fire] = []
    buffered_at, lapsed = state.buffered_at, 0
    if buffered_at is not None and buffered_at < _too_old(schedule, now):
        buffered_at, lapsed = None, 1
    if buffered_at is not None and not is_busy:
        fires.append(_fire(schedule, buffered_at, FireKind.BUFFERED))
        buffered_at, is_busy = None, True
    after = decided_until(state, now)
    missed_until = max(after, _missed_until(schedule, after, now))
    missed = fire_times.count(schedule, after, min(missed_until, now))
    chosen = _choose(schedule, missed_until, now, is_busy=is_busy, has_buffered=buffered_at is not None)
    late = _late(schedule, now)
    fires += [_fire(schedule, at, FireKind.CAUGHT_UP if at < late else FireKind.ON_TIME) for at in chosen.fires]
    watermark_at = state.watermark_at
    if missed or chosen.decided:
        watermark_at = chosen.fires[-1] if chosen.has_more else now
    if fires or lapsed or watermark_at != state.watermark_at:
        state = msgspec.structs.replace(
            state,
            watermark_at=watermark_at,
            max_watermark_at=ahead(state.max_watermark_at, watermark_at),
            buffered_at=chosen.buffer_at or buffered_at,
            fired=state.fired + len(fires),
            missed=state.missed + missed + lapsed,
            skipped=state.skipped + chosen.skipped,
        )
        state = recover(state, fired=bool(fires))
    look_at = now if chosen.has_more else fire_times.find_next(schedule, max(now, watermark_at))
    return Plan(state=state, look_at=look_at, fires=tuple(fires), cancels=chosen.cancels)


class _Chosen(msgspec.Struct, frozen=True, kw_only=True):
    """Of the fire times that are not missed: those to fire, the one to keep back, and how many are skipped."""

    fires: tuple[datetime, ...] = ()
    buffer_at: datetime | None = None
    skipped: int = 0
    cancels: bool = False
    has_more: bool = False

    @property
    def decided(self) -> bool:
        return bool(self.fires or self.buffer_at or self.skipped)


def _at_once(schedule: Schedule) -> int:
    return AT_ONCE if schedule.each is None else 1


def _missed_until(schedule: Schedule, after: datetime, now: datetime) -> datetime:
    """What fires up to here, and later than `after`, is too late."""
    late = _late(schedule, now) - TICK
    if schedule.missed is Missed.SKIP:
        return late
    window = _too_old(schedule, now) - TICK
    if schedule.missed is Missed.ALL:
        return window
    latest = fire_times.find_last(schedule, max(after, window), now)
    return late if latest is None else max(window, min(late, latest - TICK))


def _late(schedule: Schedule, now: datetime) -> datetime:
    """What was to fire before this is late."""
    return now - timedelta(seconds=schedule.grace_s)


def _too_old(schedule: Schedule, now: datetime) -> datetime:
    """What was to fire before this is never made up for."""
    return now - timedelta(seconds=max(schedule.grace_s, schedule.catch_up_s))


def _choose(schedule: Schedule, after: datetime, now: datetime, *, is_busy: bool, has_buffered: bool) -> _Chosen:
    """What becomes of the fire times later than `after` up to `now`. Where all that were missed are made up for, they
    do not overlap each other: their tasks stand in line together, and only what is on time is in their way."""
    if schedule.missed is not Missed.ALL or schedule.overlap not in (Overlap.SKIP, Overlap.BUFFER):
        return _choose_by_overlap(schedule, after, now, is_busy=is_busy, has_buffered=has_buffered)
    late = max(after, _late(schedule, now) - TICK)
    most = _at_once(schedule)
    caught_up = tuple(islice(fire_times.between(schedule, after, late), most + 1))
    if len(caught_up) > most:
        return _Chosen(fires=caught_up[:most], has_more=True)
    is_busy = is_busy or bool(caught_up)
    chosen = _choose_by_overlap(schedule, late, now, is_busy=is_busy, has_buffered=has_buffered)
    return msgspec.structs.replace(chosen, fires=caught_up + chosen.fires)


def _choose_by_overlap(
    schedule: Schedule, after: datetime, now: datetime, *, is_busy: bool, has_buffered: bool
) -> _Chosen:
    at_once = _at_once(schedule)
    most = at_once + 1 if schedule.overlap is Overlap.ALLOW else 1
    first = tuple(islice(fire_times.between(schedule, after, now), most))
    if schedule.overlap is Overlap.ALLOW or not first:
        return _Chosen(fires=first[:at_once], has_more=len(first) > at_once)
    if schedule.overlap is Overlap.CANCEL:
        # Those before the last would be canceled at once.
        last = fire_times.find_last(schedule, after, now) or first[0]
        return _Chosen(fires=(last,), skipped=fire_times.count(schedule, after, last - TICK), cancels=is_busy)
    fired = () if is_busy else first
    rest = fire_times.count(schedule, fired[-1] if fired else after, now)
    if schedule.overlap is Overlap.BUFFER and rest and not has_buffered:
        kept = next(fire_times.between(schedule, fired[-1] if fired else after, now))
        return _Chosen(fires=fired, buffer_at=kept, skipped=rest - 1)
    return _Chosen(fires=fired, skipped=rest)


def _fire(schedule: Schedule, at: datetime, kind: FireKind) -> Fire:
    return Fire(fire_at=at, due_at=at + jitter(schedule, at), kind=kind)


def jitter(schedule: Schedule, fire_at: datetime) -> timedelta:
    """How long after `fire_at` its task is due: drawn from [0, `jitter_s`), the same by whoever draws."""
    if not schedule.jitter_s:
        return timedelta()
    from hashlib import blake2b

    seed = f"{(fire_at - FIRST) // TICK} {schedule.name}".encode()
    share = int.from_bytes(blake2b(seed, digest_size=6).digest(), "big") / (1 << 48)
    return timedelta(seconds=schedule.jitter_s * share)


def overdue_since(schedule: Schedule, state: ScheduleState, *, now: datetime) -> datetime | None:
    """The first fire time that nobody has decided, if it is due for longer than `OVERDUE`: no process that could fire
    it is there."""
    if state.paused_at is not None or state.retry_at is not None:
        return None
    return next(iter(fire_times.between(schedule, decided_until(state, now), now - OVERDUE)), None)


# --- by hand, and what the store has known ----------------------------------------------------------------------------


def backfill(
    schedule: Schedule,
    *,
    start: datetime,
    end: datetime,
    now: datetime,
    limit: int = 1_000,
    known_since: datetime | None = None,
) -> tuple[Fire, ...]:
    """The fire times from `start` on and before `end`, which must be past, within the bounds of the schedule, whatever
    its state is; all due now. For those later than `known_since` that have fired there is a row, and no second task.
    More than `limit` are refused, and those that the store may have forgotten."""
    start, end = check_moment("start", start), check_moment("end", end)
    check_count("limit", limit, least=1)
    if not start < end <= now:
        raise InvalidInput(f"a backfill goes from a start to a later end that is not in the future: {start} to {end}")
    if known_since is not None and start <= known_since:
        raise InvalidInput(
            f"which of its times up to {known_since} have fired is not known any more; begin later, or say again=True "
            "(--again) to fire them whether or not they have"
        )
    first, last = fire_times.bounds(schedule, start - TICK, end - TICK)
    if first >= last:
        raise InvalidInput(
            f"nothing from {start} to {end} is within the bounds of the schedule: "
            f"start_at={schedule.start_at}, end_at={schedule.end_at}"
        )
    n = count_fires(schedule.rule, after=first, until=last)
    if n > limit:
        raise InvalidInput(f"{n:,} fire times from {start} to {end} are more than {limit:,}; take less at a time")
    found = fires_between(schedule.rule, after=first, until=last)
    return tuple(Fire(fire_at=at, due_at=now, kind=FireKind.BACKFILL) for at in found)


def expected(
    schedule: Schedule, state: ScheduleState, *, now: datetime, count: int, fired: Collection[datetime] = ()
) -> list[datetime]:
    """The next fire times that become tasks, as far as can be told: none while it is paused, nor of times up to which
    it is handled, once it was sent back if it has to be; nor those that have `fired`."""
    if state.paused_at is not None:
        return []
    state = rewind(state, now=now) if is_ahead(state, now=now) else state
    after = max(now, state.watermark_at, state.active_since or now)
    taken = set(fired)
    upcoming = fire_times.upcoming(schedule, after=after, count=count + len(taken))
    return [at for at in upcoming if at not in taken][:count]


def uncount(state: ScheduleState, repeated: Iterable[Fire]) -> ScheduleState:
    """For fires that the store had a row of already: they have not fired a second time."""
    again = sum(1 for fire in repeated if fire.kind in COUNTED)
    return msgspec.structs.replace(state, fired=state.fired - again) if again else state
