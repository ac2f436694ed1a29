"""`Task`, what was asked; `TaskRecord`, what is stored; `Claim`, the fenced right to run one attempt."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from enum import Flag, StrEnum, auto
from itertools import count, islice
from typing import Annotated, Any, NamedTuple, Self

import msgspec

from taskyard.errors import InvalidInput, NaiveDatetime, NotJson, quote
from taskyard.model.blocker import Blocker, BlockerKind, decode_requirements, lane_of, split_key
from taskyard.model.execution import ErrorKind, ExecutionError, Progress
from taskyard.model.notes import (
    AuditStamp,
    CancelRequest,
    Note,
    cancel_reason,
    describe_cancel,
    describe_hold,
    describe_note,
)
from taskyard.model.order import Priority
from taskyard.model.retry import RetryPolicy
from taskyard.model.state import HAS_PLACE, STANDS_IN_LINE, TaskState

DEFAULT_QUEUE = "default"


class _Uuid7:
    """RFC 9562 version 7: 48 bits of milliseconds, then a random number that only counts up within one
    millisecond, so that ids made by one process sort in the order they were made."""

    def __init__(self) -> None:
        self._start()
        # Race: a fork copies the counter, and parent and child would count on to the same ids; it may also copy the
        # lock while another thread holds it, and nobody in the child would let go of it.
        os.register_at_fork(after_in_child=self._start)

    def _start(self) -> None:
        self._lock = threading.Lock()
        self._drawn = _Drawn(0, "", count())

    def one(self) -> str:
        head, numbers = self._look()
        # No lock: `next` of a `count` is one step. `hex` of bytes takes half the time of a format.
        return head + next(numbers).to_bytes(6, "big").hex()

    def several(self, n: int) -> list[str]:
        """The same `n` times, at a third of the price."""
        head, numbers = self._look()
        return [head + number.to_bytes(6, "big").hex() for number in islice(numbers, n)]

    def _look(self) -> tuple[str, Iterator[int]]:
        ms, head, numbers = self._drawn
        now_ms = time.time_ns() // 1_000_000
        # Same millisecond, or a clock that stepped back: count on. It began in the lower half of 48 bits.
        return (head, numbers) if now_ms <= ms else self._draw(now_ms)

    def _draw(self, ms: int) -> tuple[str, Iterator[int]]:
        with self._lock:
            # Race: another thread may have drawn for this millisecond, or a later one, since we looked.
            if ms > self._drawn.ms:
                drawn = int.from_bytes(os.urandom(10), "big")
                high, variant = drawn >> 61 & 0xFFF, 0x8000 | drawn >> 47 & 0x3FFF
                head = f"{ms >> 16:08x}-{ms & 0xFFFF:04x}-7{high:03x}-{variant:04x}-"
                self._drawn = _Drawn(ms, head, count(drawn & 0x7FFF_FFFF_FFFF))
            return self._drawn.head, self._drawn.numbers


class _Drawn(NamedTuple):
    """What is drawn for one millisecond: all but the last 12 digits, and the numbers that these are."""

    ms: int
    head: str
    numbers: Iterator[int]


_uuids = _Uuid7()
new_uuid, new_uuids = _uuids.one, _uuids.several


def aware(field: str, value: datetime) -> datetime:
    """`value` in UTC; a naive one is refused."""
    if value.tzinfo is None or value.utcoffset() is None:
        raise NaiveDatetime(field, value)
    try:
        return value.astimezone(UTC)
    except OverflowError:
        raise InvalidInput(
            f"{value} lies outside of the calendar, which has the years 1 to 9999", field=field
        ) from None


FIRST, LAST = datetime(1970, 1, 1, tzinfo=UTC), datetime(9000, 1, 1, tzinfo=UTC)
"""Nothing is due outside of these: all that is computed from it stays within what Python and the stores can hold."""


def moment(field: str, value: datetime, *, hint: str = "") -> datetime:
    """`value` in UTC, if something can be due then."""
    at = aware(field, value)
    if not FIRST <= at < LAST:
        raise InvalidInput(f"must be between the years 1970 and 9000{hint}", field=field, given=value)
    return at


def to_json(what: str, value: Any) -> str:
    """`value` as JSON text, or `NotJson` that says why not."""
    try:
        text = msgspec.json.encode(value).decode()
        if is_large(text):
            msgspec.json.decode(text)
    except (TypeError, ValueError, RecursionError, OverflowError) as exc:
        raise NotJson(what, str(exc) or type(exc).__name__) from None
    # NaN and the infinities have become null: only a text with a null in it needs a second look.
    if "null" in text and not is_finite(msgspec.to_builtins(value)):
        raise NotJson(what, NOT_FINITE)
    return text


def is_large(text: str) -> bool:
    """Whether this JSON may hold what its readers do not take: they stop at 200 values inside of each other, and Python
    at 4300 digits."""
    return len(text) > 100 and (len(text) > 4000 or text.count("[") + text.count("{") > 100)


NOT_FINITE = "it holds NaN or an infinite number, which JSON does not have; give None or a text in its place"


def is_finite(value: Any) -> bool:
    """Whether neither NaN nor an infinity is among these plain values, however deep."""
    left = [value]
    while left:
        match left.pop():
            case float() as number if not math.isfinite(number):
                return False
            case dict() as named:
                left.extend(named)
                left.extend(named.values())
            case list() | tuple() | set() | frozenset() as several:
                left.extend(several)
    return True


def _now() -> datetime:
    # The one clock read in the model: a `Task` made by a user's `produce` is due now unless it says otherwise.
    return datetime.now(UTC)


class Task(msgspec.Struct, frozen=True):
    """What was asked: the arguments for one consumer (`source`), due at a moment. Never changed once made."""

    source: str
    args: dict[str, Any] = {}
    schedule_at: datetime = msgspec.field(default_factory=_now)
    uuid: str = msgspec.field(default_factory=new_uuid)

    def __post_init__(self) -> None:
        texts: tuple[tuple[str, object], ...] = (("source", self.source), ("uuid", self.uuid))
        for name, text in texts:
            if not isinstance(text, str) or not text:
                raise InvalidInput("of a task must be a text that is not empty", field=name, given=text)
        if not isinstance(self.schedule_at, datetime):
            raise InvalidInput("must be a datetime with a time zone", field="schedule_at", given=self.schedule_at)
        if self.schedule_at.tzinfo is not UTC:
            # In the zone's own time the two hours of a fall-back are one: kept as a moment, they stay two.
            msgspec.structs.force_setattr(self, "schedule_at", aware("schedule_at", self.schedule_at))
        if not isinstance(self.args, dict):
            raise InvalidInput(f"of a task must be a dict, not {type(self.args).__name__}", field="args")

    def to_dict(self) -> dict[str, Any]:
        return {
            "uuid": self.uuid,
            "args": self.args,
            "source": self.source,
            "schedule_at": self.schedule_at.isoformat(),
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        try:
            at, source = data["schedule_at"], data["source"]
            if not isinstance(source, str):
                raise TypeError(f"source is {quote(source)}, not a name")
            return cls(
                uuid=str(data["uuid"]),
                args=data["args"],
                source=source,
                schedule_at=at if isinstance(at, datetime) else datetime.fromisoformat(at),
            )
        except KeyError as exc:
            raise InvalidInput(f"a task's dict needs uuid, args, source and schedule_at; {exc} is missing") from None
        except (TypeError, ValueError) as exc:
            raise InvalidInput(f"a task's dict has a wrong value: {exc}") from None


class Dedupe(StrEnum):
    """What to do when the same work is there already: `replace` cancels what has not started and comes in its stead."""

    ALLOW = "allow"
    MERGE = "merge"
    REFUSE = "refuse"
    REPLACE = "replace"


class DedupeScope(StrEnum):
    """How long a task stands for its work: until it starts, until it has ended, or until a time after its submit.
    `key_idle` is `pending`, and its task is a duplicate as well while any task with its key runs in its queue."""

    QUEUED = "queued"
    PENDING = "pending"
    WINDOW = "window"
    KEY_IDLE = "key_idle"


class OnFailure(StrEnum):
    """What becomes of a task when one that it waits for ends without having completed."""

    FAIL = "fail"
    SKIP = "skip"
    IGNORE = "ignore"


class Mark(Flag):
    """Who writes a field of a record, and which tasks have it. Stores derive their columns from these marks."""

    INSERT = auto()
    """An insert writes it."""
    STORE = auto()
    """The store computes it at the insert."""
    MOVE = auto()
    """A move or a command may change it."""
    CLAIM = auto()
    """A claim sets or clears it, so a claim does not read it."""
    REPORT = auto()
    """A running attempt reports it."""
    RELATION = auto()
    """Only tasks with a group, a dependency or a dedupe slot have it."""
    RARE = auto()
    """Most tasks do not have it when they are inserted."""
    LIVE = auto()
    """Only unfinished tasks have it."""
    FINAL = auto()
    """Only finished tasks have it."""
    INTERNAL = auto()
    """The engine's own: documents leave it out."""


