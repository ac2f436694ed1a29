"""From a request for an algorithm to the executor that suits it: checked, limited, routed, tried again, told.

A direct call runs as a task that no store has: `current_run()` works inside it, with the request's id as its uuid.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, Self, TypeVar

import msgspec

from taskyard.errors import InvalidAlgorithm, InvalidArguments, InvalidInput, UnknownAlgorithm
from taskyard.execution.algorithm import Algorithm, AlgorithmContext
from taskyard.execution.asking import AlgorithmCaller, algorithm_name
from taskyard.execution.circuit import CircuitPolicy, CircuitState, Pass
from taskyard.execution.desk import AlgorithmHealth, Desk
from taskyard.execution.inline import InProcessExecutor
from taskyard.execution.installed import Installed, Payload
from taskyard.execution.isolated import IsolatedProcessPoolExecutor, settings_for
from taskyard.execution.mock import MockExecutor, NoopExecutor
from taskyard.execution.policy import ExecutionPolicy
from taskyard.execution.process import ProcessPoolExecutor
from taskyard.execution.registry import ExecutorRegistry, join_names
from taskyard.execution.run_execution import execute
from taskyard.execution.run_handle import LiveRuns, RunHandle, RunHost, pause
from taskyard.execution.thread import ThreadExecutor
from taskyard.execution.warming import warm_up_all
from taskyard.model.algorithm import AlgorithmSpec, Incident, IncidentKind, choose_place
from taskyard.model.execution import (
    INLINE,
    ISOLATED,
    MOCK,
    NOOP,
    PROCESS,
    THREAD,
    ErrorKind,
    ExecutionError,
    ExecutionResult,
    Progress,
)
from taskyard.model.given import check_name, check_timeout, check_wait
from taskyard.model.notes import Note
from taskyard.model.task import Claim, TaskRecord
from taskyard.ports.clock import Clock, SystemClock
from taskyard.ports.executor import Abilities, ExecutionRequest, ExecutorProtocol
from taskyard.ports.explain import canceled, failed, internal_fault, rejected, type_names
from taskyard.ports.middleware import Middleware, check_middleware
from taskyard.ports.sink import CallFinished, Sink, Sinks
from taskyard.ports.store import Report

log = logging.getLogger("taskyard")

T = TypeVar("T")

UNWIND_S = 2.0
"""How long interrupted runs get to clean up when a shutdown has run out of grace."""

INCIDENTS = {ErrorKind.TIMEOUT: IncidentKind.TIMEOUT, ErrorKind.SYSTEM: IncidentKind.CRASH}


def log_incident(incident: Incident) -> None:
    """Where incidents go unless somebody listens."""
    level = logging.INFO if incident.kind is IncidentKind.CIRCUIT_CLOSED else logging.WARNING
    fields = {name: getattr(incident, name) for name in ("algorithm", "version", "request_id", "trace_id")}
    log.log(level, "[%s] algorithm %s: %s", incident.kind, incident.algorithm, incident.message, extra=fields)


def ignore_progress(request_id: str, progress: Progress) -> None:
    """Where progress goes unless somebody listens."""


REGISTRY = ExecutorRegistry(
    {
        INLINE: InProcessExecutor,
        THREAD: ThreadExecutor,
        PROCESS: ProcessPoolExecutor,
        ISOLATED: lambda: IsolatedProcessPoolExecutor(lambda installed: settings_for(installed.spec.execution)),
        MOCK: MockExecutor,
        NOOP: NoopExecutor,
    }
)
"""Where algorithms run, unless a dispatcher is given another executor of that name."""


class ExecutionDispatcher(AlgorithmCaller):
    """Install algorithms, then, inside `async with`, `submit` requests or `run` them by name.

    `executors` adds or replaces places by name; `place` sends everything to one of them, whatever hints say (`mock` for
    tests with no algorithm installed). `policy` decides on timeouts and retries, `circuit` when to give an algorithm a
    rest. `on_incident` hears of timeouts, crashes and circuits, `on_progress` of how far requests are, on the loop.
    `middleware` goes around every try, and `sinks` are told of every answer (`taskyard.telemetry`)."""

    def __init__(  # noqa: PLR0913 - the settings of a dispatcher, each with a name and a default
        self,
        *,
        executors: Mapping[str, ExecutorProtocol] | None = None,
        place: str | None = None,
        policy: ExecutionPolicy | None = None,
        circuit: CircuitPolicy | None = None,
        on_incident: Callable[[Incident], None] = log_incident,
        on_progress: Callable[[str, Progress], None] = ignore_progress,
        middleware: Iterable[Middleware] = (),
        sinks: Iterable[Sink] = (),
        clock: Clock | None = None,
    ) -> None:
        self._sinks = Sinks(sinks)
        self._executors: dict[str, ExecutorProtocol] = dict(executors or {})
        self._place = place
        self._policy, self._circuit = policy or ExecutionPolicy(), circuit or CircuitPolicy()
        self._on_incident, self._on_progress = on_incident, on_progress
        self._clock = clock or SystemClock()
        self._middleware = check_middleware(middleware)
        self._desks: dict[str, Desk] = {}
        self._live = LiveRuns()
        self._going_on: set[asyncio.Task[Any]] = set()
        self._tokens = itertools.count(1)
        self._is_closed = False
        if place is not None:
            self._executor(place)

    @property
    def abilities(self) -> Abilities:
        """What it can do in every place: nothing that one of them could not."""
        used = [desk.executor for desk in self._desks.values()]
        if not used and self._place is not None:
            used = [self._executor(self._place)]
        found = [executor.abilities for executor in used]
        return Abilities(
            kills=all(abilities.kills for abilities in found),
            isolates=all(abilities.isolates for abilities in found),
            runs_code=not found or any(abilities.runs_code for abilities in found),
        )

    # --- algorithms ---------------------------------------------------------------------------------------------------

    def install(self, algorithm: type[Algorithm] | Callable[..., Any], *, spec: AlgorithmSpec | None = None) -> None:
        """Make an algorithm known: a subclass of `Algorithm`, or a function of the input (and the context) with a
        `spec`. What cannot be run as it is written is refused here."""
        installed = Installed(algorithm, spec)
        if installed.name in self._desks:
            raise InvalidAlgorithm(installed.name, "one of that name is installed already; rename one of the two")
        place = self._place or choose_place(installed.spec.execution, is_async=installed.is_async)
        executor = self._executor(place)
        installed.check_place(place)
        self._desks[installed.name] = Desk(installed, place, executor, self._circuit)

    def _executor(self, place: str) -> ExecutorProtocol:
        executor = self._executors.get(place)
        if executor is None:
            if place not in REGISTRY:
                known = join_names({*self._executors, *REGISTRY.names})
                raise InvalidInput(f"there is no executor called {place!r} (known: {known})")
            executor = self._executors[place] = REGISTRY.make(place)
        return executor

    def _find(self, asked: Any) -> Desk | None:
        """The algorithm that is meant; None where no code is needed to answer; raises `UnknownAlgorithm`."""
        desk = self._desks.get(algorithm_name(asked))
        is_other = desk is not None and isinstance(asked, AlgorithmSpec) and asked.version != desk.spec.version
        if desk is None or is_other:
            if self._place is not None and not self._executor(self._place).abilities.runs_code:
                return None
            name = f"{algorithm_name(asked)} {asked.version}" if is_other else algorithm_name(asked)
            raise UnknownAlgorithm(name, [f"{desk.spec.name} {desk.spec.version}" for desk in self._desks.values()])
        return desk

    def health(self) -> dict[str, AlgorithmHealth]:
        """Each algorithm at this moment."""
        return {name: desk.health() for name, desk in self._desks.items()}

    # --- life ---------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start every executor, or none."""
        cold = [desk.installed.warm_up for desk in self._desks.values() if desk.executor.abilities.runs_code]
        await warm_up_all(cold)
        async with contextlib.AsyncExitStack() as started:
            for executor in self._executors.values():
                await executor.start()
                started.push_async_callback(executor.shutdown)
            started.pop_all()
        self._is_closed = False

    async def shutdown(self, *, wait: bool = True, grace_s: float | None = None) -> None:
        """All executors and algorithms are shut down, also if some of it fails; then that is raised. What waits is
        answered `rejected`. With `wait`, until what runs has ended; after `grace_s` it is interrupted, and answered
        `canceled`. A thread that goes on even then is left behind."""
        grace_s = check_wait("grace_s", grace_s)
        self._is_closed = True
        if wait and grace_s is not None:
            await self._end_within(grace_s)
        else:
            await self._end(wait=wait)

    async def _end_within(self, grace_s: float) -> None:
        ending = asyncio.get_running_loop().create_task(self._end(wait=True))
        try:
            await self._watch(ending, grace_s)
            if not ending.done():
                self._live.request_stop(answer_canceled=True)  # the grace of a cancel they have had already
            await self._watch(ending, UNWIND_S)
            if ending.done():
                await ending
                return
        finally:
            ending.cancel()
        log.warning("what still runs %g s after it was interrupted is left behind", UNWIND_S)
        _ = self._go_on(self._close_algorithms())

    async def _watch(self, ending: asyncio.Task[None], within_s: float) -> None:
        wake = asyncio.Event()
        ending.add_done_callback(lambda _: wake.set())
        await self._clock.wait(wake, self._clock.monotonic() + within_s)

    async def _end(self, *, wait: bool) -> None:
        endings = [executor.shutdown(wait=wait) for executor in self._executors.values()]
        failures = [end for end in await asyncio.gather(*endings, return_exceptions=True) if end is not None]
        if wait:
            await self._close_algorithms()
        else:
            _ = self._go_on(self._close_algorithms())
        if len(failures) > 1:
            raise BaseExceptionGroup("executors could not be shut down", failures)
        if failures:
            raise failures[0]

    async def _close_algorithms(self) -> None:
        for desk in self._desks.values():
            await desk.installed.close()

    def _go_on(self, what: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Have it run to its end, whoever waits for it."""
        task = asyncio.get_running_loop().create_task(what)
        self._going_on.add(task)
        task.add_done_callback(self._going_on.discard)
        return task

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.shutdown()

    def cancel(self, request_id: str) -> bool:
        """Ask the runs of this request to end; whether there are any. They answer `canceled`."""
        found = [run for run in self._live.values() if run.uuid == request_id]
        for run in found:
            run.request_cancel()
        return bool(found)

    # --- requests -----------------------------------------------------------------------------------------------------

    async def submit(self, request: ExecutionRequest) -> ExecutionResult:
        if CallFinished not in self._sinks.kinds:
            return await self._serve(request, may_degrade=True)
        began_mono = self._clock.monotonic()
        result = await self._serve(request, may_degrade=True)
        name, took_s = algorithm_name(request.spec), self._clock.monotonic() - began_mono
        version = self._desks[name].spec.version if name in self._desks else None
        self._sinks.tell(CallFinished(request.request_id, request.trace_id, name, version, result, took_s))
        return result

    async def _serve(self, request: ExecutionRequest, *, may_degrade: bool) -> ExecutionResult:
        if self._is_closed:
            return failed(rejected("the dispatcher is shut down"))
        try:
            desk, request = self._prepare(request)
        except InvalidInput as exc:
            return failed(_unfit(exc))
        if desk is None:
            try:
                return await self._executor(self._place or MOCK).submit(request)
            except Exception as exc:
                return failed(internal_fault(exc))
        if refusal := desk.too_often(self._clock.monotonic()):
            return failed(refusal)
        granted = desk.circuit.admit(self._clock.monotonic())
        if not isinstance(granted, Pass):
            return await self._refuse(desk, request, granted, may_degrade=may_degrade)
        return await self._try(desk, request, granted)

    def _prepare(self, request: ExecutionRequest) -> tuple[Desk | None, ExecutionRequest]:
        """Who serves it, and the request as that executor gets it; nothing was queued so far. Raises `InvalidInput`."""
        desk = self._find(request.spec)
        if desk is None:
            return None, request
        check_name("request_id", request.request_id)
        for field, seconds in (("timeout_s", request.timeout_s), ("wait_s", request.wait_s)):
            if seconds is not None:
                check_timeout(seconds, field=field)
        context = request.context if request.context is not None else AlgorithmContext()
        if not isinstance(context, AlgorithmContext):
            raise InvalidInput(f"context must be an AlgorithmContext, not {type(context).__name__}")
        return desk, msgspec.structs.replace(
            request,
            spec=desk.installed,
            payload=Payload(
                desk.installed.check(request.payload), context.of_request(request.request_id, request.trace_id)
            ),
            context=None,
            timeout_s=self._policy.timeout_s(desk.spec, request),
            wait_s=self._policy.wait_s(desk.spec, request),
        )

    async def _refuse(
        self, desk: Desk, request: ExecutionRequest, retry_after_s: float, *, may_degrade: bool
    ) -> ExecutionResult:
        why = f"algorithm {desk.spec.name!r} has crashed {self._circuit.crashes} times in a row and is given a rest"
        if desk.spec.fallback is None or not may_degrade:
            return failed(rejected(why, "CircuitOpen", retry_after_s=retry_after_s))
        given, context = request.payload
        asked = msgspec.structs.replace(request, spec=desk.spec.fallback, payload=given, context=context)
        result = await self._serve(asked, may_degrade=False)
        return msgspec.structs.replace(result, note=Note.remark(f"answered by {desk.spec.fallback!r}: {why}"))

    async def _try(self, desk: Desk, request: ExecutionRequest, granted: Pass) -> ExecutionResult:
        """Run it, and again as the policy says."""
        run = self._make_run(request)
        token = run.claim.token
        self._live[token] = run
        try:
            result = await self._attempt(desk, request, run, granted)
            while result.error is not None and (again := await self._again(desk, run, result.error)) is not None:
                run.next_attempt(next(self._tokens))
                result = await self._attempt(desk, request, run, again)
            return _heed_cancel(result) if run.cancel_requested else result
        finally:
            self._live.pop(token, None)
            run.end()

    def _make_run(self, request: ExecutionRequest) -> RunHandle:
        now = self._clock.now()
        record = TaskRecord(request.request_id, request.spec.name, now, now, now, attempt=1)
        host = RunHost(asyncio.get_running_loop(), self._hear)
        run = RunHandle(Claim(record, 1, next(self._tokens)), host)
        run.belongs_to(asyncio.current_task())
        return run

    async def _again(self, desk: Desk, run: RunHandle, error: ExecutionError) -> Pass | None:
        """Wait for the next try, if there is one; None when it stays at what the last one answered."""
        delay_s = self._policy.retry_after_s(error, retries=run.claim.attempt - 1, jitter=random.random())
        if delay_s is None or run.cancel_requested:
            return None
        await pause(run, self._clock, delay_s)
        if run.must_end or self._is_closed:
            return None
        granted = desk.circuit.admit(self._clock.monotonic())
        return granted if isinstance(granted, Pass) else None

    async def _attempt(self, desk: Desk, request: ExecutionRequest, run: RunHandle, granted: Pass) -> ExecutionResult:
        result: ExecutionResult | None = None
        try:
            result = await self._run(desk, request, run)
        finally:
            self._judge(desk, request, granted, result)
        return result

    async def _run(self, desk: Desk, request: ExecutionRequest, run: RunHandle) -> ExecutionResult:
        began_mono = self._clock.monotonic()
        refusal = await desk.gate.enter(run, request.wait_s)
        if refusal is not None:
            return failed(refusal)
        if run.cancel_requested:  # since it was given the turn
            desk.gate.leave()
            return failed(canceled("canceled before it began"))
        left_s = request.wait_s
        if left_s is not None:
            left_s = max(0.001, left_s - (self._clock.monotonic() - began_mono))
        request = msgspec.structs.replace(request, run=run, wait_s=left_s)
        if desk.outlives_callers:
            return await self._outlive(desk, run, request)
        try:
            return await execute(run, desk.executor, request, self._middleware)
        finally:
            desk.gate.leave()

    async def _outlive(self, desk: Desk, run: RunHandle, request: ExecutionRequest) -> ExecutionResult:
        """Its place is free when the code has ended, not when its caller has gone; the code is told of that."""

        going_on = self._go_on(execute(run, desk.executor, request, self._middleware))
        going_on.add_done_callback(lambda _: desk.gate.leave())
        try:
            return await asyncio.shield(going_on)
        except asyncio.CancelledError:
            run.request_cancel()
            raise

    # --- what is told -------------------------------------------------------------------------------------------------

    def _hear(self, report: Report) -> None:
        if report.checkpoint is not None:
            report.claim.record.checkpoint = report.checkpoint  # for the next try
        if report.progress is not None:
            try:
                self._on_progress(report.claim.uuid, report.progress)
            except Exception:
                log.exception("a listener for progress failed")

    def _judge(self, desk: Desk, request: ExecutionRequest, granted: Pass, result: ExecutionResult | None) -> None:
        changed = desk.circuit.record(granted, result, self._clock.monotonic())
        error = None if result is None else result.error
        kind = None if error is None else INCIDENTS.get(error.kind)
        if kind is not None and error is not None:
            self._tell(desk, request, kind, error.message, None if result is None else result.worker_pid)
        if changed is CircuitState.OPEN:
            rest = f"no more requests for {self._circuit.cool_down_s:g} s"
            why = f"{self._circuit.crashes} crashes in a row; {rest}"
            self._tell(desk, request, IncidentKind.CIRCUIT_OPENED, why)
        elif changed is CircuitState.CLOSED:
            self._tell(desk, request, IncidentKind.CIRCUIT_CLOSED, "a trial went well; requests are served again")

    def _tell(
        self, desk: Desk, request: ExecutionRequest, kind: IncidentKind, message: str, pid: int | None = None
    ) -> None:
        incident = Incident(
            kind=kind,
            algorithm=desk.spec.name,
            version=desk.spec.version,
            message=message,
            at=self._clock.now().timestamp(),
            request_id=request.request_id,
            trace_id=request.trace_id,
            worker_pid=pid,
        )
        try:
            self._on_incident(incident)
        except Exception:
            log.exception("a listener for incidents failed")


def _unfit(exc: InvalidInput) -> ExecutionError:
    details = {"problems": exc.problems} if isinstance(exc, InvalidArguments) else {}
    return ExecutionError(kind=ErrorKind.VALIDATION, message=str(exc), types=type_names(type(exc)), details=details)


def _heed_cancel(result: ExecutionResult) -> ExecutionResult:
    """It was asked to cancel: what failed, or would have been tried again, is canceled."""
    if result.error is None or result.error.kind is ErrorKind.CANCELED:
        return result
    return msgspec.structs.replace(result, error=msgspec.structs.replace(result.error, kind=ErrorKind.CANCELED))
