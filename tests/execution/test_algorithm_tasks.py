"""Algorithms as tasks of a yard: the same code as in direct calls, stored first."""

import asyncio
import math
import os
from pathlib import Path

import pytest

from taskyard import AlgorithmSpec, ErrorKind, ExecutionHints, RetryPolicy, TaskFailed, Yard
from taskyard.algorithms import InvalidAlgorithm
from taskyard.errors import DuplicateConsumer, InvalidArguments, InvalidConsumer
from tests.execution import algorithms
from tests.execution.algorithms import AsyncLedger, Ledger
from tests.execution.asking import PATIENCE_S, spec
from tests.execution.census import ended, is_alive


async def run(yard, name, args, **options):
    return await (await yard.submit(name, args, **options)).result(timeout_s=PATIENCE_S)


@pytest.mark.spec("EXE-03", "EXE-09")
async def test_a_task_runs_in_the_pool_of_its_algorithm():
    """An algorithm that is installed in a yard is initialized once in its worker, and answers every task from there."""
    yard = Yard("memory://")
    yard.install(Ledger)
    async with yard:
        served = [await run(yard, "ledger", {"n": n}) for n in range(3)]
        assert [one["n"] for one in served] == [0, 1, 4]
        assert {(one["pid"], one["opened"]) for one in served} == {(served[0]["pid"], 1)}
        assert served[0]["pid"] != os.getpid()
        assert len(served[2]["before"]) == 2
    await ended(served[0]["pid"])


@pytest.mark.spec("EXE-03", "EXE-11")
@pytest.mark.parametrize("place", ["inline", "thread", "process", "isolated"])
async def test_a_task_in_every_place(place):
    """Wherever it runs, the context knows the task by its uuid, the algorithm and the attempt, and takes progress."""
    yard = Yard("memory://")
    code = algorithms.report_async if place == "inline" else algorithms.report
    yard.install(code, spec=spec("report", executor=place))
    async with yard:
        handle = await yard.submit("report", {"n": 3, "pid": os.getpid()})
        assert await handle.result(timeout_s=PATIENCE_S) == {
            "n": 3,
            "request_id": handle.uuid,
            "algorithm": "report 1.0",
            "attempt": 1,
            "is_here": place in ("inline", "thread"),
        }
        progress = (await handle.record()).progress
        assert progress is not None
        assert (progress.fraction, progress.message) == (0.5, "half way")


@pytest.mark.spec("EXE-04")
@pytest.mark.parametrize("args", [{}, {"n": "many"}, {"n": math.nan}, {"n": 1, "folder": None}])
async def test_arguments_that_do_not_fit_are_refused(args):
    """What is no `Input` is refused when it is submitted, and nothing is stored."""
    yard = Yard("memory://")
    yard.install(Ledger)
    async with yard:
        with pytest.raises(InvalidArguments, match="ledger"):
            await yard.submit("ledger", args)
        assert await yard.store.count() == {}


@pytest.mark.spec("EXE-07", "EXE-20")
async def test_what_goes_wrong_fails_the_task():
    """What the code raises fails its task with the traceback; an output that does not fit fails it at once, because
    another run would give the same."""
    yard = Yard("memory://")
    yard.install(Ledger, retry=RetryPolicy(max_retries=2, first_s=0.001))
    async with yard:
        with pytest.raises(TaskFailed, match="-1 is negative") as raised:
            await run(yard, "ledger", {"n": -1})
        assert raised.value.error_type == "ValueError"
        unlucky = await yard.submit("ledger", {"n": 13})
        with pytest.raises(TaskFailed, match="does not fit its Output") as raised:
            await unlucky.result(timeout_s=PATIENCE_S)
        assert (raised.value.error_type, (await unlucky.record()).attempt) == ("InvalidOutput", 1)


@pytest.mark.spec("EXE-05", "EXE-16")
async def test_hints_hold_for_tasks(hold):
    """The timeout and the pool that the hints ask for are those of the tasks: past its time one is ended for good, and
    a worker that has had its runs is replaced."""
    yard = Yard("memory://")
    yard.install(Ledger, spec=AlgorithmSpec("short-lived", execution=ExecutionHints(recycle_after=1)))
    yard.install(
        algorithms.hang,
        spec=spec("hang", isolated_pool=True, timeout_s=0.2),
        retry=RetryPolicy(max_retries=0),
    )
    held = hold()
    async with yard:
        first, second = [(await run(yard, "short-lived", {"n": 1}))["pid"] for _ in range(2)]
        assert first != second
        handle = await yard.submit("hang", {"n": 1, "folder": held.folder})
        await held.began()
        with pytest.raises(TaskFailed) as raised:
            await handle.result(timeout_s=PATIENCE_S)
        assert raised.value.kind == ErrorKind.TIMEOUT
        assert not is_alive(int(Path(held.folder, "pid").read_text()))


async def test_instances_of_this_process_are_shut_down_with_the_yard():
    """An algorithm that runs on the loop is loaded once, and shut down when the yard is."""
    yard = Yard("memory://")
    yard.install(AsyncLedger)
    before = AsyncLedger.shut
    async with yard:
        async with asyncio.timeout(PATIENCE_S):
            served = [await run(yard, "async-ledger", {"n": n}) for n in range(2)]
        assert len(served[1]["before"]) == 1
        assert AsyncLedger.shut == before
    assert AsyncLedger.shut == before + 1


def test_what_cannot_be_installed_says_so():
    """A name that is taken, a place that a yard does not have, and code that a worker cannot find are refused."""
    yard = Yard("memory://")
    yard.install(Ledger)
    with pytest.raises(DuplicateConsumer):
        yard.install(Ledger)
    with pytest.raises(InvalidConsumer, match="no executor='mock'"):
        yard.install(algorithms.report, spec=spec("elsewhere", executor="mock"))
    with pytest.raises(InvalidAlgorithm, match="top level of a module"):
        yard.install(lambda given: given, spec=spec("nameless"))
    with pytest.raises(InvalidConsumer, match="concurrency"):
        yard.install(algorithms.report, spec=spec("report"), concurrency=0)