_I, _S, _M, _C, _P = Mark.INSERT, Mark.STORE, Mark.MOVE, Mark.CLAIM, Mark.REPORT
_R, _X, _L, _F, _N = Mark.RELATION, Mark.RARE, Mark.LIVE, Mark.FINAL, Mark.INTERNAL


class TaskExtra(msgspec.Struct, frozen=True, omit_defaults=True):
    """Fields of a task that no rule of a store reads, in one JSON column. They are written at the insert and never
    changed. To add one: a line here, the submit option, the documentation."""

    title: str = ""
    labels: dict[str, str] = {}
    trace: str = ""
    submitted_by: str = ""
    values: dict[str, Any] = {}
    """What middleware has added."""


NO_EXTRA = TaskExtra()


class TaskRecord(msgspec.Struct, gc=False):
    """Everything the store keeps of one task. `args`, `result` and `checkpoint` are JSON text; the last is what a run
    has saved for the next one, until the task is completed. `id` orders tasks as they were added.

    `attempt` counts the runs started; `retries` those that failed and were tried again; `crashes` the workers this task
    took down; `recoveries` how often it was taken back from a dead node. `token` fences the present run, `worker_pid`
    is its worker process, once that is known. `bucket` counts in queues that are ordered by buckets.

    `dedupe_slot` is the work it stands for now; `dedupe_key` the same, remembered when it no longer does.
    `open_dependencies` counts the tasks that it waits for. `group_id` is the uuid of the group's summary, where it has
    one. `origin` is the ended task that this one was made of, to run it again. `hold` says who holds a paused task,
    `cancel` who asked to cancel it: that stays when the task has finished. `extra` has the fields that no rule reads.

    `blocked_by` is the key of the blocker that keeps it from starting; a task that waits for others has none.
    `blocked_at` says since when; a task that has waited for others from its submit on has none. `requires` are the
    labels that a place must have to run it, as canonical JSON. `device` is the place where the present run is.

    `is_parked`: it is queued and its key is taken; or it is held and does not stand in line, because it was to wait for
    its time as well."""

    uuid: Annotated[str, _I]
    consumer: Annotated[str, _I]
    due_at: Annotated[datetime, _I | _M]
    created_at: Annotated[datetime, _I]
    updated_at: Annotated[datetime, _I | _S | _M | _C]
    id: Annotated[int, _I | _S | _N] = 0
    queue: Annotated[str, _I] = DEFAULT_QUEUE
    args: Annotated[str, _I] = "{}"
    state: Annotated[TaskState, _I | _S | _M | _C] = TaskState.CREATED
    priority: Annotated[int, _I | _M] = Priority.NORMAL.value
    position: Annotated[int, _I | _S | _M | _N] = 0
    is_parked: Annotated[bool, _I | _S | _M | _C | _L | _N] = False
    key: Annotated[str | None, _I] = None
    dedupe_slot: Annotated[str | None, _I | _M | _L | _N] = None
    timeout_s: Annotated[float | None, _I] = None
    retry: Annotated[RetryPolicy | None, _I] = None
    started_at: Annotated[datetime | None, _C] = None
    finished_at: Annotated[datetime | None, _M | _C | _F] = None
    attempt: Annotated[int, _M] = 0
    retries: Annotated[int, _M] = 0
    crashes: Annotated[int, _M] = 0
    recoveries: Annotated[int, _M] = 0
    token: Annotated[int | None, _M | _C | _L | _N] = None
    node: Annotated[str | None, _M | _C | _L] = None
    worker_pid: Annotated[int | None, _M | _C | _P | _L] = None
    device: Annotated[str | None, _M | _C | _L] = None
    progress: Annotated[Progress | None, _P] = None
    result: Annotated[str | None, _M | _C | _F] = None
    error: Annotated[ExecutionError | None, _M] = None
    note: Annotated[Note | None, _I | _M | _C | _P | _X] = None
    hold: Annotated[AuditStamp | None, _M | _C | _L] = None
    cancel: Annotated[CancelRequest | None, _M | _C] = None
    blocked_by: Annotated[str | None, _M | _C | _L | _N] = None
    blocked_at: Annotated[datetime | None, _M | _C | _L | _N] = None
    checkpoint: Annotated[str | None, _P | _N] = None
    bucket: Annotated[str | None, _I | _X] = None
    requires: Annotated[str | None, _I | _X] = None
    group_id: Annotated[str | None, _I | _R] = None
    open_dependencies: Annotated[int, _I | _S | _M | _C | _R | _N] = 0
    on_failure: Annotated[OnFailure | None, _I | _R | _N] = None
    dedupe_key: Annotated[str | None, _I | _R | _N] = None
    dedupe_scope: Annotated[DedupeScope | None, _I | _R | _N] = None
    origin: Annotated[str | None, _I | _X] = None
    extra: Annotated[TaskExtra | None, _I | _X | _N] = None

    @property
    def lane(self) -> str:
        """The lane that it waits in with those of its consumer that require the same."""
        return self.consumer if self.requires is None else lane_of(self.consumer, self.requires)

    @property
    def requirements(self) -> dict[str, str]:
        """The labels that a place must have to run it."""
        return decode_requirements(self.requires)

    @property
    def blocker(self) -> Blocker | None:
        """What it waits for, if it is blocked."""
        if self.state is not TaskState.BLOCKED:
            return None
        if self.blocked_by is None:
            return Blocker(BlockerKind.DEPENDENCY, str(self.open_dependencies), self.blocked_at or self.created_at)
        return Blocker(*split_key(self.blocked_by), self.blocked_at or self.updated_at)

    @property
    def title(self) -> str:
        return "" if self.extra is None else self.extra.title

    @property
    def labels(self) -> dict[str, str]:
        return {} if self.extra is None else self.extra.labels

    @property
    def values(self) -> dict[str, Any]:
        """What middleware has added when it was submitted: JSON by name."""
        return {} if self.extra is None else self.extra.values

    @property
    def submitted_by(self) -> str:
        return "" if self.extra is None else self.extra.submitted_by

    @property
    def trace(self) -> str:
        """The trace context of the submit, as a W3C traceparent; empty if it had none."""
        return "" if self.extra is None else self.extra.trace

    @property
    def remarks(self) -> str:
        """What people read: who holds the task, who asked to cancel it, what happened to it last."""
        is_canceled = self.state is TaskState.CANCELED
        said = (
            "" if self.hold is None else describe_hold(self.hold),
            "" if self.cancel is None else describe_cancel(self.cancel, is_canceled=is_canceled),
            "" if self.note is None else describe_note(self.note),
        )
        return "; ".join(filter(None, said))

    def clone(self) -> TaskRecord:
        """A copy, at half the price of `copy.copy`: records are copied on the hot path."""
        copied: TaskRecord = self.__copy__()  # type: ignore[attr-defined]
        return copied

    @property
    def stands_in_line(self) -> bool:
        """Whether those behind it wait for it, where places alone count."""
        return (self.state in STANDS_IN_LINE or self.blocked_by is not None) and self.has_place

    @property
    def has_place(self) -> bool:
        """Whether it has a place that counts, now or once nothing else holds it."""
        return self.state in HAS_PLACE and not (self.is_parked and self.state is TaskState.PAUSED)

    @property
    def can_start(self) -> bool:
        """As far as it says itself: its queue and its source may have no room."""
        return self.state is TaskState.QUEUED and not self.is_parked

    @property
    def task(self) -> Task:
        return Task(source=self.consumer, args=msgspec.json.decode(self.args), schedule_at=self.due_at, uuid=self.uuid)


