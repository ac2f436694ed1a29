"""The executors of an `ExecutorManager`: everybody's to use, and the manager's alone to end."""

from __future__ import annotations

from typing import NoReturn

from taskyard.errors import TaskyardError
from taskyard.execution.futures import ProcessPool
from taskyard.execution.io_pool import ThreadPool


class ManagerOwns(TaskyardError, RuntimeError):
    """The executor belongs to the process's `ExecutorManager`, and others use it: shut down the manager, or, for an end
    of your own, make a `ProcessPool`."""

    def __init__(self) -> None:
        super().__init__(
            "this executor belongs to the ExecutorManager, and others use it: `await manager.shutdown()` ends it; "
            "for `with` and `shutdown`, make a pool of your own"
        )


class OwnedProcessPool(ProcessPool):
    """`end` is what its manager calls; `kill` says why what runs is killed."""

    def end(self, *, kill: str = "") -> None:
        self._loop.shutdown(wait=False, kill=kill)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> NoReturn:
        raise ManagerOwns

    def kill_workers(self, *, wait: bool = True, why: str = "") -> NoReturn:
        raise ManagerOwns

    def __enter__(self) -> NoReturn:
        raise ManagerOwns


class OwnedThreadPool(ThreadPool):
    """`end` and `abandon` are what its manager calls."""

    def end(self) -> None:
        self._close(wait=False)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> NoReturn:
        raise ManagerOwns

    def __enter__(self) -> NoReturn:
        raise ManagerOwns
