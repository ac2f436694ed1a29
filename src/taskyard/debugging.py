"""Runs the code of a stored task once more, in this process and its main thread, for `taskyard debug`.

The code gets its arguments, its values and the last checkpoint, with the middleware of its yard around it. What it
reports is told to the caller. Nothing is written to the store: it is not even open while the code runs.

The event loop of the node is in a thread of its own, so that the main thread is free for the code and its debugger.
"""

from __future__ import annotations

import asyncio
import bdb
import contextvars
import functools
import inspect
import pdb
import queue
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from taskyard.errors import NotJson
from taskyard.execution.code_loop import close_loop_here, loop_here
from taskyard.execution.loop_thread import ServingThread
from taskyard.execution.run_execution import execute
from taskyard.execution.run_handle import RunHandle, RunHost
from taskyard.model.execution import ExecutionResult
from taskyard.model.task import Claim, TaskRecord, to_json
from taskyard.ports.consumer import Consumer
from taskyard.ports.executor import Abilities, ExecutionRequest, ExecutorHealth, ExecutorStats
from taskyard.ports.explain import explain, failed
from taskyard.ports.middleware import Middleware
from taskyard.ports.store import Report, Store
from taskyard.queueing.summary import is_summary, with_results
from taskyard.yard import Yard

Say = Callable[[str], None]


async def load_task(store: Store, uuid: str) -> TaskRecord | None:
    """The task as a run of it gets it: the summary of a group with what the others returned."""
    record = await store.find(uuid)
    return await with_results(store, record) if record is not None and is_summary(record) else record


def debug_task(
    yard: Yard, record: TaskRecord, *, say: Say, break_at_start: bool = False, post_mortem: bool = False
) -> ExecutionResult:
    """Run the code of the task here, on the main thread, without its timeout. `say` gets a line for everything that it
    reports. `break_at_start` stops in its first line, `post_mortem` where it has raised an exception. Raises
    `UnknownConsumer` if the yard has no consumer of that name."""
    consumer = yard._get_consumer(record.consumer)
    terminal = _TerminalExecutor(break_at_start=break_at_start)
    thread = ServingThread()
    try:
        with tempfile.TemporaryDirectory(prefix="taskyard-debug-") as folder:
            driving = asyncio.run_coroutine_threadsafe(
                _drive(consumer, record, terminal, yard.middleware, say, Path(folder)), thread.loop
            )
            terminal.work()
            result, raised = driving.result()
    finally:
        close_loop_here()
        thread.end()
    if post_mortem and raised is not None and not isinstance(raised, bdb.BdbQuit):
        pdb.post_mortem(raised.__traceback__)
    return result


async def _drive(
    consumer: Consumer,
    record: TaskRecord,
    terminal: _TerminalExecutor,
    middleware: tuple[Middleware, ...],
    say: Say,
    folder: Path,
) -> tuple[ExecutionResult, BaseException | None]:
    """What the runner does with an attempt, without the store."""
    try:
        host = RunHost(asyncio.get_running_loop(), lambda report: _tell(report, say), artifact_folder=folder)
        run = RunHandle(Claim(record, max(1, record.attempt), record.token or 0), host)
        run.belongs_to(asyncio.current_task())
        run.set_consumer(consumer)
        request = ExecutionRequest(spec=consumer, payload=record, request_id=record.uuid, run=run)
        result = await execute(run, terminal, request, middleware + consumer.middleware)
        raised = run.exception
        run.end()
        if consumer.close is not None:
            await consumer.close()
        return _checked(result), raised
    finally:
        terminal.end()


def _checked(result: ExecutionResult) -> ExecutionResult:
    """A result that JSON cannot hold is a failure, as it is in a node."""
    try:
        to_json("the result", result.data)
    except NotJson as exc:
        return failed(explain(exc))
    return result


def _tell(report: Report, say: Say) -> None:
    """What a store would keep of the run."""
    if report.progress is not None:
        progress = report.progress
        share = "" if progress.fraction is None else f" {progress.fraction:.0%}"
        rate = "" if progress.rate is None else f" ({progress.rate:g}/s)"
        facts = "".join(f" {name}={value}" for name, value in progress.facts.items())
        say(f"progress{share}{rate} {progress.message}{facts}".rstrip())
    if report.checkpoint is not None:
        say(f"checkpoint {report.checkpoint}")
    if report.note is not None:
        say(f"note {report.note.reason}")
    for line in report.lines:
        say(f"log {line.level}: {line.text}")
    for artifact in report.artifacts:
        say(f"artifact {artifact.name}: {artifact.size:,} bytes of {artifact.media_type}, not kept")


class _Call:
    """One call of the code, from the loop to the main thread and back."""

    def __init__(self, request: ExecutionRequest) -> None:
        self.request = request
        self.context = contextvars.copy_context()
        self.loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self.loop.create_future()
        self.started_at = time.time()
        self.value: Any = None
        self.raised: BaseException | None = None


class _TerminalExecutor:
    """Runs code in the thread that calls `work`."""

    abilities = Abilities(capacity=1)

    def __init__(self, *, break_at_start: bool) -> None:
        self._break_at_start = break_at_start
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()

    async def start(self) -> None:
        """It needs no start."""

    async def shutdown(self, *, wait: bool = True) -> None:
        """What runs goes on."""

    def stats(self, name: str | None = None) -> ExecutorStats:
        return ExecutorStats(1)

    def health(self) -> ExecutorHealth:
        return ExecutorHealth()

    async def submit(self, request: ExecutionRequest) -> ExecutionResult:
        call = _Call(request)
        self._calls.put(call)
        await call.ended
        error = None
        if call.raised is not None:
            error = explain(call.raised)
            if request.run is not None:
                request.run.keep_exception(call.raised)
        return ExecutionResult(
            success=error is None, data=call.value, error=error, started_at=call.started_at, ended_at=time.time()
        )

    def end(self) -> None:
        self._calls.put(None)

    def work(self) -> None:
        """Run what is submitted, until the end."""
        while (call := self._calls.get()) is not None:
            try:
                call.value = self._run(call)
            except BaseException as exc:  # Ctrl-C ends the code, and the run is told as any other
                call.raised = exc
            call.loop.call_soon_threadsafe(call.ended.set_result, None)

    def _run(self, call: _Call) -> Any:
        spec, payload = call.request.spec, call.request.payload
        if not self._break_at_start:
            return self._call(call, spec, payload)
        debugger = _Debugger(_find_file(spec.function or spec.call))
        debugger.set_trace()
        try:
            return self._call(call, spec, payload)
        finally:
            sys.settrace(None)

    def _call(self, call: _Call, spec: Any, payload: Any) -> Any:
        value = call.context.run(spec.call, payload)
        return loop_here().run(value, context=call.context) if spec.is_async else value


class _Debugger(pdb.Pdb):
    """Stops for the first time in the file of the task's own code; from there on like any other."""

    def __init__(self, file: str) -> None:
        super().__init__(nosigint=True)
        self._file = file
        self._has_stopped = False

    def stop_here(self, frame: FrameType) -> bool:
        self._has_stopped = self._has_stopped or frame.f_code.co_filename == self._file
        return self._has_stopped and super().stop_here(frame)


def _find_file(function: Any) -> str:
    """The file of the code of a function, a method, a partial or an object that is called. Decorators do not count."""
    function = inspect.unwrap(function)
    if isinstance(function, functools.partial):
        return _find_file(function.func)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return "" if code is None else code.co_filename
