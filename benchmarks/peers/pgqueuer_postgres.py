"""PgQueuer on PostgreSQL, over asyncpg on uvloop: tables at its default durability, its autovacuum settings applied.

It keeps no results. A job counts when its log says `successful`, not when its body has run. One manager drains: two
in a process, or four, are slower (12 k/s and 9 k/s against 15 k/s when this was written).
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
import uvloop
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver, AsyncpgPoolDriver
from pgqueuer.models import Job
from pgqueuer.queries import Queries

from benchmarks.reading import Reading

BATCH = 1_000
LOGGED_POLL_S = 0.001
TIMEOUT_S = 60.0
LOGGED = "SELECT count(*) FROM pgqueuer_log WHERE status = $1"

_encode = msgspec.json.encode


def _payload(number: int) -> bytes:
    return _encode({"number": number})


async def _install(dsn: str) -> None:
    database = await asyncpg.connect(dsn)
    queries = Queries.from_asyncpg_connection(database)
    await queries.install()
    await queries.optimize_autovacuum()
    await database.close()


async def _enqueue_many(queries: Any, numbers: range) -> None:
    await queries.enqueue(["noop"] * len(numbers), [_payload(number) for number in numbers], [0] * len(numbers))


async def _held(dsn: str, query: str, *arguments: object) -> int:
    database = await asyncpg.connect(dsn)
    held = await database.fetchval(query, *arguments)
    await database.close()
    return int(held)


async def _queued(dsn: str) -> int:
    return await _held(dsn, "SELECT count(*) FROM pgqueuer WHERE status = 'queued'")


@asynccontextmanager
async def _driver(dsn: str, connections: int) -> AsyncIterator[Any]:
    """A connection, or a pool of them: what its guide says for a manager, and for producers."""
    if connections == 1:
        connection = await asyncpg.connect(dsn)
        yield AsyncpgDriver(connection)
        await connection.close()
        return
    async with asyncpg.create_pool(dsn, min_size=connections, max_size=connections) as pool:
        yield AsyncpgPoolDriver(pool)


def drain(folder: Path, dsn: str, count: int, connections: int) -> Reading:
    return uvloop.run(_drain(dsn, count, connections))


async def _drain(dsn: str, count: int, connections: int) -> Reading:
    await _install(dsn)
    async with _driver(dsn, connections) as driver:
        await _enqueue_many(Queries(driver), range(count))
    all_ran, ran = asyncio.Event(), 0

    async def noop(job: Job) -> None:
        nonlocal ran
        ran += 1
        if ran == count:
            all_ran.set()

    watcher = await asyncpg.connect(dsn)
    async with _driver(dsn, connections) as driver:
        queuer = PgQueuer(driver)
        queuer.entrypoint("noop")(noop)
        began = time.perf_counter()
        running = asyncio.ensure_future(queuer.run(batch_size=BATCH))
        async with asyncio.timeout(TIMEOUT_S):
            await all_ran.wait()
            while await watcher.fetchval(LOGGED, "successful") < count:  # noqa: ASYNC110 -- nothing tells
                await asyncio.sleep(LOGGED_POLL_S)
        elapsed = time.perf_counter() - began
        queuer.shutdown.set()
        await running
    await watcher.close()
    return Reading(count / elapsed, given=count, held=await _held(dsn, LOGGED, "successful"))


def clients(folder: Path, dsn: str, count: int, clients: int, connections: int) -> Reading:
    return uvloop.run(_clients(dsn, count, clients, connections))


async def _clients(dsn: str, count: int, clients: int, connections: int) -> Reading:
    await _install(dsn)
    async with _driver(dsn, connections) as driver:
        queries, numbers = Queries(driver), iter(range(count))

        async def client() -> None:
            for number in numbers:
                await queries.enqueue("noop", _payload(number))

        began = time.perf_counter()
        await asyncio.gather(*[client() for _ in range(clients)])
        elapsed = time.perf_counter() - began
    return Reading(count / elapsed, given=count, held=await _queued(dsn))


def batch(folder: Path, dsn: str, batches: int, size: int) -> Reading:
    return uvloop.run(_batch(dsn, batches, size))


async def _batch(dsn: str, batches: int, size: int) -> Reading:
    await _install(dsn)
    given = batches * size
    async with _driver(dsn, 1) as driver:
        queries = Queries(driver)
        began = time.perf_counter()
        for first in range(0, given, size):
            await _enqueue_many(queries, range(first, first + size))
        elapsed = time.perf_counter() - began
    return Reading(given / elapsed, given=given, held=await _queued(dsn))
