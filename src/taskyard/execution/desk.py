"""What the dispatcher holds of one algorithm: its place, its limits, its circuit."""

from __future__ import annotations

import msgspec

from taskyard.execution.circuit import Circuit, CircuitPolicy, CircuitState
from taskyard.execution.gate import Gate
from taskyard.execution.installed import Installed
from taskyard.model.algorithm import AlgorithmSpec
from taskyard.model.execution import ExecutionError
from taskyard.model.rate import TokenBucket
from taskyard.ports.executor import ExecutorProtocol
from taskyard.ports.explain import rejected


class AlgorithmHealth(msgspec.Struct, frozen=True):
    """One algorithm at one moment: `active` requests are with its executor (in a pool of its own: with a worker), and
    `queued` ones wait for their turn."""

    place: str
    active: int
    queued: int
    circuit: CircuitState


class Desk:
    def __init__(self, installed: Installed, place: str, executor: ExecutorProtocol, circuit: CircuitPolicy) -> None:
        self.installed, self.place, self.executor = installed, place, executor
        self.circuit = Circuit(circuit)
        hints = installed.spec.execution
        # A pool of its own has the algorithm's size and queue; elsewhere they are held here.
        has_own_limits = executor.abilities.has_own_limits
        limit = None if has_own_limits else hints.max_workers
        if limit is None and not has_own_limits and hints.queue_limit is not None:
            limit = executor.abilities.capacity
        self.gate = Gate(limit, hints.queue_limit)
        self._bucket = None if hints.rate_limit is None else TokenBucket(hints.rate_limit, hints.burst)

    @property
    def outlives_callers(self) -> bool:
        """Whether code here goes on when nobody waits for it any more: in threads."""
        return not self.executor.abilities.kills and not self.installed.is_async

    @property
    def spec(self) -> AlgorithmSpec:
        return self.installed.spec

    def too_often(self, now_mono: float) -> ExecutionError | None:
        """Why a request may not come now, if so; otherwise it is counted."""
        wait_s = 0.0 if self._bucket is None else self._bucket.take(now_mono)
        if not wait_s:
            return None
        limit = f"{self.spec.execution.rate_limit:g} requests a second"
        return rejected(f"algorithm {self.spec.name!r} takes {limit}", "RateLimited", retry_after_s=wait_s)

    def health(self) -> AlgorithmHealth:
        active, queued = self.gate.active, self.gate.queued
        if self.executor.abilities.has_own_limits:
            stats = self.executor.stats(self.spec.name)
            active, queued = stats.active, stats.queued
        return AlgorithmHealth(self.place, active, queued, self.circuit.state)
