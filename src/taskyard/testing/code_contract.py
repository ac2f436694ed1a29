"""What every executor that runs code must do with what the code returns or raises. See `taskyard.testing.contract`."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from taskyard.errors import Cancel, RetryLater
from taskyard.execution.context import CURRENT, current_run
from taskyard.execution.run_handle import RunHandle, RunHost
from taskyard.model.execution import ErrorKind, ExecutionResult
from taskyard.model.task import Claim
from taskyard.ports.consumer import Consumer
from taskyard.ports.executor import ExecutionRequest, ExecutorProtocol
from taskyard.ports.explain import MESSAGE_CHARS, TRACEBACK_CHARS
from taskyard.ports.store import Report
from taskyard.testing.answer_contract import AnswerContract
from taskyard.testing.samples import a_record


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
    return run.uuid, run.attempt, run.token, run.consumer


async def call_async(function: Callable[[Any], Any], payload: Any) -> Any:
    """What an async function does as well."""
    await asyncio.sleep(0)
    return function(payload)


@dataclass
class Host:
    """A run to go with a request, and what it reported."""

    run: RunHandle
    reports: list[Report]
    has_reported: asyncio.Event


class CodeContract(AnswerContract):
    """Subclass it, say whether the code is to be async and whether it runs in other processes, and write
    `make_executor`; once for each kind of code, because every executor runs both."""

    is_async: bool
    is_remote = False

    def make_executor(self) -> ExecutorProtocol:
        raise NotImplementedError

    def request(self, payload: Any) -> ExecutionRequest:
        return ExecutionRequest(spec=self.spec(echo), payload=payload, request_id="r")

    # --- what to run --------------------------------------------------------------------------------------------------

    def spec(self, function: Callable[[Any], Any]) -> Consumer:
        call = functools.partial(call_async, function) if self.is_async else function
        return Consumer(name="code", encode=str, call=call, is_async=self.is_async, executor="any")

    def raising(self, error: BaseException) -> Consumer:
        return self.spec(functools.partial(fail, error))

    def host(self) -> Host:
        reports: list[Report] = []
        has_reported = asyncio.Event()

        def report(report: Report) -> None:
            reports.append(report)
            has_reported.set()

        run = RunHandle(Claim(a_record(), 1, 1), RunHost(asyncio.get_running_loop(), report))
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
                run.belongs_to(asyncio.current_task())
                CURRENT.set(run)
            request = ExecutionRequest(spec=spec, payload=payload, request_id="r", run=run, **fields)
            return await executor.submit(request)

        return asyncio.get_running_loop().create_task(submit())

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

    async def test_code_sees_its_run(self, executor: ExecutorProtocol) -> None:
        """`current_run()` inside the code is the run that was handed in, or stands for it."""
        host = self.host()
        result = await self.begin(executor, self.spec(see_run), host=host)
        run = host.run
        assert result.data == (run.uuid, run.claim.attempt, run.claim.token, run.claim.record.consumer)

    async def test_code_within_its_deadline_is_left_alone(self, executor: ExecutorProtocol) -> None:
        """A timeout that does not pass changes nothing."""
        result = await self.begin(executor, self.spec(echo), 7, timeout_s=60)
        assert result.data == 7

    async def test_a_timeout_of_its_own_is_the_code_s_error(self, executor: ExecutorProtocol) -> None:
        """A TimeoutError that the code raises within its deadline is `runtime`, not `timeout`."""
        error = (await self.begin(executor, self.raising(TimeoutError("theirs")), timeout_s=60)).error
        assert error is not None
        assert (error.kind, error.type) == (ErrorKind.RUNTIME, "TimeoutError")
