"""What people and programs can ask of a yard: the one interface of the command line, the web service and the client.

A call takes plain values or a request and returns a document. Both have a JSON schema. No yard, handle, callback or
event object crosses this line, so a call means the same here (`LocalApplication`) and over HTTP.

- A command on one task, queue or schedule that raises has changed nothing, `OutcomeUnknown` aside.
- A bulk command yields its progress; the last report says how far it came, also after an error.
- Every command is kept with the actor that the application was opened for.
- A `limit` is from 1 to 10,000, or `InvalidInput` is raised.
- Documents are redacted: secrets are `***` unless the call has `reveal=True`.

It decides nothing about tasks: rules live in `model/`, transactions in `stores/`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol

from taskyard.application.audit_documents import AuditPage
from taskyard.application.command_requests import QueueCommand, TaskCommand
from taskyard.application.consumer_documents import ConsumerDocument
from taskyard.application.device_documents import (
    DeviceChange,
    DeviceCommand,
    DeviceDetail,
    DeviceDocument,
    DeviceHistory,
    DeviceOverview,
    DeviceReceipt,
    DeviceRequest,
    QuarantinedAccountDocument,
    ReleaseReceipt,
    RunQuery,
)
from taskyard.application.event_documents import EventDocument, EventPageDocument
from taskyard.application.node_documents import DrainReceipt, NodeDocument
from taskyard.application.overview_documents import OverviewDocument
from taskyard.application.queue_documents import QueueDocument
from taskyard.application.queue_order_documents import QueueOrderDocument, WaitSummary
from taskyard.application.schedule_documents import (
    RemovedSchedule,
    ScheduleDetail,
    ScheduleDocument,
    ScheduleRequest,
    ScheduleTasks,
)
from taskyard.application.task_documents import (
    ArtifactContent,
    ChainLink,
    FailurePage,
    LogDocument,
    TaskDetail,
    TaskDocument,
    TaskPage,
)
from taskyard.application.task_requests import (
    BulkReport,
    CommandReceipt,
    GroupDocument,
    GroupReceipt,
    PruneReport,
    RerunReport,
    SubmitReceipt,
    SubmitRequest,
)
from taskyard.model.event import ANY_EVENT, EventFilter
from taskyard.model.task_filter import ALL_TASKS, TaskFilter


class TaskCalls(Protocol):
    """Tasks and groups. A `ref` is a task id, or at least 4 characters of its beginning or end; where it names none or
    several, a call raises `InvalidRef`, `UnknownTask` or `AmbiguousTask`."""

    # queries

    async def list(self, where: TaskFilter = ALL_TASKS, *, before: str | None = None, limit: int = 20) -> TaskPage:
        """A page, newest first; the next one begins before the task `before`."""
        ...

    async def get(self, ref: str, *, reveal: bool = False) -> TaskDetail:
        """Everything about one task: its attempts, the end of its log, its artifacts, why it waits."""
        ...

    async def get_many(self, ids: Sequence[str]) -> tuple[TaskDocument, ...]:
        """The tasks with these ids, in this order; unknown ones are left out."""
        ...

    async def resolve(self, refs: Sequence[str]) -> tuple[str, ...]:
        """The ids that the refs name, each once."""
        ...

    async def count(self, where: TaskFilter = ALL_TASKS) -> int:
        """How many tasks match."""
        ...

    async def get_log(
        self, ref: str, *, attempt: int | None = None, limit: int = 100, reveal: bool = False
    ) -> LogDocument:
        """The latest log lines of a task, or of one attempt (1 is the first)."""
        ...

    async def read_artifact(self, ref: str, name: str, *, attempt: int | None = None) -> ArtifactContent:
        """An artifact of the latest attempt that has one of this name, or of this attempt. Raises `UnknownArtifact`,
        `ArtifactElsewhere`."""
        ...

    async def explain(self, ref: str, *, max_chain: int = 10) -> tuple[ChainLink, ...]:
        """Why a task waits, then why the task in its way does, and so on."""
        ...

    async def explain_all(self, where: TaskFilter = ALL_TASKS, *, limit: int = 20) -> WaitSummary:
        """Why the tasks that wait and match do, added up: the `limit` largest groups, each with a command that frees
        it."""
        ...

    async def failures(self, where: TaskFilter = ALL_TASKS, *, limit: int = 20) -> FailurePage:
        """Failed tasks by class of error and consumer, the largest groups first."""
        ...

    async def wait(self, ref: str, *, timeout_s: float | None = None, reveal: bool = False) -> TaskDocument:
        """Wait until the task has completed. Raises `TaskFailed`, `TaskCanceled`, `TaskSkipped`, `WaitTimeout`."""
        ...

    # commands

    async def submit(self, request: SubmitRequest) -> SubmitReceipt:
        """Store one task. Raises `InvalidArguments`, `UnknownConsumer`, `DuplicateTask`; nothing is stored then."""
        ...

    async def apply(self, refs: Sequence[str], command: TaskCommand) -> tuple[CommandReceipt, ...]:
        """Apply the command to each task. A refusal is in the receipt and does not stop the others. Of a move, each
        task goes right before or after the other task, in the order of the refs."""
        ...

    def apply_matching(
        self, where: TaskFilter, command: TaskCommand, *, dry_run: bool = False
    ) -> AsyncIterator[BulkReport]:
        """Apply the command to all tasks that match, in chunks of 500, with a report that grows."""
        ...

    async def rerun(
        self,
        refs: Sequence[str],
        *,
        changes: Mapping[str, Any] | None = None,
        changes_text: Mapping[str, str] | None = None,
    ) -> tuple[CommandReceipt, ...]:
        """Make a new task of each finished task, with its arguments or with some changed; the receipt has the new
        task. `changes_text` is as in a `SubmitRequest`."""
        ...

    def rerun_matching(
        self,
        where: TaskFilter,
        *,
        changes: Mapping[str, Any] | None = None,
        repeat: bool = False,
        dry_run: bool = False,
    ) -> AsyncIterator[RerunReport]:
        """The same for all finished tasks that match. Without `repeat`, those that were run again before are left
        out."""
        ...

    async def prune(self, *, finished_before: datetime, dry_run: bool = False) -> PruneReport:
        """Forget the tasks that finished before then, with their attempts and results."""
        ...

    # groups

    async def get_group(self, ref: str, *, limit: int = 20) -> GroupDocument:
        """A group by its id, or by a ref of one of its tasks. Raises `UnknownGroup`, `NoGroup`."""
        ...

    async def cancel_group(self, ref: str, *, reason: str = "") -> GroupReceipt:
        """Cancel the tasks of a group that have not finished; those that run are asked to stop."""
        ...

    async def retry_group(self, ref: str, *, include_quarantined: bool = False) -> GroupReceipt:
        """Retry the failed tasks of a group, and its summary after them."""
        ...


class QueueCalls(Protocol):
    """Queues. A queue is known once it has rules, tasks, or a node that serves it."""

    async def list(self) -> tuple[QueueDocument, ...]:
        """Every queue that has rules, tasks or a command on it, by name, with its rate."""
        ...

    async def order(self, name: str, *, limit: int = 20, concurrency: int | None = None) -> QueueOrderDocument:
        """A queue in the order in which it will start, at most `limit` tasks of each part; and when it would be
        finished under another `concurrency`. Raises `UnknownQueue`."""
        ...

    async def apply(self, name: str, command: QueueCommand) -> QueueDocument:
        """Carry out a command on a queue; the queue after it. Raises `UnknownQueue`."""
        ...


class ScheduleCalls(Protocol):
    """Schedules. A call about one raises `UnknownSchedule`."""

    async def list(self) -> tuple[ScheduleDocument, ...]:
        """Every schedule by name, with its next fire time."""
        ...

    async def get(self, name: str, *, next_count: int = 5, reveal: bool = False) -> ScheduleDetail:
        """A schedule with its next fire times, and the last ones with their tasks."""
        ...

    async def put(self, request: ScheduleRequest, *, replace: bool = False) -> ScheduleDocument:
        """Add a schedule, or replace one that was added before. Raises `ScheduleExists`, `InvalidArguments`."""
        ...

    async def pause(self, name: str, *, note: str = "") -> ScheduleDocument:
        """Fire nothing until it is resumed."""
        ...

    async def resume(self, name: str) -> ScheduleDocument:
        """Fire again, from now on."""
        ...

    async def remove(self, name: str) -> RemovedSchedule:
        """Forget a schedule; its tasks stay."""
        ...

    async def run_now(self, name: str) -> ScheduleTasks:
        """Make one task of it now. Raises `AppRequired` without the consumer's code."""
        ...

    async def backfill(
        self, name: str, *, start: datetime, end: datetime, limit: int = 1_000, again: bool = False
    ) -> ScheduleTasks:
        """Make a task for each fire time in a past range that has none yet; with `again` also for times so old that
        they may have fired. Raises `AppRequired` without the consumer's code."""
        ...


