"""The short way to ask for one run of an algorithm, the same for everything that answers such requests."""

from __future__ import annotations

from typing import Any

from taskyard.execution.algorithm import Algorithm, AlgorithmContext
from taskyard.model.algorithm import AlgorithmSpec
from taskyard.model.execution import ExecutionResult
from taskyard.model.task import new_uuid
from taskyard.ports.executor import ExecutionRequest

Asked = AlgorithmSpec | type[Algorithm] | str
"""An algorithm, however a caller names it."""


def algorithm_name(asked: Any) -> str:
    if isinstance(asked, str):
        return asked
    spec = getattr(asked, "spec", asked)
    return str(getattr(spec, "name", asked))


class AlgorithmCaller:
    """For executors: `run` beside `submit`."""

    async def submit(self, request: ExecutionRequest) -> ExecutionResult:
        raise NotImplementedError

    async def run(
        self,
        algorithm: Asked,
        payload: Any,
        *,
        context: AlgorithmContext | None = None,
        request_id: str | None = None,
        trace_id: str | None = None,
        timeout_s: float | None = None,
        wait_s: float | None = None,
    ) -> ExecutionResult:
        """One run of the algorithm, given by class, spec or name. Whatever happens, it answers with a result."""
        return await self.submit(
            ExecutionRequest(
                spec=getattr(algorithm, "spec", algorithm),
                payload=payload,
                request_id=request_id or new_uuid(),
                trace_id=trace_id,
                context=context,
                timeout_s=timeout_s,
                wait_s=wait_s,
            )
        )
