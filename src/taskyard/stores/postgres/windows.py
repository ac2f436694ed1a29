"""Until when those stand for their work that new tasks were merged into, or refused for. It is looked up after a turn:
what that has done stands, whether or not this can be told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from msgspec.structs import replace

from taskyard.errors import DuplicateTask, TaskyardError
from taskyard.model.task import TaskRecord
from taskyard.ports.store import Add, Added
from taskyard.stores.postgres.connection import Connection

Answer = list[Added] | TaskyardError
Ends = Mapping[tuple[str, str], datetime]
"""When a window ends, by its slot and by who stands for it."""


def slots_of(adds: Sequence[Add], answers: Sequence[Answer]) -> list[str]:
    """The work that somebody has to be told of: of a merge only who comes with a window, so that others need not wait
    for one more answer of the database."""
    slots: set[str] = set()
    for add, answer in zip(adds, answers, strict=True):
        if isinstance(answer, DuplicateTask):
            slots.add(answer.slot)
        elif isinstance(answer, list) and add.window_s is not None:
            slots.update(
                record.dedupe_slot
                for record, added in zip(add.records, answer, strict=True)
                if not added.is_new and record.dedupe_slot is not None
            )
    return sorted(slots)


async def read_ends(conn: Connection, slots: Sequence[str]) -> Ends:
    rows = await conn.fetch("SELECT slot, uuid, until FROM taskyard.slot_window WHERE slot = ANY ($1)", slots)
    return {(slot, uuid): until for slot, uuid, until in rows}


def told(add: Add, answer: Answer, ends: Ends) -> Answer:
    """The same answer, with what is known by now of windows."""
    if isinstance(answer, DuplicateTask):
        return DuplicateTask(answer.existing, answer.slot, until=ends.get((answer.slot, answer.existing)))
    if isinstance(answer, TaskyardError):
        return answer
    return [_until(record, added, ends) for record, added in zip(add.records, answer, strict=True)]


def _until(record: TaskRecord, added: Added, ends: Ends) -> Added:
    end = None if added.is_new else ends.get((record.dedupe_slot or "", added.uuid))
    return added if end is None else replace(added, until=end)
