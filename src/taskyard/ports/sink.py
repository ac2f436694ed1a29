"""What happens in a node, as values, and the sinks that are told: logs, metrics, traces, the probes of tests.

A node event belongs to one process and is not stored; `model.event.Event` is what the store keeps. On the hot path a
node makes an event only if a sink wants its kind: without one, it costs a lookup.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Protocol

import msgspec

from taskyard.errors import ClaimLost, InvalidInput, quote
from taskyard.model.execution import ExecutionError, ExecutionResult
from taskyard.model.move import Move
from taskyard.model.notes import NoteCode, describe_note
from taskyard.model.state import COMPLETED, TaskState
from taskyard.model.task import Claim
from taskyard.ports.consumer import Consumer
from taskyard.ports.executor import ExecutorStats

log = logging.getLogger("taskyard")

SLOW_S = 0.1
"""A sink that takes longer for one event is logged once: it holds up every task on the event loop."""


class NodeEvent(msgspec.Struct, frozen=True):
    """Something that happened in a node."""


# --- runs -------------------------------------------------------------------------------------------------------------


class RunStarted(NodeEvent, frozen=True):
    """An attempt goes to its executor, where it may wait for a free worker. `consumer` is None if this node has none of
    that name."""

    claim: Claim
    consumer: Consumer | None
    at: datetime

    @property
    def wait_s(self) -> float:
        """From the moment when the task was due, or due again, to this start."""
        return max(0.0, (self.at - self.claim.record.due_at).total_seconds())


class RunFinished(NodeEvent, frozen=True):
    """An attempt has finished on this node, and the store has yet to take the outcome, `move`. `result` is the answer
    of the executor; None if the attempt was cut short, or did not get there. `raised` is the exception, if the code ran
    in this process."""

    claim: Claim
    consumer: Consumer | None
    move: Move
    result: ExecutionResult | None = None
    raised: BaseException | None = None
    attempts: int = 0

    @property
    def status(self) -> str:
        """What the task became, in one word."""
        return str(self.move.state)

    @property
    def duration_s(self) -> float:
        """How long the code ran; where it never did, how long the attempt took."""
        result, started_at = self.result, self.claim.record.started_at
        if result is not None and result.started_at:
            return max(0.0, result.ended_at - result.started_at)
        return 0.0 if started_at is None else max(0.0, (self.move.at - started_at).total_seconds())

    @property
    def worker_pid(self) -> int | None:
        """The worker process, if the code ran in one."""
        return None if self.result is None else self.result.worker_pid

    @property
    def error(self) -> ExecutionError | None:
        return self.move.error or (None if self.result is None else self.result.error)


class RunCompleted(RunFinished, frozen=True):
    """The attempt returned a result."""


class RunFailed(RunFinished, frozen=True):
    """The attempt failed: an exception, a timeout, a worker process that died, an argument that does not fit.
    `attempts` is how many the task may have in all."""

    @property
    def is_final(self) -> bool:
        return self.move.state is not TaskState.RETRYING

    @property
    def has_crashed(self) -> bool:
        """Whether it took its worker process down."""
        return self.move.crashed

    @property
    def retry_in_s(self) -> float | None:
        """None if this was the last attempt."""
        due_at = self.move.due_at
        return None if due_at is None or self.is_final else max(0.0, (due_at - self.move.at).total_seconds())


class RunCanceled(RunFinished, frozen=True):
    """A cancel request or the code itself ended the task."""


class RunReturned(RunFinished, frozen=True):
    """The task goes back, and no failure counts. Its status says why: `rejected` by an executor without room,
    `interrupted` by the stop of the node, the loss of its lease or that of the device, `postponed` by `RetryLater`."""

    @property
    def status(self) -> str:
        if self.move.state is TaskState.RETRYING:
            return "postponed"
        note = self.move.note
        return "rejected" if note is not None and note.code is NoteCode.RETURNED else "interrupted"

    @property
    def reason(self) -> str:
        note = self.move.note
        if note is not None:
            return describe_note(note)
        return "" if self.error is None else self.error.text


class CallFinished(NodeEvent, frozen=True):
    """A direct call of an algorithm was answered, after however many attempts. `version` is None if the algorithm is
    unknown here."""

    request_id: str
    trace_id: str | None
    algorithm: str
    version: str | None
    result: ExecutionResult
    took_s: float

    @property
    def status(self) -> str:
        """`completed`, or the kind of the error."""
        error = self.result.error
        return "completed" if error is None else str(error.kind)

    @property
    def duration_s(self) -> float:
        """How long the code ran in the last attempt; `took_s` has the waits and the other attempts as well."""
        return max(0.0, self.result.ended_at - self.result.started_at)


def finished_kind(move: Move) -> type[RunFinished]:
    """The kind of event that tells of this outcome."""
    if move.state is COMPLETED:
        return RunCompleted
    if move.state is TaskState.CANCELED:
        return RunCanceled
    is_failure = move.state is TaskState.FAILED or (move.state is TaskState.RETRYING and move.retried)
    return RunFailed if is_failure else RunReturned


# --- the store --------------------------------------------------------------------------------------------------------


class TasksClaimed(NodeEvent, frozen=True):
    """The store gave these tasks to this node, and they start now."""

    claims: Sequence[Claim]


class TasksSettled(NodeEvent, frozen=True):
    """The store answered these outcomes: None where it took one, `ClaimLost` where another node had the task."""

    settles: Sequence[tuple[Claim, Move]]
    answers: Sequence[ClaimLost | None]


class ReportsStored(NodeEvent, frozen=True):
    """The store took what these attempts reported: progress, checkpoints, log lines."""

    claims: Sequence[Claim]


class StoreCalled(NodeEvent, frozen=True):
    """One transaction of this node with its store: how long it took, how many outcomes, new tasks and claims it
    carried. `error` is why it failed."""

    duration_s: float
    settled: int
    added: int
    claimed: int
    error: BaseException | None = None


class StoreFailed(NodeEvent, frozen=True):
    """The store does not answer, or refuses. The node tries again after a pause; `failures` counts in a row."""

    error: Exception
    failures: int


# --- the node ---------------------------------------------------------------------------------------------------------


class NodeSampled(NodeEvent, frozen=True):
    """The numbers of this node, once a second: how many runs go on of how many that may, how many more of each consumer
    could start (`available`), and each executor with what runs and waits there."""

    running: int
    max_running: int
    available: Mapping[str, int]
    executors: Mapping[str, ExecutorStats]


class LeaseLost(NodeEvent, frozen=True):
    """The store gave this node up, and its runs are interrupted."""

    incarnation: str


class LeaseRegained(NodeEvent, frozen=True):
    """The node has joined again, under another incarnation."""

    former: str
    incarnation: str


class LoopRestarted(NodeEvent, frozen=True):
    """A loop of the engine failed, and starts again after a pause. `error` is None if it returned."""

    name: str
    error: Exception | None


class TasksRescued(NodeEvent, frozen=True):
    """This node took back what a dead one held."""

    incarnation: str
    uuids: Sequence[str]


class BlockerFreed(NodeEvent, frozen=True):
    """Tasks that waited for the blocker `key` may start."""

    key: str


class SchedulesChecked(NodeEvent, frozen=True):
    """The recurring loop has fired what was due. `next_at` is when it looks again; None if nothing is to come."""

    next_at: datetime | None


class ScheduleFired(NodeEvent, frozen=True):
    """A schedule made these tasks. `skipped` is the number of its items that made none."""

    uuids: Sequence[str]
    schedule: str = ""
    skipped: int = 0


KINDS: tuple[type[NodeEvent], ...] = (
    RunStarted, RunCompleted, RunFailed, RunCanceled, RunReturned, CallFinished,
    TasksClaimed, TasksSettled, ReportsStored, StoreCalled, StoreFailed, NodeSampled,
    LeaseLost, LeaseRegained, LoopRestarted, TasksRescued, BlockerFreed, SchedulesChecked, ScheduleFired,
)  # fmt: skip


# --- sinks ------------------------------------------------------------------------------------------------------------


class Sink(Protocol):
    """Told of every event of its `kinds`; `{RunFinished}` is all that are derived from it, `{NodeEvent}` is all there
    are.

    `tell` is called on the event loop, in order, and must not block: hand what takes time to a thread or a queue. A
    sink that raises never harms the node: its first error is logged, and it goes on being told. One that takes longer
    than 0.1 s for an event is logged once."""

    @property
    def kinds(self) -> Collection[type[NodeEvent]]: ...

    def tell(self, event: NodeEvent) -> None: ...


class Sinks:
    """The sinks of a node. They may come and go while it runs."""

    def __init__(self, sinks: Iterable[Sink] = ()) -> None:
        self._sinks: list[Sink] = []
        self._by_kind: dict[type[NodeEvent], tuple[Sink, ...]] = {}
        self._complained: set[tuple[int, str]] = set()
        self.kinds: frozenset[type[NodeEvent]] = frozenset()
        """The kinds that a sink wants. Look here before you make an event: no sink may want it."""
        for sink in sinks:
            self.add(sink)

    def add(self, sink: Sink) -> Callable[[], None]:
        """Tell this one as well, until the function that is returned is called."""
        check_sink(sink)
        self._sinks.append(sink)
        self._sort()

        def remove() -> None:
            if sink in self._sinks:
                self._sinks.remove(sink)
                self._sort()

        return remove

    def _sort(self) -> None:
        wanted = {kind: tuple(sink for sink in self._sinks if issubclass(kind, tuple(sink.kinds))) for kind in KINDS}
        self._by_kind = {kind: sinks for kind, sinks in wanted.items() if sinks}
        self.kinds = frozenset(self._by_kind)

    def tell(self, event: NodeEvent) -> None:
        """Never raises."""
        for sink in self._by_kind.get(type(event), ()):
            began = time.perf_counter()
            try:
                sink.tell(event)
            except (Exception, SystemExit) as error:  # SystemExit too: it would end the loop that all tasks run on
                self._complain(sink, "the sink %s failed; it is told of what follows", error)
            if (took_s := time.perf_counter() - began) > SLOW_S:
                self._complain(sink, f"the sink %s took {took_s:.1f} s for one event, and all tasks wait meanwhile")

    def _complain(self, sink: Sink, text: str, error: BaseException | None = None) -> None:
        """Once of each sink and trouble."""
        trouble = (id(sink), "slow" if error is None else "failed")
        if trouble not in self._complained:
            self._complained.add(trouble)
            log.error(text, type(sink).__name__, exc_info=error)


def check_sink(sink: object) -> None:
    """Raises `InvalidInput` unless it has `tell` and `kinds` of events."""
    kinds = getattr(sink, "kinds", None)
    is_fit = isinstance(kinds, Collection) and all(
        isinstance(one, type) and issubclass(one, NodeEvent) for one in kinds
    )
    if not is_fit or not callable(getattr(sink, "tell", None)):
        raise InvalidInput(
            f"a sink has a method tell(event) and an attribute kinds, such as {{RunFinished}}; {quote(sink)} has not"
        )


NO_SINKS = Sinks()
"""For parts that are used alone. Nobody may add to it."""
