"""huey on SQLite at full durability (`fsync=True` is `synchronous=FULL`, WAL), results on, drained by its consumer."""

import sqlite3
import time
from pathlib import Path

from huey import SqliteHuey

from benchmarks.reading import Reading

IDLE_POLL_S = 0.001
# Counting walks the results: often enough to be exact to about 1 %, seldom enough not to be in the way.
DONE_POLL_S = 0.02


def _noop(number: int) -> int:
    return number


def _fill(huey: SqliteHuey, count: int) -> None:
    """What calling the task would enqueue, in one transaction: filling is not what is measured."""
    noop = huey.task()(_noop)
    rows = [(huey.name, huey.serialize_task(noop.s(number)), 0) for number in range(count)]
    with huey.storage.db(commit=True) as cursor:
        cursor.executemany("insert into task (queue, data, priority) values (?, ?, ?)", rows)


def _held(path: Path) -> int:
    """Results kept, provided that nothing is left in the queue."""
    database = sqlite3.connect(path)
    left, kept = database.execute("select (select count(*) from task), (select count(*) from kv)").fetchone()
    database.close()
    return 0 if left else int(kept)


def _check_durability(huey: SqliteHuey) -> None:
    (level,) = huey.storage.conn.execute("pragma synchronous").fetchone()
    if level != 2:
        raise RuntimeError(f"huey runs at synchronous={level}, not FULL (2): the sides promise different things")


def drain(folder: Path, count: int, workers: int, worker_type: str) -> Reading:
    path = folder / "huey.db"
    huey = SqliteHuey(filename=str(path), fsync=True, journal_mode="wal", results=True)
    _fill(huey, count)
    _check_durability(huey)
    consumer = huey.create_consumer(
        workers=workers, worker_type=worker_type, periodic=False, initial_delay=IDLE_POLL_S, max_delay=IDLE_POLL_S
    )
    began = time.perf_counter()
    consumer.start()
    while huey.storage.result_store_size() < count:
        time.sleep(DONE_POLL_S)
    elapsed = time.perf_counter() - began
    consumer.stop(graceful=True)
    huey.storage.close()
    return Reading(count / elapsed, given=count, held=_held(path))
