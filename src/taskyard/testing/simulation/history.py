"""What was asked, what was answered, and what ran: the record of one simulation, for the checker.

Every line gets a place; the order of places is the order in which things happened. Runs, kills and stops are entries of
the ledger (`taskyard.testing.ledger`), whose checker is used for them; what was asked of tasks is an `Op`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from datetime import datetime
from enum import Enum, StrEnum

import msgspec

from taskyard.model.event import Event
from taskyard.model.queue import QueueSettings
from taskyard.model.state import TaskState
from taskyard.model.task import Dedupe, TaskRecord
from taskyard.testing.ledger import Entry, Stored


class Kind(StrEnum):
    SUBMIT = "submit"
    CLAIM = "claim"
    SETTLE = "settle"
    CANCEL = "cancel"
    RETRY = "retry"
    PRIORITY = "priority"
    RESCUE = "rescue"
    ENDED = "ended"
    """Somebody waited for the end of a task, and was told of it."""
    PENDING = "pending"
    """A submit was answered with this task, which stands for the same work."""


class Fate(Enum):
    """What is known of an op: nothing (it may have happened, at any time after it was asked), that it was done, that it
    was refused because of what was found or because another stands for the same work, or that nothing of it
    happened."""

    UNKNOWN = "unknown"
    DONE = "done"
    REFUSED = "refused"
    TAKEN = "taken"
    NEVER = "never"


class Op(msgspec.Struct, kw_only=True):
    """One thing asked of one task, between two places of the history. `state` is where a settle wanted to lead,
    `found` what the answer showed; None as an answer is a task that does not exist."""

    kind: Kind
    task: str
    asked: int
    asked_mono: float = 0.0
    answered: int | None = None
    fate: Fate = Fate.UNKNOWN
    node: str = ""
    token: int = 0
    attempt: int = 0
    state: TaskState | None = None
    found: TaskState | None = None
    due_at: datetime | None = None
    retried: bool = False
    is_certain: bool = False
    """No answer came, and yet it has happened: something else shows it."""


class Submitted(msgspec.Struct, frozen=True):
    """A task as it was asked for. `batch` tells those that were submitted together; `parent` is the run they are of, as
    its incarnation and token."""

    record: TaskRecord
    dedupe: Dedupe
    batch: int
    at: int
    at_mono: float
    parent: tuple[str, int] | None = None


class Start(msgspec.Struct, frozen=True):
    """A run began, on the node with this incarnation."""

    task: str
    token: int
    node: str
    at: int
    at_mono: float


class History:
    """`step` is called whenever the store's wall clock is set: `steps` says since when it is how far ahead."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.entries: list[Entry] = []
        self.submitted: dict[str, Submitted] = {}
        self.starts: dict[int, Start] = {}
        self.ends: dict[int, int] = {}
        self.expired: dict[str, int] = {}
        self.gone: dict[str, int] = {}
        self.steps: list[tuple[float, float]] = [(0.0, 0.0)]
        self.lines: list[str] = []
        self.faults: list[str] = []
        self.is_closed = False
        self._place = 0

    def place(self) -> int:
        self._place += 1
        return self._place

    def say(self, line: str) -> None:
        if not self.is_closed:
            self.lines.append(line)

    def ask(self, op: Op) -> Op:
        self.ops.append(op)
        return op

    def answer(self, op: Op, fate: Fate, found: TaskState | None = None) -> None:
        if not self.is_closed:
            op.answered, op.fate, op.found = self.place(), fate, found

    def blame(self, fault: str) -> None:
        """Something that is wrong by itself, whatever else is in the history."""
        if not self.is_closed:
            self.faults.append(fault)

    def of(self, uuid: str) -> Iterator[str]:
        """The lines that speak of a task."""
        return (line for line in self.lines if uuid in line)

    def digest(self, *more: object) -> str:
        """One value for all that happened."""
        told = hashlib.sha256("\n".join(self.lines).encode())
        told.update(repr(more).encode())
        return told.hexdigest()


class End(msgspec.Struct, frozen=True):
    """What is left when everything is over, and the rules that held throughout."""

    stored: dict[str, Stored]
    events: list[Event]
    counts: dict[tuple[str, TaskState], int]
    queues: dict[str, QueueSettings]
    room: dict[str, int]
    """How much of each source one node runs at once."""
    max_retries: int
    """Of tasks that name no policy of their own."""
