"""What blocks, for code without an event loop and for threads beside one: how it waits for a loop in another thread,
the loop that a yard is opened on, and the face of an executor. That of a yard is in `blocking_yard`."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from taskyard.errors import BlockingOnLoop, InvalidInput, NotOpen, TaskyardError
from taskyard.execution.loop_thread import ServingThread
from taskyard.model.execution import ExecutionResult
from taskyard.ports.executor import ExecutionRequest, RequestServer

if TYPE_CHECKING:
    from taskyard.execution.asking import Asked
    from taskyard.yard import Yard

T = TypeVar("T")

log = logging.getLogger("taskyard")


UNWIND_S = 2.0
"""How long what runs may take to end after Ctrl-C. Worker processes are killed within milliseconds; a thread cannot
be, and is left behind then."""


def _begin(what: str, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
    """Hand the coroutine to the loop of another thread; `BlockingOnLoop` in the loop's own, which would wait for
    itself."""
    try:
        running: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
    except RuntimeError:
        running = None
    if running is loop:
        coroutine.close()
        raise BlockingOnLoop(what)
    return asyncio.run_coroutine_threadsafe(coroutine, loop)


def _wait_for(future: Future[T]) -> T:
    """What it gives or raises. Whoever is interrupted while he waits, by Ctrl-C, cancels it."""
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


class OwnLoop:
    """The loop, in a thread of its own, on which a closed yard is opened for those who have none. All threads share it:
    the first to enter opens the yard, the last to leave closes it, and whoever comes in between waits for that."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._thread: ServingThread | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        thread = self._thread
        return None if thread is None else thread.loop

    def enter(self, yard: Yard, *, serve: bool) -> asyncio.AbstractEventLoop:
        with self._lock:
            loop = self.loop or self._open(yard, serve)
            self._inside += 1
            return loop

    def leave(self, yard: Yard) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0 and self._thread is not None:
                try:
                    run_on(self._thread.loop, yard, "leaving yard.blocking()", yard.stop())
                finally:
                    self._end(self._thread)

    def _open(self, yard: Yard, serve: bool) -> asyncio.AbstractEventLoop:
        thread = self._thread = ServingThread()
        try:
            run_on(thread.loop, yard, "yard.blocking()", yard.start(serve=serve))
        except BaseException:
            self._end(thread)
            raise
        return thread.loop

    def _end(self, thread: ServingThread) -> None:
        thread.end()
        self._thread = None


def run_on(loop: asyncio.AbstractEventLoop, yard: Yard, what: str, coroutine: Coroutine[Any, Any, T]) -> T:
    """The same on behalf of a yard, which must not have been left behind by a fork."""
    try:
        yard._refuse_fork()
    except TaskyardError:
        coroutine.close()
        raise
    return _wait_for(_begin(what, loop, coroutine))


class BlockingExecutor:
    """`with BlockingExecutor(dispatcher) as sync:` — an executor for code without an event loop: it is started on a
    loop in a thread of its own, and shut down when the block ends. Any number of threads may call it, save those that
    run an event loop: it would stand still meanwhile (`BlockingOnLoop`)."""

    def __init__(self, executor: RequestServer) -> None:
        self._executor = executor
        self._thread: ServingThread | None = None
        self._calls: set[Future[Any]] = set()

    def __enter__(self) -> BlockingExecutor:
        if asyncio._get_running_loop() is not None:
            raise BlockingOnLoop("BlockingExecutor")
        self._thread = ServingThread()
        try:
            self._call("BlockingExecutor", self._executor.start())
        except BaseException:
            self._end_thread()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._thread is not None and self._thread.home.is_elsewhere:
            return  # a forked child leaves the block, which is the parent's
        try:
            if isinstance(exc, KeyboardInterrupt):
                self._interrupt()
            else:
                self._call("leaving BlockingExecutor", self._executor.shutdown(wait=True))
        finally:
            self._end_thread()

    def _interrupt(self) -> None:
        """Ctrl-C has ended the block: whatever other threads still wait for is cancelled."""
        for call in list(self._calls):
            call.cancel()
        self._call("leaving BlockingExecutor", _cut_short(self._executor))

    def _end_thread(self) -> None:
        if self._thread is not None:
            self._thread.end()
            self._thread = None

    def _call(self, what: str, coroutine: Coroutine[Any, Any, T]) -> T:
        try:
            if asyncio._get_running_loop() is not None:
                raise BlockingOnLoop(what)
            if self._thread is None:
                raise NotOpen("this executor is not open; use it inside `with BlockingExecutor(…):`")
            self._thread.home.claim()
        except TaskyardError:
            coroutine.close()
            raise
        future = _begin(what, self._thread.loop, coroutine)
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        return _wait_for(future)

    def submit(self, request: ExecutionRequest) -> ExecutionResult:
        return self._call("submit", self._executor.submit(request))

    def run(self, algorithm: Asked, payload: Any, **options: Any) -> ExecutionResult:
        """As `ExecutionDispatcher.run`."""
        from taskyard.execution.asking import AlgorithmCaller

        if not isinstance(self._executor, AlgorithmCaller):
            raise InvalidInput(
                f"{type(self._executor).__name__} runs no algorithms; give requests to an ExecutionDispatcher"
            )
        return self._call("run", self._executor.run(algorithm, payload, **options))


async def _cut_short(executor: RequestServer) -> None:
    try:
        async with asyncio.timeout(UNWIND_S):
            await executor.shutdown(wait=True)
    except TimeoutError:
        log.warning("after an interrupt something still runs, and is left behind: a thread cannot be ended")
        await executor.shutdown(wait=False)
