"""Everything for an executor of your own: the port, and the errors that an executor answers with.

See docs/EXECUTORS.md. An executor passes `ExecutorContract` of `taskyard.testing.contract`, and is given to a yard by
name: `Yard(executors={"ray": RayExecutor})`.
"""

from taskyard.model.execution import ErrorKind, ExecutionError, ExecutionResult
from taskyard.ports.executor import (
    Abilities,
    ExecutionRequest,
    ExecutorFactory,
    ExecutorHealth,
    ExecutorProtocol,
    ExecutorStats,
    RunHandle,
    Runnable,
)
from taskyard.ports.explain import canceled as canceled_error
from taskyard.ports.explain import explain as error_from_exception
from taskyard.ports.explain import failed as failed_result
from taskyard.ports.explain import rejected as rejected_error
from taskyard.ports.explain import timed_out as timeout_error
from taskyard.ports.explain import waited_long as wait_timeout_error

__all__ = [
    "Abilities",
    "ErrorKind",
    "ExecutionError",
    "ExecutionRequest",
    "ExecutionResult",
    "ExecutorFactory",
    "ExecutorHealth",
    "ExecutorProtocol",
    "ExecutorStats",
    "RunHandle",
    "Runnable",
    "canceled_error",
    "error_from_exception",
    "failed_result",
    "rejected_error",
    "timeout_error",
    "wait_timeout_error",
]
