"""`ProcessPool`, a `concurrent.futures` executor on worker processes that can be killed, and what its futures raise."""

from taskyard.execution.explain import RemoteTraceback
from taskyard.execution.forks import PoolForked
from taskyard.execution.futures import PoolOptions, ProcessPool
from taskyard.execution.pool_loop import CallFuture
from taskyard.execution.raising import (
    CallKilled,
    CallTimedOut,
    CannotCross,
    RemoteError,
    WorkerDied,
)

__all__ = [
    "CallFuture",
    "CallKilled",
    "CallTimedOut",
    "CannotCross",
    "PoolForked",
    "PoolOptions",
    "ProcessPool",
    "RemoteError",
    "RemoteTraceback",
    "WorkerDied",
]