class NodeCalls(Protocol):
    """Nodes: the processes that run tasks."""

    async def list(self) -> tuple[NodeDocument, ...]:
        """Every node on the store, by name. A dead one is there until its tasks were taken back."""
        ...

    async def drain(self, ref: str, *, draining: bool = True) -> DrainReceipt:
        """Ask a node to take no more tasks, or to take tasks again, and wait up to 2 s until it has heard of it. `ref`
        is its name, its incarnation, or at least 4 characters of its beginning. Raises `UnknownNode`,
        `AmbiguousNode`."""
        ...


class DeviceCalls(Protocol):
    """Devices, their pools and the accounts of their tasks. A pool is the queue of the same name. Calls with the name
    of a pool raise `UnknownPool`, calls about one device `UnknownDevice`."""

    # queries

    async def list(self, pool: str | None = None) -> tuple[DeviceDocument, ...]:
        """Every device, or those of one pool, by pool, number and name."""
        ...

    async def get(self, name: str, *, limit: int = 10, reveal: bool = False) -> DeviceDetail:
        """Everything about one device, with its last runs."""
        ...

    async def history(self, where: RunQuery, *, before: str | None = None, limit: int = 20) -> DeviceHistory:
        """Runs on devices, newest first, and how they ended by device and by account; these sums are on the first page
        only. The next page begins before `next` of the last one."""
        ...

    async def overview(self, pool: str | None = None) -> DeviceOverview:
        """What the devices are doing, how their pools go, and what happened last."""
        ...

    def watch(self, pool: str | None = None, *, min_interval_s: float = 0.2) -> AsyncIterator[DeviceOverview]:
        """The overview now, and again after each change and each second, at most once in `min_interval_s`. While the
        store is away, the last one is repeated with `away_since`."""
        ...

    # commands

    async def add(self, request: DeviceRequest) -> DeviceDocument:
        """Add a device. Raises `DeviceExists` if its name, number or address is taken, `InvalidInput` if its adapter
        does not know its settings."""
        ...

    async def edit(self, name: str, change: DeviceChange) -> DeviceReceipt:
        """Change how a device is reached. Raises `DeviceExists`, `InvalidInput`."""
        ...

    async def label(self, names: Sequence[str], labels: Mapping[str, str]) -> tuple[DeviceReceipt, ...]:
        """Set labels of each of these devices; an empty text removes a label, and those that are not named stay."""
        ...

    async def apply(self, names: Sequence[str], command: DeviceCommand) -> tuple[DeviceReceipt, ...]:
        """Drain, take, quarantine or return each of these devices. A refusal is in the receipt and does not stop the
        others."""
        ...

    async def remove(self, names: Sequence[str], *, force: bool = False) -> tuple[DeviceReceipt, ...]:
        """Forget devices; their runs stay in the history. While a task runs on a device it is refused, unless `force`
        is given: then that run is interrupted."""
        ...

    # accounts

    async def accounts(self, pool: str | None = None) -> tuple[QuarantinedAccountDocument, ...]:
        """The accounts and consumers of which no more tasks are taken, because the last ones have all failed."""
        ...

    async def release(
        self, account: int | str, *, consumer: str | None = None, pool: str | None = None
    ) -> ReleaseReceipt:
        """Take tasks of an account again. Raises `NotQuarantined`."""
        ...


