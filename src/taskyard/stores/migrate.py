"""Numbered migrations: `sql/<database>/NNNN_name.sql`, applied in order, each once."""

from __future__ import annotations

from importlib import resources
from importlib.resources.abc import Traversable

import msgspec

from taskyard.model.dedupe import replaced
from taskyard.model.dependency import give_up
from taskyard.model.move import Move
from taskyard.model.order import GAP
from taskyard.model.places import CROWDED, SHARE, SMALLEST, THINNING
from taskyard.model.settle import ASKED_TO_CANCEL, CANCELED_BY_FORCE, TOO_LATE
from taskyard.model.state import TaskState, sql_guard
from taskyard.model.task import FIRST, LAST, TaskRecord
from taskyard.ports.store import PROMOTE_AT_MOST, RUNS_KEPT, Schema
from taskyard.stores.locks import Lock
from taskyard.stores.plan import RELEASE_AT_MOST
from taskyard.stores.rows import EPOCH

EVENTS_AT_MOST = 1 << 17
"""Events of one transaction, in a store that numbers events by transactions: more than the largest batch brings."""

RAISE_AFTER = 500 * GAP
"""How far claims must have come beyond a lane's mark before it is moved: some 250 tasks, of two numbers each."""

RAISE_ONE_IN = 16
"""A claim of one task looks so seldom whether the mark is to be moved, one of more tasks more often."""

READ_AHEAD = 16
"""Tasks of a lane that a claim over several priorities reads at once. There may be many lanes, and it takes of few."""

LOCKED_AT_MOST = 1000
"""Slots of one add that are locked each by itself: a server has room for some thousands of locks."""

RULED_AT_MOST = 1000
"""Tasks, or keys, that are brought under another rule of their queue at a time: nothing of it starts meanwhile."""

LOOKED_AT_MOST = 20_000
"""Tasks, of whatever queue, that are looked through for them."""

LANES_KEPT = 100
"""So many are looked at in less than a millisecond; with more, those that are empty are forgotten."""

CHANNEL = "taskyard"
"""Where processes tell each other of what they wrote, over PostgreSQL."""

SEPARATOR = chr(30)
"""Between texts that are sent as one: a control character, which JSON never has and an id must not have."""

LEAP = 10_000_000
"""Numbers that are left out where a server may hand out again what another has: far more than that one can have handed
out without this one's knowledge, and a millionth of what there are."""

HIGHEST = 2**63 - 1
"""No id lies above it."""

LONGEST_NAME_BYTES = 1200
"""Of a text that stands in an index, where there are two of them in most; PostgreSQL takes about 2,700 for both."""

LOWEST = -(2**62)
"""Below every place that a store comes to in practice; and a place less this one is still a number of 64 bits."""

PARENT = "\x01parent\x01"
"""Stands there for the task that another waited for, or that came in its stead."""

REASON = "\x01reason\x01"
"""Stands in a stored error for the reason of a cancel that only the database knows. No text has it by chance."""


def migrations(database: str) -> list[tuple[int, str]]:
    """(number, SQL) of every migration for `database`, in order."""
    found = _files(database)
    return [(int(file.name[:4]), _fill(file.read_text(encoding="utf-8"), database)) for file in found]


def newest(database: str) -> int:
    """The number of the last of them."""
    return int(_files(database)[-1].name[:4])


def schema_at(version: int, database: str) -> Schema:
    """What lies between that version and the newest."""
    names = [file.name.removesuffix(".sql") for file in _files(database)]
    pending = tuple(name for name in names if int(name[:4]) > version)
    return Schema(version=version, newest=int(names[-1][:4]), pending=pending)


def _files(database: str) -> list[Traversable]:
    folder = resources.files("taskyard.stores") / "sql" / database
    return sorted((f for f in folder.iterdir() if f.name.endswith(".sql")), key=lambda file: file.name)


def _fill(sql: str, database: str) -> str:
    """Put in what Python knows as well, so that it stands once."""
    values = {
        "created": TaskState.CREATED,
        "illegal_start": sql_guard(f"'{TaskState.CREATED}'", "NEW.state"),
        "illegal_move": sql_guard("OLD.state", "NEW.state"),
        "gap": str(GAP),
        "promote_at_most": str(PROMOTE_AT_MOST),
        "runs_kept": str(RUNS_KEPT),
        "events_at_most": str(EVENTS_AT_MOST),
        "raise_after": str(RAISE_AFTER),
        "raise_one_in": str(RAISE_ONE_IN),
        "read_ahead": str(READ_AHEAD),
        "too_late": TOO_LATE,
        "asked_to_cancel": ASKED_TO_CANCEL,
        "canceled_by_force": CANCELED_BY_FORCE,
        "lowest": str(LOWEST),
        "highest": str(HIGHEST),
        "lanes_kept": str(LANES_KEPT),
        "ruled_at_most": str(RULED_AT_MOST),
        "looked_at_most": str(LOOKED_AT_MOST),
        "smallest": str(SMALLEST),
        "crowded": str(CROWDED),
        "thinning": str(THINNING),
        "share": str(SHARE),
        "release_at_most": str(RELEASE_AT_MOST),
        "lost_failed": _lost(TaskState.FAILED),
        "lost_canceled": _lost(TaskState.CANCELED),
        "lost_skipped": _lost(TaskState.SKIPPED),
        "replaced": _json(replaced(PARENT, now=EPOCH)),
        "reason": REASON.replace("\x01", "\\u0001"),  # as JSON writes it
        "parent": PARENT.replace("\x01", "\\u0001"),
        "locked_at_most": str(LOCKED_AT_MOST),
        "channel": CHANNEL,
        "first": FIRST.isoformat(),
        "last": LAST.isoformat(),
        "leap": str(LEAP),
        "longest_name": str(LONGEST_NAME_BYTES),
        "separator": f"chr({ord(SEPARATOR)})",
    } | {f"lock_{lock.name.lower()}": str(int(lock)) for lock in Lock}
    if database == "postgres":
        values["illegal_move"] = sql_guard("v_old", "NEW.state").replace("instr(", "strpos(")
    for name, value in values.items():
        sql = sql.replace("{{" + name + "}}", value)
    return sql


def _lost(parent: TaskState) -> str:
    """The error of a task that waited for one that ended so, as it is stored."""
    return _json(give_up(TaskRecord("", "", EPOCH, EPOCH, EPOCH), PARENT, parent, now=EPOCH))


def _json(move: Move) -> str:
    return msgspec.json.encode(move.error).decode()
