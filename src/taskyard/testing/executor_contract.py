"""What every executor must do, sentence by sentence of `taskyard.ports.executor`. See `taskyard.testing.contract`.

What it demands depends on the executor's `abilities`. What it runs are functions of this module, which can be found
from another process as well.
"""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import pytest

from taskyard.errors import Cancel, RetryLater
from taskyard.execution.context import CURRENT, RunContext, RunHost, current_run
from taskyard.execution.explain import MESSAGE_CHARS, TRACEBACK_CHARS
from taskyard.model.execution import ErrorKind, ExecutionRequest, ExecutionResult
from taskyard.model.task import Claim
from taskyard.ports.consumer import Consumer
from taskyard.ports.executor import ExecutorProtocol
from taskyard.ports.store import Report
from taskyard.testing.answer_contract import AnswerContract
from taskyard.testing.pipe import Pipe
from taskyard.testing.samples import a_record

SHORT_S = 0.01
PATIENCE_S = 10.0


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


class MyLookupError(KeyError):
    pass


RAISED = [
    pytest.param(ValueError("bad"), ("ValueError",), "bad", id="plain"),
    pytest.param(MyLookupError("x"), ("MyLookupError", "KeyError", "LookupError"), "'x'", id="bases-by-name"),
    pytest.param(Exception("any"), ("Exception",), "any", id="most-general"),
    pytest.param(RuntimeError(), ("RuntimeError",), "RuntimeError", id="without-text"),
    pytest.param(RuntimeError("\ud800"), ("RuntimeError",), "\\ud800", id="lone-surrogate"),
    pytest.param(SystemExit(1), ("SystemExit",), "1", id="exits"),
    pytest.param(KeyboardInterrupt(), ("KeyboardInterrupt",), "KeyboardInterrupt", id="interrupts"),
    pytest.param(StopAsyncIteration("on"), ("StopAsyncIteration", "RuntimeError"), "", id="stops-iteration"),
    pytest.param(Unspeakable(), ("Unspeakable",), "Unspeakable, whose text could not be read", id="cannot-be-printed"),
]


def echo(payload: Any) -> Any:
    return payload


def fail(error: BaseException, _: Any) -> None:
    raise error


def put_off(_: Any) -> None:
    raise RetryLater(2.5)


def fail_deep(_: Any) -> None:
    def down(n: int) -> None:
        if n:
            down(n - 1)
        raise ValueError("x" * 100_000)

    down(300)


def see_run(_: Any) -> tuple[str, int, int, str]:
    run = current_run()
    return run.uuid, run.attempt, run.token, run.source


def kill_own_process(signum: int) -> None:
    os.kill(os.getpid(), signum)


def wait_at_gate(folder: str, payload: Any) -> Any:
    """Say that it began and wait to be let go, across processes."""
    with open(f"{folder}/began", "w") as began:
        began.write("!")
    with open(f"{folder}/gate") as gate:
        gate.read(1)
    return payload


class Flag(Protocol):
    def is_set(self) -> bool: ...


@dataclass
class Hold:
    """Code that goes on until it is let go, or until it notices that it should end."""

    spec: Consumer
    began: Flag
    let_go: Callable[[], None]


@dataclass
class Host:
    """A run to go with a request, and what it reported."""

    run: RunContext
    reports: list[Report]
    has_reported: asyncio.Event


