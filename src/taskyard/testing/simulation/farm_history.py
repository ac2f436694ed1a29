"""What happened on a simulated farm: what was enqueued, what the store did, what ran where, which devices failed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from datetime import datetime
from itertools import islice
from typing import TypeVar

import msgspec

from taskyard.model.device import DeviceStatus
from taskyard.model.event import Event, EventKind
from taskyard.model.task import Attempt, TaskRecord
from taskyard.testing.simulation.history import Fate, History, Op
from taskyard.testing.simulation.network import Line, Network

T = TypeVar("T")

PERSON = "a person"
"""Who gives orders to devices here; what a node orders goes by its own name."""


class Enqueued(msgspec.Struct, kw_only=True):
    """A call of `enqueue`, between two places. `answer` is None if it is not known whether a task was stored. `uuid` is
    that of the `Task`, which the stored task has as its origin."""

    uuid: str
    account: str
    consumer: str
    asked: int
    answered: int | None = None
    answer: bool | None = None
    is_never: bool = False
    """It failed, and nothing was stored."""


class Execution(msgspec.Struct, kw_only=True):
    """The code of one attempt, on a device. `told` is where it was first asked to stop."""

    task: str
    token: int
    node: str
    device: str
    account: str
    began: int
    began_mono: float
    ended: int | None = None
    told: int | None = None


class Outage(msgspec.Struct, kw_only=True):
    """A device does not work as it should."""

    what: str
    from_mono: float
    until_mono: float


class Told(msgspec.Struct, frozen=True):
    """An event of the store, at its place in the history."""

    at: int
    at_mono: float
    event: Event


class FarmHistory(History):
    """Keeps no lines: there are too many. `tail` are the last ones if the seed is told."""

    def __init__(self, *, tell: Callable[[str], None] | None = None) -> None:
        super().__init__()
        self.enqueued: list[Enqueued] = []
        self.executions: list[Execution] = []
        self.told: list[Told] = []
        self.outages: dict[str, list[Outage]] = {}
        self.left: dict[str, int] = {}
        """Where a node has left the store, by its incarnation."""
        self._tell = tell
        self._sum = hashlib.sha256()
        self._number: dict[str, int] = {}

    def say(self, line: str) -> None:
        if not self.is_closed and self._tell is not None:
            self._tell(line)

    def ask(self, op: Op) -> Op:
        return op

    def answer(self, op: Op, fate: Fate, found: object = None) -> None:
        """Claims and settles are judged by the events that they leave."""

    def note_events(self, events: Iterable[Event], at_mono: float) -> None:
        if self.is_closed:
            return
        at = self.place()
        for event in events:
            self.told.append(Told(at, at_mono, event))
            number = self._number.setdefault(event.uuid, len(self._number))  # ids differ from run to run
            self._sum.update(f"{at_mono:.6f} {event.kind} {number} {event.device}\n".encode())
            self.say(f"{at_mono:.6f} {event.kind} {event.uuid} {event.device} {event.code}")

    def digest(self, *more: object) -> str:
        told = self._sum.copy()
        told.update(repr(more).encode())
        return told.hexdigest()


class FarmNetwork(Network):
    """Notes the events that a call has left, and tells the other nodes."""

    history: FarmHistory
    seen = 0

    def carry_out(self, line: Line, verb: str, effect: Callable[[], T]) -> T:
        answer = effect()
        if self.core.event_seq != self.seen:
            self.note_events()
            for other in self._lines:
                if other is not line:
                    other.hint(self._hint_s())
        return answer

    def drop(self, line: Line) -> None:
        """Its process is gone: what it has sent still arrives, and nothing is told to it any more."""
        self._lines.remove(line)

    def note_events(self) -> None:
        """Those that are new. `MemoryCore.events` would look through all that are kept."""
        count, self.seen = self.core.event_seq - self.seen, self.core.event_seq
        news = [*islice(reversed(self.core._events), count)][::-1]
        first = self.seen - count + 1
        events = [
            Event.of(seq, at, EventKind(kind), record.uuid, record.consumer, record.queue, detail)
            for seq, (kind, record, at, detail) in enumerate(news, first)
        ]
        self.history.note_events(events, self.loop.time())


class FarmEnd(msgspec.Struct, frozen=True):
    """What is left. `broken` are the devices that stay as they are; `actors` the states that the nodes know."""

    records: dict[str, TaskRecord]
    attempts: dict[str, list[Attempt]]
    devices: list[DeviceStatus]
    now: datetime
    broken: frozenset[str]
    is_bucketed: bool
    auto_recover: int
