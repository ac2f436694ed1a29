"""An executor as a package outside of Taskyard would write it: a new thread for each run, and nothing but the port."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import threading
import time
from collections import deque
from typing import Any

from taskyard.executor_port import (
    Abilities,
    ExecutionError,
    ExecutionRequest,
    ExecutionResult,
    ExecutorHealth,
    ExecutorStats,
    canceled_error,
    error_from_exception,
    failed_result,
    rejected_error,
    timeout_error,
    wait_timeout_error,
)


class ThreadPerRunExecutor:
    """Runs at most `max_workers` at once, and queues `queue_limit` more."""

    def __init__(self, max_workers: int = 4, queue_limit: int = 100) -> None:
        self.abilities = Abilities(capacity=max_workers)
        self._max_workers, self._queue_limit = max_workers, queue_limit
        self._runs: set[_Run] = set()
        self._queue: deque[_Run] = deque()
        self._done = 0
        self._is_closed = False

    async def start(self) -> None:
        self._is_closed = False

    async def shutdown(self, *, wait: bool = True) -> None:
        self._is_closed = True
        for queued in list(self._queue):
            queued.refuse(rejected_error("the executor was shut down before it began"))
        while wait and self._runs:
            await asyncio.wait([run.ended for run in self._runs])

    def stats(self, name: str | None = None) -> ExecutorStats:
        return ExecutorStats(self._max_workers, len(self._runs), len(self._queue), self._done)

    def health(self) -> ExecutorHealth:
        return ExecutorHealth(not self._is_closed, "it is shut down" if self._is_closed else "")

    async def submit(self, request: ExecutionRequest) -> ExecutionResult:
        if self._is_closed:
            return failed_result(rejected_error("the executor is shut down"))
        if len(self._runs) >= self._max_workers and len(self._queue) >= self._queue_limit:
            return failed_result(rejected_error("all threads are busy"))
        run = _Run(request)
        self._queue.append(run)
        self._start_next()
        try:
            return await run.serve()
        finally:
            if not run.is_started:
                self._queue.remove(run)

    def _start_next(self) -> None:
        while self._queue and len(self._runs) < self._max_workers:
            run = self._queue.popleft()
            self._runs.add(run)
            run.ended.add_done_callback(functools.partial(self._on_end, run))
            run.start()

    def _on_end(self, run: _Run, _: asyncio.Future[None]) -> None:
        self._runs.discard(run)
        self._done += 1
        self._start_next()


class _Run:
    """One request. Everything but `_work` runs on the event loop."""

    def __init__(self, request: ExecutionRequest) -> None:
        self._request, self._handle = request, request.run
        self._loop = asyncio.get_running_loop()
        self._context = contextvars.copy_context()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._refused: asyncio.Future[ExecutionError] = self._loop.create_future()
        self.is_started = self._is_expired = False
        self._started_at = 0.0
        self._value: Any = None
        self._raised: BaseException | None = None
        self._code: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None
        self._must_end = False
        if self._handle is not None:
            self._handle.set_interrupt(self._interrupt)
            self._handle.mark_queued()

    def refuse(self, error: ExecutionError) -> None:
        if not self.is_started and not self._refused.done():
            self._refused.set_result(error)

    def start(self) -> None:
        self.is_started, self._started_at = True, time.time()
        if self._handle is not None:
            self._handle.mark_started()
        threading.Thread(target=self._work, daemon=True).start()

    async def serve(self) -> ExecutionResult:
        timers = []
        if self._request.wait_s is not None and not self.is_started:
            wait_s = self._request.wait_s
            timers.append(self._loop.call_later(wait_s, self.refuse, wait_timeout_error(wait_s)))
        if self._request.timeout_s is not None:
            timers.append(self._loop.call_later(self._request.timeout_s, self._expire))
        try:
            either: list[asyncio.Future[Any]] = [self.ended, self._refused]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await self._leave()
            raise
        finally:
            for timer in timers:
                timer.cancel()
        if not self.ended.done():
            return failed_result(self._refused.result())
        return self._answer()

    async def _leave(self) -> None:
        """Our caller is cancelled. The run may be taken for ended only if its code has ended."""
        if not self.is_started or self.ended.done():
            return
        handle = self._handle
        if handle is not None:
            handle.detach()
            self.ended.add_done_callback(lambda _: handle.reattach())
        self._interrupt()
        if self._request.spec.is_async:
            await asyncio.wait([self.ended])

    def _answer(self) -> ExecutionResult:
        error, raised = None, self._raised
        if self._is_expired:
            error = timeout_error(self._request.timeout_s or 0.0)
        elif isinstance(raised, asyncio.CancelledError) and self._must_end:
            error = canceled_error()
        elif raised is not None:
            error = error_from_exception(raised)
            if self._handle is not None:
                self._handle.keep_exception(raised)
        return ExecutionResult(
            success=error is None,
            data=self._value if error is None else None,
            error=error,
            started_at=self._started_at,
            ended_at=time.time(),
        )

    def _expire(self) -> None:
        self._is_expired = True
        if self._handle is not None:
            self._handle.mark_expired()
            if not self._request.spec.is_async:
                self._handle.add_remark("past its timeout; a thread cannot be stopped")
        if self._request.spec.is_async:
            self._interrupt()

    def _interrupt(self) -> None:
        if not self.is_started:
            self.refuse(canceled_error("canceled while it waited for a thread"))
            return
        self._must_end = True
        if self._code is not None:
            loop, task = self._code
            with contextlib.suppress(RuntimeError):  # it has just ended
                loop.call_soon_threadsafe(task.cancel)

    def _work(self) -> None:
        try:
            self._value = self._context.run(self._request.spec.call, self._request.payload)
            if self._request.spec.is_async:
                self._value = self._context.run(asyncio.run, self._await(self._value))
        except BaseException as exc:
            self._raised = exc
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits for this
            self._loop.call_soon_threadsafe(self.ended.set_result, None)

    async def _await(self, coroutine: Any) -> Any:
        task = asyncio.current_task()
        assert task is not None
        self._code = asyncio.get_running_loop(), task
        if self._must_end:
            task.cancel()
        return await coroutine
