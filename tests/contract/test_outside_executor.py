"""An executor that is no part of Taskyard: it passes the contract suite, and runs tasks of a yard and direct calls."""

from __future__ import annotations

import asyncio
import threading

import pytest

from taskyard import (
    AlgorithmSpec,
    BaseTaskConsumer,
    ExecutionDispatcher,
    InvalidInput,
    Task,
    TaskCanceled,
    Yard,
    current_run,
)
from taskyard.errors import InvalidConsumer
from taskyard.executor_port import ExecutorProtocol
from taskyard.testing.contract import ExecutorContract
from tests.contract.thread_per_run import ThreadPerRunExecutor


class TestThreadPerRun(ExecutorContract):
    is_async = False

    def make_executor(self) -> ExecutorProtocol:
        return ThreadPerRunExecutor(self.workers, queue_limit=1)


class TestThreadPerRunAsync(ExecutorContract):
    is_async = True

    def make_executor(self) -> ExecutorProtocol:
        return ThreadPerRunExecutor(self.workers, queue_limit=1)


async def test_it_runs_tasks_of_a_yard():
    """Consumers of each form name it, run in it, and see their run; its numbers can be asked for."""
    yard = Yard("memory://", executors={"fresh": ThreadPerRunExecutor})
    idents = set()

    @yard.consumer(executor="fresh")
    def plain(x: int) -> tuple[int, int]:
        idents.add(threading.get_ident())
        current_run().progress(0.5, "half")
        return x, current_run().attempt

    @yard.consumer(executor="fresh")
    async def later(x: int) -> int:
        idents.add(threading.get_ident())
        return x + 1

    class Own(BaseTaskConsumer):
        name, executor = "own", "fresh"

        async def consume(self, task: Task) -> str:
            idents.add(threading.get_ident())
            return task.uuid

    yard.register(Own())
    async with yard:
        assert await (await plain.submit(x=1)).result() == [1, 1]
        assert await (await later.submit(x=1)).result() == 2
        own = await yard.submit("own")
        assert await own.result() == own.uuid
        assert yard.executors["fresh"].stats().done == 3
        assert yard.executors["fresh"].health().is_healthy
    assert threading.get_ident() not in idents


async def test_a_yard_makes_a_new_one_each_time():
    """The factory is called when the yard is opened, so that an executor belongs to one event loop."""
    made: list[ThreadPerRunExecutor] = []

    def make() -> ThreadPerRunExecutor:
        made.append(ThreadPerRunExecutor())
        return made[-1]

    yard = Yard("memory://", executors={"fresh": make})
    assert made == []
    for _ in range(2):
        async with yard:
            pass
    assert len(made) == 2
    assert made[0] is not made[1]


async def test_its_cancel_reaches_a_task():
    """A task that runs in it can be canceled."""
    yard = Yard("memory://", executors={"fresh": ThreadPerRunExecutor})
    began = threading.Event()

    @yard.consumer(executor="fresh")
    def listen() -> None:
        began.set()
        while not current_run().cancelled:
            threading.Event().wait(0.001)
        raise InterruptedError

    async with yard:
        handle = await listen.submit()
        await asyncio.to_thread(began.wait)
        await handle.cancel()
        with pytest.raises(TaskCanceled):
            await handle.result()


async def test_direct_calls_run_in_it():
    """A dispatcher takes it by name, with the same life of a run: a retry is another attempt."""
    tries: list[int] = []

    def flaky(payload: int) -> int:
        tries.append(current_run().attempt)
        if len(tries) == 1:
            raise OSError("once")
        return payload

    executor = ThreadPerRunExecutor()
    async with ExecutionDispatcher(executors={"fresh": executor}, place="fresh") as dispatcher:
        dispatcher.install(flaky, spec=AlgorithmSpec("flaky"))
        result = await dispatcher.run("flaky", 7)
        assert not result.success
        assert (await dispatcher.run("flaky", 7)).data == 7
        assert dispatcher.health()["flaky"].place == "fresh"
    assert tries == [1, 1]
    assert executor.stats().done == 2


@pytest.mark.parametrize(
    ("executors", "match"),
    [
        ({"thread": ThreadPerRunExecutor}, "called 'thread' is there already"),
        ({"fresh": ThreadPerRunExecutor()}, "needs a class or function"),
        ({"": ThreadPerRunExecutor}, "name of an executor"),
    ],
)
def test_bad_executors(executors, match):
    """A name that is taken and a thing that makes no executor are refused with what is wrong."""
    with pytest.raises(InvalidInput, match=match):
        Yard("memory://", executors=executors)


def test_an_unknown_executor():
    """A consumer that names none of a yard's executors is refused with those that there are."""
    yard = Yard("memory://", executors={"fresh": ThreadPerRunExecutor})
    with pytest.raises(InvalidConsumer, match=r"no executor='ray'.* 'isolated', 'fresh'"):

        @yard.consumer(executor="ray")
        def f() -> None: ...