class Claim(msgspec.Struct, frozen=True, gc=False):
    """The right to run one attempt, spent by the first settle: whoever settles with an old one gets `ClaimLost`."""

    record: TaskRecord
    attempt: int
    token: int

    @property
    def uuid(self) -> str:
        return self.record.uuid


class Attempt(msgspec.Struct, frozen=True, gc=False):
    """One execution of a task, from its claim on. `token` is its identity: no two attempts of a store have the same.
    `state` is running until it has finished, then what the task became; an attempt that was cut short says interrupted.
    `worker_pid` is the worker process that ran it, `device` the place, where its consumer has places."""

    attempt: int
    token: int
    node: str
    state: TaskState
    started_at: datetime
    finished_at: datetime | None = None
    error: ExecutionError | None = None
    worker_pid: int | None = None
    device: str | None = None


class Outcome(msgspec.Struct, frozen=True, gc=False):
    """How a task ended, for who waits on it."""

    uuid: str
    state: TaskState
    result: str | None = None
    error: ExecutionError | None = None
    cancel: CancelRequest | None = None

    @property
    def cancel_text(self) -> str:
        """Why the task was canceled: what the request says, and what the code raised meanwhile."""
        asked = "" if self.cancel is None else cancel_reason(self.cancel)
        is_own = self.error is not None and self.error.kind is ErrorKind.CANCELED
        raised = self.error.text if self.error is not None and is_own else ""
        if self.cancel is not None and self.error is not None and not self.error.types:
            raised = ""  # the executor's words for having carried out the request
        return "; ".join(filter(None, (asked, raised)))
