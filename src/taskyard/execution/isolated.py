"""A process pool of its own for each consumer or algorithm: one that hogs, grows or crashes leaves the others alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from taskyard.execution.pool import WorkerPool
from taskyard.execution.pool_settings import PoolSettings
from taskyard.execution.process import HAS_NURSERY, make_pool, submit_to
from taskyard.model.algorithm import ExecutionHints
from taskyard.model.execution import ExecutionResult
from taskyard.ports.executor import Abilities, ExecutionRequest, ExecutorHealth, ExecutorStats
from taskyard.ports.explain import failed, rejected


def settings_of(spec: Any) -> PoolSettings:
    """As many workers as the consumer may run at once."""
    return PoolSettings(max_workers=getattr(spec, "slots", 1))


def settings_for(hints: ExecutionHints, *, workers: int = 1) -> PoolSettings:
    """The pool of an algorithm with these hints; `workers` where they leave it open."""
    asked = {
        "queue_limit": hints.queue_limit,
        "load_s": hints.load_s,
        "memory_limit": hints.memory_limit,
        "recycle_after": hints.recycle_after,
        "environ": None if hints.gpu is None else {"CUDA_VISIBLE_DEVICES": str(hints.gpu)},
    }
    given = {name: value for name, value in asked.items() if value is not None}
    return PoolSettings(max_workers=hints.max_workers or workers, **given)  # type: ignore[arg-type]


class IsolatedProcessPoolExecutor:
    """Pools are made when a name is first asked for, with what `settings` says of its spec."""

    abilities = Abilities(kills=True, isolates=True, has_own_limits=True)

    def __init__(
        self, settings: Callable[[Any], PoolSettings] = settings_of, *, portable: bool = not HAS_NURSERY
    ) -> None:
        self._settings, self._is_portable = settings, portable
        self._pools: dict[str, WorkerPool] = {}
        self._is_closed = False

    def stats(self, name: str | None = None) -> ExecutorStats:
        """Of the pool of this name, or of all together."""
        if name is not None:
            return self._pools[name].stats() if name in self._pools else ExecutorStats()
        found = [pool.stats() for pool in self._pools.values()]
        return ExecutorStats(
            max_workers=sum(one.max_workers or 0 for one in found),
            active=sum(one.active for one in found),
            queued=sum(one.queued for one in found),
            done=sum(one.done for one in found),
        )

    def health(self) -> ExecutorHealth:
        if self._is_closed:
            return ExecutorHealth(is_healthy=False, problem="it is shut down")
        found = {name: pool.health() for name, pool in self._pools.items()}
        problems = [f"{name}: {health.problem}" for name, health in found.items() if not health.is_healthy]
        return ExecutorHealth(not problems, "; ".join(problems))

    async def start(self) -> None:
        self._is_closed = False
        for pool in self._pools.values():
            await pool.start(warm=False)

    async def submit(self, request: ExecutionRequest) -> ExecutionResult:
        pool = self._pools.get(request.spec.name)
        if pool is None:
            if self._is_closed:
                return failed(rejected("the isolated process pools are shut down"))
            pool = make_pool(self._settings(request.spec), portable=self._is_portable)
            self._pools[request.spec.name] = pool
        return await submit_to(pool, request)

    async def shutdown(self, *, wait: bool = True) -> None:
        self._is_closed = True
        await asyncio.gather(*(pool.shutdown(wait=wait) for pool in self._pools.values()))