class EventCalls(Protocol):
    """What happened on the store, in order. The store keeps the last 10,000 events or more."""

    async def read(
        self,
        where: EventFilter = ANY_EVENT,
        *,
        after: int | None = None,
        tail: int | None = None,
        limit: int = 1000,
    ) -> EventPageDocument:
        """A page of the next `limit` events after the number `after`, or of about the last `tail`; of those, the ones
        that match. Without either it is empty, and only tells the number of the newest event."""
        ...

    def subscribe(self, where: EventFilter = ANY_EVENT, *, after: int | None = None) -> AsyncIterator[EventDocument]:
        """The matching events from now on, or after the number `after`. It waits for a store that is away. Raises
        `EventsMissed` if the store has dropped some before they were read."""
        ...


class OverviewCalls(Protocol):
    """What the store is doing, or only the tasks that the refs name."""

    async def get(self, refs: Sequence[str] = ()) -> OverviewDocument:
        """The overview now."""
        ...

    def watch(self, refs: Sequence[str] = (), *, min_interval_s: float = 0.1) -> AsyncIterator[OverviewDocument]:
        """The overview now, and again after each change, at most once in `min_interval_s`, and at most ten times a
        second. While the store is away, the last one is repeated with `away_since`."""
        ...


class ConsumerCalls(Protocol):
    """The consumers that nodes have published in the store."""

    async def list(self) -> tuple[ConsumerDocument, ...]:
        """All of them by name, with the schemas of their arguments and results; also those that a node served last in
        the past week."""
        ...


class AuditCalls(Protocol):
    """The record of what people asked for: one entry per call, kept for a year unless the yard says otherwise."""

    async def list(
        self,
        *,
        by: str | None = None,
        command: str | None = None,
        task: str | None = None,
        queue: str | None = None,
        device: str | None = None,
        since: datetime | None = None,
        before: int | None = None,
        limit: int = 100,
    ) -> AuditPage:
        """A page, newest first: of one actor (`ana`, or `cli:ana` for one way), of one command, about one task (a ref,
        or the whole id of a forgotten one), one queue or one device, or since a time. The next page begins before the
        number `before`."""
        ...


class Application(Protocol):
    """All calls, grouped by noun. Open it with `taskyard.application.opening.open_application`."""

    @property
    def store(self) -> str:
        """The address of the store, without its password."""
        ...

    @property
    def tasks(self) -> TaskCalls: ...

    @property
    def queues(self) -> QueueCalls: ...

    @property
    def schedules(self) -> ScheduleCalls: ...

    @property
    def nodes(self) -> NodeCalls: ...

    @property
    def devices(self) -> DeviceCalls: ...

    @property
    def events(self) -> EventCalls: ...

    @property
    def overview(self) -> OverviewCalls: ...

    @property
    def consumers(self) -> ConsumerCalls: ...

    @property
    def audit(self) -> AuditCalls: ...
