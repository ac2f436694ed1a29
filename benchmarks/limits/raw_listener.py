"""PostgreSQL by itself between two processes: one stores a row and notifies, the other listens and claims it.

The second is started with `python -m benchmarks.limits.raw_listener DSN`. It says a line when it listens and after
every claim, and when its standard input ends, when it had claimed each.
"""

import asyncio
import sys
import time
from pathlib import Path

import asyncpg
import msgspec
import uvloop

from benchmarks.limits.raw_postgres import CHANNEL, CLAIM, INSERT_AND_NOTIFY, count_held, make_row, open_database
from benchmarks.reading import Reading, percentile

LONGEST_LINE = 1 << 24


def notify_and_claim(folder: Path, dsn: str, count: int, gap_s: float) -> Reading:
    """p50 from one process's row and NOTIFY, in one commit, to its claim by another."""
    return uvloop.run(_notify_and_claim(dsn, count, gap_s))


async def _notify_and_claim(dsn: str, count: int, gap_s: float) -> Reading:
    database = await open_database(dsn)
    submit = await database.prepare(INSERT_AND_NOTIFY)
    command, pipe = [sys.executable, "-m", __name__, dsn], asyncio.subprocess.PIPE
    listener = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=LONGEST_LINE)
    if listener.stdin is None or listener.stdout is None or not await listener.stdout.readline():
        raise RuntimeError("the listener did not start")
    asked_mono = []
    for number in range(count):
        await asyncio.sleep(gap_s)
        row = make_row(number)
        asked_mono.append(time.monotonic())
        await submit.fetch(*row)
        await listener.stdout.readline()
    listener.stdin.close()
    claimed_mono = msgspec.json.decode(await listener.stdout.readline(), type=list[float])
    await listener.wait()
    await database.close()
    times = [claimed - asked for asked, claimed in zip(asked_mono, claimed_mono, strict=True)]
    return Reading(percentile(times, 50), given=count, held=await count_held(dsn, "running"))


async def _listen(dsn: str) -> None:
    database = await asyncpg.connect(dsn)
    claim = await database.prepare(CLAIM)
    woken = asyncio.Event()
    claimed_mono: list[float] = []
    await database.add_listener(CHANNEL, lambda *_: woken.set())

    async def work() -> None:
        while True:
            await woken.wait()
            woken.clear()
            if await claim.fetch(1):
                claimed_mono.append(time.monotonic())
                print("claimed", flush=True)

    print("listening", flush=True)
    working = asyncio.ensure_future(work())
    await asyncio.to_thread(sys.stdin.read)
    working.cancel()
    print(msgspec.json.encode(claimed_mono).decode(), flush=True)
    await database.close()


if __name__ == "__main__":
    uvloop.run(_listen(sys.argv[1]))
