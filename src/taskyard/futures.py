"""Process pools without a yard: `ProcessPool`, a `concurrent.futures` executor on worker processes that can be killed,
what its futures raise, and the settings of `ExecutorManager`."""

from taskyard.execution.forks import PoolForked
from taskyard.execution.futures import PoolOptions, ProcessPool
from taskyard.execution.pool import PoolNumbers
from taskyard.execution.pool_loop import CallFuture
from taskyard.execution.pool_settings import PoolSettings
from taskyard.execution.raising import (
    CallKilled,
    CallTimedOut,
    CannotCross,
    RemoteError,
    WorkerDied,
)
from taskyard.manager import CallOptions, ManagerSettings
from taskyard.ports.explain import RemoteTraceback

__all__ = [
    "CallFuture",
    "CallKilled",
    "CallOptions",
    "CallTimedOut",
    "CannotCross",
    "ManagerSettings",
    "PoolForked",
    "PoolNumbers",
    "PoolOptions",
    "PoolSettings",
    "ProcessPool",
    "RemoteError",
    "RemoteTraceback",
    "WorkerDied",
]
