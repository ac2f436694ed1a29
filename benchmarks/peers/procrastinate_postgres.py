"""Procrastinate on PostgreSQL, over psycopg's C implementation: finished jobs are kept, as is its default.

A worker that does not wait ends when nothing is left to fetch and every job it ran is marked as done.
"""

import asyncio
import time
from pathlib import Path
from typing import Any

import psycopg
import uvloop
from procrastinate import App, PsycopgConnector

from benchmarks.reading import Reading

FILL_AT_ONCE = 1_000


async def _noop(number: int) -> int:
    return number


def _app(dsn: str, connections: int) -> App:
    # `min_size` as well: no connection is opened while the time runs.
    return App(connector=PsycopgConnector(conninfo=dsn, min_size=connections, max_size=connections))


async def _installed(app: App) -> Any:
    await app.schema_manager.apply_schema_async()
    return app.task(name="noop", queue="default")(_noop)


async def _held(dsn: str, status: str) -> int:
    async with await psycopg.AsyncConnection.connect(dsn) as database:
        cursor = await database.execute("SELECT count(*) FROM procrastinate_jobs WHERE status = %s", [status])
        row = await cursor.fetchone()
    return int(row[0]) if row else 0


def drain(folder: Path, dsn: str, count: int, workers: int, concurrency: int) -> Reading:
    return uvloop.run(_drain(dsn, count, workers, concurrency))


async def _drain(dsn: str, count: int, workers: int, concurrency: int) -> Reading:
    app = _app(dsn, connections=workers * concurrency + 1)
    async with app.open_async():
        noop = await _installed(app)
        for first in range(0, count, FILL_AT_ONCE):
            await noop.batch_defer_async(*[{"number": number} for number in range(first, first + FILL_AT_ONCE)])
        began = time.perf_counter()
        await asyncio.gather(*[_work(app, concurrency) for _ in range(workers)])
        elapsed = time.perf_counter() - began
    return Reading(count / elapsed, given=count, held=await _held(dsn, "succeeded"))


async def _work(app: App, concurrency: int) -> None:
    await app.run_worker_async(
        concurrency=concurrency, wait=False, listen_notify=False, install_signal_handlers=False, delete_jobs="never"
    )


def clients(folder: Path, dsn: str, count: int, clients: int, connections: int) -> Reading:
    return uvloop.run(_clients(dsn, count, clients, connections))


async def _clients(dsn: str, count: int, clients: int, connections: int) -> Reading:
    app = _app(dsn, connections)
    async with app.open_async():
        noop, numbers = await _installed(app), iter(range(count))

        async def client() -> None:
            for number in numbers:
                await noop.defer_async(number=number)

        began = time.perf_counter()
        await asyncio.gather(*[client() for _ in range(clients)])
        elapsed = time.perf_counter() - began
    return Reading(count / elapsed, given=count, held=await _held(dsn, "todo"))


def batch(folder: Path, dsn: str, batches: int, size: int) -> Reading:
    return uvloop.run(_batch(dsn, batches, size))


async def _batch(dsn: str, batches: int, size: int) -> Reading:
    app, given = _app(dsn, connections=1), batches * size
    async with app.open_async():
        noop = await _installed(app)
        began = time.perf_counter()
        for first in range(0, given, size):
            await noop.batch_defer_async(*[{"number": number} for number in range(first, first + size)])
        elapsed = time.perf_counter() - began
    return Reading(given / elapsed, given=given, held=await _held(dsn, "todo"))
