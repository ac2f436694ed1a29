"""Executors that run nothing, for tests of what stands around them: preset answers, or none at all."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from taskyard.errors import InvalidInput, quote
from taskyard.execution.asking import AlgorithmCaller, algorithm_name
from taskyard.model.execution import ExecutionError, ExecutionResult
from taskyard.ports.executor import Abilities, ExecutionRequest, ExecutorHealth, ExecutorStats
from taskyard.ports.explain import explain, refused, rejected


class NoopExecutor(AlgorithmCaller):
    """Answers every request with success and no data."""

    abilities = Abilities(runs_code=False)

    def __init__(self, *, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._is_closed = False
        self._done = 0

    async def start(self) -> None:
        self._is_closed = False

    async def shutdown(self, *, wait: bool = True) -> None:
        self._is_closed = True

    def stats(self, name: str | None = None) -> ExecutorStats:
        return ExecutorStats(done=self._done)

    def health(self) -> ExecutorHealth:
        return ExecutorHealth(not self._is_closed, "it is shut down" if self._is_closed else "")

    async def submit(self, request: ExecutionRequest) -> ExecutionResult:
        started_at = self._now()
        answer = rejected("the executor is shut down") if self._is_closed else self._answer(request)
        self._done += not self._is_closed
        if isinstance(answer, ExecutionResult):
            return answer
        error = answer if isinstance(answer, ExecutionError) else None
        return ExecutionResult(
            success=error is None,
            data=answer if error is None else None,
            error=error,
            started_at=started_at,
            ended_at=self._now(),
        )

    def _answer(self, request: ExecutionRequest) -> Any:
        return None


class MockExecutor(NoopExecutor):
    """Answers with `results` by the name of the algorithm: a value is the data; an exception, an `ExecutionError` or an
    `ExecutionResult` is what comes of it; a function is called with the request and returns any of these. A list gives
    one answer after the other, the last one for ever. A name that is not there is answered with `otherwise`, or, left
    out, as `validation`. `requests` are those it was asked, in their order."""

    def __init__(
        self,
        results: Mapping[str, Any] | None = None,
        *,
        otherwise: Any = ...,
        now: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(now=now)
        if not isinstance(results, Mapping | None):
            raise InvalidInput(f"results must be a dict of answers by the name of the algorithm, not {quote(results)}")
        self.results = dict(results or {})
        self.requests: list[ExecutionRequest] = []
        self._otherwise = otherwise
        self._served: dict[str, int] = {}

    def asked(self, name: str) -> list[ExecutionRequest]:
        """The requests for one algorithm."""
        return [request for request in self.requests if algorithm_name(request.spec) == name]

    def _answer(self, request: ExecutionRequest) -> Any:
        self.requests.append(request)
        name = algorithm_name(request.spec)
        preset = self.results.get(name, self._otherwise)
        if preset is ...:
            return refused(f"no result is preset for algorithm {name!r}")
        if isinstance(preset, list):
            place = self._served.get(name, 0)
            self._served[name] = place + 1
            preset = preset[min(place, len(preset) - 1)] if preset else None
        if callable(preset) and not isinstance(preset, BaseException | type | msgspec.Struct):
            try:
                preset = preset(request)
            except Exception as exc:
                preset = exc
        return explain(preset) if isinstance(preset, BaseException) else preset
