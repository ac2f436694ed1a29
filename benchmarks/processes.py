"""A first look at calls to worker processes, beside what there is: `python -m benchmarks.processes [rounds]`.

All sides are measured in turn, several rounds, and the medians are compared: the machine drifts between moments. Not
part of `make bench` yet. anyio, pebble and NumPy take part where they are installed.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import multiprocessing
import operator
import os
import pickle
import signal
import socket
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

from taskyard.execution.calls import PendingCall
from taskyard.execution.pool import PoolSettings, WorkerPool
from taskyard.execution.process import make_pool

CALLS = 2000
PARALLEL = 6000
MEGABYTE = 1_000_000

Ask = Callable[..., Awaitable[Any]]


def hang() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(60)


def total(array: Any) -> float:
    return float(array[0] + array[-1])


def echo(value: Any) -> Any:
    return value


# --- sides ------------------------------------------------------------------------------------------------------------


def ours(pool: WorkerPool) -> Ask:
    async def ask(function: Callable[..., Any], *args: Any) -> Any:
        return (await pool.submit(PendingCall(function, args))).data

    return ask


class Raw:
    """The limit: a forked child that unpickles and pickles what comes over a socketpair, and a host that blocks."""

    def __init__(self) -> None:
        self._sock, child = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            self._sock.close()
            while data := child.recv(1 << 16):
                function, args = pickle.loads(data)
                child.send(pickle.dumps(function(*args), 5))
            os._exit(0)
        child.close()

    def ask(self, function: Callable[..., Any], *args: Any) -> Any:
        self._sock.send(pickle.dumps((function, args), 5))
        return pickle.loads(self._sock.recv(1 << 16))

    def close(self) -> None:
        self._sock.close()
        os.waitpid(self.pid, 0)


def stdlib(pool: concurrent.futures.Executor) -> Ask:
    async def ask(function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(pool, function, *args)

    return ask


async def anyio_ask(function: Callable[..., Any], *args: Any) -> Any:
    from anyio import to_process

    return await to_process.run_sync(function, *args)


# --- scenarios --------------------------------------------------------------------------------------------------------


async def one_at_a_time(ask: Ask) -> float:
    """Microseconds, median."""
    taken = []
    for _ in range(CALLS):
        started = time.perf_counter()
        await ask(operator.add, 1, 2)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken) * 1e6


async def raw_one_at_a_time() -> float:
    raw = Raw()
    taken = []
    for _ in range(CALLS):
        started = time.perf_counter()
        raw.ask(operator.add, 1, 2)
        taken.append(time.perf_counter() - started)
    raw.close()
    return statistics.median(taken) * 1e6


async def in_parallel(ask: Ask, clients: int) -> float:
    """Calls a second."""

    async def client() -> None:
        for _ in range(PARALLEL // clients):
            await ask(operator.add, 1, 2)

    started = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return PARALLEL / (time.perf_counter() - started)


async def megabytes(ask: Ask) -> float:
    """Round trips of a megabyte a second."""
    data = os.urandom(MEGABYTE)
    started = time.perf_counter()
    for _ in range(100):
        assert len(await ask(echo, data)) == MEGABYTE
    return 100 / (time.perf_counter() - started)


async def big_array(ask: Ask) -> float:
    """Milliseconds for 64 MB in, a number out."""
    import numpy

    array = numpy.ones(8_000_000)
    taken = []
    for _ in range(5):
        started = time.perf_counter()
        assert await ask(total, array) == 2.0
        taken.append(time.perf_counter() - started)
    return statistics.median(taken) * 1e3


async def hung(pool: WorkerPool) -> float:
    """Milliseconds from the deadline of a call that ignores SIGTERM to the end of the next call."""
    taken = []
    for _ in range(5):
        await pool.submit(PendingCall(operator.add, (1, 2)))
        timeout_s = 0.2
        call = PendingCall(hang, timeout_s=timeout_s)
        started = time.perf_counter()
        await pool.submit(call)
        await pool.submit(PendingCall(operator.add, (1, 2)))
        taken.append(time.perf_counter() - started - timeout_s)
    return statistics.median(taken) * 1e3


# --- in turn ----------------------------------------------------------------------------------------------------------


async def measure(rounds: int) -> dict[str, list[float]]:
    pool = make_pool(PoolSettings(max_workers=2))
    piped = make_pool(PoolSettings(max_workers=2, pipeline=16))
    standard = concurrent.futures.ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("forkserver"))
    found: dict[str, list[float]] = {}
    asks = {"taskyard": ours(pool), "concurrent.futures": stdlib(standard), "anyio": anyio_ask}
    with contextlib.suppress(ImportError):
        import numpy  # noqa: F401

        asks["numpy"] = ours(pool)
    has_numpy = asks.pop("numpy", None) is not None
    for ask in [*asks.values(), ours(piped)]:
        await asyncio.gather(*(ask(operator.add, 1, 2) for _ in range(4)))
    await pool.submit(PendingCall(hang, timeout_s=0.01))

    async def note(name: str, measured: Awaitable[float]) -> None:
        gc.collect()
        found.setdefault(name, []).append(await measured)

    for _ in range(rounds):
        await note("one at a time, raw echo: µs", raw_one_at_a_time())
        for name, ask in asks.items():
            await note(f"one at a time, {name}: µs", one_at_a_time(ask))
        for name, ask in asks.items():
            await note(f"parallel, {name}: /s", in_parallel(ask, 2 if name == "taskyard" else 8))
        await note("parallel, taskyard, 8 clients: /s", in_parallel(ours(pool), 8))
        await note("parallel, taskyard, pipelined, 32 clients: /s", in_parallel(ours(piped), 32))
        for name, ask in asks.items():
            await note(f"1 MB there and back, {name}: /s", megabytes(ask))
        if has_numpy:
            for name, ask in asks.items():
                await note(f"64 MB array, {name}: ms", big_array(ask))
        await note("hung call, deadline to next done, taskyard: ms", hung(pool))
    await pool.shutdown()
    await piped.shutdown()
    standard.shutdown()
    return found


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    for name, values in asyncio.run(measure(rounds)).items():
        print(f"{name:55} {statistics.median(values):10.1f}   ({min(values):.1f} … {max(values):.1f})")


if __name__ == "__main__":
    main()
