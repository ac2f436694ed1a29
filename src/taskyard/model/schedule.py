"""Recurring schedules: what is asked, and the pure decision which fire times become tasks now.

Every fire time is decided once: fired, missed or skipped, or kept back until the task before it has ended. `handled_at`
says how far that has come. It goes back only where a clock was ahead, and never behind `since`, so a clock that is set
back fires nothing twice, nor what lies before the schedule. Nothing here writes: that a fire time becomes one task,
whoever decides it, is the store's unique row (schedule, fire time).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from datetime import datetime, timedelta
from enum import StrEnum
from itertools import islice
from typing import Annotated, Any

import msgspec

from taskyard.errors import InvalidInput, quote
from taskyard.model.given import (
    LONGEST_S,
    check_count,
    check_name,
    check_reason,
    check_retry,
    check_text,
    check_timeout,
)
from taskyard.model.order import Priority
from taskyard.model.recurrence import (
    FIRST,
    LAST,
    TICK,
    Cron,
    Every,
    Rule,
    count_fires,
    find_last_fire,
    fires_between,
    next_fires,
)
from taskyard.model.retry import RetryPolicy
from taskyard.model.task import aware

AT_ONCE = 100
"""How many fires one plan holds: what is left of a long catch-up comes in the next looks, in batches a store takes."""

LONGEST_JITTER_S = 86_400.0

LEAST_GRACE_S = 1.0
"""Where what is late is skipped: nobody looks at the very moment, so with less a schedule would never fire."""

AHEAD = timedelta(seconds=5)
"""A schedule that is further ahead than this was handled by a clock that was wrong; nodes differ by less."""

FARTHEST = timedelta(days=1)
"""A schedule that was begun later than so long from now was begun by a clock that was wrong; a slow one is right again
sooner, or seen by everybody."""

Moment = Annotated[datetime, msgspec.Meta(tz=True)]
"""As it comes out of a store: one without a zone is refused where it is read."""


class Missed(StrEnum):
    """What becomes of fire times that nobody was there for, or `grace_s` too late. Older ones than `catch_up_s` are
    never made up for."""

    SKIP = "skip"
    ONCE = "once"
    """One run makes up for all: the latest, unless a fire time that is not late stands in for it."""
    ALL = "all"


class Overlap(StrEnum):
    """What becomes of a fire time while the task of an earlier one has not ended."""

    SKIP = "skip"
    BUFFER = "buffer"
    """One is kept back until then, the others are skipped."""
    ALLOW = "allow"
    CANCEL = "cancel"
    """The earlier one is canceled."""


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """A task for `source`, again and again: `rule` says when, from `start_at` on and before `end_at`. `args` is JSON
    text; `queue`, `timeout_s` and `retry` are as the consumer has them if they are None.

    A fire time is late when `grace_s` have passed (a second at least, where what is late is skipped); `missed` and
    `catch_up_s` say what then. Tasks are due up to
    `jitter_s` after their fire time, by a lot that is the same on every node."""

    name: str
    rule: Rule
    source: str
    args: str = "{}"
    queue: str | None = None
    priority: Priority = Priority.NORMAL
    key: str | None = None
    timeout_s: float | None = None
    retry: RetryPolicy | None = None
    missed: Missed = Missed.ONCE
    catch_up_s: float = 86_400.0
    grace_s: float = 60.0
    overlap: Overlap = Overlap.SKIP
    jitter_s: float = 0.0
    start_at: datetime | None = None
    end_at: datetime | None = None

    def __post_init__(self) -> None:
        check_name("the name of a schedule", self.name)
        if not isinstance(self.rule, Cron | Every):
            raise InvalidInput(
                f"the rule of schedule {quote(self.name)} must be a Cron or an Every, such as "
                f"Cron('30 4 * * MON', 'Europe/Berlin') or Every(900), not {quote(self.rule)}"
            )
        self._check_task()
        self._set(
            missed=_one_of(Missed, "missed", self.missed),
            overlap=_one_of(Overlap, "overlap", self.overlap),
            catch_up_s=_check_span("catch_up_s", self.catch_up_s),
            grace_s=_check_span("grace_s", self.grace_s),
            jitter_s=_check_span("jitter_s", self.jitter_s, most=LONGEST_JITTER_S),
            start_at=_check_bound("start_at", self.start_at),
            end_at=_check_bound("end_at", self.end_at),
        )
        if self.missed is Missed.SKIP and self.grace_s < LEAST_GRACE_S:
            raise InvalidInput(
                f"with missed='skip' and grace_s={self.grace_s:g} it would never fire: nobody looks at the very "
                f"moment. Give grace_s at least {LEAST_GRACE_S:g}"
            )
        if isinstance(self.rule, Every) and self.jitter_s >= self.rule.seconds:
            raise InvalidInput(f"jitter_s={self.jitter_s:g} must be shorter than the interval, {self.rule.seconds:g} s")
        if self.start_at is not None and self.end_at is not None and self.start_at >= self.end_at:
            raise InvalidInput(f"end_at={self.end_at} must be later than start_at={self.start_at}")

    def _check_task(self) -> None:
        check_name("source", self.source)
        for field, text in (("queue", self.queue), ("key", self.key)):
            if text is not None:
                check_name(field, text)
        try:
            self._set(priority=Priority.of(self.priority))
        except ValueError as exc:
            raise InvalidInput(str(exc)) from None
        if self.timeout_s is not None:
            self._set(timeout_s=check_timeout(self.timeout_s))
        if self.retry is not None:
            self._set(retry=check_retry(self.retry))
        try:
            msgspec.json.decode(check_text("args", self.args), type=dict[str, Any])
        except (ValueError, RecursionError) as exc:
            raise InvalidInput(f"args must be a JSON object as text, not {quote(self.args)}: {exc}") from None

    def _set(self, **fields: object) -> None:
        for name, value in fields.items():
            msgspec.structs.force_setattr(self, name, value)


class ScheduleState(msgspec.Struct, frozen=True, kw_only=True):
    """How far a schedule has come. All fire times up to `handled_at` are decided: they are counted as fired, missed or
    skipped, but for the one at `buffered_at`, which waits for the task before it. What a person fires, now or for
    times long past, is not counted. Of fire times up to `forgotten_at` the store no longer knows which have fired.

    Of times up to `since` nothing ever fires: it was begun, resumed, or given another rule then. `reached_at` is how
    far it had come before it was sent back."""

    handled_at: Moment
    since: Moment | None = None
    reached_at: Moment | None = None
    buffered_at: Moment | None = None
    paused_at: Moment | None = None
    paused_by: str = ""
    note: str = ""
    fired: int = 0
    missed: int = 0
    skipped: int = 0
    forgotten_at: Moment | None = None

    @classmethod
    def begin(cls, now: datetime) -> ScheduleState:
        """Of a schedule that is made now: it fires from here on."""
        return cls(handled_at=aware("now", now), since=now)


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
    """One task to make: `fire_at` is what the rule says, and with the schedule's name unique; `due_at` when it may
    start."""

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


# --- deciding ---------------------------------------------------------------------------------------------------------


def due(schedule: Schedule, state: ScheduleState, *, now: datetime, is_busy: bool) -> Plan:
    """What is to be done at `now`. `is_busy`: the task of an earlier fire has not ended."""
    if state.paused_at is not None:
        return Plan(state=_skip(schedule, state, now), look_at=None)
    fires: list[Fire] = []
    buffered_at, lapsed = state.buffered_at, 0
    if buffered_at is not None and buffered_at < _too_old(schedule, now):
        buffered_at, lapsed = None, 1
    if buffered_at is not None and not is_busy:
        fires.append(_fire(schedule, buffered_at, FireKind.BUFFERED))
        buffered_at, is_busy = None, True
    after = _decided_until(state, now)
    missed_until = max(after, _missed_until(schedule, after, now))
    missed = _count(schedule, after, min(missed_until, now))
    chosen = _choose(schedule, missed_until, now, is_busy=is_busy, has_buffered=buffered_at is not None)
    late = _late(schedule, now)
    fires += [_fire(schedule, at, FireKind.CAUGHT_UP if at < late else FireKind.ON_TIME) for at in chosen.fires]
    handled_at = state.handled_at
    if missed or chosen.decided:
        handled_at = chosen.fires[-1] if chosen.has_more else now
    if fires or lapsed or handled_at != state.handled_at:
        state = msgspec.structs.replace(
            state,
            handled_at=handled_at,
            reached_at=_ahead(state.reached_at, handled_at),
            buffered_at=chosen.buffer_at or buffered_at,
            fired=state.fired + len(fires),
            missed=state.missed + missed + lapsed,
            skipped=state.skipped + chosen.skipped,
        )
    look_at = now if chosen.has_more else _find_next(schedule, max(now, handled_at))
    return Plan(state=state, look_at=look_at, fires=tuple(fires), cancels=chosen.cancels)


def _decided_until(state: ScheduleState, now: datetime) -> datetime:
    """Seen at `now`. What lies before the place from which it was sent back may fire at its time, and is not made up
    for once that is past: it was decided, and a clock that was set back for a while is no reason to do so again."""
    if state.reached_at is None or state.reached_at > now:
        return state.handled_at
    return max(state.handled_at, state.reached_at)


def _ahead(reached_at: datetime | None, handled_at: datetime) -> datetime | None:
    return None if reached_at is None or reached_at <= handled_at else reached_at


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


def _missed_until(schedule: Schedule, after: datetime, now: datetime) -> datetime:
    """What fires up to here, and later than `after`, is too late."""
    late = _late(schedule, now) - TICK
    if schedule.missed is Missed.SKIP:
        return late
    window = _too_old(schedule, now) - TICK
    if schedule.missed is Missed.ALL:
        return window
    latest = _find_last(schedule, max(after, window), now)
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
    caught_up = tuple(islice(_between(schedule, after, late), AT_ONCE + 1))
    if len(caught_up) > AT_ONCE:
        return _Chosen(fires=caught_up[:AT_ONCE], has_more=True)
    is_busy = is_busy or bool(caught_up)
    chosen = _choose_by_overlap(schedule, late, now, is_busy=is_busy, has_buffered=has_buffered)
    return msgspec.structs.replace(chosen, fires=caught_up + chosen.fires)


def _choose_by_overlap(
    schedule: Schedule, after: datetime, now: datetime, *, is_busy: bool, has_buffered: bool
) -> _Chosen:
    first = tuple(islice(_between(schedule, after, now), AT_ONCE + 1 if schedule.overlap is Overlap.ALLOW else 1))
    if schedule.overlap is Overlap.ALLOW or not first:
        return _Chosen(fires=first[:AT_ONCE], has_more=len(first) > AT_ONCE)
    if schedule.overlap is Overlap.CANCEL:
        # Those before the last would be canceled at once.
        last = _find_last(schedule, after, now) or first[0]
        return _Chosen(fires=(last,), skipped=_count(schedule, after, last - TICK), cancels=is_busy)
    fired = () if is_busy else first
    rest = _count(schedule, fired[-1] if fired else after, now)
    if schedule.overlap is Overlap.BUFFER and rest and not has_buffered:
        kept = next(_between(schedule, fired[-1] if fired else after, now))
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


# --- what a person asks -----------------------------------------------------------------------------------------------


def pause(state: ScheduleState, *, now: datetime, note: str = "", by: str = "") -> ScheduleState:
    """Fires nothing from now on, not even what was kept back. A second pause changes the note, and whose it is."""
    told = {"paused_by": check_text("by", by), "note": check_reason(note, field="note")}
    return msgspec.structs.replace(state, paused_at=state.paused_at or now, **told)


def resume(schedule: Schedule, state: ScheduleState, *, now: datetime) -> ScheduleState:
    """Fires again from now on. What has come due while it was paused is skipped, whatever `missed` says."""
    if state.paused_at is None:
        return state
    return msgspec.structs.replace(_skip(schedule, _begin_at(state, now), now), paused_at=None, paused_by="", note="")


def amend(old: Schedule | None, state: ScheduleState, *, now: datetime) -> ScheduleState:
    """For a schedule that is given another rule or policy than the `old` one (None if that cannot be read): it counts
    from now on, and nothing is kept back. What has come due by the old one is skipped."""
    kept = state.buffered_at is not None
    if old is not None:
        state = _skip(old, state, now)
    handled_at = max(state.handled_at, now)
    state = msgspec.structs.replace(state, handled_at=handled_at, buffered_at=None, skipped=state.skipped + kept)
    return _begin_at(state, now)


def _begin_at(state: ScheduleState, now: datetime) -> ScheduleState:
    return msgspec.structs.replace(state, since=now if state.since is None else max(state.since, now))


def rewind(state: ScheduleState, *, now: datetime) -> ScheduleState:
    """For a clock that was far ahead, and is right again: what lies after `now` may be decided once more. What has
    fired of it does not fire again, by the store's unique row; so it goes back no further than there are rows. Nor
    behind `since`, for it may be the clock of now that is wrong, unless that is too far ahead to be true."""
    since = state.since
    if since is not None and since > now + FARTHEST:
        since = now
    back_to = max(now, since or now, state.forgotten_at or now)
    if back_to >= state.handled_at:
        return state
    reached_at = max(state.handled_at, state.reached_at or state.handled_at)
    return msgspec.structs.replace(state, handled_at=back_to, since=since, reached_at=reached_at)


def forget(state: ScheduleState, fire_at: datetime | None) -> ScheduleState:
    """The store has forgotten fire times, the last of them at `fire_at`."""
    if fire_at is None or (state.forgotten_at is not None and state.forgotten_at >= fire_at):
        return state
    return msgspec.structs.replace(state, forgotten_at=fire_at)


def uncount(state: ScheduleState, repeated: Iterable[Fire]) -> ScheduleState:
    """For fires that the store had a row of already: they have not fired a second time."""
    again = sum(1 for fire in repeated if fire.kind in COUNTED)
    return msgspec.structs.replace(state, fired=state.fired - again) if again else state


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
    start, end = _check_moment("start", start), _check_moment("end", end)
    check_count("limit", limit, least=1)
    if not start < end <= now:
        raise InvalidInput(f"a backfill goes from a start to a later end that is not in the future: {start} to {end}")
    if known_since is not None and start <= known_since:
        raise InvalidInput(
            f"which of its times up to {known_since} have fired is not known any more; begin later, or say again=True "
            "(--again) to fire them whether or not they have"
        )
    first, last = _bounds(schedule, start - TICK, end - TICK)
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


def is_ahead(state: ScheduleState, *, now: datetime) -> bool:
    """Whether it is to be sent back: a clock that was far ahead has handled it."""
    return state.handled_at > now + AHEAD


def is_unsure(state: ScheduleState, *, now: datetime) -> bool:
    """Whether some of the fire times that are still to come may have fired already."""
    return max(state.handled_at, state.reached_at or state.handled_at) > now


def expected(
    schedule: Schedule, state: ScheduleState, *, now: datetime, count: int, fired: Collection[datetime] = ()
) -> list[datetime]:
    """The next fire times that become tasks, as far as can be told: none while it is paused, nor of times up to which
    it is handled, once it was sent back if it has to be; nor those that have `fired`."""
    if state.paused_at is not None:
        return []
    state = rewind(state, now=now) if is_ahead(state, now=now) else state
    after = max(now, state.handled_at, state.since or now)
    taken = set(fired)
    return [at for at in upcoming(schedule, after=after, count=count + len(taken)) if at not in taken][:count]


def upcoming(schedule: Schedule, *, after: datetime, count: int) -> list[datetime]:
    """The next fire times within the schedule's bounds."""
    first, last = _bounds(schedule, after, LAST)
    return [at for at in next_fires(schedule.rule, after=first, count=count) if at <= last]


