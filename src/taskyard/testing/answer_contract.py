"""What every executor must do, also one that runs no code: answer, and end. See `taskyard.testing.contract`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from taskyard.model.algorithm import AlgorithmSpec
from taskyard.model.execution import ErrorKind
from taskyard.ports.executor import ExecutionRequest, RequestServer


class AnswerContract:
    """Subclass it and write `make_executor`; and `request`, if the executor needs more of a spec than its name."""

    def make_executor(self) -> RequestServer:
        raise NotImplementedError

    @pytest.fixture
    async def executor(self) -> AsyncIterator[RequestServer]:
        executor = self.make_executor()
        await executor.start()
        yield executor
        await executor.shutdown(wait=True)

    def request(self, payload: Any) -> ExecutionRequest:
        """One that is answered with success."""
        return ExecutionRequest(spec=AlgorithmSpec("code"), payload=payload, request_id="r")

    @pytest.mark.spec("EXE-01", "EXE-02")
    async def test_an_answer_has_its_times(self, executor: RequestServer) -> None:
        """Success comes without an error, and with the times between which it came about."""
        result = await executor.submit(self.request(7))
        assert result.success
        assert result.error is None
        assert 0 < result.started_at <= result.ended_at

    @pytest.mark.spec("EXE-02")
    async def test_requests_may_come_together(self, executor: RequestServer) -> None:
        """Each of several requests at once gets its answer."""
        results = await asyncio.gather(*(executor.submit(self.request(n)) for n in range(2)))
        assert [result.success for result in results] == [True, True]

    @pytest.mark.spec("EXE-02", "EXE-06")
    async def test_after_a_shutdown_requests_are_rejected(self, executor: RequestServer) -> None:
        """What comes after a shutdown is `rejected`, unrun."""
        await executor.shutdown()
        result = await executor.submit(self.request(7))
        assert not result.success
        assert result.error is not None
        assert result.error.kind is ErrorKind.REJECTED

    @pytest.mark.spec("EXE-02")
    async def test_start_and_shutdown_are_idempotent(self, executor: RequestServer) -> None:
        """Starting and shutting down twice is the same as once, and a start after a shutdown opens it again."""
        await executor.start()
        await executor.shutdown()
        await executor.shutdown()
        await executor.start()
        assert (await executor.submit(self.request(7))).success
