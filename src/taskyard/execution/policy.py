"""How long a direct call may take and whether it is tried again: replaceable, decided purely."""

from __future__ import annotations

from taskyard.model.algorithm import AlgorithmSpec
from taskyard.model.execution import ErrorKind, ExecutionError
from taskyard.model.limits import tighter
from taskyard.model.retry import NO_RETRY, RetryPolicy
from taskyard.ports.executor import ExecutionRequest

FINAL = frozenset({ErrorKind.VALIDATION, ErrorKind.REJECTED, ErrorKind.CANCELED})
"""Not failures of the run: the caller has to change something, or to wait."""


class ExecutionPolicy:
    """Override a method to decide otherwise. `retry`: by default nothing is tried again, the caller hears at once."""

    def __init__(self, *, retry: RetryPolicy = NO_RETRY) -> None:
        self.retry = retry

    def timeout_s(self, spec: AlgorithmSpec, request: ExecutionRequest) -> float | None:
        """The smaller of the algorithm's and the request's."""
        return tighter(spec.execution.timeout_s, request.timeout_s)

    def wait_s(self, spec: AlgorithmSpec, request: ExecutionRequest) -> float | None:
        """How long to wait for a worker: the smaller of the two as well."""
        return tighter(spec.execution.wait_s, request.wait_s)

    def retry_after_s(self, error: ExecutionError, *, retries: int, jitter: float) -> float | None:
        """Seconds until the next try after `retries` earlier ones, or None to leave it at that. `jitter` is drawn from
        [0, 1)."""
        if error.kind in FINAL or self.retry.exhausted(retries, error):
            return None
        asked_s = error.details.get("delay_s") if error.type == "RetryLater" else None
        return float(asked_s) if isinstance(asked_s, int | float) else self.retry.delay(retries, jitter)
