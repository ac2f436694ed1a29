"""The states of a task and the one table of legal moves between them.

The SQL stores enforce this same table in the database; `sql_guard` writes it out for them, so it lives once.
"""

from __future__ import annotations

from enum import StrEnum

from taskyard.errors import IllegalMove


class TaskState(StrEnum):
    CREATED = "created"
    SCHEDULED = "scheduled"
    QUEUED = "queued"
    BLOCKED = "blocked"
    RUNNING = "running"
    RETRYING = "retrying"
    PAUSED = "paused"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELED = "canceled"
    SKIPPED = "skipped"
    INTERRUPTED = "interrupted"


QUEUED, RUNNING, COMPLETED, FAILED = TaskState.QUEUED, TaskState.RUNNING, TaskState.COMPLETED, TaskState.FAILED
"""The states that are looked for on the way of every task, for the hot path: to name one by its class costs 70 ns on
Python 3.11, and each task takes dozens of looks."""

_S = TaskState

LEGAL: dict[TaskState, frozenset[TaskState]] = {
    _S.CREATED: frozenset({_S.SCHEDULED, _S.QUEUED, _S.BLOCKED, _S.CANCELED}),
    _S.SCHEDULED: frozenset({_S.QUEUED, _S.BLOCKED, _S.PAUSED, _S.CANCELED, _S.SKIPPED}),
    _S.QUEUED: frozenset({_S.RUNNING, _S.SCHEDULED, _S.BLOCKED, _S.PAUSED, _S.CANCELED, _S.SKIPPED}),
    _S.BLOCKED: frozenset({_S.QUEUED, _S.SCHEDULED, _S.PAUSED, _S.CANCELED, _S.SKIPPED, _S.FAILED}),
    _S.PAUSED: frozenset({_S.QUEUED, _S.SCHEDULED, _S.BLOCKED, _S.RETRYING, _S.CANCELED, _S.SKIPPED}),
    _S.RUNNING: frozenset({_S.COMPLETED, _S.FAILED, _S.RETRYING, _S.CANCELED, _S.INTERRUPTED, _S.QUEUED}),
    _S.RETRYING: frozenset({_S.QUEUED, _S.PAUSED, _S.CANCELED, _S.SKIPPED, _S.FAILED}),
    _S.INTERRUPTED: frozenset({_S.QUEUED, _S.FAILED, _S.CANCELED}),
    _S.FAILED: frozenset({_S.QUEUED}),
    _S.COMPLETED: frozenset(),
    _S.CANCELED: frozenset(),
    _S.SKIPPED: frozenset(),
}

ENDED = frozenset({_S.COMPLETED, _S.FAILED, _S.CANCELED, _S.SKIPPED})
"""Where a task rests. A failed one can still be sent again by a person; the others are final."""

WAITING_FOR_TIME = frozenset({_S.SCHEDULED, _S.RETRYING})
"""What the due-time loop promotes to queued."""

STANDS_IN_LINE = frozenset({_S.QUEUED, _S.PAUSED})
"""What others wait behind in a queue that is strict about places; of what is held, that which had a place when it was.
Who waits for others has not come to the line yet: it may stand before one of those."""

HAS_PLACE = STANDS_IN_LINE | {_S.BLOCKED}
"""What stands in line, or will, at a place it has already: where that is, people may change."""

HOLDS_KEY = frozenset({_S.RUNNING, _S.RETRYING})
"""What counts against the limit of its key. A task in backoff keeps its turn: order within a key survives retries."""


def check_move(old: TaskState, new: TaskState) -> None:
    if new not in LEGAL[old]:
        raise IllegalMove(old, new)


def sql_guard(old: str, new: str) -> str:
    """The table above as an SQL expression that is true for every *illegal* move from column `old` to column `new`.

    A search in one text of pairs: `IN (…)` lists inside a trigger are built anew for every row, which on SQLite costs
    ten times as much. The pairs of the hot path stand first."""
    hot = [(_S.CREATED, _S.QUEUED), (_S.QUEUED, _S.RUNNING), (_S.RUNNING, _S.COMPLETED)]
    pairs = hot + [(a, b) for a, after in LEGAL.items() for b in sorted(after) if (a, b) not in hot]
    text = "".join(f"{a}>{b}|" for a, b in pairs)
    return f"{old} <> {new} AND instr('|{text}', '|' || {old} || '>' || {new} || '|') = 0"