def _skip(schedule: Schedule, state: ScheduleState, now: datetime) -> ScheduleState:
    skipped = _count(schedule, _decided_until(state, now), now)
    if not skipped:
        return state
    reached_at = _ahead(state.reached_at, now)
    return msgspec.structs.replace(state, handled_at=now, reached_at=reached_at, skipped=state.skipped + skipped)


# --- the rule within the bounds of its schedule -----------------------------------------------------------------------


def _bounds(schedule: Schedule, after: datetime, until: datetime) -> tuple[datetime, datetime]:
    if schedule.start_at is not None:
        after = max(after, schedule.start_at - TICK)
    if schedule.end_at is not None:
        until = min(until, schedule.end_at - TICK)
    return after, until


def _between(schedule: Schedule, after: datetime, until: datetime) -> Iterator[datetime]:
    first, last = _bounds(schedule, after, until)
    return fires_between(schedule.rule, after=first, until=last)


def _count(schedule: Schedule, after: datetime, until: datetime) -> int:
    first, last = _bounds(schedule, after, until)
    return count_fires(schedule.rule, after=first, until=last)


def _find_last(schedule: Schedule, after: datetime, until: datetime) -> datetime | None:
    first, last = _bounds(schedule, after, until)
    return find_last_fire(schedule.rule, after=first, until=last) if first < last else None


def _find_next(schedule: Schedule, after: datetime) -> datetime | None:
    return next(iter(upcoming(schedule, after=after, count=1)), None)


# --- checks -----------------------------------------------------------------------------------------------------------


def _one_of(kind: type[StrEnum], field: str, value: Any) -> StrEnum:
    try:
        return kind(value)
    except ValueError:
        raise InvalidInput(f"{field} {quote(value)} is not one of {', '.join(kind)}") from None


def _check_span(field: str, value: Any, *, most: float = LONGEST_S) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise InvalidInput(f"{field} must be a number of seconds from 0 to {most:g}, not {quote(value)}")
    return float(value)


def _check_bound(field: str, value: Any) -> datetime | None:
    return None if value is None else _check_moment(field, value, hint=", or None for no bound")


def _check_moment(field: str, value: Any, *, hint: str = "") -> datetime:
    """`value` in UTC, if a rule can fire then: nothing that is computed from it leaves the calendar."""
    if not isinstance(value, datetime):
        raise InvalidInput(f"{field} must be a datetime with a time zone{hint}, not {quote(value)}")
    at = aware(field, value)
    if not FIRST <= at < LAST:
        raise InvalidInput(f"{field} must be between the years 1970 and 9000{hint}, not {value}")
    return at
