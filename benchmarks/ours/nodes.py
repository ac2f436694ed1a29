"""Nodes on one store, each a process: together they empty a queue, or one waits for what another process submits, and
they say afterwards who ran what and when.

A node is started with `python -m benchmarks.ours.nodes '{…}'`, says that it is ready, opens its yard when it is told
to, and closes it when its standard input ends.
"""

import asyncio
import mmap
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import uvloop

from benchmarks.ours.places import persisted
from benchmarks.ours.submitting import SLOTS, noop, queue_without_running
from benchmarks.reading import Reading, percentile
from taskyard import Yard
from taskyard.model.state import TaskState

POLL_S = 0.001
TIMEOUT_S = 120.0
COUNTER_BYTES = 8


class Orders(msgspec.Struct):
    """What one node is told."""

    dsn: str
    folder: str
    number: int
    concurrency: int | None
    work_s: float

    @property
    def runs_file(self) -> Path:
        return Path(self.folder) / f"runs-{self.number}.json"


class TaskRan(msgspec.Struct, array_like=True):
    """On the machine's monotonic clock, which all its processes share."""

    number: int
    began_mono: float
    ended_mono: float


def drain(folder: Path, dsn: str, count: int, nodes: int, concurrency: int | None, work_s: float) -> Reading:
    """Tasks a second until the last result is in the store; each ran once, and never more at a time than allowed."""
    orders = [Orders(dsn, str(folder), number, concurrency, work_s) for number in range(nodes)]
    return uvloop.run(_drain(folder, dsn, count, orders))


async def _drain(folder: Path, dsn: str, count: int, orders: Sequence[Orders]) -> Reading:
    await queue_without_running(dsn, count)
    counters = _counters(folder, len(orders))
    async with asyncio.timeout(TIMEOUT_S), _started(orders) as nodes:
        began = time.perf_counter()
        for node in nodes:
            _input_of(node).write(b"open\n")
        while sum(counters) < count:  # noqa: ASYNC110 -- other processes count
            await asyncio.sleep(POLL_S)
        while await persisted(dsn, TaskState.COMPLETED) < count:  # noqa: ASYNC110 -- nothing tells when a store holds n
            await asyncio.sleep(POLL_S)
        elapsed = time.perf_counter() - began
    runs = [run for order in orders for run in msgspec.json.decode(order.runs_file.read_bytes(), type=list[TaskRan])]
    _check_each_once(runs, count)
    _check_limit(runs, orders[0].concurrency)
    return Reading(count / elapsed, given=count, held=await persisted(dsn, TaskState.COMPLETED))


def idle(folder: Path, dsn: str, count: int, gap_s: float) -> Reading:
    """p50 from the call of `submit` in a process that runs nothing to the first line of the task in another one."""
    return uvloop.run(_idle(folder, dsn, count, gap_s))


async def _idle(folder: Path, dsn: str, count: int, gap_s: float) -> Reading:
    orders = Orders(dsn, str(folder), number=0, concurrency=None, work_s=0.0)
    _counters(folder, 1)
    yard = Yard(dsn, max_running=SLOTS)
    consumer = yard.consumer(concurrency=SLOTS)(noop)
    asked_mono = []
    async with asyncio.timeout(TIMEOUT_S), _started([orders]) as (node,), yard.client():
        _input_of(node).write(b"open\n")
        for number in range(count):
            await asyncio.sleep(gap_s)
            asked_mono.append(time.monotonic())
            handle = await consumer.submit(number=number)
            await handle.result()
    runs = msgspec.json.decode(orders.runs_file.read_bytes(), type=list[TaskRan])
    times = [run.began_mono - asked_mono[run.number] for run in runs]
    return Reading(percentile(times, 50), given=count, held=len(times))


def _counters(folder: Path, nodes: int) -> "memoryview[int]":
    """How many tasks each node has run, in memory that they share: asking for it is in nobody's way."""
    file = folder / "ran"
    if not file.exists():
        file.write_bytes(bytes(COUNTER_BYTES * nodes))
    with file.open("r+b") as opened:
        return memoryview(mmap.mmap(opened.fileno(), 0)).cast("Q")


@asynccontextmanager
async def _started(orders: Sequence[Orders]) -> AsyncIterator[list[asyncio.subprocess.Process]]:
    """Nodes that have loaded everything and wait for the word."""
    pipe = asyncio.subprocess.PIPE
    nodes = []
    for order in orders:
        command = [sys.executable, "-m", "benchmarks.ours.nodes", msgspec.json.encode(order).decode()]
        nodes.append(await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe))
    try:
        for node in nodes:
            if node.stdout is None or not await node.stdout.readline():
                raise RuntimeError("a node did not start")
        yield nodes
        for node in nodes:
            _input_of(node).close()
        if any([await node.wait() for node in nodes]):
            raise RuntimeError("a node failed")
    finally:
        for node in nodes:
            if node.returncode is None:
                node.kill()
                await node.wait()


def _input_of(node: asyncio.subprocess.Process) -> asyncio.StreamWriter:
    if node.stdin is None:
        raise RuntimeError("a node was started without its input")
    return node.stdin


def _check_each_once(runs: Sequence[TaskRan], count: int) -> None:
    times = Counter(run.number for run in runs)
    wrong = {number: times[number] for number in range(count) if times[number] != 1}
    if wrong or len(runs) != count:
        raise RuntimeError(f"of {count:,} tasks, {len(wrong):,} did not run exactly once")


def _check_limit(runs: Sequence[TaskRan], limit: int | None) -> None:
    changes = sorted([(run.began_mono, 1) for run in runs] + [(run.ended_mono, -1) for run in runs])
    running = most = 0
    for _, change in changes:
        running += change
        most = max(most, running)
    if limit is not None and most > limit:
        raise RuntimeError(f"{most} tasks ran at a time, {limit} may")


# --- one node -------------------------------------------------------------------------------------------------------


async def _node(orders: Orders) -> None:
    counters = _counters(Path(orders.folder), 0)
    yard = Yard(orders.dsn, max_running=SLOTS)
    yard.define_queue("default", concurrency=orders.concurrency)
    runs: list[TaskRan] = []

    @yard.consumer(name="noop", concurrency=SLOTS)
    async def stamped_noop(number: int) -> int:
        began_mono = time.monotonic()
        if orders.work_s:
            await asyncio.sleep(orders.work_s)
        runs.append(TaskRan(number, began_mono, time.monotonic()))
        counters[orders.number] += 1
        return number

    print("ready", flush=True)
    await _line_from_input()
    async with yard:
        await _line_from_input()
    orders.runs_file.write_bytes(msgspec.json.encode(runs))


async def _line_from_input() -> str:
    return await asyncio.to_thread(sys.stdin.readline)


if __name__ == "__main__":
    uvloop.run(_node(msgspec.json.decode(sys.argv[1], type=Orders)))
