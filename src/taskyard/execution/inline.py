"""Code on the event loop: a coroutine runs inside the caller's own asyncio task, a plain function right here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from taskyard.execution.idle import Idle
from taskyard.execution.run_handle import TaskInterrupt
from taskyard.model.execution import ExecutionError, ExecutionResult
from taskyard.ports.executor import Abilities, ExecutionRequest, ExecutorHealth, ExecutorStats, RunHandle
from taskyard.ports.explain import canceled, explain, rejected, timed_out


class InProcessExecutor:
    """No limit of its own: what runs at once is decided by whoever submits. A plain function, or a coroutine that never
    awaits, cannot be interrupted, and holds up the loop: only what takes milliseconds belongs here."""

    abilities = Abilities()

    def __init__(self, *, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._running = self._done = 0
        self._is_closed = False
        self._idle = Idle()

    async def start(self) -> None:
        self._is_closed = False

    async def shutdown(self, *, wait: bool = True) -> None:
        self._is_closed = True
        if wait:
            await self._idle.wait_while(lambda: self._running)

    def stats(self, name: str | None = None) -> ExecutorStats:
        return ExecutorStats(active=self._running, done=self._done)

    def health(self) -> ExecutorHealth:
        return ExecutorHealth(not self._is_closed, "it is shut down" if self._is_closed else "")

    async def submit(self, request: ExecutionRequest) -> ExecutionResult:
        started_at = self._now()
        if self._is_closed:
            error = rejected("the in-process executor is shut down")
            return ExecutionResult(success=False, error=error, started_at=started_at, ended_at=started_at)
        run = request.run
        interrupt: TaskInterrupt | None = None
        if run is not None and run.asyncio_task is not None and request.spec.is_async:
            interrupt = TaskInterrupt(run.asyncio_task)
            run.set_interrupt(interrupt)
        self._running += 1
        try:
            if not request.spec.is_async:
                data = _call(request)
            elif request.timeout_s is None:
                data = await request.spec.call(request.payload)
            else:
                data = await self._within(request)
        except BaseException as exc:
            # SystemExit too: a consumer must not end the loop that all the others run on.
            error = self._explain(exc, request)
            return ExecutionResult(success=False, error=error, started_at=started_at, ended_at=self._now())
        finally:
            if interrupt is not None:
                interrupt.undo()
            self._running -= 1
            self._done += 1
            self._idle.tell()
        return ExecutionResult(success=True, data=data, started_at=started_at, ended_at=self._now())

    async def _within(self, request: ExecutionRequest) -> Any:
        deadline = asyncio.timeout(request.timeout_s)
        try:
            async with deadline:
                data = await request.spec.call(request.payload)
        except Exception as exc:
            if deadline.expired():
                raise _TimedOut from exc
            raise
        if deadline.expired():
            raise _TimedOut  # it swallowed the cancellation and returned after its deadline
        return data

    def _explain(self, exc: BaseException, request: ExecutionRequest) -> ExecutionError:
        """What `exc` means for the run. The cancellation of our own caller is no answer, and is raised again."""
        if isinstance(exc, _TimedOut):
            return timed_out(request.timeout_s or 0.0)
        run = request.run
        if isinstance(exc, GeneratorExit) and not _is_stepping(run):
            raise exc  # this coroutine is being closed, with the loop gone
        if isinstance(exc, asyncio.CancelledError):
            if run is not None and run.cancel_requested:
                return canceled()
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise exc
            # Nobody cancelled this task: the consumer awaited something that was cancelled, and let it through.
        if run is not None:
            run.keep_exception(exc)
        return explain(exc)


def _call(request: ExecutionRequest) -> Any:
    """A plain function. Nobody can stop it, or tell it anything: it has timed out if it took too long."""
    began_mono = time.monotonic()
    try:
        return request.spec.call(request.payload)
    finally:
        if request.timeout_s is not None and time.monotonic() - began_mono > request.timeout_s:
            raise _TimedOut


def _is_stepping(run: RunHandle | None) -> bool:
    """Whether this code is run by the event loop as the run's own asyncio task."""
    try:
        return run is not None and asyncio.current_task() is run.asyncio_task
    except RuntimeError:  # there is no running loop
        return False


class _TimedOut(Exception):
    """The deadline passed, whatever the code did about it."""
