"""How a run gets to an executor: `execute`, for direct calls and for queued tasks with middleware. The runner submits a
task without middleware by itself.

A run has ended only when its code has: `execute` never answers earlier, whatever middleware does. Its caller frees the
slot and the key of the task then, and one task must not run twice at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import msgspec

from taskyard.execution.context import CURRENT
from taskyard.execution.run_handle import RunHandle, TaskInterrupt
from taskyard.execution.run_middleware import CodeInside, list_around_code, run_around
from taskyard.model.execution import ExecutionResult
from taskyard.ports.executor import ExecutionRequest, ExecutorProtocol
from taskyard.ports.explain import canceled, explain, failed, internal_fault, rejected
from taskyard.ports.middleware import AroundRun, Middleware, name_of

log = logging.getLogger("taskyard")

STOP_GRACE_S = 1.0
"""Seconds: middleware of a node that stops gets less than the 2 s after which the engine lets go of the run."""


async def execute(
    run: RunHandle, executor: ExecutorProtocol, request: ExecutionRequest, middleware: Sequence[Middleware] = ()
) -> ExecutionResult:
    """Have the executor run the request as this run, with `middleware` around it. Raises `CancelledError` only when
    this asyncio task is cancelled."""
    mark = CURRENT.set(run)
    try:
        if middleware:
            return await _MiddlewareRun(run, executor, request, middleware).execute()
        return await executor.submit(request)
    except Exception as exc:
        return _fault(run, exc)
    finally:
        run.clear_interrupt()
        try:  # noqa: SIM105 - `suppress` costs more than all the rest, and this is once per run
            CURRENT.reset(mark)
        except ValueError:  # closed with its loop gone, this coroutine is no longer in the context it began in
            pass


def _fault(run: RunHandle, exc: Exception) -> ExecutionResult:
    """An executor must not raise. If one does, that is the answer, as an error of Taskyard and not of the task."""
    run.keep_exception(exc)  # it is logged with the failure
    return failed(internal_fault(exc))


class _MiddlewareRun:
    """One run with middleware around it. What the middleware raises is how the run ends.

    A cancel or a stop interrupts the middleware at once until the code begins. Then it interrupts the code, in the way
    of the executor. After the code has ended the middleware gets a grace, then it is interrupted, and the result of the
    code counts."""

    def __init__(
        self, run: RunHandle, executor: ExecutorProtocol, request: ExecutionRequest, middleware: Sequence[Middleware]
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._run, self._executor, self._request, self._middleware = run, executor, request, middleware
        self._task = task
        self._before, self._after = TaskInterrupt(task), TaskInterrupt(task)
        self._submitter: asyncio.Task[ExecutionResult] | None = None  # in which the code is awaited, as long as it is
        self._code_ended = asyncio.Event()
        self._passed: tuple[AroundRun, ExecutionResult] | None = None  # the middleware that has the result now
        self._timer: asyncio.TimerHandle | None = None
        self._is_cut = self._has_answered = False

    async def execute(self) -> ExecutionResult:
        self._run.set_interrupt(self._before)
        try:
            result = await self._call_middleware()
        finally:
            self._has_answered = True
            self._undo()
        if self._submitter is not None or self._run.is_detached:
            await self._wait_for_code()
        return result

    async def _call_middleware(self) -> ExecutionResult:
        try:
            around_code = list_around_code(self._middleware)
            if around_code:
                self._request = msgspec.structs.replace(self._request, spec=CodeInside(self._request.spec, around_code))
            around = [one.around_run for one in self._middleware if one.around_run is not None]
            return await run_around(around, self._run.context, self._submit, self._pass)
        except GeneratorExit:
            raise
        except BaseException as exc:
            self._undo()
            if isinstance(exc, asyncio.CancelledError) and self._task.cancelling() and self._is_let_go:
                raise
            return self._answer(exc)

    @property
    def _is_let_go(self) -> bool:
        """If this asyncio task is cancelled: whether that is more than the cancel or stop of the run."""
        return self._run.is_detached or not self._run.must_end

    def _answer(self, exc: BaseException) -> ExecutionResult:
        """How the run ends if middleware has raised this."""
        run = self._run
        if self._is_cut and self._passed is not None:
            return self._passed[1]
        if isinstance(exc, asyncio.CancelledError):
            if run.cancel_requested:
                return failed(canceled())
            if run.stop_requested:
                return failed(rejected("its node was stopped before it began"))
        run.keep_exception(exc)
        return failed(explain(exc))

    # --- the code -----------------------------------------------------------------------------------------------------

    async def _submit(self) -> ExecutionResult:
        run = self._run
        self._before.undo()
        if run.cancel_requested:
            return failed(canceled("canceled before it began"))
        if run.stop_requested:
            return failed(rejected("its node was stopped before it began"))
        if self._has_answered:
            return failed(rejected("its middleware returned before it called call_next()"))
        run.clear_interrupt()
        self._submitter = asyncio.current_task()
        try:
            result = await self._executor.submit(self._request)
        except Exception as exc:
            result = _fault(run, exc)
        finally:
            run.clear_interrupt()
            self._submitter = None
            self._code_ended.set()
        if not self._has_answered:
            self._limit_rest()
        return result

    async def _wait_for_code(self) -> None:
        """Middleware may end before the code: by a timeout around `call_next()`, which stops no thread, or if it leaves
        `call_next()` to another asyncio task."""
        run = self._run
        run.mark_expired()  # the code may look at `current_run().cancelled`
        run.add_remark("its middleware ended before its code; the task keeps its slot until the code ends")
        if self._submitter is not None:
            self._submitter.cancel()
            await self._code_ended.wait()
        await run.wait_reattached()

    # --- after the code -----------------------------------------------------------------------------------------------

    def _pass(self, function: AroundRun, result: ExecutionResult) -> None:
        self._passed = function, result

    def _limit_rest(self) -> None:
        """From now on a cancel or a stop limits how long the middleware goes on."""
        self._run.set_interrupt(self._start_grace, kill=self._cut)
        if self._run.must_end:
            self._start_grace()

    def _start_grace(self) -> None:
        run, loop = self._run, self._task.get_loop()
        grace_s = min(run.cancel_grace_s, STOP_GRACE_S) if run.stop_requested else run.cancel_grace_s
        end_mono = loop.time() + grace_s
        if self._timer is None or end_mono < self._timer.when():
            self._stop_timer()
            self._timer = loop.call_at(end_mono, self._cut)

    def _cut(self) -> None:
        if self._passed is None:
            return  # no middleware has it: the run is about to end
        if not self._is_cut:
            self._is_cut = True
            text = "middleware %s of task %s did not end in time after the code; it is interrupted, and the result of "
            text += "the code is kept"
            log.warning(text, name_of(self._passed[0]), self._run.uuid, extra={"task_record": self._run.claim.record})
        self._after()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _undo(self) -> None:
        self._stop_timer()
        self._before.undo()
        self._after.undo()
