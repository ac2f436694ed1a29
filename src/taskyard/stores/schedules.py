"""What the stores share about schedules: their text, and what becomes of fire times that were there already."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from functools import lru_cache

import msgspec

from taskyard.errors import TaskyardError
from taskyard.model.command import Cancel
from taskyard.model.firing import Fire, uncount
from taskyard.model.notes import CancelCode
from taskyard.model.schedule import Schedule
from taskyard.model.schedule_state import ScheduleState
from taskyard.model.task import TaskRecord
from taskyard.ports.schedules import UNREAD, ScheduleStatus

Fires = Sequence[tuple[Fire, TaskRecord]]


def to_text(value: Schedule | ScheduleState) -> str:
    return msgspec.json.encode(value).decode()


def read_status(
    name: str, definition: str, state: str, *, version: str, is_busy: bool, by: str, from_code: bool
) -> ScheduleStatus:
    """A schedule that cannot be read, or its state, is no reason not to read the others."""
    schedule, problem, read = None, "", UNREAD
    try:
        read = msgspec.json.decode(state, type=ScheduleState)
        schedule = _decode(definition)
    except (ValueError, TaskyardError) as exc:  # of msgspec's own, and text that is not even UTF-8
        problem = str(exc)
    return ScheduleStatus(
        name=name,
        schedule=schedule,
        state=read,
        version=version,
        is_busy=is_busy,
        by=by,
        from_code=from_code,
        problem=problem,
    )


@lru_cache(maxsize=4_096)
def _decode(definition: str) -> Schedule:
    """All of them are read at every look, and they seldom change."""
    return msgspec.json.decode(definition, type=Schedule)


def correct(state: ScheduleState, fires: Fires, made: Collection[datetime]) -> ScheduleState:
    """The state to write: fires that made no task have not fired."""
    return uncount(state, (fire for fire, _ in fires if fire.fire_at not in made))


def cancel_for(name: str) -> Cancel:
    return Cancel(code=CancelCode.OVERLAP, subject=name)
