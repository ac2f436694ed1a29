"""What the stores share about schedules: their text, and what becomes of fire times that were there already."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from datetime import datetime
from functools import lru_cache

import msgspec

from taskyard.errors import TaskyardError
from taskyard.model.command import Cancel
from taskyard.model.firing import uncount
from taskyard.model.notes import CancelCode
from taskyard.model.schedule import Schedule
from taskyard.model.schedule_state import ScheduleState
from taskyard.model.task import Dedupe
from taskyard.ports.schedules import UNREAD, FireRow, FireTasks, ScheduleStatus
from taskyard.ports.store import Add, Added

Fires = Sequence[FireTasks]

LARGE = 16_384
"""Characters of a definition. Longer ones have many items, and few of them are kept in memory."""


def to_text(value: Schedule | ScheduleState) -> str:
    return msgspec.json.encode(value).decode()


def read_status(
    name: str, definition: str, state: str, *, version: str, is_busy: bool, by: str, from_code: bool
) -> ScheduleStatus:
    """A schedule that cannot be read, or its state, is no reason not to read the others."""
    schedule, problem, read = None, "", UNREAD
    try:
        read = msgspec.json.decode(state, type=ScheduleState)
        schedule = _decode(definition) if len(definition) < LARGE else _decode_large(definition)
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


@lru_cache(maxsize=16)
def _decode_large(definition: str) -> Schedule:
    return msgspec.json.decode(definition, type=Schedule)


def correct(state: ScheduleState, fires: Fires, new: Collection[datetime]) -> ScheduleState:
    """The state to write: fires whose fire time is not new have not fired."""
    return uncount(state, (one.fire for one in fires if one.fire.fire_at not in new))


def make_add(fires: Fires) -> Add:
    """The tasks of these fire times as one add: those that have a dedupe slot are merged into the same work, and
    those of quarantined accounts are left out."""
    records = [record for one in fires for record in one.records]
    merges = any(record.dedupe_slot is not None for record in records)
    return Add(records, Dedupe.MERGE if merges else Dedupe.ALLOW, leaves_out=merges)


def rows_of(fires: Fires, added: Sequence[Added]) -> list[tuple[FireRow, list[str]]]:
    """What became of each fire time, and its new tasks. `added` is the answer to `make_add`."""
    rows, at = [], 0
    for one in fires:
        until = at + len(one.records)
        made = [answer.uuid for answer in added[at:until] if answer.is_new]
        row = FireRow(
            fire_at=one.fire.fire_at,
            task=made[0] if made else "",
            kind=one.fire.kind,
            made=len(made),
            skipped=one.skipped + len(one.records) - len(made),
        )
        rows.append((row, made))
        at = until
    return rows


def choose_new(fires: Fires, is_known: Callable[[datetime], bool]) -> list[FireTasks]:
    """Those whose fire time has not fired yet, each once."""
    new: dict[datetime, FireTasks] = {}
    for one in fires:
        if not is_known(one.fire.fire_at):
            new.setdefault(one.fire.fire_at, one)
    return list(new.values())


def count_asked(fires: Fires) -> int:
    """What an audit entry says was asked for."""
    return sum(len(one.records) + one.skipped for one in fires)


def cancel_for(name: str) -> Cancel:
    return Cancel(code=CancelCode.OVERLAP, subject=name)
