"""The same work twice: who stands for it, and for how long."""

from __future__ import annotations

from datetime import datetime
from hashlib import blake2b

import msgspec

from taskyard.model.move import Move
from taskyard.model.notes import CancelCode, CancelRequest
from taskyard.model.state import ENDED, RUNNING, TaskState
from taskyard.model.task import Dedupe, DedupeScope, TaskRecord

CALLED_OFF = frozenset({TaskState.CANCELED, TaskState.SKIPPED})


def make_slot(consumer: str, args: str, key: str | None) -> str:
    """What the same work has in common. A given key stands for the arguments. The length comes first, so that no name
    runs over into a key: "a" with the key "b key c" is not "a key b" with the key "c"."""
    what = f"key {key}" if key is not None else "args " + blake2b(_canonical(args).encode(), digest_size=16).hexdigest()
    return f"{len(consumer)} {consumer} {what}"


def _canonical(args: str) -> str:
    return msgspec.json.encode(msgspec.json.decode(args), order="deterministic").decode()


def take_slot(record: TaskRecord, dedupe: Dedupe) -> None:
    """What a new task keeps of the slot that it was asked with. One that holds it for a window does so by a time, and
    not by its state."""
    if dedupe is Dedupe.ALLOW or record.dedupe_slot is None:
        record.dedupe_slot = record.dedupe_scope = None
        return
    record.dedupe_key = record.dedupe_slot
    if record.dedupe_scope is DedupeScope.WINDOW:
        record.dedupe_slot = None


def is_replaceable(holder: TaskState | None) -> bool:
    """Whether a task that stands for some work can make way for another: not once it runs, nor when it is over (None:
    and forgotten), though its window is not."""
    return holder is not None and holder is not RUNNING and holder not in ENDED


def counts_as_done(holder: TaskState | None) -> bool:
    """Whether a task that has a window stands for its work: not if that was called off (None: it is forgotten, and
    nobody knows)."""
    return holder not in CALLED_OFF


def replaced(by: str, *, now: datetime) -> Move:
    return Move.canceled(at=now, cancel=CancelRequest(now, code=CancelCode.REPLACED, subject=by))
