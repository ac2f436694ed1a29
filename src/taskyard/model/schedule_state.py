"""How far a schedule has come, and what else than firing moves it: a person, another rule, a clock that was wrong.

Every fire time is decided once: fired, missed, skipped, or held back until the task before it finishes. `watermark_at`
says how far the decisions came. It goes back only after a clock was ahead, and never behind `active_since`. So a clock
that is set back fires nothing twice, and nothing from before the schedule.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Annotated

import msgspec

from taskyard.model import fire_times
from taskyard.model.given import check_reason, check_text
from taskyard.model.schedule import Schedule
from taskyard.model.task import aware

AHEAD = timedelta(seconds=5)
"""A schedule that is further ahead than this was handled by a clock that was wrong; nodes differ by less."""

RETRY, LONGEST_RETRY = timedelta(seconds=10), timedelta(minutes=5)
"""How long after a failed fire the next try comes: twice as long each time, up to the second."""

FARTHEST = timedelta(days=1)
"""A schedule that was begun later than so long from now was begun by a clock that was wrong; a slow one is right again
sooner, or seen by everybody."""

Moment = Annotated[datetime, msgspec.Meta(tz=True)]
"""As it comes out of a store: one without a zone is refused where it is read."""


class ScheduleState(msgspec.Struct, frozen=True, kw_only=True):
    """How far a schedule has come. All fire times up to `watermark_at` are decided: each is counted as fired, missed or
    skipped, except the one at `buffered_at`, which waits for the task before it. Fires by a person, now or for past
    times, are not counted. For fire times up to `forgotten_at` the store no longer knows which of them fired.

    No time up to `active_since` ever fires: the schedule was created, resumed or changed then. `max_watermark_at` is
    the watermark before it was set back.

    If the items of a schedule cannot be listed, nothing fires: `failed` counts that, `problem` says why, and the next
    try is at `retry_at`; `retries` is how often in a row that was so."""

    watermark_at: Moment
    active_since: Moment | None = None
    max_watermark_at: Moment | None = None
    buffered_at: Moment | None = None
    paused_at: Moment | None = None
    paused_by: str = ""
    note: str = ""
    fired: int = 0
    missed: int = 0
    skipped: int = 0
    forgotten_at: Moment | None = None
    failed: int = 0
    problem: str = ""
    retry_at: Moment | None = None
    retries: int = 0

    @classmethod
    def begin(cls, now: datetime) -> ScheduleState:
        """Of a schedule that is made now: it fires from here on."""
        return cls(watermark_at=aware("now", now), active_since=now)


def pause(state: ScheduleState, *, now: datetime, note: str = "", by: str = "") -> ScheduleState:
    """Fires nothing from now on, not even what was kept back. A second pause changes the note, and whose it is."""
    told = {"paused_by": check_text("by", by), "note": check_reason(note, field="note")}
    return msgspec.structs.replace(state, paused_at=state.paused_at or now, **told)


def resume(schedule: Schedule, state: ScheduleState, *, now: datetime) -> ScheduleState:
    """Fires again from now on. What has come due while it was paused is skipped, whatever `missed` says."""
    if state.paused_at is None:
        return state
    state = skip(schedule, _begin_at(state, now), now)
    watermark_at = max(state.watermark_at, now)
    state = msgspec.structs.replace(state, watermark_at=watermark_at, paused_at=None, paused_by="", note="")
    return recover(state)


def amend(old: Schedule | None, state: ScheduleState, *, now: datetime) -> ScheduleState:
    """For a schedule that is given another rule or policy than the `old` one (None if that cannot be read): it counts
    from now on, and nothing is kept back. What has come due by the old one is skipped."""
    kept = state.buffered_at is not None
    if old is not None:
        state = skip(old, state, now)
    watermark_at = max(state.watermark_at, now)
    state = msgspec.structs.replace(state, watermark_at=watermark_at, buffered_at=None, skipped=state.skipped + kept)
    return _begin_at(recover(state), now)


def _begin_at(state: ScheduleState, now: datetime) -> ScheduleState:
    return msgspec.structs.replace(
        state, active_since=now if state.active_since is None else max(state.active_since, now)
    )


def rewind(state: ScheduleState, *, now: datetime) -> ScheduleState:
    """For a clock that was far ahead, and is right again: what lies after `now` may be decided once more. What has
    fired of it does not fire again, by the store's unique row; so it goes back no further than there are rows. Nor
    behind `active_since`, for it may be the clock of now that is wrong, unless that is too far ahead to be true."""
    since = state.active_since
    if since is not None and since > now + FARTHEST:
        since = now
    back_to = max(now, since or now, state.forgotten_at or now)
    if back_to >= state.watermark_at:
        return state
    max_watermark_at = max(state.watermark_at, state.max_watermark_at or state.watermark_at)
    return msgspec.structs.replace(state, watermark_at=back_to, active_since=since, max_watermark_at=max_watermark_at)


def forget(state: ScheduleState, fire_at: datetime | None) -> ScheduleState:
    """The store has forgotten fire times, the last of them at `fire_at`."""
    if fire_at is None or (state.forgotten_at is not None and state.forgotten_at >= fire_at):
        return state
    return msgspec.structs.replace(state, forgotten_at=fire_at)


def is_ahead(state: ScheduleState, *, now: datetime) -> bool:
    """Whether it is to be sent back: a clock that was far ahead has handled it."""
    return state.watermark_at > now + AHEAD


def is_unsure(state: ScheduleState, *, now: datetime) -> bool:
    """Whether some of the fire times that are still to come may have fired already."""
    return max(state.watermark_at, state.max_watermark_at or state.watermark_at) > now


def fail(state: ScheduleState, *, now: datetime, problem: str) -> ScheduleState:
    """For a fire whose tasks could not be made. Nothing is decided: it is tried again, until it is missed."""
    pause = min(RETRY * 2 ** min(state.retries, 10), LONGEST_RETRY)
    return msgspec.structs.replace(
        state, failed=state.failed + 1, problem=problem, retry_at=now + pause, retries=state.retries + 1
    )


def recover(state: ScheduleState, *, fired: bool = True) -> ScheduleState:
    """For a schedule that has fired, or was changed or resumed: what failed before counts no more. Without `fired`, it
    is given up instead, and the problem stays to be seen."""
    problem = "" if fired else state.problem
    if state.retry_at is None and state.problem == problem:
        return state
    return msgspec.structs.replace(state, problem=problem, retry_at=None, retries=0)


def is_held(state: ScheduleState, *, now: datetime) -> bool:
    """Whether the next try after a failed fire is still to come. A time that is too far ahead is that of a clock that
    was wrong."""
    return state.retry_at is not None and now < state.retry_at <= now + LONGEST_RETRY


def skip(schedule: Schedule, state: ScheduleState, now: datetime) -> ScheduleState:
    """What has come due up to `now`, and is not decided, does not fire."""
    skipped = fire_times.count(schedule, decided_until(state, now), now)
    if not skipped:
        return state
    max_watermark_at = ahead(state.max_watermark_at, now)
    return msgspec.structs.replace(
        state, watermark_at=now, max_watermark_at=max_watermark_at, skipped=state.skipped + skipped
    )


def decided_until(state: ScheduleState, now: datetime) -> datetime:
    """Seen at `now`, how far. What lies before the place from which it was sent back may fire at its time, and is not
    made up for once that is past: it was decided, and a clock that was set back for a while is no reason to do so
    again."""
    if state.max_watermark_at is None or state.max_watermark_at > now:
        return state.watermark_at
    return max(state.watermark_at, state.max_watermark_at)


def ahead(max_watermark_at: datetime | None, watermark_at: datetime) -> datetime | None:
    """How far it had come, unless it has come as far again."""
    return None if max_watermark_at is None or max_watermark_at <= watermark_at else max_watermark_at
