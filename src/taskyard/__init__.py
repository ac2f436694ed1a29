"""Taskyard runs tasks: when they are due, in the right order, in the right place, within limits, without losing any."""

from taskyard.blocking import BlockingExecutor, BlockingYard
from taskyard.errors import (
    BatchTooLarge,
    BlockingOnLoop,
    Cancel,
    ClaimLost,
    CommandRefused,
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
    NaiveDatetime,
    NoCurrentRun,
    NotJson,
    NotOpen,
    OutcomeUnknown,
    PayloadTooLarge,
    ResultGone,
    RetryLater,
    StoreBusy,
    StoreCorrupt,
    StoreError,
    StoreFolderMissing,
    StoreForeign,
    StoreFull,
    StoreOnNetwork,
    StoreReadOnly,
    StoreTooNew,
    StoreUnavailable,
    StoreUrlInvalid,
    TaskCanceled,
    TaskEnded,
    TaskFailed,
    TaskSkipped,
    TaskyardError,
    UnguardedScript,
    UnknownAlgorithm,
    UnknownConsumer,
    UnknownTask,
    WrongLoop,
)
from taskyard.execution.algorithm import Algorithm, AlgorithmContext
from taskyard.execution.circuit import CircuitPolicy, CircuitState
from taskyard.execution.context import RunContext, current_run
from taskyard.execution.desk import AlgorithmHealth
from taskyard.execution.inline import InProcessExecutor
from taskyard.execution.isolated import IsolatedProcessPoolExecutor
from taskyard.execution.mock import MockExecutor, NoopExecutor
from taskyard.execution.nursery import WorkerHandle
from taskyard.execution.policy import ExecutionPolicy
from taskyard.execution.pool import PoolNumbers, PoolSettings
from taskyard.execution.process import ProcessPoolExecutor
from taskyard.execution.router import ExecutionDispatcher
from taskyard.execution.thread import ThreadExecutor
from taskyard.handle import ConsumerFunction, TaskHandle
from taskyard.model.algorithm import AlgorithmSpec, ExecutionHints, Incident, IncidentKind
from taskyard.model.event import Event, EventKind
from taskyard.model.execution import ErrorKind, ExecutionError, ExecutionRequest, ExecutionResult, Progress
from taskyard.model.order import Priority
from taskyard.model.retry import RetryPolicy
from taskyard.model.state import TaskState
from taskyard.model.task import Dedupe, Run, Task, TaskRecord
from taskyard.ports.consumer import BaseTaskConsumer, TaskConsumerRegistry
from taskyard.ports.executor import Abilities, ExecutorProtocol
from taskyard.ports.store import TaskFilter
from taskyard.standalone import Scheduler
from taskyard.yard import Yard

__version__ = "0.1.0"

__all__ = [
    "Abilities",
    "Algorithm",
    "AlgorithmContext",
    "AlgorithmHealth",
    "AlgorithmSpec",
    "BaseTaskConsumer",
    "BatchTooLarge",
    "BlockingExecutor",
    "BlockingOnLoop",
    "BlockingYard",
    "Cancel",
    "CircuitPolicy",
    "CircuitState",
    "ClaimLost",
    "CommandRefused",
    "ConsumerFunction",
    "Dedupe",
    "DuplicateConsumer",
    "DuplicateTask",
    "ErrorKind",
    "Event",
    "EventKind",
    "EventsMissed",
    "ExecutionDispatcher",
    "ExecutionError",
    "ExecutionHints",
    "ExecutionPolicy",
    "ExecutionRequest",
    "ExecutionResult",
    "ExecutorProtocol",
    "ForkedStore",
    "IllegalMove",
    "InProcessExecutor",
    "Incident",
    "IncidentKind",
    "InvalidAlgorithm",
    "InvalidArguments",
    "InvalidConsumer",
    "InvalidInput",
    "InvalidOutput",
    "IsolatedProcessPoolExecutor",
    "MockExecutor",
    "NaiveDatetime",
    "NoCurrentRun",
    "NoopExecutor",
    "NotJson",
    "NotOpen",
    "OutcomeUnknown",
    "PayloadTooLarge",
    "PoolNumbers",
    "PoolSettings",
    "Priority",
    "ProcessPoolExecutor",
    "Progress",
    "ResultGone",
    "RetryLater",
    "RetryPolicy",
    "Run",
    "RunContext",
    "Scheduler",
    "StoreBusy",
    "StoreCorrupt",
    "StoreError",
    "StoreFolderMissing",
    "StoreForeign",
    "StoreFull",
    "StoreOnNetwork",
    "StoreReadOnly",
    "StoreTooNew",
    "StoreUnavailable",
    "StoreUrlInvalid",
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
    "UnknownConsumer",
    "UnknownTask",
    "WorkerHandle",
    "WrongLoop",
    "Yard",
    "current_run",
]
