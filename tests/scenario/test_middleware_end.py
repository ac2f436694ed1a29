"""A run with middleware ends when its code has ended, whatever the middleware does."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from taskyard import RetryPolicy, TaskFailed, TaskState, Yard
from taskyard.middleware import ExecutionResult, RunContext, RunNext
from tests.scenario.gates import attend, attend_in_thread

NO_RETRY = RetryPolicy(max_retries=0)
PATIENCE_S = 20


class GiveUp:
    """Run middleware with two timeouts around the code, which pass when the test says so."""

    def __init__(self) -> None:
        self.gave_up = asyncio.Event()
        self.deadlines: list[asyncio.Timeout] = []

    async def __call__(self, run: RunContext, call_next: RunNext) -> ExecutionResult:
        try:
            async with asyncio.timeout(None) as outer, asyncio.timeout(None) as inner:
                self.deadlines = [inner, outer]
                return await call_next()
        finally:
            self.gave_up.set()

    async def expire(self, *, times: int = 1) -> None:
        for deadline in self.deadlines[:times]:
            if self.gave_up.is_set():
                return
            deadline.reschedule(asyncio.get_running_loop().time())
            for _ in range(5):
                await asyncio.sleep(0)


async def test_a_thread_outlasts_the_timeout_of_its_middleware(gates):
    """Middleware that stops waiting for a thread fails the attempt only when the thread has ended: until then the task
    keeps its slot, and its code is told to end."""
    yard, around = Yard("memory://"), GiveUp()
    yard.around_run(around)
    gate = yard.consumer(name="gate", executor="thread", concurrency=1, retry=NO_RETRY)(attend_in_thread)
    other = yard.consumer(name="other")(attend)
    async with asyncio.timeout(PATIENCE_S), yard:
        first, second = await gate.submit(gates.port, "first"), await gate.submit(gates.port, "second")
        run = await gates.begun("first")
        await around.expire()
        await around.gave_up.wait()
        beside = await other.submit(gates.port, "beside")
        (await gates.begun("beside")).finish()
        await beside.result()
        assert [await one.state() for one in (first, second)] == [TaskState.RUNNING, TaskState.QUEUED]
        run.look()  # `current_run().cancelled` tells it to end
        await run.gone()
        with pytest.raises(TaskFailed, match="TimeoutError"):
            await first.result()
        (await gates.begun("second")).finish("done")
        assert await second.result() == "done"


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("executor", ["inline", "thread", "process"])
async def test_code_that_can_be_stopped_ends_before_its_run(gates, executor, times):
    """Middleware that stops waiting ends async code and worker processes; the attempt fails when they have ended."""
    yard, around = Yard("memory://"), GiveUp()
    yard.around_run(around)
    gate = yard.consumer(name="gate", executor=executor, concurrency=1, retry=NO_RETRY)(attend)
    async with asyncio.timeout(PATIENCE_S), yard:
        first, second = await gate.submit(gates.port, "first"), await gate.submit(gates.port, "second")
        run = await gates.begun("first")
        await around.expire(times=times)
        with pytest.raises(TaskFailed, match="TimeoutError"):
            await first.result()
        await run.gone()
        (await gates.begun("second")).finish("done")
        assert await second.result() == "done"
    assert gates.most_at_once == 1


@pytest.mark.parametrize("executor", ["inline", "thread", "process"])
async def test_code_that_nobody_awaits_ends_before_its_run(executor):
    """Middleware that leaves `call_next()` to another asyncio task, and returns, ends the code; the task is answered
    when the code has ended."""
    yard = Yard("memory://")
    calls: list[asyncio.Future[ExecutionResult]] = []

    @yard.around_run
    async def leave(run: RunContext, call_next: RunNext) -> ExecutionResult:
        calls.append(asyncio.ensure_future(call_next()))
        await asyncio.wait(calls, timeout=0.01)
        return ExecutionResult(success=True, data="early")

    yard.consumer(name="wait", executor=executor)(wait)
    async with asyncio.timeout(PATIENCE_S), yard:
        assert await (await yard.submit("wait")).result() == "early"
        assert calls[0].done()


async def wait() -> None:
    await asyncio.Event().wait()


async def test_code_never_begins_after_its_run():
    """A `call_next()` that begins when its middleware has returned does not run the code."""
    yard = Yard("memory://")
    calls: list[asyncio.Future[ExecutionResult]] = []
    ran: list[int] = []

    @yard.around_run
    async def leave(run: RunContext, call_next: RunNext) -> ExecutionResult:
        calls.append(asyncio.ensure_future(call_next()))
        return ExecutionResult(success=True, data="early")

    @yard.consumer
    async def work() -> None:
        ran.append(1)

    async with asyncio.timeout(PATIENCE_S), yard:
        assert await (await work.submit()).result() == "early"
        result = await calls[0]
    assert (ran, result.success) == ([], False)
    assert result.error is not None
    assert "returned before" in result.error.message


async def test_a_stop_keeps_the_claim_of_a_thread(tmp_path, gates):
    """A node that stops while a thread goes on does not give its task to others, whatever its middleware makes of the
    cancel."""
    yard = Yard(tmp_path / "work.db")

    @yard.around_run
    async def swallow(run: RunContext, call_next: RunNext) -> Any:
        try:
            return await call_next()
        except asyncio.CancelledError:
            return ExecutionResult(success=True, data="wrong")

    gate = yard.consumer(name="gate", executor="thread")(attend_in_thread)
    async with asyncio.timeout(PATIENCE_S):
        async with yard:
            handle = await gate.submit(gates.port, "first")
            run = await gates.begun("first")
            await yard.stop(grace_s=0)
        async with Yard(tmp_path / "work.db").client() as client:
            record = await client.store.find(handle.uuid)
            assert record is not None
            assert record.state is TaskState.RUNNING
        run.finish()
        await run.gone()


async def test_a_stop_keeps_a_result_that_is_there(tmp_path, caplog):
    """Middleware that hangs after the code does not cost its result: a node that stops interrupts the middleware, says
    which one it was, and stores the result."""
    yard = Yard(tmp_path / "work.db")
    hangs = asyncio.Event()

    @yard.around_run
    async def hang_on_the_way_back(run: RunContext, call_next: RunNext) -> ExecutionResult:
        result = await call_next()
        hangs.set()
        await asyncio.Event().wait()
        return result

    @yard.consumer
    async def work() -> str:
        return "done"

    async with asyncio.timeout(PATIENCE_S):
        async with yard:
            handle = await work.submit()
            await hangs.wait()
            await yard.stop(grace_s=0)
        async with Yard(tmp_path / "work.db").client() as client:
            assert await client.handle(handle.uuid).result() == "done"
    assert "hang_on_the_way_back" in caplog.text
