"""Executors that raise instead of answering: their own fault, and no crash of a worker."""

import asyncio

import pytest

from taskyard import AlgorithmSpec, ErrorKind, ExecutionDispatcher
from taskyard.execution.runner import Hooks, Runner, RunnerSettings
from taskyard.model.execution import ExecutionError, ExecutionResult
from taskyard.model.move import Move
from taskyard.model.retry import NO_RETRY, RetryPolicy
from taskyard.model.settle import settle
from taskyard.model.state import TaskState
from taskyard.model.task import Claim
from taskyard.ports.clock import SystemClock
from taskyard.ports.consumer import Consumer
from taskyard.ports.executor import Abilities, ExecutorHealth, ExecutorStats
from taskyard.testing.samples import a_record

pytestmark = pytest.mark.spec("EXE-08")

CLOCK = SystemClock()


class Broken:
    """An executor with a fault."""

    abilities = Abilities()

    async def start(self) -> None: ...

    async def shutdown(self, *, wait: bool = True) -> None: ...

    def stats(self, name=None):
        return ExecutorStats()

    def health(self):
        return ExecutorHealth()

    async def submit(self, request):
        raise LookupError("no such pool")


async def run_once(record, *, retry=NO_RETRY) -> Move:
    settled: list[Move] = []
    ended = asyncio.Event()

    def take(_: Claim, move: Move) -> None:
        settled.append(move)
        ended.set()

    consumer = Consumer(name=record.consumer, encode=str, call=print, is_async=False, executor="broken", retry=retry)
    runner = Runner(
        consumers={record.consumer: consumer},
        executors={"broken": Broken()},
        queues={},
        clock=CLOCK,
        hooks=Hooks(settle=take, report=lambda report: None, complete=lambda record: asyncio.sleep(0, record)),
        jitter=lambda: 0.5,
        settings=RunnerSettings(),
    )
    runner.start(Claim(record, 1, 1))
    async with asyncio.timeout(10):
        await ended.wait()
    runner.close()
    [move] = settled
    return move


async def test_a_task_fails_as_system():
    """A task whose executor raises fails as `system`, with what was raised."""
    move = await run_once(a_record())
    assert move.state is TaskState.FAILED
    assert move.error is not None
    assert (move.error.kind, move.error.type, move.error.message) == (ErrorKind.SYSTEM, "LookupError", "no such pool")


async def test_it_is_no_crash_of_a_worker():
    """A fault of the executor never leads to quarantine: no worker died of the task."""
    record = a_record()
    record.crashes = 2
    move = await run_once(record, retry=RetryPolicy(max_retries=5))
    assert (move.state, move.crashed) == (TaskState.RETRYING, False)


def test_a_dead_worker_still_leads_to_quarantine():
    """A task that takes down its third worker is failed for good."""
    record = a_record()
    record.crashes = 2
    result = ExecutionResult(success=False, error=ExecutionError(kind=ErrorKind.SYSTEM, message="its worker died"))
    move = settle(record, result, retry=RetryPolicy(max_retries=5), now=CLOCK.now(), jitter=0.5)
    assert (move.state, move.crashed) == (TaskState.FAILED, True)


@pytest.mark.parametrize("runs_code", [True, False])
async def test_a_direct_call_is_answered_as_system(runs_code):
    """A direct call whose executor raises is answered `system`, as a task is."""
    broken = Broken()
    broken.abilities = Abilities(runs_code=runs_code)
    async with ExecutionDispatcher(executors={"broken": broken}, place="broken") as dispatcher:
        if runs_code:
            dispatcher.install(abs, spec=AlgorithmSpec("abs", "1.0"))
        result = await dispatcher.run("abs", -1)
    assert result.error is not None
    assert (result.error.kind, result.error.type, result.error.message) == (
        ErrorKind.SYSTEM,
        "LookupError",
        "no such pool",
    )
