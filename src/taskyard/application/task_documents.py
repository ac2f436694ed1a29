"""Documents of tasks, and how they are made of stored records: JSON unpacked, secrets hidden."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, cast

from taskyard.application.documents import Document
from taskyard.application.formatting import seconds_between
from taskyard.model.attempt import Artifact, AttemptArtifact, AttemptLine, LineOrigin, LogLevel
from taskyard.model.blocker import Blocker
from taskyard.model.execution import ErrorCode, ErrorKind, ExecutionError, Progress
from taskyard.model.failures import FailureGroup
from taskyard.model.notes import AuditStamp, CancelRequest, Note
from taskyard.model.order import Priority
from taskyard.model.redaction import Redactor
from taskyard.model.retry import RetryPolicy
from taskyard.model.state import TaskState
from taskyard.model.task import Attempt, TaskRecord
from taskyard.model.why import Reason, Why

PriorityName = Literal["high", "normal", "low"]
PRIORITIES: tuple[PriorityName, ...] = ("high", "normal", "low")


class TaskError(Document, frozen=True, kw_only=True):
    """The last error of a task or of an attempt."""

    kind: ErrorKind
    type: str
    code: ErrorCode | None
    message: str
    traceback: str | None


class TaskDocument(Document, frozen=True, kw_only=True):
    """A task. `finished_at` is set once it is completed, failed, canceled or skipped; `duration_s` is the time from
    the start of its latest attempt to then. `group` is the id of its group, `origin` the task that it was made of.
    `values` are what middleware has added. `remarks` say in words which actor holds it, which asked to cancel it, and
    what happened to it last."""

    uuid: str
    title: str
    labels: dict[str, str]
    values: dict[str, Any]
    trace: str
    submitted_by: str
    group: str | None
    consumer: str
    due_at: datetime
    created_at: datetime
    updated_at: datetime
    queue: str
    args: Any
    state: TaskState
    priority: PriorityName
    key: str | None
    timeout_s: float | None
    retry: RetryPolicy | None
    started_at: datetime | None
    finished_at: datetime | None
    attempt: int
    retries: int
    crashes: int
    recoveries: int
    node: str | None
    worker_pid: int | None
    device: str | None
    progress: Progress | None
    result: Any
    error: TaskError | None
    note: Note | None
    hold: AuditStamp | None
    cancel: CancelRequest | None
    bucket: str | None
    requires: dict[str, str]
    origin: str | None
    blocker: Blocker | None
    duration_s: float | None
    remarks: str


class WhyDocument(Document, frozen=True, kw_only=True):
    """Why a task waits: a reason that programs compare, the same in words, and what would free it. `until` is when the
    wait ends by itself; `blocking_task` the task in the way, if one is."""

    reason: Reason
    text: str
    remedy: str
    since: datetime | None
    until: datetime | None
    blocking_task: str | None


class WaitingTask(TaskDocument, frozen=True, kw_only=True):
    """A task and why it waits, None if it does not."""

    why: WhyDocument | None = None


class AttemptDocument(Document, frozen=True, kw_only=True):
    """One execution of a task. `node` is the incarnation that ran it, `node_name` its name while it is known. `device`
    is the place where it ran, `device_number` its number if it is a device of the store."""

    attempt: int
    token: int
    node: str
    state: TaskState
    started_at: datetime
    finished_at: datetime | None
    error: TaskError | None
    worker_pid: int | None
    device: str | None
    duration_s: float | None
    node_name: str = ""
    device_number: int | None = None


class LineDocument(Document, frozen=True, kw_only=True):
    """A log line of an attempt; `dropped` counts lines that were left out in its place."""

    attempt: int | None
    at: datetime
    level: LogLevel
    origin: LineOrigin
    text: str
    dropped: int


class LogDocument(Document, frozen=True, kw_only=True):
    """The latest log lines of a task, oldest first."""

    task: str
    lines: tuple[LineDocument, ...]


class ArtifactDocument(Document, frozen=True, kw_only=True):
    """An artifact of an attempt, without its content. `path` is where the file is on the machine `host`; without a
    path the content is in the store."""

    attempt: int | None
    name: str
    size: int
    sha256: str
    media_type: str
    created_at: datetime
    host: str | None
    path: str | None


class ArtifactContent(Document, frozen=True, kw_only=True):
    """The content of an artifact."""

    task: str
    name: str
    data: bytes


class TaskDetail(WaitingTask, frozen=True, kw_only=True):
    """Everything about one task. `waits_for_key`: other tasks with its key go first."""

    waits_for_key: bool
    attempts: tuple[AttemptDocument, ...]
    lines: tuple[LineDocument, ...]
    artifacts: tuple[ArtifactDocument, ...]
    node_name: str = ""


class TaskPage(Document, frozen=True, kw_only=True):
    """One page of tasks, newest first. `counts` are those of the store, or of the queue that the filter names; if that
    has no task, `store_counts` are those of the store. The next page begins before the task `next_before`; None on the
    last one. `no_match` says why a page is empty, if the filter names an unknown queue or consumer."""

    tasks: tuple[WaitingTask, ...]
    counts: dict[TaskState, int]
    store_counts: dict[TaskState, int] = {}
    next_before: str | None = None
    no_match: str = ""


class ChainLink(Document, frozen=True, kw_only=True):
    """A task of a chain in which each waits for the next one."""

    uuid: str
    consumer: str
    queue: str
    state: TaskState
    why: WhyDocument | None


class FailureDocument(Document, frozen=True, kw_only=True):
    """Failed tasks of one consumer with one class of error; quarantined ones are a group of their own. `uuid`,
    `message` and `newest_at` are those of the task that failed last."""

    error: str
    consumer: str
    quarantined: bool
    count: int
    newest_at: datetime
    uuid: str
    message: str


class FailurePage(Document, frozen=True, kw_only=True):
    """Groups of failed tasks, the largest first. If there is none, `other_errors` counts the failed tasks that do not
    match by class of error, and `no_match` says which unknown queue or consumer the filter names."""

    groups: tuple[FailureDocument, ...]
    other_errors: dict[str, int] = {}
    no_match: str = ""


# --- from records -----------------------------------------------------------------------------------------------------


def task_document(record: TaskRecord, *, reveal: bool = False) -> TaskDocument:
    return TaskDocument(**task_fields(record, Redactor(record, reveal=reveal)))


def waiting_task(record: TaskRecord, why: Why | None) -> WaitingTask:
    redactor = Redactor(record)
    return WaitingTask(**task_fields(record, redactor), why=why_document(why, redactor))


def task_fields(record: TaskRecord, redactor: Redactor) -> dict[str, Any]:
    """The values of a `TaskDocument`."""
    return {
        "uuid": record.uuid,
        "title": redactor.text(record.title),
        "labels": {name: redactor.text(value) for name, value in record.labels.items()},
        "values": redactor.values,
        "trace": record.trace,
        "submitted_by": redactor.text(record.submitted_by),
        "group": record.group_id,
        "consumer": record.consumer,
        "due_at": record.due_at,
        "created_at": record.created_at,
        "updated_at": record.updated_at,
        "queue": record.queue,
        "args": redactor.args,
        "state": record.state,
        "priority": priority_name(record.priority),
        "key": record.key,
        "timeout_s": record.timeout_s,
        "retry": record.retry,
        "started_at": record.started_at,
        "finished_at": record.finished_at,
        "attempt": record.attempt,
        "retries": record.retries,
        "crashes": record.crashes,
        "recoveries": record.recoveries,
        "node": record.node,
        "worker_pid": record.worker_pid,
        "device": record.device,
        "progress": redactor.value(record.progress),
        "result": redactor.result,
        "error": task_error(record.error, redactor),
        "note": redactor.value(record.note),
        "hold": redactor.value(record.hold),
        "cancel": redactor.value(record.cancel),
        "bucket": record.bucket,
        "requires": record.requirements,
        "origin": record.origin,
        "blocker": record.blocker,
        "duration_s": seconds_between(record.started_at, record.finished_at),
        "remarks": redactor.text(record.remarks),
    }


def task_error(error: ExecutionError | None, redactor: Redactor) -> TaskError | None:
    if error is None:
        return None
    return TaskError(
        kind=error.kind,
        type=error.type,
        code=error.code,
        message=redactor.text(error.text),
        traceback=None if error.traceback is None else redactor.text(error.traceback),
    )


def why_document(why: Why | None, redactor: Redactor) -> WhyDocument | None:
    if why is None:
        return None
    return WhyDocument(
        reason=why.reason,
        text=redactor.text(why.text),
        remedy=why.remedy,
        since=why.since,
        until=why.until,
        blocking_task=why.blocker,
    )


def attempt_document(
    attempt: Attempt, redactor: Redactor, names: Mapping[str, str], numbers: Mapping[str, int]
) -> AttemptDocument:
    """`names` are those of the nodes, by incarnation, `numbers` those of the devices, by name."""
    return AttemptDocument(
        attempt=attempt.attempt,
        token=attempt.token,
        node=attempt.node,
        state=attempt.state,
        started_at=attempt.started_at,
        finished_at=attempt.finished_at,
        error=task_error(attempt.error, redactor),
        worker_pid=attempt.worker_pid,
        device=attempt.device,
        duration_s=seconds_between(attempt.started_at, attempt.finished_at),
        node_name=names.get(attempt.node, ""),
        device_number=numbers.get(attempt.device or ""),
    )


def line_documents(
    lines: Sequence[AttemptLine], attempts: Sequence[Attempt], redactor: Redactor
) -> tuple[LineDocument, ...]:
    return tuple(
        LineDocument(
            attempt=_number_of(token, attempts),
            at=line.at,
            level=line.level,
            origin=line.origin,
            text=redactor.text(line.text),
            dropped=line.dropped,
        )
        for token, line in lines
    )


def artifact_documents(
    artifacts: Sequence[AttemptArtifact], attempts: Sequence[Attempt]
) -> tuple[ArtifactDocument, ...]:
    return tuple(_artifact_document(one.artifact, _number_of(one.token, attempts)) for one in artifacts)


def _artifact_document(artifact: Artifact, attempt: int | None) -> ArtifactDocument:
    return ArtifactDocument(
        attempt=attempt,
        name=artifact.name,
        size=artifact.size,
        sha256=artifact.sha256,
        media_type=artifact.media_type,
        created_at=artifact.created_at,
        host=artifact.host,
        path=artifact.path,
    )


def _number_of(token: int, attempts: Sequence[Attempt]) -> int | None:
    """The number of the attempt with this token, if the attempt is still kept."""
    return next((one.attempt for one in attempts if one.token == token), None)


def failure_document(group: FailureGroup, message: str) -> FailureDocument:
    return FailureDocument(
        error=group.error,
        consumer=group.consumer,
        quarantined=group.is_quarantined,
        count=group.count,
        newest_at=group.newest_at,
        uuid=group.uuid,
        message=message,
    )


def priority_name(priority: int) -> PriorityName:
    return cast(PriorityName, Priority(priority).label)
