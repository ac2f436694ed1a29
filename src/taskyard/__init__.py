"""Taskyard runs tasks: when they are due, in the right order, in the right place, within limits, without losing any."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from taskyard.errors import (
    ArtifactElsewhere,
    BatchTooLarge,
    BlockingOnLoop,
    Cancel,
    ChangedMeanwhile,
    ClaimLost,
    CommandRefused,
    DependencyCycle,
    DependencyLost,
    DuplicateConsumer,
    DuplicateTask,
    EventsMissed,
    ForkedStore,
    IllegalMove,
    InvalidAlgorithm,
    InvalidArguments,
    InvalidConsumer,
    InvalidInput,
    InvalidOutput,
    InvalidRetry,
    NaiveDatetime,
    NoCurrentRun,
    NoScript,
    NotInTransaction,
    NotJson,
    NotOpen,
    OtherDatabase,
    OutcomeUnknown,
    PayloadTooLarge,
    ResultGone,
    ResultsPruned,
    RetryLater,
    ScheduleExists,
    SlotTaken,
    StaleTransaction,
    StoreBusy,
    StoreCorrupt,
    StoredArgumentsInvalid,
    StoreDenied,
    StoreError,
    StoreFolderMissing,
    StoreForeign,
    StoreFull,
    StoreIncomplete,
    StoreMigrationChanged,
    StoreNotUtf8,
    StoreOnNetwork,
    StoreReadOnly,
    StoreReplaced,
    StoreTooNew,
    StoreTooOld,
    StoreUnavailable,
    StoreUnreachable,
    StoreUrlInvalid,
    SubmitPending,
    TaskCanceled,
    TaskEnded,
    TaskFailed,
    TaskSkipped,
    TaskyardError,
    UnguardedScript,
    UnknownAlgorithm,
    UnknownArtifact,
    UnknownConsumer,
    UnknownGroup,
    UnknownNode,
    UnknownSchedule,
    UnknownTask,
    UnusableConnection,
    WrongLoop,
)
from taskyard.execution.context import RunContext, current_run
from taskyard.execution.inline import InProcessExecutor
from taskyard.execution.sizing import set_default_workers
from taskyard.execution.thread import ThreadExecutor
from taskyard.group import Group, GroupProgress
from taskyard.handle import BoundTask, ConsumerFunction, TaskHandle
from taskyard.model.blocker import Blocker
from taskyard.model.event import Event, EventKind
from taskyard.model.execution import ErrorKind, ExecutionError, ExecutionResult, Progress
from taskyard.model.failures import FailureGroup
from taskyard.model.order import Priority
from taskyard.model.queue import QueueControl, QueueOrder, QueueSettings, QueueState, QueueStatus
from taskyard.model.recurrence import Cron, Every
from taskyard.model.retry import RetryPolicy
from taskyard.model.schedule import Missed, Overlap, Schedule
from taskyard.model.schedule_state import ScheduleState
from taskyard.model.state import TaskState
from taskyard.model.task import Attempt, Dedupe, DedupeScope, OnFailure, Task, TaskRecord
from taskyard.model.task_filter import TaskFilter
from taskyard.model.why import Reason, Why
from taskyard.ports.admission import Admission
from taskyard.ports.consumer import BaseTaskConsumer, ConsumerChange, TaskConsumerRegistry
from taskyard.ports.executor import Abilities, ExecutionRequest, ExecutorProtocol
from taskyard.ports.places import Place, Places
from taskyard.ports.schedules import FireRow, ScheduleStatus
from taskyard.queueing.controller import QueueController
from taskyard.queueing.matching import BulkReport, Matching, RerunReport
from taskyard.schedules import Schedules
from taskyard.version import VERSION
from taskyard.yard import Yard

if TYPE_CHECKING:
    from taskyard.blocking import BlockingExecutor
    from taskyard.blocking_yard import BlockingYard
    from taskyard.execution.algorithm import Algorithm, AlgorithmContext
    from taskyard.execution.circuit import CircuitPolicy, CircuitState
    from taskyard.execution.desk import AlgorithmHealth
    from taskyard.execution.isolated import IsolatedProcessPoolExecutor
    from taskyard.execution.mock import MockExecutor, NoopExecutor
    from taskyard.execution.policy import ExecutionPolicy
    from taskyard.execution.pool import PoolNumbers
    from taskyard.execution.pool_settings import PoolSettings
    from taskyard.execution.process import ProcessPoolExecutor
    from taskyard.execution.router import ExecutionDispatcher
    from taskyard.execution.starting import WorkerHandle
    from taskyard.manager import CallOptions, ExecutorManager, ManagerSettings, get_executor_manager
    from taskyard.model.algorithm import AlgorithmSpec, ExecutionHints, Incident, IncidentKind
    from taskyard.standalone import Scheduler, StandaloneQueue

__version__ = VERSION

_LATER = {
    "Algorithm": "taskyard.execution.algorithm",
    "AlgorithmContext": "taskyard.execution.algorithm",
    "AlgorithmHealth": "taskyard.execution.desk",
    "AlgorithmSpec": "taskyard.model.algorithm",
    "BlockingExecutor": "taskyard.blocking",
    "BlockingYard": "taskyard.blocking_yard",
    "CallOptions": "taskyard.manager",
    "CircuitPolicy": "taskyard.execution.circuit",
    "CircuitState": "taskyard.execution.circuit",
    "ExecutionDispatcher": "taskyard.execution.router",
    "ExecutionHints": "taskyard.model.algorithm",
    "ExecutionPolicy": "taskyard.execution.policy",
    "ExecutorManager": "taskyard.manager",
    "Incident": "taskyard.model.algorithm",
    "IncidentKind": "taskyard.model.algorithm",
    "IsolatedProcessPoolExecutor": "taskyard.execution.isolated",
    "ManagerSettings": "taskyard.manager",
    "MockExecutor": "taskyard.execution.mock",
    "NoopExecutor": "taskyard.execution.mock",
    "PoolNumbers": "taskyard.execution.pool",
    "PoolSettings": "taskyard.execution.pool_settings",
    "ProcessPoolExecutor": "taskyard.execution.process",
    "Scheduler": "taskyard.standalone",
    "StandaloneQueue": "taskyard.standalone",
    "WorkerHandle": "taskyard.execution.starting",
    "get_executor_manager": "taskyard.manager",
}
"""What is imported when it is first asked for, and where it is: most programs need none of it."""


def _cpu_workers() -> int:
    from taskyard.resources.workers import count_workers

    return count_workers().cpu


set_default_workers(_cpu_workers)


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LATER[name]), name)
    return value


__all__ = [
    "Abilities",
    "Admission",
    "Algorithm",
    "AlgorithmContext",
    "AlgorithmHealth",
    "AlgorithmSpec",
    "ArtifactElsewhere",
    "Attempt",
    "BaseTaskConsumer",
    "BatchTooLarge",
    "Blocker",
    "BlockingExecutor",
    "BlockingOnLoop",
    "BlockingYard",
    "BoundTask",
    "BulkReport",
    "CallOptions",
    "Cancel",
    "ChangedMeanwhile",
    "CircuitPolicy",
    "CircuitState",
    "ClaimLost",
    "CommandRefused",
    "ConsumerChange",
    "ConsumerFunction",
    "Cron",
    "Dedupe",
    "DedupeScope",
    "DependencyCycle",
    "DependencyLost",
    "DuplicateConsumer",
    "DuplicateTask",
    "ErrorKind",
    "Event",
    "EventKind",
    "EventsMissed",
    "Every",
    "ExecutionDispatcher",
    "ExecutionError",
    "ExecutionHints",
    "ExecutionPolicy",
    "ExecutionRequest",
    "ExecutionResult",
    "ExecutorManager",
    "ExecutorProtocol",
    "FailureGroup",
    "FireRow",
    "ForkedStore",
    "Group",
    "GroupProgress",
    "IllegalMove",
    "InProcessExecutor",
    "Incident",
    "IncidentKind",
    "InvalidAlgorithm",
    "InvalidArguments",
    "InvalidConsumer",
    "InvalidInput",
    "InvalidOutput",
    "InvalidRetry",
    "IsolatedProcessPoolExecutor",
    "ManagerSettings",
    "Matching",
    "Missed",
    "MockExecutor",
    "NaiveDatetime",
    "NoCurrentRun",
    "NoScript",
    "NoopExecutor",
    "NotInTransaction",
    "NotJson",
    "NotOpen",
    "OnFailure",
    "OtherDatabase",
    "OutcomeUnknown",
    "Overlap",
    "PayloadTooLarge",
    "Place",
    "Places",
    "PoolNumbers",
    "PoolSettings",
    "Priority",
    "ProcessPoolExecutor",
    "Progress",
    "QueueControl",
    "QueueController",
    "QueueOrder",
    "QueueSettings",
    "QueueState",
    "QueueStatus",
    "Reason",
    "RerunReport",
    "ResultGone",
    "ResultsPruned",
    "RetryLater",
    "RetryPolicy",
    "RunContext",
    "Schedule",
    "ScheduleExists",
    "ScheduleState",
    "ScheduleStatus",
    "Scheduler",
    "Schedules",
    "SlotTaken",
    "StaleTransaction",
    "StandaloneQueue",
    "StoreBusy",
    "StoreCorrupt",
    "StoreDenied",
    "StoreError",
    "StoreFolderMissing",
    "StoreForeign",
    "StoreFull",
    "StoreIncomplete",
    "StoreMigrationChanged",
    "StoreNotUtf8",
    "StoreOnNetwork",
    "StoreReadOnly",
    "StoreReplaced",
    "StoreTooNew",
    "StoreTooOld",
    "StoreUnavailable",
    "StoreUnreachable",
    "StoreUrlInvalid",
    "StoredArgumentsInvalid",
    "SubmitPending",
    "Task",
    "TaskCanceled",
    "TaskConsumerRegistry",
    "TaskEnded",
    "TaskFailed",
    "TaskFilter",
    "TaskHandle",
    "TaskRecord",
    "TaskSkipped",
    "TaskState",
    "TaskyardError",
    "ThreadExecutor",
    "UnguardedScript",
    "UnknownAlgorithm",
    "UnknownArtifact",
    "UnknownConsumer",
    "UnknownGroup",
    "UnknownNode",
    "UnknownSchedule",
    "UnknownTask",
    "UnusableConnection",
    "Why",
    "WorkerHandle",
    "WrongLoop",
    "Yard",
    "current_run",
    "get_executor_manager",
]
