"""Taskyard runs tasks: when they are due, in the right order, in the right place, within limits, without losing any.

`__all__` is what most programs need. The rest has a module of its own: `taskyard.errors`, `taskyard.algorithms`,
`taskyard.futures` (process pools), `taskyard.executor_port` and `taskyard.middleware` (extending Taskyard).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from taskyard.errors import (
    Cancel,
    InvalidInput,
    OutcomeUnknown,
    ResultGone,
    RetryLater,
    StoreError,
    TaskCanceled,
    TaskFailed,
    TaskSkipped,
    TaskyardError,
)
from taskyard.execution.context import RunContext, current_run
from taskyard.execution.sizing import set_default_workers
from taskyard.group import Group, GroupProgress
from taskyard.handle import BoundTask, ConsumerFunction, TaskHandle
from taskyard.model.blocker import Blocker
from taskyard.model.each import ScheduleItem
from taskyard.model.event import Event, EventKind
from taskyard.model.execution import Progress
from taskyard.model.failures import FailureGroup
from taskyard.model.order import Priority
from taskyard.model.queue import QueueOrder, QueueSettings, QueueState, QueueStatus
from taskyard.model.recurrence import Cron, Every
from taskyard.model.retry import RetryPolicy
from taskyard.model.schedule import Missed, Overlap, Schedule
from taskyard.model.state import TaskState
from taskyard.model.task import Attempt, Dedupe, DedupeScope, OnFailure, Task, TaskRecord
from taskyard.model.task_filter import TaskFilter
from taskyard.model.why import Reason, Why
from taskyard.ports.admission import Admission
from taskyard.ports.consumer import BaseTaskConsumer, TaskConsumerRegistry
from taskyard.ports.places import Place
from taskyard.ports.schedules import ScheduleStatus
from taskyard.queueing.controller import QueueController
from taskyard.queueing.matching import BulkReport, Matching, RerunReport
from taskyard.schedules import Schedules
from taskyard.version import VERSION
from taskyard.yard import Yard

if TYPE_CHECKING:
    from taskyard.blocking_yard import BlockingYard as BlockingYard
    from taskyard.device_pool import QueueItem as QueueItem
    from taskyard.device_pool import TaskRun as TaskRun
    from taskyard.devices.actor import WorkerActor as WorkerActor
    from taskyard.execution.algorithm import Algorithm as Algorithm
    from taskyard.execution.algorithm import AlgorithmContext as AlgorithmContext
    from taskyard.execution.inline import InProcessExecutor as InProcessExecutor
    from taskyard.execution.isolated import IsolatedProcessPoolExecutor as IsolatedProcessPoolExecutor
    from taskyard.execution.mock import MockExecutor as MockExecutor
    from taskyard.execution.mock import NoopExecutor as NoopExecutor
    from taskyard.execution.policy import ExecutionPolicy as ExecutionPolicy
    from taskyard.execution.process import ProcessPoolExecutor as ProcessPoolExecutor
    from taskyard.execution.router import ExecutionDispatcher as ExecutionDispatcher
    from taskyard.execution.starting import WorkerHandle as WorkerHandle
    from taskyard.execution.thread import ThreadExecutor as ThreadExecutor
    from taskyard.executor_service import ExecutorService as ExecutorService
    from taskyard.manager import ExecutorManager as ExecutorManager
    from taskyard.manager import get_executor_manager as get_executor_manager
    from taskyard.model.algorithm import AlgorithmSpec as AlgorithmSpec
    from taskyard.model.algorithm import ExecutionHints as ExecutionHints
    from taskyard.model.execution import ErrorKind as ErrorKind
    from taskyard.model.execution import ExecutionError as ExecutionError
    from taskyard.model.execution import ExecutionResult as ExecutionResult
    from taskyard.ports.device import EmulatorAdapter as EmulatorAdapter
    from taskyard.ports.executor import ExecutionRequest as ExecutionRequest
    from taskyard.ports.executor import ExecutorProtocol as ExecutorProtocol
    from taskyard.standalone import Scheduler as Scheduler
    from taskyard.standalone import StandaloneQueue as StandaloneQueue

__version__ = VERSION

_LAZY = {
    "Algorithm": "taskyard.execution.algorithm",
    "AlgorithmContext": "taskyard.execution.algorithm",
    "AlgorithmSpec": "taskyard.model.algorithm",
    "BlockingYard": "taskyard.blocking_yard",
    "EmulatorAdapter": "taskyard.ports.device",
    "ErrorKind": "taskyard.model.execution",
    "ExecutionDispatcher": "taskyard.execution.router",
    "ExecutionError": "taskyard.model.execution",
    "ExecutionHints": "taskyard.model.algorithm",
    "ExecutionPolicy": "taskyard.execution.policy",
    "ExecutionRequest": "taskyard.ports.executor",
    "ExecutionResult": "taskyard.model.execution",
    "ExecutorManager": "taskyard.manager",
    "ExecutorProtocol": "taskyard.ports.executor",
    "ExecutorService": "taskyard.executor_service",
    "InProcessExecutor": "taskyard.execution.inline",
    "IsolatedProcessPoolExecutor": "taskyard.execution.isolated",
    "MockExecutor": "taskyard.execution.mock",
    "NoopExecutor": "taskyard.execution.mock",
    "ProcessPoolExecutor": "taskyard.execution.process",
    "QueueItem": "taskyard.device_pool",
    "Scheduler": "taskyard.standalone",
    "StandaloneQueue": "taskyard.standalone",
    "TaskRun": "taskyard.device_pool",
    "ThreadExecutor": "taskyard.execution.thread",
    "WorkerActor": "taskyard.devices.actor",
    "WorkerHandle": "taskyard.execution.starting",
    "get_executor_manager": "taskyard.manager",
}
"""Names that are imported at their first use, with their module: most programs need none of them. Those that are not in
`__all__` are here because the designs that Taskyard implements import them from `taskyard`."""


def _cpu_workers() -> int:
    from taskyard.resources.workers import count_workers

    return count_workers().cpu


set_default_workers(_cpu_workers)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LAZY[name]), name)
    return value


__all__ = [
    "Admission",
    "Attempt",
    "BaseTaskConsumer",
    "Blocker",
    "BlockingYard",
    "BoundTask",
    "BulkReport",
    "Cancel",
    "ConsumerFunction",
    "Cron",
    "Dedupe",
    "DedupeScope",
    "Event",
    "EventKind",
    "Every",
    "ExecutorManager",
    "FailureGroup",
    "Group",
    "GroupProgress",
    "InvalidInput",
    "Matching",
    "Missed",
    "OnFailure",
    "OutcomeUnknown",
    "Overlap",
    "Place",
    "Priority",
    "Progress",
    "QueueController",
    "QueueOrder",
    "QueueSettings",
    "QueueState",
    "QueueStatus",
    "Reason",
    "RerunReport",
    "ResultGone",
    "RetryLater",
    "RetryPolicy",
    "RunContext",
    "Schedule",
    "ScheduleItem",
    "ScheduleStatus",
    "Scheduler",
    "Schedules",
    "StandaloneQueue",
    "StoreError",
    "Task",
    "TaskCanceled",
    "TaskConsumerRegistry",
    "TaskFailed",
    "TaskFilter",
    "TaskHandle",
    "TaskRecord",
    "TaskSkipped",
    "TaskState",
    "TaskyardError",
    "Why",
    "Yard",
    "current_run",
    "get_executor_manager",
]
