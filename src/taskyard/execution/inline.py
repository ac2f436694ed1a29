"""Code on the event loop: a coroutine runs inside the caller's own asyncio task, a plain function right here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from taskyard.execution.context import RunContext
from taskyard.execution.explain import canceled, explain, rejected, timed_out
from taskyard.execution.idle import Idle
from taskyard.model.execution import ExecutionError, ExecutionRequest, ExecutionResult
from taskyard.ports.executor import Abilities


class InProcessExecutor:
    """No limit of its own: what runs at once is decided by whoever submits. A plain function, or a coroutine that never
    awaits, cannot be interrupted, and holds up the loop: only what takes milliseconds belongs here."""

    abilities = Abilities()

    def __init__(self, *, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._running = 0
        self._is_closed = False
        self._idle = Idle()

    async def start(self) -> None:
        self._is_closed = False

    async def shutdown(self, *, wait: bool = True) -> None:
        self._is_closed = True
        if wait:
            await self._idle.wait_while(lambda: self._running)

    async def submit(self, request: ExecutionRequest) -> ExecutionResult:
        started_at = self._now()
        if self._is_closed:
            error = rejected("the in-process executor is shut down")
            return ExecutionResult(success=False, error=error, started_at=started_at, ended_at=started_at)
        run: RunContext | None = request.context
        interrupt: _Interrupt | None = None
        if run is not None and run.task is not None and request.spec.is_async:
            run.interrupt = interrupt = _Interrupt(run.task)
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
                interrupt.take_back()
            self._running -= 1
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
        run: RunContext | None = request.context
        if isinstance(exc, GeneratorExit) and not _is_stepping(run):
            raise exc  # this coroutine is being closed, with the loop gone
        if isinstance(exc, asyncio.CancelledError):
            if run is not None and run.cancel_asked:
                return canceled()
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise exc
            # Nobody cancelled this task: the consumer awaited something that was cancelled, and let it through.
        if run is not None:
            run.raised = exc
        return explain(exc)


class _Interrupt:
    """Cancels the caller's task, in which the code runs. The caller itself is not meant: once the code has ended,
    whatever it made of the cancellation, that is taken back."""

    __slots__ = ("_is_over", "_task", "_times")

    def __init__(self, task: asyncio.Task[None]) -> None:
        self._task = task
        self._times = 0
        self._is_over = False

    def __call__(self) -> None:
        if asyncio.current_task() is self._task:
            # The code itself asks. If it awaits nothing more, the caller's next await must not be hit instead.
            self._task.get_loop().call_soon(self._cancel)
        else:
            self._cancel()

    def _cancel(self) -> None:
        if not self._is_over:
            self._times += 1
            self._task.cancel()

    def take_back(self) -> None:
        self._is_over = True
        for _ in range(self._times):
            self._task.uncancel()


def _call(request: ExecutionRequest) -> Any:
    """A plain function. Nobody can stop it, or tell it anything: it has timed out if it took too long."""
    began_mono = time.monotonic()
    try:
        return request.spec.call(request.payload)
    finally:
        if request.timeout_s is not None and time.monotonic() - began_mono > request.timeout_s:
            raise _TimedOut


def _is_stepping(run: RunContext | None) -> bool:
    """Whether this code is run by the event loop as the run's own asyncio task."""
    try:
        return run is not None and asyncio.current_task() is run.task
    except RuntimeError:  # there is no running loop
        return False


class _TimedOut(Exception):
    """The deadline passed, whatever the code did about it."""
