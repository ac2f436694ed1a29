"""How each side runs a function in a worker process, from asyncio. Every peer as it is shipped."""

import asyncio
import concurrent.futures
import multiprocessing
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from taskyard.execution.calls import PendingCall
from taskyard.execution.pool_settings import PoolSettings
from taskyard.execution.process import make_pool

Ask = Callable[..., Awaitable[Any]]

WORKERS = 2
PIPELINE = 16


class CallFailed(Exception):
    """A call that should have succeeded has not."""


@asynccontextmanager
async def taskyard(**settings: Any) -> AsyncIterator[Ask]:
    pool = make_pool(PoolSettings(**{"max_workers": WORKERS, "queue_limit": 1_000_000, **settings}))
    await pool.start()

    async def ask(function: Callable[..., Any], *args: Any, timeout_s: float | None = None) -> Any:
        result = await pool.submit(PendingCall(function, args, timeout_s=timeout_s))
        if not result.success:
            raise CallFailed(result.error)
        return result.data

    yield ask
    await pool.shutdown()


@asynccontextmanager
async def taskyard_pipelined() -> AsyncIterator[Ask]:
    async with taskyard(pipeline=PIPELINE) as ask:
        yield ask


@asynccontextmanager
async def stdlib() -> AsyncIterator[Ask]:
    with concurrent.futures.ProcessPoolExecutor(WORKERS) as pool:
        yield _in_executor(pool)


@asynccontextmanager
async def loky() -> AsyncIterator[Ask]:
    from loky import ProcessPoolExecutor

    pool = ProcessPoolExecutor(WORKERS)
    yield _in_executor(pool)
    pool.shutdown()


def _in_executor(pool: concurrent.futures.Executor) -> Ask:
    loop = asyncio.get_running_loop()

    async def ask(function: Callable[..., Any], *args: Any) -> Any:
        return await loop.run_in_executor(pool, function, *args)

    return ask


@asynccontextmanager
async def pebble() -> AsyncIterator[Ask]:
    from pebble import ProcessPool

    # As it is shipped, but for the start method: forked workers of a threaded process can hang.
    pool = ProcessPool(max_workers=WORKERS, context=multiprocessing.get_context("forkserver"))

    async def ask(function: Callable[..., Any], *args: Any, timeout_s: float | None = None) -> Any:
        return await asyncio.wrap_future(pool.schedule(function, args=args, timeout=timeout_s))

    yield ask
    pool.stop()
    pool.join()


@asynccontextmanager
async def anyio() -> AsyncIterator[Ask]:
    from anyio import CapacityLimiter, fail_after, to_process

    limiter = CapacityLimiter(WORKERS)

    async def ask(function: Callable[..., Any], *args: Any, timeout_s: float | None = None) -> Any:
        if timeout_s is None:
            return await to_process.run_sync(function, *args, limiter=limiter)
        with fail_after(timeout_s):
            return await to_process.run_sync(function, *args, cancellable=True, limiter=limiter)

    yield ask


@asynccontextmanager
async def multiprocessing_pool() -> AsyncIterator[Ask]:
    loop = asyncio.get_running_loop()
    with multiprocessing.Pool(WORKERS) as pool:

        async def ask(function: Callable[..., Any], *args: Any) -> Any:
            answer: asyncio.Future[Any] = loop.create_future()
            pool.apply_async(
                function,
                args,
                callback=lambda value: loop.call_soon_threadsafe(answer.set_result, value),
                error_callback=lambda error: loop.call_soon_threadsafe(answer.set_exception, error),
            )
            return await answer

        yield ask


@asynccontextmanager
async def threads() -> AsyncIterator[Ask]:
    with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
        yield _in_executor(pool)


CALLERS: dict[str, Callable[[], Any]] = {
    "taskyard": taskyard,
    "taskyard, pipelined": taskyard_pipelined,
    "run_in_executor": stdlib,
    "loky": loky,
    "pebble": pebble,
    "anyio.to_process": anyio,
    "multiprocessing.Pool": multiprocessing_pool,
    "threads": threads,
}
