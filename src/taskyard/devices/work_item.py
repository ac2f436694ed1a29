"""One request on its way through a device: waiting, its code running, its end."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Callable
from datetime import datetime
from enum import Enum
from typing import Any

from taskyard.devices.device import CURRENT_DEVICE, Device
from taskyard.devices.device_thread import DeviceThread
from taskyard.errors import DeviceError, DeviceLost
from taskyard.model.execution import ExecutionError, ExecutionResult
from taskyard.ports.clock import Clock
from taskyard.ports.executor import ExecutionRequest
from taskyard.ports.explain import canceled, device_lost, explain, rejected, timed_out


class Cause(Enum):
    """Why the actor has interrupted code."""

    EXPIRED = "expired"
    LOST = "lost"


class WorkItem:
    """Made in the context that the code is to see. Belongs to the event loop, but for `_call`.

    `finished` is done when the request has its answer. `ended` is done when nothing of it runs any more."""

    def __init__(self, request: ExecutionRequest, clock: Clock) -> None:
        loop = asyncio.get_running_loop()
        self.request, self.clock = request, clock
        self.finished: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.queued_at = clock.now()
        self.device: Device | None = None
        """What its code uses, once it has begun."""
        self.is_started = self.is_over = self.is_detached = False
        self.cause: Cause | None = None
        self.began_mono = 0.0
        self.due_mono: float | None = None
        """When the actor has to look at it next: its timeout, or the end of the grace for its cleanup."""
        self.graces = 0
        """How often the actor has interrupted it."""
        self._loop, self._context = loop, contextvars.copy_context()
        self.detached_at: datetime | None = None
        """When the caller left code that had begun."""
        self._started_at: datetime | None = None
        self._task: asyncio.Task[None] | None = None
        self._on_over: Callable[[], None] | None = None
        self._refusal: ExecutionError | None = None
        self._has_outcome = self._is_interrupted = False
        self._value: Any = None
        self._raised: BaseException | None = None

    @property
    def task_id(self) -> str:
        run = self.request.run
        return self.request.request_id if run is None else run.claim.record.uuid

    @property
    def task_type(self) -> str:
        return str(self.request.spec.name)

    @property
    def is_async(self) -> bool:
        return bool(self.request.spec.is_async)

    @property
    def lost_reason(self) -> str:
        """What the code said of its device, if it raised `DeviceLost`."""
        return explain(self._raised).message if isinstance(self._raised, DeviceLost) else ""

    @property
    def is_suspect(self) -> bool:
        """Whether the device may be the reason for how it ended."""
        return self.cause is Cause.EXPIRED or isinstance(self._raised, DeviceError)

    # --- the code -----------------------------------------------------------------------------------------------------

    def begin(self, device: Device, thread: DeviceThread, on_over: Callable[[], None]) -> None:
        """Start the code. `on_over` is called on the loop when it has ended."""
        run, now_mono = self.request.run, self.clock.monotonic()
        self.device, self._on_over = device, on_over
        self.is_started, self.began_mono, self._started_at = True, now_mono, self.clock.now()
        if self.request.timeout_s is not None:
            self.due_mono = now_mono + self.request.timeout_s
        self._context.run(CURRENT_DEVICE.set, device)
        if run is not None:
            run.mark_started()
        if self.is_async:
            self._task = self._loop.create_task(self._await_code(), context=self._context)
            self._task.add_done_callback(self._on_task_end)
            return
        try:
            thread.put(self._call)
        except RuntimeError as exc:
            self.break_off(rejected(f"no thread could be started: {exc}"))

    def break_off(self, error: ExecutionError) -> None:
        """Its code could not begin."""
        self._refusal = error
        self._over()

    async def _await_code(self) -> None:
        try:
            self._value = await self.request.spec.call(self.request.payload)
        except GeneratorExit:
            raise  # this coroutine is being closed, with the loop gone
        except BaseException as exc:
            # SystemExit too: a consumer must not end the loop that all others run on.
            self._raised = exc
        self._has_outcome = True

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        if not self._has_outcome:
            # It was cancelled before its first step, or raised GeneratorExit.
            self._raised = asyncio.CancelledError() if task.cancelled() else task.exception()
        self._over()

    def _call(self) -> None:
        """In the thread."""
        try:
            self._value = self._context.run(self.request.spec.call, self.request.payload)
        except BaseException as exc:
            # SystemExit too, which would end the thread without a word.
            self._raised = exc
        # A closed loop raises: nobody waits for this any more.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._over)

    def _over(self) -> None:
        self.is_over = True
        if self._on_over is not None:
            self._on_over()

    # --- ending it ----------------------------------------------------------------------------------------------------

    def interrupt(self) -> None:
        """For a cancel of the run, or a node that stops. An item that waits is given up; async code is cancelled; a
        plain function can only look at `current_run().cancelled`."""
        if not self.is_started:
            run = self.request.run
            is_canceled = run is not None and run.cancel_requested
            self.refuse(
                canceled("canceled while it waited for its device")
                if is_canceled
                else rejected("it was interrupted while it waited for its device")
            )
        elif self._task is not None and not self.is_over:
            self._is_interrupted = True
            self._task.cancel()

    def _interrupt_once(self) -> None:
        """Code that was cancelled before is cleaning up."""
        if not self._is_interrupted:
            self.interrupt()

    def refuse(self, error: ExecutionError) -> None:
        """It never begins."""
        if not self.is_started and not self.finished.done():
            self._refusal, self.is_over = error, True
            self.finish()

    def expire(self) -> None:
        """Its time is up."""
        run = self.request.run
        self.cause = Cause.EXPIRED
        if run is not None:
            run.mark_expired()
            if not self.is_async:
                run.add_remark(
                    f"past its timeout of {self.request.timeout_s:g} s; a thread cannot be stopped, "
                    f"so it keeps its device until it ends"
                )
        self._interrupt_once()

    def lose(self, reason: str) -> None:
        """Its device is gone."""
        run = self.request.run
        self.cause = Cause.LOST
        if run is not None:
            run.mark_expired()
            if not self.is_async:
                run.add_remark(f"its device is lost ({reason}); a thread cannot be stopped")
        self._interrupt_once()

    def detach(self) -> None:
        """The caller stops waiting. If the code has begun, the run is told, and told again when the code has ended."""
        run = self.request.run
        if run is not None and self.is_started and not self.is_detached:
            self.is_detached, self.detached_at = True, self.clock.now()
            run.detach()

    def leave_alone(self) -> None:
        """The actor ends before the code, which is interrupted, and answers by itself when it ends."""
        self._on_over = self.finish
        if self.is_over:
            self.finish()
        else:
            self.interrupt()

    def finish(self) -> None:
        """The actor has taken note of its end: the request is answered."""
        if self.is_detached and self.request.run is not None:
            self.request.run.reattach()
        for future in (self.ended, self.finished):
            if not future.done() and not future.get_loop().is_closed():
                future.set_result(None)

    # --- the answer ---------------------------------------------------------------------------------------------------

    def result(self) -> ExecutionResult:
        ended_at = self.clock.now().timestamp()
        started_at = ended_at if self._started_at is None else self._started_at.timestamp()
        error = self._error()
        self._raised = None  # its frames know this item
        if error is not None:
            return ExecutionResult(success=False, error=error, started_at=started_at, ended_at=ended_at)
        return ExecutionResult(success=True, data=self._value, started_at=started_at, ended_at=ended_at)

    def _error(self) -> ExecutionError | None:
        run, raised = self.request.run, self._raised
        if self._refusal is not None:
            return self._refusal
        is_cut_short = isinstance(raised, asyncio.CancelledError) or (
            self.cause is Cause.LOST and isinstance(raised, DeviceLost)
        )
        is_cancel = is_cut_short and run is not None and run.cancel_requested
        if self.cause is None and not isinstance(raised, DeviceLost):
            if raised is None:
                return None
            if is_cancel:
                return canceled()
            if run is not None:
                run.keep_exception(raised)
            return explain(raised)
        if is_cancel:
            return canceled()
        if raised is not None and run is not None and not isinstance(raised, asyncio.CancelledError):
            run.keep_exception(raised)
        if self.cause is Cause.EXPIRED:
            return timed_out(self.request.timeout_s or 0.0)
        return device_lost("" if self.device is None else self.device.name)