class ExecutorContract(AnswerContract):
    """Subclass it, say whether the executor runs async code and whether in other processes, and write `make_executor`;
    `workers` are the threads or processes it is made with, beyond which it queues `queue_limit` and rejects (None: it
    never rejects). An executor that kills is made with a grace for cancels well below a second."""

    is_async: bool
    is_remote = False
    workers = 2
    queue_limit: int | None = 1

    def request(self, payload: Any) -> ExecutionRequest:
        return ExecutionRequest(spec=self.spec(echo), payload=payload, request_id="r")

    # --- what to run --------------------------------------------------------------------------------------------------

    def spec(self, function: Callable[[Any], Any]) -> Consumer:
        async def call_async(payload: Any) -> Any:
            return function(payload)

        call = call_async if self.is_async else function
        return Consumer(name="code", encode=str, call=call, is_async=self.is_async, executor="any")

    def raising(self, error: BaseException) -> Consumer:
        return self.spec(functools.partial(fail, error))

    @pytest.fixture(autouse=True)
    def _gates(self) -> Iterator[None]:
        self._pipes: list[Pipe] = []
        with tempfile.TemporaryDirectory() as self._folder:
            yield
            for pipe in self._pipes:
                pipe.close()

    def hold(self) -> Hold:
        if self.is_remote:
            return self._remote_hold()
        began, released, loop = threading.Event(), threading.Event(), asyncio.get_running_loop()
        gate = asyncio.Event()

        async def wait_async(payload: Any) -> Any:
            began.set()
            await gate.wait()
            return payload

        def wait(payload: Any) -> Any:
            began.set()
            released.wait(PATIENCE_S)
            return payload

        def let_go() -> None:
            released.set()
            loop.call_soon_threadsafe(gate.set)

        call = wait_async if self.is_async else wait
        spec = Consumer(name="hold", encode=str, call=call, is_async=self.is_async, executor="any")
        return Hold(spec, began, let_go)

    def _remote_hold(self) -> Hold:
        folder = tempfile.mkdtemp(dir=self._folder)
        began, gate = Pipe(f"{folder}/began"), Pipe(f"{folder}/gate")
        self._pipes += [began, gate]
        return Hold(self.spec(functools.partial(wait_at_gate, folder)), began, gate.write)

    def host(self) -> Host:
        reports: list[Report] = []
        has_reported = asyncio.Event()

        def report(report: Report) -> None:
            reports.append(report)
            has_reported.set()

        run = RunContext(Claim(a_record(), 1, 1), RunHost(asyncio.get_running_loop(), report))
        return Host(run, reports, has_reported)

    def begin(
        self,
        executor: ExecutorProtocol,
        spec: Consumer,
        payload: Any = None,
        *,
        host: Host | None = None,
        **fields: Any,
    ) -> asyncio.Task[ExecutionResult]:
        """The request in a task of its own, as the runner does it."""
        run = host.run if host is not None else None

        async def submit() -> ExecutionResult:
            if run is not None:
                run.task = asyncio.current_task()
                CURRENT.set(run)
            request = ExecutionRequest(spec=spec, payload=payload, request_id="r", context=run, **fields)
            return await executor.submit(request)

        return asyncio.get_running_loop().create_task(submit())

    async def started(self, hold: Hold) -> None:
        """The code has begun to run."""
        async with asyncio.timeout(PATIENCE_S):
            while not hold.began.is_set():  # noqa: ASYNC110 -- a thread sets it, and must not need the loop to do so
                await asyncio.sleep(0.001)

    # --- results and errors -------------------------------------------------------------------------------------------

    @pytest.mark.spec("EXE-01")
    async def test_what_code_returns_is_the_result(self, executor: ExecutorProtocol) -> None:
        """The value comes back as it is, with the times between which it was made."""
        value = ("value", 7) if self.is_remote else object()
        result = await self.begin(executor, self.spec(echo), value)
        assert result.success
        assert result.data == value
        assert result.error is None
        assert 0 < result.started_at <= result.ended_at

    @pytest.mark.spec("EXE-07")
    @pytest.mark.parametrize(("error", "types", "message"), RAISED)
    async def test_what_code_raises_is_an_answer(
        self, executor: ExecutorProtocol, error: BaseException, types: tuple[str, ...], message: str
    ) -> None:
        """Whatever code raises, `submit` answers with its class, its bases, its text and its traceback."""
        result = await self.begin(executor, self.raising(error))
        assert not result.success
        assert result.error is not None
        assert result.error.kind is ErrorKind.RUNTIME
        assert set(result.error.types) & set(types)
        assert message in result.error.message
        assert "in fail" in (result.error.traceback or "") or isinstance(error, Unspeakable)

    async def test_errors_are_bounded(self, executor: ExecutorProtocol) -> None:
        """An endless message and an endless traceback are cut to what a store should keep."""
        error = (await self.begin(executor, self.spec(fail_deep))).error
        assert error is not None
        assert len(error.message) <= MESSAGE_CHARS
        assert len(error.traceback or "") <= TRACEBACK_CHARS

    async def test_steering(self, executor: ExecutorProtocol) -> None:
        """`Cancel` is answered as canceled, `RetryLater` with the delay it asks for."""
        canceled = (await self.begin(executor, self.raising(Cancel("enough")))).error
        later = (await self.begin(executor, self.spec(put_off))).error
        assert canceled is not None
        assert later is not None
        assert (canceled.kind, canceled.message) == (ErrorKind.CANCELED, "enough")
        assert (later.type, later.details) == ("RetryLater", {"delay_s": 2.5})

    async def test_a_consumer_of_the_wrong_kind_is_refused(self, executor: ExecutorProtocol) -> None:
        """Sync code where async is expected, or the other way round, is refused unrun, as `validation`."""
        wrong = Consumer(name="wrong", encode=str, call=lambda _: 1 / 0, is_async=not self.is_async, executor="any")
        error = (await self.begin(executor, wrong)).error
        assert error is not None
        assert error.kind is ErrorKind.VALIDATION

    async def test_code_sees_its_run(self, executor: ExecutorProtocol) -> None:
        """`current_run()` inside the code is the run that was handed in, or stands for it."""
        host = self.host()
        result = await self.begin(executor, self.spec(see_run), host=host)
        run = host.run
        assert result.data == (run.uuid, run.attempt, run.token, run.source)

    # --- ending early -------------------------------------------------------------------------------------------------

    async def test_a_deadline_that_passes_is_a_timeout(self, executor: ExecutorProtocol) -> None:
        """Code past its timeout is answered as `timeout`, and only when it has ended."""
        hold, host = self.hold(), self.host()
        running = self.begin(executor, hold.spec, host=host, timeout_s=SHORT_S)
        if not self.is_async and not executor.abilities.kills:
            await self.started(hold)
            # It cannot be stopped: the run is told, and says so, and goes on until the code ends.
            async with asyncio.timeout(PATIENCE_S):
                await host.has_reported.wait()
            assert host.run.cancelled
            assert "cannot be stopped" in (host.reports[-1].note or "")
            assert not running.done()
            hold.let_go()
        error = (await running).error
        assert error is not None
        assert error.kind is ErrorKind.TIMEOUT

    async def test_code_within_its_deadline_is_left_alone(self, executor: ExecutorProtocol) -> None:
        """A timeout that does not pass changes nothing."""
        result = await self.begin(executor, self.spec(echo), 7, timeout_s=60)
        assert result.data == 7

    async def test_a_timeout_of_its_own_is_the_code_s_error(self, executor: ExecutorProtocol) -> None:
        """A TimeoutError that the code raises within its deadline is `runtime`, not `timeout`."""
        error = (await self.begin(executor, self.raising(TimeoutError("theirs")), timeout_s=60)).error
        assert error is not None
        assert (error.kind, error.type) == (ErrorKind.RUNTIME, "TimeoutError")

    async def test_a_cancel_reaches_the_code(self, executor: ExecutorProtocol) -> None:
        """A run that is asked to cancel knows, and async code is interrupted and answered as canceled."""
        hold, host = self.hold(), self.host()
        running = self.begin(executor, hold.spec, host=host)
        await self.started(hold)
        host.run.ask_cancel()
        assert host.run.cancelled
        if self.is_async or executor.abilities.kills:
            error = (await running).error
            assert error is not None
            assert error.kind is ErrorKind.CANCELED
        else:
            hold.let_go()
            assert (await running).success

    async def test_a_cancel_leaves_nothing_behind(self, executor: ExecutorProtocol) -> None:
        """After an answered cancel the caller's own task is not marked as cancelled."""
        if not self.is_async:
            return
        hold, host = self.hold(), self.host()
        left: list[int] = []

        async def submit() -> None:
            task = asyncio.current_task()
            assert task is not None
            host.run.task = task
            await executor.submit(ExecutionRequest(spec=hold.spec, payload=None, request_id="r", context=host.run))
            left.append(task.cancelling())

        running = asyncio.get_running_loop().create_task(submit())
        await self.started(hold)
        host.run.ask_cancel()
        await running
        assert left == [0]

    async def test_a_caller_that_is_cancelled_hears_of_it(self, executor: ExecutorProtocol) -> None:
        """When the caller itself is cancelled, `submit` raises, and says if the code may still be running."""
        hold, host = self.hold(), self.host()
        running = self.begin(executor, hold.spec, host=host)
        await self.started(hold)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert host.run.abandoned is not (self.is_async or executor.abilities.kills)
        hold.let_go()

    # --- what only some can do ----------------------------------------------------------------------------------------

    @pytest.mark.spec("EXE-08")
    @pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSEGV])
    async def test_a_crash_touches_one_run(self, executor: ExecutorProtocol, signum: int) -> None:
        """Where crashes are isolated, one is answered `system`; what runs beside and after it is not touched."""
        if not executor.abilities.isolates:
            return
        hold = self.hold()
        beside = self.begin(executor, hold.spec, 7)
        await self.started(hold)
        error = (await self.begin(executor, self.spec(kill_own_process), signum)).error
        assert error is not None
        assert error.kind is ErrorKind.SYSTEM
        assert (await self.begin(executor, self.spec(echo), 8)).data == 8
        hold.let_go()
        assert (await beside).data == 7

    @pytest.mark.spec("EXE-05")
    async def test_a_slot_is_free_again_after_a_timeout(self, executor: ExecutorProtocol) -> None:
        """Where code can be killed, as many time out as there are workers, and the next ones run."""
        if not executor.abilities.kills:
            return
        holds = [self.hold() for _ in range(self.workers)]
        for ended in [self.begin(executor, hold.spec, timeout_s=SHORT_S) for hold in holds]:
            error = (await ended).error
            assert error is not None
            assert error.kind is ErrorKind.TIMEOUT
        assert (await self.begin(executor, self.spec(echo), 7)).data == 7

    # --- capacity and life --------------------------------------------------------------------------------------------

    async def test_requests_run_side_by_side(self, executor: ExecutorProtocol) -> None:
        """As many as there are workers run at once."""
        holds = [self.hold() for _ in range(self.workers)]
        running = [self.begin(executor, hold.spec, place) for place, hold in enumerate(holds)]
        for hold in holds:
            await self.started(hold)
        for hold in reversed(holds):
            hold.let_go()
        assert [(await one).data for one in running] == list(range(self.workers))

    @pytest.mark.spec("EXE-06")
    async def test_what_is_too_much_is_rejected_unrun(self, executor: ExecutorProtocol) -> None:
        """Beyond workers and queue a request is `rejected` at once; what was queued runs when there is room."""
        if self.queue_limit is None:
            return
        holds = [self.hold() for _ in range(self.workers + self.queue_limit)]
        running = [self.begin(executor, hold.spec, place) for place, hold in enumerate(holds)]
        for hold in holds[: self.workers]:
            await self.started(hold)
        error = (await self.begin(executor, self.raising(AssertionError("it ran")))).error
        assert error is not None
        assert error.kind is ErrorKind.REJECTED
        for hold in holds:
            hold.let_go()
        assert [(await one).data for one in running] == list(range(len(holds)))

    async def test_a_queued_request_can_be_canceled(self, executor: ExecutorProtocol) -> None:
        """A request that waits for a worker is canceled without having run."""
        if self.queue_limit is None:
            return
        holds = [self.hold() for _ in range(self.workers)]
        running = [self.begin(executor, hold.spec) for hold in holds]
        for hold in holds:
            await self.started(hold)
        host = self.host()
        queued = self.begin(executor, self.raising(AssertionError("it ran")), host=host)
        await asyncio.sleep(0)
        host.run.ask_cancel()
        error = (await queued).error
        assert error is not None
        assert error.kind is ErrorKind.CANCELED
        for hold in holds:
            hold.let_go()
        await asyncio.gather(*running)

    async def test_shutdown_waits_for_what_runs(self, executor: ExecutorProtocol) -> None:
        """`shutdown(wait=True)` returns when what runs has ended, and takes nothing new meanwhile."""
        hold = self.hold()
        running = self.begin(executor, hold.spec, 7)
        await self.started(hold)
        closing = asyncio.get_running_loop().create_task(executor.shutdown(wait=True))
        await asyncio.sleep(0)
        error = (await self.begin(executor, self.spec(echo))).error
        assert error is not None
        assert error.kind is ErrorKind.REJECTED
        assert not closing.done()
        hold.let_go()
        await closing
        assert (await running).data == 7

    async def test_shutdown_need_not_wait(self, executor: ExecutorProtocol) -> None:
        """`shutdown(wait=False)` returns at once; what runs goes on and is answered."""
        hold = self.hold()
        running = self.begin(executor, hold.spec, 7)
        await self.started(hold)
        await executor.shutdown(wait=False)
        hold.let_go()
        assert (await running).data == 7
