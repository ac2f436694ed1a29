"""`ExecutorManager`: one CPU process pool and one I/O thread pool for the whole process, and a way to await them.

Belongs to no event loop: whoever calls is answered on the loop it calls from, and nothing here blocks one. The pools
start their first thread and worker when they are first used.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import CancelledError, Future
from enum import StrEnum
from typing import Any, ParamSpec, Self, TypeVar, overload

import msgspec

from taskyard.errors import TaskyardError, quote
from taskyard.execution.bridge import bridge_here, outcome
from taskyard.execution.checks import (
    check_flag,
    check_function,
    check_memory,
    check_plain_function,
    check_seconds,
    check_whole,
)
from taskyard.execution.forks import Home
from taskyard.execution.futures import Async
from taskyard.execution.owned import OwnedProcessPool, OwnedThreadPool
from taskyard.execution.pool import PoolNumbers
from taskyard.execution.process import HAS_NURSERY
from taskyard.execution.raising import CallKilled, CannotCross, WorkerDied
from taskyard.resources.workers import count_workers

P = ParamSpec("P")
T = TypeVar("T")

Args = tuple[Any, ...]

BURIAL_S = 10.0
"""How long a forced shutdown waits for killed workers to be gone. It takes milliseconds, unless the system refuses."""

log = logging.getLogger("taskyard")


class Unpicklable(StrEnum):
    """What becomes of a CPU call that cannot be sent to another process."""

    RAISE = "raise"
    THREAD = "thread"


class CallOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How `run_cpu_intensive` treats a call. `retries`: how often it is run again when its worker has died.
    `unpicklable`: raise `CannotCross` (a ValueError), or use a thread. `timeout_s`: the longest it may run."""

    retries: int = 0
    unpicklable: Unpicklable = Unpicklable.RAISE
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        Unpicklable(self.unpicklable)
        check_whole("retries", self.retries, least=0)
        if self.timeout_s is not None:
            check_seconds("timeout_s", self.timeout_s)


class ManagerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes are by default those of the environment, or of the machine. `recycle_after` and `memory_limit` are for
    each CPU worker, as in `PoolSettings`; `calls` is for each CPU call that is not given other `options`."""

    cpu_workers: int | None = None
    io_workers: int | None = None
    recycle_after: int | None = None
    memory_limit: int | None = None
    portable: bool = not HAS_NURSERY
    calls: CallOptions = CallOptions()

    def __post_init__(self) -> None:
        for name in ("cpu_workers", "io_workers", "recycle_after"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name))
        if self.memory_limit is not None:
            check_memory("memory_limit", self.memory_limit)
        check_flag("portable", self.portable)
        if not isinstance(self.calls, CallOptions):
            raise TypeError(f"calls must be CallOptions, not {quote(self.calls)}")


class ManagerNumbers(msgspec.Struct, frozen=True):
    """Both pools at one moment."""

    cpu_executor: PoolNumbers
    io_executor: PoolNumbers


class ManagerClosed(TaskyardError, RuntimeError):
    """The manager is shut down, or was before the call began: `get_executor_manager()` makes a new one."""

    def __init__(self) -> None:
        super().__init__("this ExecutorManager is shut down; get_executor_manager() makes a new one")


class ExecutorManager:
    """There is one in a process: to make it again is to get it, until it is shut down. `cpu_executor` and `io_executor`
    are `concurrent.futures` executors, which only the manager can shut down. `async with` shuts it down at the end."""

    settings: ManagerSettings
    cpu_executor: OwnedProcessPool
    io_executor: OwnedThreadPool
    _home: Home
    _is_closed: bool

    def __new__(cls, settings: ManagerSettings | None = None) -> ExecutorManager:
        global _current
        with _making:
            if _current is None:
                made = super().__new__(cls)
                made._open(settings or ManagerSettings())
                _current = made
            elif settings is not None and settings != _current.settings:
                raise RuntimeError("an ExecutorManager with other settings is open; shut that one down first")
            return _current

    def _open(self, settings: ManagerSettings) -> None:
        counts = count_workers()
        self.settings, self._home, self._is_closed = settings, Home(), False
        self._home.claim()
        self.cpu_executor = OwnedProcessPool(
            counts.cpu if settings.cpu_workers is None else settings.cpu_workers,
            portable=settings.portable,
            max_tasks_per_child=settings.recycle_after,
            memory_limit=settings.memory_limit,
        )
        self.io_executor = OwnedThreadPool(counts.io if settings.io_workers is None else settings.io_workers)
        sizes = self.cpu_executor.max_workers, self.io_executor.max_workers
        log.info("[ExecutorManager] opened with %d CPU workers and %d I/O threads", *sizes)

    @property
    def numbers(self) -> ManagerNumbers:
        return ManagerNumbers(self.cpu_executor.numbers, self.io_executor.numbers)

    # --- calls --------------------------------------------------------------------------------------------------------

    @overload
    async def run_cpu_intensive(self, func: Async[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...

    @overload
    async def run_cpu_intensive(self, func: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...

    async def run_cpu_intensive(self, func: Callable[P, Any], /, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Call `func` in a worker process, and await what it returns or raises. A worker that dies raises `WorkerDied`;
        what cannot be sent there `CannotCross`, a ValueError. Cancelling this ends the call, with its worker."""
        return await self._run_cpu(self.settings.calls, func, args, kwargs)

    async def run_io_intensive(self, func: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `func` in a thread, in a copy of the present context. Cancelling this leaves a running thread alone."""
        return await self._run_io(func, args, kwargs)

    def options(self, **changes: Any) -> CpuCalls:
        """The same calls with other `CallOptions`: `manager.options(retries=2).run_cpu_intensive(…)`."""
        changed = msgspec.structs.asdict(self.settings.calls) | changes
        return CpuCalls(functools.partial(self._run_cpu, CallOptions(**changed)))

    async def _run_cpu(self, options: CallOptions, func: Callable[..., T], args: Args, kwargs: dict[str, Any]) -> T:
        check_function(func)
        left = options.retries
        while True:
            self._refuse_closed()
            future = self.cpu_executor.submit_within(options.timeout_s, func, *args, **kwargs)
            try:
                return await _result(future)
            except asyncio.CancelledError:
                future.kill()
                raise
            except WorkerDied as died:
                if not left or isinstance(died, CallKilled):
                    raise
                left -= 1
                log.warning("[ExecutorManager] run again (%d more times at most): %s", left, died)
            except CannotCross as exc:
                # What has run must not run twice; and a thread is used only by choice.
                if exc.has_run or options.unpicklable != Unpicklable.THREAD:
                    raise
                log.warning("[ExecutorManager] run in a thread: %s", exc)
                return await self._run_io(func, args, kwargs)

    async def _run_io(self, func: Callable[..., T], args: Args, kwargs: dict[str, Any]) -> T:
        check_plain_function(func)
        self._refuse_closed()
        call = functools.partial(func, *args, **kwargs)
        future = self.io_executor.submit(contextvars.copy_context().run, call)
        try:
            return await _result(future)
        except asyncio.CancelledError:
            future.cancel()
            raise

    def _refuse_closed(self) -> None:
        self._home.claim()
        if self._is_closed:
            raise ManagerClosed

    # --- the end ------------------------------------------------------------------------------------------------------

    async def shutdown(self, timeout: float = 30.0) -> None:
        """Take nothing new; return as soon as all work is done. What is not done after `timeout` seconds is ended: what
        waits is dropped, worker processes are killed, threads are left behind. A new manager can be made at once."""
        check_seconds("timeout", timeout, may_be_zero=True)
        self._home.claim()
        self._is_closed = True
        _forget(self)  # from here on its callers are told to get a new one
        log.info("[ExecutorManager] shutting down")
        self.cpu_executor.end()
        self.io_executor.end()
        if not await _are_done([self.cpu_executor.ended, self.io_executor.ended], timeout):
            await self._force(timeout)
        log.info("[ExecutorManager] shut down")

    async def _force(self, after_s: float) -> None:
        numbers = self.numbers
        log.warning(
            "[ExecutorManager] not done after %g s: %d CPU calls and %d I/O calls are running, %d wait; ending them",
            after_s,
            numbers.cpu_executor.active,
            numbers.io_executor.active,
            numbers.cpu_executor.queued + numbers.io_executor.queued,
        )
        self.cpu_executor.end(kill=f"its manager was shut down and could wait {after_s:g} s only")
        left = self.io_executor.abandon()
        if left:
            log.warning("[ExecutorManager] %d threads are left behind: a thread cannot be ended", left)
        if not await _are_done([self.cpu_executor.ended], BURIAL_S):
            log.error("[ExecutorManager] a killed worker process is still there after %g s", BURIAL_S)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.shutdown()


class CpuCalls:
    """`run_cpu_intensive` with options of its own."""

    def __init__(self, run: Callable[[Callable[..., Any], Args, dict[str, Any]], Awaitable[Any]]) -> None:
        self._run = run

    @overload
    async def run_cpu_intensive(self, func: Async[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...

    @overload
    async def run_cpu_intensive(self, func: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...

    async def run_cpu_intensive(self, func: Callable[P, Any], /, *args: P.args, **kwargs: P.kwargs) -> Any:
        """As `ExecutorManager.run_cpu_intensive`."""
        return await self._run(func, args, kwargs)


async def _result(future: Future[T]) -> T:
    try:
        return await outcome(future)
    except CancelledError:
        if future.cancelled():
            raise ManagerClosed from None
        raise  # the function's own


async def _are_done(futures: Sequence[Future[None]], within_s: float) -> bool:
    waiters = [bridge_here().watch(future) for future in futures]
    _, pending = await asyncio.wait(waiters, timeout=within_s)
    return not pending


_making = threading.Lock()
_current: ExecutorManager | None = None


def get_executor_manager(settings: ManagerSettings | None = None) -> ExecutorManager:
    """The manager of this process, made by the first call."""
    return ExecutorManager(settings)


def _forget(manager: ExecutorManager) -> None:
    global _current
    with _making:
        if _current is manager:
            _current = None


def _begin_anew() -> None:
    """In a forked child: the manager is the parent's, and another thread may hold the lock for ever."""
    global _making, _current
    _making, _current = threading.Lock(), None


os.register_at_fork(after_in_child=_begin_anew)
