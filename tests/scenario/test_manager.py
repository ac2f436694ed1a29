"""`ExecutorManager`: CPU work in processes and I/O work in threads, awaited."""

import asyncio
import concurrent.futures
import contextvars
import os
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

import pytest

from taskyard import ExecutorManager, get_executor_manager
from taskyard.execution.owned import ManagerOwns
from taskyard.futures import CallOptions, CallTimedOut, CannotCross, ManagerSettings, WorkerDied
from tests.execution import deeds, misdeeds
from tests.execution.census import ended
from tests.scenario.managers import PATIENCE_S, SMALL, WAYS, begin
from tests.scenario.processes import run_python

# --- one for a process ------------------------------------------------------------------------------------------------


@pytest.mark.spec("MGR-01")
async def test_there_is_one(manager):
    """All who ask get the same manager, whichever thread they ask from."""
    found: list[ExecutorManager] = []
    threads = [threading.Thread(target=lambda: found.append(get_executor_manager())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {id(one) for one in [*found, ExecutorManager()]} == {id(manager)}
    with pytest.raises(RuntimeError, match="with other settings is open"):
        get_executor_manager(ManagerSettings(cpu_workers=7))


RACE = """
import threading
from taskyard import get_executor_manager
found, barrier = [], threading.Barrier(16)
def ask():
    barrier.wait()
    found.append(get_executor_manager())
threads = [threading.Thread(target=ask) for _ in range(16)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(len({id(one) for one in found}), threading.active_count())
"""


@pytest.mark.spec("MGR-01")
def test_the_first_to_ask_make_one():
    """Sixteen threads that ask first, at once, get one manager; and making it starts nothing."""
    assert run_python(RACE) == "1 1\n"


SIZES = """
import logging
logging.basicConfig(level="INFO", format="%(message)s")
from taskyard import get_executor_manager
from taskyard.futures import PoolSettings
from taskyard.futures import ProcessPool
manager = get_executor_manager()
print(manager.cpu_executor.max_workers, manager.io_executor.max_workers)
print(PoolSettings().max_workers, ProcessPool().max_workers)
"""


@pytest.mark.spec("MGR-02", "MGR-03")
def test_sizes_come_from_the_environment():
    """The variables set the sizes of both pools, and the cap that of the CPU pool; what makes no sense is left out."""
    said = run_python(SIZES, CPU_EXECUTOR_WORKERS="6", IO_EXECUTOR_WORKERS="7", EXECUTOR_GLOBAL_MAX_WORKERS="5")
    assert said.split() == ["5", "7", "5", "5"]
    cores = len(os.sched_getaffinity(0))
    said = run_python(SIZES, CPU_EXECUTOR_WORKERS="some", IO_EXECUTOR_WORKERS="0", EXECUTOR_GLOBAL_MAX_WORKERS="")
    assert int(said.split()[0]) <= max(1, cores - 1)
    assert int(said.split()[1]) <= min(cores * 5, 20)


# --- calls ------------------------------------------------------------------------------------------------------------


@WAYS
@pytest.mark.spec("MGR-04", "MGR-08")
async def test_cpu_calls(portable):
    """Functions, class and static methods run in other processes, with keyword arguments."""
    async with get_executor_manager(ManagerSettings(cpu_workers=1, portable=portable)) as manager:
        assert await manager.run_cpu_intensive(os.getpid) != os.getpid()
        assert await manager.run_cpu_intensive(deeds.Parser.of_class, 1, plus=5) == 16
        assert await manager.run_cpu_intensive(deeds.Parser.static, 1) == 2
        assert await manager.run_cpu_intensive(deeds.show, 1, func=2, self=3) == ((1,), {"func": 2, "self": 3})
        with pytest.raises(deeds.Custom):
            await manager.run_cpu_intensive(deeds.fail, deeds.Custom, 1)


@pytest.mark.spec("MGR-04")
async def test_io_calls(manager):
    """Anything runs in a thread of this process, lambdas as well, in the context of its caller."""
    name = contextvars.ContextVar("name", default="nobody")
    name.set("me")
    here = threading.get_ident()
    assert await manager.run_io_intensive(lambda: (os.getpid(), threading.get_ident() != here)) == (os.getpid(), True)
    assert await manager.run_io_intensive(lambda *, key: (key, name.get()), key=1) == (1, "me")
    with pytest.raises(deeds.Custom):
        await manager.run_io_intensive(deeds.fail, deeds.Custom, 1)


@pytest.mark.spec("MGR-04")
async def test_executors_of_the_standard_library(manager):
    """Both executors can be handed to whoever takes one of `concurrent.futures`."""
    loop = asyncio.get_running_loop()
    for executor in (manager.cpu_executor, manager.io_executor):
        assert isinstance(executor, concurrent.futures.Executor)
        assert await loop.run_in_executor(executor, pow, 2, 8) == 256


async def test_stop_iteration_does_not_hang(manager):
    """A function that raises StopIteration, which no asyncio future takes, is answered."""
    for run in (manager.run_cpu_intensive, manager.run_io_intensive):
        with pytest.raises(RuntimeError, match="StopIteration"):
            await run(deeds.fail, StopIteration)


def test_a_manager_serves_several_loops():
    """Loops in several threads, and one after the other, are served by the same manager."""
    totals: list[int] = []

    async def use() -> None:
        manager = get_executor_manager(SMALL)
        totals.append(sum(await asyncio.gather(*(manager.run_cpu_intensive(deeds.echo, n) for n in range(20)))))

    threads = [threading.Thread(target=lambda: asyncio.run(use())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    asyncio.run(use())
    asyncio.run(get_executor_manager().shutdown())
    assert totals == [190] * 4


# --- what cannot cross ------------------------------------------------------------------------------------------------


@pytest.mark.spec("MGR-05")
async def test_what_cannot_be_pickled(manager):
    """A clear ValueError names the function and says what to do; errors of the function itself are its own."""
    with pytest.raises(ValueError, match=re.escape("<lambda> cannot run in a worker process")) as raised:
        await manager.run_cpu_intensive(lambda: 1)
    assert isinstance(raised.value, CannotCross)
    assert "top level of a module" in str(raised.value)
    with pytest.raises(ValueError, match="echo cannot run"):
        await manager.run_cpu_intensive(deeds.echo, threading.Lock())
    with pytest.raises(TypeError, match="has no len"):
        await manager.run_cpu_intensive(deeds.type_error)


@pytest.mark.spec("MGR-05")
async def test_falling_back_to_a_thread(manager, caplog):
    """By choice what cannot be sent runs in a thread, which is logged; what has run does not run again."""
    calls = manager.options(unpicklable="thread")
    assert await calls.run_cpu_intensive(lambda: (os.getpid(),)) == (os.getpid(),)
    assert "[ExecutorManager] run in a thread: " in caplog.text
    assert await calls.run_cpu_intensive(os.getpid) != os.getpid()
    with pytest.raises(CannotCross):
        await calls.run_cpu_intensive(deeds.lock)
    with pytest.raises(TypeError):
        await calls.run_cpu_intensive(deeds.type_error)


# --- crashes, timeouts, cancels ---------------------------------------------------------------------------------------


@WAYS
@pytest.mark.spec("MGR-06", "MGR-08")
async def test_a_crash(portable):
    """A dead worker is told apart from an exception, and the next call is served."""
    async with get_executor_manager(ManagerSettings(cpu_workers=1, portable=portable)) as manager:
        with pytest.raises(BrokenProcessPool, match="die was not finished"):
            await manager.run_cpu_intensive(deeds.die)
        assert await manager.run_cpu_intensive(deeds.echo, 1) == 1
        assert manager.numbers.cpu_executor.crashed == 1


@pytest.mark.spec("MGR-15")
async def test_retries_of_what_died(manager, tmp_path, caplog):
    """By choice a call whose worker died is run again, so many times; an exception of the function is not."""
    path = str(tmp_path / "once")
    with pytest.raises(WorkerDied):
        await manager.run_cpu_intensive(deeds.die_once, path)
    os.unlink(path)
    assert await manager.options(retries=1).run_cpu_intensive(deeds.die_once, path) == "alive"
    assert "[ExecutorManager] run again (0 more times at most): die_once was not finished" in caplog.text
    before = manager.numbers.cpu_executor
    with pytest.raises(WorkerDied):
        await manager.options(retries=2).run_cpu_intensive(deeds.die)
    with pytest.raises(deeds.Custom):
        await manager.options(retries=2).run_cpu_intensive(deeds.fail, deeds.Custom, 1)
    after = manager.numbers.cpu_executor
    assert (after.crashed - before.crashed, after.done - before.done) == (3, 4)


def test_options_are_checked():
    """Options that make no sense are refused."""
    for options in (
        {"retries": -1},
        {"retries": "2"},
        {"timeout_s": 0},
        {"timeout_s": "1"},
        {"unpicklable": "perhaps"},
    ):
        with pytest.raises((TypeError, ValueError), match=r"retries|timeout_s|perhaps"):
            CallOptions(**options)


@pytest.mark.parametrize("name", ["cpu_executor", "io_executor"])
async def test_its_executors_are_its_own(manager, name):
    """Nobody else can shut down an executor that all share: who tries is told, and the others go on."""
    executor = getattr(manager, name)
    for end in (executor.shutdown, executor.__enter__, getattr(executor, "kill_workers", executor.shutdown)):
        with pytest.raises(ManagerOwns, match=r"await manager\.shutdown\(\)"):
            end()
    assert await asyncio.wrap_future(executor.submit(pow, 2, 3)) == 8
    assert await manager.run_cpu_intensive(deeds.echo, 1) == await manager.run_io_intensive(deeds.echo, 1)


async def test_async_functions(manager):
    """A worker process runs one to its end, with options and without."""
    for run in (manager.run_cpu_intensive, manager.options(retries=1).run_cpu_intensive):
        assert await run(deeds.echo_later, 7) == 7


async def test_a_time_limit(manager):
    """A call that runs too long is ended, by choice."""
    with pytest.raises(CallTimedOut):
        await manager.options(timeout_s=0.1).run_cpu_intensive(misdeeds.hang)


async def test_a_cancelled_caller_ends_its_call(manager, stage):
    """Whoever stops waiting for a CPU call ends it: its process goes, and its slot is free."""
    task, pid = await begin(manager, stage)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    busy = [manager.run_cpu_intensive(deeds.echo, n) for n in range(4)]
    assert await asyncio.gather(*busy) == [0, 1, 2, 3]
    async with asyncio.timeout(PATIENCE_S):
        await ended(pid)
    await manager.shutdown()
    assert manager.numbers.cpu_executor.killed == 1


@pytest.mark.parametrize("cls", [concurrent.futures.CancelledError, asyncio.CancelledError])
@pytest.mark.parametrize("way", ["run_cpu_intensive", "run_io_intensive"])
async def test_a_function_that_raises_cancelled_itself(manager, way, cls):
    """A CancelledError that the function raised is its own: nobody is told that the manager is shut down."""
    with pytest.raises(cls, match="of its own"):
        await getattr(manager, way)(deeds.fail, cls, "of its own")
    assert await getattr(manager, way)(deeds.echo, 1) == 1


# --- numbers ----------------------------------------------------------------------------------------------------------


async def test_numbers(stage):
    """The numbers of both pools are those of the moment."""
    async with get_executor_manager(ManagerSettings(cpu_workers=1, io_workers=1)) as manager:
        assert manager.numbers.cpu_executor.workers == 0
        gate = threading.Event()
        begun = asyncio.Event()
        loop = asyncio.get_running_loop()
        held, _ = await begin(manager, stage)
        more = [asyncio.create_task(manager.run_cpu_intensive(deeds.echo)) for _ in range(2)]
        blocked = asyncio.create_task(
            manager.run_io_intensive(lambda: (loop.call_soon_threadsafe(begun.set), gate.wait()))
        )
        await begun.wait()
        waits = asyncio.create_task(manager.run_io_intensive(int))
        await asyncio.sleep(0)
        numbers = manager.numbers
        assert (numbers.cpu_executor.active, numbers.cpu_executor.queued, numbers.cpu_executor.done) == (1, 2, 0)
        assert (numbers.io_executor.workers, numbers.io_executor.active, numbers.io_executor.queued) == (1, 1, 1)
        gate.set()
        await asyncio.to_thread(stage.let_go)
        await asyncio.gather(held, *more, blocked, waits)
        assert manager.numbers.cpu_executor.done == 3


# --- the loop stays responsive ----------------------------------------------------------------------------------------


class Lag(NamedTuple):
    """How late the loop comes back from a sleep of a millisecond, in seconds."""

    median: float
    p99: float

    def is_like(self, idle: "Lag") -> bool:
        return self.p99 <= 2 * idle.p99 and self.median <= 2 * idle.median


async def lag_while(work: asyncio.Future[Any]) -> Lag:
    """Until `work` is done."""
    late: list[float] = []
    while not work.done():
        began = time.perf_counter()
        await asyncio.sleep(0.001)
        late.append(time.perf_counter() - began - 0.001)
    await work
    late.sort()
    return Lag(late[len(late) // 2], late[len(late) * 99 // 100])


async def find_pair(begin: Callable[[float], asyncio.Future[Any]], *, pairs: int) -> tuple[bool, list[tuple[Lag, Lag]]]:
    """Whether the lag beside the work is like that of an idle loop, measured in turn. The machine may be busy
    otherwise: the best of so many pairs counts, and the first that will do ends it."""
    seen: list[tuple[Lag, Lag]] = []
    for _ in range(pairs):
        idle = await lag_while(asyncio.ensure_future(asyncio.sleep(0.4)))
        busy = await lag_while(begin(0.4))
        seen.append((idle, busy))
        if busy.is_like(idle):
            return True, seen
    return False, seen


@pytest.mark.spec("MGR-07")
async def test_cpu_work_leaves_the_loop_responsive():
    """While all workers are busy, the p99 of the loop's lag is at most twice that of an idle loop; the same measure
    notices work in threads, which take the interpreter for 5 ms at a time."""
    async with get_executor_manager() as manager:
        workers = manager.cpu_executor.max_workers

        def in_processes(seconds: float) -> asyncio.Future[Any]:
            return asyncio.gather(*(manager.run_cpu_intensive(deeds.work_for, seconds) for _ in range(workers)))

        def in_threads(seconds: float) -> asyncio.Future[Any]:
            return asyncio.gather(*(manager.run_io_intensive(deeds.work_for, seconds) for _ in range(2)))

        await in_processes(0.01)
        is_found, seen = await find_pair(in_processes, pairs=25)
        assert is_found, seen
        is_found, seen = await find_pair(in_threads, pairs=2)
        assert not is_found, seen
