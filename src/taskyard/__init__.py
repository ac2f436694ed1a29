"""Taskyard runs tasks: when they are due, in the right order, in the right place, within limits, without losing any."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

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
from taskyard.execution.context import RunContext, current_run
from taskyard.execution.inline import InProcessExecutor
from taskyard.execution.isolated import IsolatedProcessPoolExecutor
from taskyard.execution.nursery import WorkerHandle
from taskyard.execution.pool import PoolNumbers, PoolSettings
from taskyard.execution.process import ProcessPoolExecutor
from taskyard.execution.thread import ThreadExecutor
from taskyard.handle import ConsumerFunction, TaskHandle
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

if TYPE_CHECKING:
    from taskyard.execution.algorithm import Algorithm, AlgorithmContext
    from taskyard.execution.circuit import CircuitPolicy, CircuitState
    from taskyard.execution.desk import AlgorithmHealth
    from taskyard.execution.mock import MockExecutor, NoopExecutor
    from taskyard.execution.policy import ExecutionPolicy
    from taskyard.execution.router import ExecutionDispatcher
    from taskyard.model.algorithm import AlgorithmSpec, ExecutionHints, Incident, IncidentKind

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

_LATER = {
    "Algorithm": "taskyard.execution.algorithm",
    "AlgorithmContext": "taskyard.execution.algorithm",
    "CircuitPolicy": "taskyard.execution.circuit",
    "CircuitState": "taskyard.execution.circuit",
    "AlgorithmHealth": "taskyard.execution.desk",
    "MockExecutor": "taskyard.execution.mock",
    "NoopExecutor": "taskyard.execution.mock",
    "ExecutionPolicy": "taskyard.execution.policy",
    "ExecutionDispatcher": "taskyard.execution.router",
    "AlgorithmSpec": "taskyard.model.algorithm",
    "ExecutionHints": "taskyard.model.algorithm",
    "Incident": "taskyard.model.algorithm",
    "IncidentKind": "taskyard.model.algorithm",
}
"""What most programs never use is imported when it is first asked for."""


def __getattr__(name: str) -> Any:
    module = _LATER.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(module), name)
    return value
