"""Taskyard runs tasks: when they are due, in the right order, in the right place, within limits, without losing any."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from taskyard.blocking import BlockingYard
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
    InvalidArguments,
    InvalidConsumer,
    InvalidInput,
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
    UnknownConsumer,
    UnknownTask,
    WrongLoop,
)
from taskyard.execution.context import RunContext, current_run
from taskyard.execution.inline import InProcessExecutor
from taskyard.execution.sizing import set_default_workers
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
from taskyard.sizing import cpu_workers
from taskyard.standalone import Scheduler
from taskyard.yard import Yard

if TYPE_CHECKING:
    from taskyard.execution.isolated import IsolatedProcessPoolExecutor
    from taskyard.execution.pool import PoolNumbers, PoolSettings
    from taskyard.execution.process import ProcessPoolExecutor
    from taskyard.manager import CallOptions, ExecutorManager, ManagerSettings, get_executor_manager

__version__ = "0.1.0"

_LATER = {
    "CallOptions": "taskyard.manager",
    "ExecutorManager": "taskyard.manager",
    "IsolatedProcessPoolExecutor": "taskyard.execution.isolated",
    "ManagerSettings": "taskyard.manager",
    "PoolNumbers": "taskyard.execution.pool",
    "PoolSettings": "taskyard.execution.pool",
    "ProcessPoolExecutor": "taskyard.execution.process",
    "get_executor_manager": "taskyard.manager",
}
"""What is imported when it is first asked for, and where it is: most programs need none of it."""

set_default_workers(cpu_workers)


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)


__all__ = [
    "Abilities",
    "BaseTaskConsumer",
    "BatchTooLarge",
    "BlockingOnLoop",
    "BlockingYard",
    "CallOptions",
    "Cancel",
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
    "ExecutionError",
    "ExecutionRequest",
    "ExecutionResult",
    "ExecutorManager",
    "ExecutorProtocol",
    "ForkedStore",
    "IllegalMove",
    "InProcessExecutor",
    "InvalidArguments",
    "InvalidConsumer",
    "InvalidInput",
    "IsolatedProcessPoolExecutor",
    "ManagerSettings",
    "NaiveDatetime",
    "NoCurrentRun",
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
    "UnknownConsumer",
    "UnknownTask",
    "WrongLoop",
    "Yard",
    "current_run",
    "get_executor_manager",
]
