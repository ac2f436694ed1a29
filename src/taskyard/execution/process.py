"""Code in worker processes, which can be killed and whose crashes touch one run only: the shared pool."""

from __future__ import annotations

import asyncio
import sys

import msgspec

from taskyard.errors import InvalidInput
from taskyard.execution.calls import PendingCall
from taskyard.execution.pool import PoolNumbers, WorkerPool
from taskyard.execution.pool_settings import PoolSettings
from taskyard.execution.spawner import Spawner
from taskyard.execution.starting import Starter
from taskyard.model.execution import ExecutionResult
from taskyard.ports.executor import Abilities, ExecutionRequest, ExecutorHealth, ExecutorStats, RunHandle

HAS_NURSERY = sys.platform == "linux"

if HAS_NURSERY:
    from taskyard.execution.nursery import NURSERY


def make_pool(
    settings: PoolSettings, *, portable: bool = not HAS_NURSERY, starter: Starter | None = None
) -> WorkerPool:
    """A pool of forked workers under a nursery; `portable`: of spawned ones, without anything only Linux has.
    `starter`: where its workers come from instead."""
    if not portable and not HAS_NURSERY:
        raise InvalidInput("only Linux has what portable=False needs; leave it out")
    if starter is None:
        starter = Spawner() if portable else NURSERY
    return WorkerPool(settings, starter=starter, shares=not portable)


class ProcessPoolExecutor:
    """At most `max_workers` at once (default: the usable cores less one); `settings` has everything else. `warm`: a
    start has a worker ready, instead of the first request. `starter` makes the workers, if not the default one."""

    def __init__(
        self,
        *,
        max_workers: int | None = None,
        settings: PoolSettings | None = None,
        portable: bool = not HAS_NURSERY,
        warm: bool = True,
        starter: Starter | None = None,
    ) -> None:
        settings = settings or PoolSettings()
        if max_workers is not None:
            settings = msgspec.structs.replace(settings, max_workers=max_workers)
        self.abilities = Abilities(kills=True, isolates=True, capacity=settings.max_workers)
        self._pool = make_pool(settings, portable=portable, starter=starter)
        self._is_warm = warm

    @property
    def numbers(self) -> PoolNumbers:
        return self._pool.numbers

    def stats(self, name: str | None = None) -> ExecutorStats:
        return self._pool.stats()

    def health(self) -> ExecutorHealth:
        return self._pool.health()

    async def start(self) -> None:
        await self._pool.start(warm=self._is_warm)

    async def shutdown(self, *, wait: bool = True) -> None:
        await self._pool.shutdown(wait=wait)

    async def submit(self, request: ExecutionRequest) -> ExecutionResult:
        return await submit_to(self._pool, request)


async def submit_to(pool: WorkerPool, request: ExecutionRequest) -> ExecutionResult:
    """Run the request in the pool; what an executor's `submit` does."""
    run = request.run
    is_record = run is not None and request.payload is run.claim.record
    call = PendingCall(
        getattr(request.spec, "remote", None) or request.spec.call,
        () if is_record else (request.payload,),
        timeout_s=request.timeout_s,
        wait_s=request.wait_s,
        run=run,
        record_first=is_record,
    )
    if run is not None:
        run.set_interrupt(lambda: pool.interrupt(call), kill=lambda: pool.end_now(call, "it was canceled by force"))
    future = pool.submit(call)
    try:
        return await future
    except asyncio.CancelledError:
        await _end(pool, call, run)
        raise


async def _end(pool: WorkerPool, call: PendingCall, run: RunHandle | None) -> None:
    """Our caller is cancelled: whoever owns the run may take it for ended only when it has."""
    if call.is_over:
        return
    pool.end_now(call)
    if run is None:
        await call.buried(lambda: None)
        return
    run.detach()  # if this wait is cancelled as well
    await call.buried(run.reattach)
