"""PostgreSQL by itself, as fast as plain statements over asyncpg go at default durability.

The table is the one of `raw_sqlite`: twelve columns, a time-ordered id as primary key, and one secondary index over
what is queued. A commit returns when it is on the disk: a server that promises less is refused.
"""

import asyncio
import os
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
import uvloop
from asyncpg.pgproto.pgproto import UUID  # the driver's own: made and sent in a fraction of the time

from benchmarks.reading import Reading, percentile

CLAIMED_AT_ONCE = 100
CHANNEL = "raw"

SCHEMA = """
CREATE TABLE task (
    id uuid PRIMARY KEY,
    queue text NOT NULL,
    name text NOT NULL,
    state text NOT NULL,
    priority smallint NOT NULL,
    position bigint NOT NULL,
    arguments text NOT NULL,
    created_at timestamptz NOT NULL,
    due_at timestamptz NOT NULL,
    attempt int NOT NULL,
    finished_at timestamptz,
    result text
);
CREATE INDEX task_queued ON task (queue, priority, position) WHERE state = 'queued';
"""
INSERT = """
INSERT INTO task (id, queue, name, state, priority, position, arguments, created_at, due_at, attempt)
VALUES ($1, 'default', 'noop', 'queued', 0, $2, $3, $4, $4, 0)
"""
INSERT_MANY = """
INSERT INTO task (id, queue, name, state, priority, position, arguments, created_at, due_at, attempt)
SELECT id, 'default', 'noop', 'queued', 0, position, arguments, made_at, made_at, 0
FROM unnest($1::uuid[], $2::bigint[], $3::text[], $4::timestamptz[]) AS row (id, position, arguments, made_at)
"""
INSERT_AND_NOTIFY = f"WITH submitted AS ({INSERT} RETURNING id) SELECT pg_notify('{CHANNEL}', '') FROM submitted"
CLAIM = """
UPDATE task SET state = 'running', attempt = attempt + 1
WHERE id = ANY (ARRAY(
    SELECT id FROM task WHERE queue = 'default' AND state = 'queued'
    ORDER BY priority, position LIMIT $1 FOR UPDATE SKIP LOCKED
))
RETURNING id, arguments
"""
COMPLETE = """
UPDATE task SET state = 'completed', finished_at = $1, result = done.result
FROM unnest($2::uuid[], $3::text[]) AS done (id, result) WHERE task.id = done.id
"""

Row = tuple[UUID, int, str, datetime]
_encode = msgspec.json.encode


async def open_database(dsn: str) -> asyncpg.Connection:
    database = await asyncpg.connect(dsn)
    await database.execute(SCHEMA)
    return database


def make_row(number: int) -> Row:
    """What a submit has to make at the very least: a fresh id and the arguments as JSON."""
    now = datetime.now(UTC)
    fresh = UUID(int(now.timestamp() * 1000).to_bytes(6, "big") + os.urandom(10))
    return fresh, number << 32, _encode({"number": number}).decode(), now


def _columns(rows: list[Row]) -> Iterator[list[object]]:
    return (list(column) for column in zip(*rows, strict=True))


async def count_held(dsn: str, state: str) -> int:
    """Counted through a new connection: only what was committed."""
    database = await asyncpg.connect(dsn)
    held = await database.fetchval("SELECT count(*) FROM task WHERE state = $1", state)
    await database.close()
    return int(held)


def drain(folder: Path, dsn: str, count: int) -> Reading:
    """Claim 100, commit, complete 100 with a result, commit, on one connection; until nothing is queued."""
    return uvloop.run(_drain(dsn, count))


async def _drain(dsn: str, count: int) -> Reading:
    database = await open_database(dsn)
    await database.execute(INSERT_MANY, *_columns([make_row(number) for number in range(count)]))
    claim, complete = await database.prepare(CLAIM), await database.prepare(COMPLETE)
    began = time.perf_counter()
    while claimed := await claim.fetch(CLAIMED_AT_ONCE):
        await complete.fetch(datetime.now(UTC), [row["id"] for row in claimed], [row["arguments"] for row in claimed])
    elapsed = time.perf_counter() - began
    await database.close()
    return Reading(count / elapsed, given=count, held=await count_held(dsn, "completed"))


def insert_one_by_one(folder: Path, dsn: str, count: int, clients: int) -> Reading:
    """One row per commit, from as many connections as there are clients."""
    return uvloop.run(_insert_one_by_one(dsn, count, clients))


async def _insert_one_by_one(dsn: str, count: int, clients: int) -> Reading:
    first = await open_database(dsn)
    connections = [first, *[await asyncpg.connect(dsn) for _ in range(clients - 1)]]
    inserts = [await connection.prepare(INSERT) for connection in connections]
    numbers = iter(range(count))

    async def client(insert: Any) -> None:
        for number in numbers:
            await insert.fetch(*make_row(number))

    began = time.perf_counter()
    await asyncio.gather(*[client(insert) for insert in inserts])
    elapsed = time.perf_counter() - began
    for connection in connections:
        await connection.close()
    return Reading(count / elapsed, given=count, held=await count_held(dsn, "queued"))


def insert_batches(folder: Path, dsn: str, batches: int, size: int) -> Reading:
    """Rows made (an id, the arguments as JSON) and inserted by one `unnest` of `size`."""
    return uvloop.run(_insert_batches(dsn, batches * size, _made(batches, size)))


def insert_ready_batches(folder: Path, dsn: str, batches: int, size: int) -> Reading:
    """The same with rows made beforehand: what the driver and the database take."""
    return uvloop.run(_insert_batches(dsn, batches * size, list(_made(batches, size))))


def _made(batches: int, size: int) -> Iterator[list[Row]]:
    return ([make_row(number) for number in range(first, first + size)] for first in range(0, batches * size, size))


async def _insert_batches(dsn: str, count: int, made: Iterable[list[Row]]) -> Reading:
    database = await open_database(dsn)
    insert = await database.prepare(INSERT_MANY)
    began = time.perf_counter()
    for rows in made:
        await insert.fetch(*_columns(rows))
    elapsed = time.perf_counter() - began
    await database.close()
    return Reading(count / elapsed, given=count, held=await count_held(dsn, "queued"))


def notify_and_claim(folder: Path, dsn: str, count: int, gap_s: float) -> Reading:
    """p50 from one connection's row and NOTIFY, in one commit, to its claim by another that listens."""
    return uvloop.run(_notify_and_claim(dsn, count, gap_s))


async def _notify_and_claim(dsn: str, count: int, gap_s: float) -> Reading:
    submitter, worker = await open_database(dsn), await asyncpg.connect(dsn)
    submit, claim = await submitter.prepare(INSERT_AND_NOTIFY), await worker.prepare(CLAIM)
    woken = asyncio.Event()
    await worker.add_listener(CHANNEL, lambda *_: woken.set())

    async def work() -> float:
        await woken.wait()
        woken.clear()
        if not await claim.fetch(1):
            raise RuntimeError("notified, and nothing to claim")
        return time.perf_counter()

    times = []
    for number in range(count):
        await asyncio.sleep(gap_s)
        waiting, row = asyncio.ensure_future(work()), make_row(number)
        asked = time.perf_counter()
        await submit.fetch(*row)
        times.append(await waiting - asked)
    await submitter.close()
    await worker.close()
    return Reading(percentile(times, 50), given=count, held=await count_held(dsn, "running"))
