"""What every executor must do, sentence by sentence of `taskyard.ports.executor`. See `taskyard.testing.contract`.

What it demands depends on the executor's `abilities`. What it runs are functions of this module, which can be found
from another process as well.
"""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import pytest

from taskyard.model.execution import ErrorKind
from taskyard.ports.consumer import Consumer
from taskyard.ports.executor import ExecutionRequest, ExecutorHealth, ExecutorProtocol
from taskyard.testing.code_contract import CodeContract, echo
from taskyard.testing.pipe import Pipe

SHORT_S = 0.01
PATIENCE_S = 10.0


def kill_own_process(signum: int) -> None:
    os.kill(os.getpid(), signum)


def wait_at_gate(folder: str, payload: Any) -> Any:
    """Say that it began and wait to be let go, across processes."""
    _say_began(folder)
    with open(f"{folder}/gate") as gate:
        gate.read(1)
    return payload


async def wait_at_gate_async(folder: str, payload: Any) -> Any:
    """The same for async code, which can be cancelled meanwhile."""
    _say_began(folder)
    gate, is_open = os.open(f"{folder}/gate", os.O_RDONLY | os.O_NONBLOCK), asyncio.Event()
    asyncio.get_running_loop().add_reader(gate, is_open.set)
    try:
        await is_open.wait()
    finally:
        asyncio.get_running_loop().remove_reader(gate)
        os.close(gate)
    return payload


def _say_began(folder: str) -> None:
    with open(f"{folder}/began", "w") as began:
        began.write("!")


class Flag(Protocol):
    def is_set(self) -> bool: ...


@dataclass
class Hold:
    """Code that goes on until it is let go, or until it notices that it should end."""

    spec: Consumer
    began: Flag
    let_go: Callable[[], None]


class ExecutorContract(CodeContract):
    """The rest of it: ending code early, capacity, life. `workers` are the threads or processes it is made with, beyond
    which it queues `queue_limit` and rejects (None: it never rejects). An executor that kills is made with a grace for
    cancels well below a second."""

    workers = 2
    queue_limit: int | None = 1

    @pytest.fixture(autouse=True)
    def _gates(self) -> Iterator[None]:
        self._pipes: list[Pipe] = []
        with tempfile.TemporaryDirectory() as self._folder:
            yield
            for pipe in self._pipes:
                pipe.close()

    def hold(self) -> Hold:
        if self.is_remote:
            return self._remote_hold()
        began, released, loops = threading.Event(), threading.Event(), []
        gate = asyncio.Event()

        async def wait_async(payload: Any) -> Any:
            loops.append(asyncio.get_running_loop())
            began.set()
            if not released.is_set():
                await gate.wait()
            return payload

        def wait(payload: Any) -> Any:
            began.set()
            released.wait(PATIENCE_S)
            return payload

        def let_go() -> None:
            released.set()
            for loop in loops:
                if not loop.is_closed():
                    loop.call_soon_threadsafe(gate.set)

        call = wait_async if self.is_async else wait
        spec = Consumer(name="hold", encode=str, call=call, is_async=self.is_async, executor="any")
        return Hold(spec, began, let_go)

    def _remote_hold(self) -> Hold:
        folder = tempfile.mkdtemp(dir=self._folder)
        began, gate = Pipe(f"{folder}/began"), Pipe(f"{folder}/gate")
        self._pipes += [began, gate]
        wait: Callable[..., Any] = wait_at_gate_async if self.is_async else wait_at_gate
        call = functools.partial(wait, folder)
        spec = Consumer(name="code", encode=str, call=call, is_async=self.is_async, executor="any")
        return Hold(spec, began, gate.write)

    async def started(self, hold: Hold) -> None:
        """The code has begun to run."""
        async with asyncio.timeout(PATIENCE_S):
            while not hold.began.is_set():  # noqa: ASYNC110 -- a thread sets it, and must not need the loop to do so
                await asyncio.sleep(0.001)

    # --- ending early -------------------------------------------------------------------------------------------------

    async def test_a_deadline_that_passes_is_a_timeout(self, executor: ExecutorProtocol) -> None:
        """Code past its timeout is answered as `timeout`, and only when it has ended."""
        hold, host = self.hold(), self.host()
        running = self.begin(executor, hold.spec, host=host, timeout_s=SHORT_S)
        if not self.is_async and not executor.abilities.kills:
            await self.started(hold)
            # It cannot be stopped: the run is told, and says so, and goes on until the code ends.
            async with asyncio.timeout(PATIENCE_S):
                await host.has_reported.wait()
            assert host.run.is_cancelled
            note = host.reports[-1].note
            assert note is not None
            assert "cannot be stopped" in note.reason
            assert not running.done()
            hold.let_go()
        error = (await running).error
        assert error is not None
        assert error.kind is ErrorKind.TIMEOUT

    async def test_a_cancel_reaches_the_code(self, executor: ExecutorProtocol) -> None:
        """A run that is asked to cancel knows, and async code is interrupted and answered as canceled."""
        hold, host = self.hold(), self.host()
        running = self.begin(executor, hold.spec, host=host)
        await self.started(hold)
        host.run.request_cancel()
        assert host.run.is_cancelled
        if self.is_async or executor.abilities.kills:
            error = (await running).error
            assert error is not None
            assert error.kind is ErrorKind.CANCELED
        else:
            hold.let_go()
            assert (await running).success

    async def test_a_cancel_leaves_nothing_behind(self, executor: ExecutorProtocol) -> None:
        """After an answered cancel the caller's own task is not marked as cancelled."""
        if not self.is_async:
            return
        hold, host = self.hold(), self.host()
        left: list[int] = []

        async def submit() -> None:
            task = asyncio.current_task()
            assert task is not None
            host.run.belongs_to(task)
            await executor.submit(ExecutionRequest(spec=hold.spec, payload=None, request_id="r", run=host.run))
            left.append(task.cancelling())

        running = asyncio.get_running_loop().create_task(submit())
        await self.started(hold)
        host.run.request_cancel()
        await running
        assert left == [0]

    async def test_a_caller_that_is_cancelled_hears_of_it(self, executor: ExecutorProtocol) -> None:
        """When the caller itself is cancelled, `submit` raises, and says if the code may still be running, and when it
        has ended."""
        hold, host = self.hold(), self.host()
        running = self.begin(executor, hold.spec, host=host)
        await self.started(hold)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert host.run.is_detached is not (self.is_async or executor.abilities.kills)
        hold.let_go()
        async with asyncio.timeout(PATIENCE_S):
            await host.run.wait_reattached()

    # --- what only some can do ----------------------------------------------------------------------------------------

    @pytest.mark.spec("EXE-08")
    @pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSEGV])
    async def test_a_crash_touches_one_run(self, executor: ExecutorProtocol, signum: int) -> None:
        """Where crashes are isolated, one is answered `system`; what runs beside and after it is not touched."""
        if not executor.abilities.isolates:
            return
        hold = self.hold()
        beside = self.begin(executor, hold.spec, 7)
        await self.started(hold)
        error = (await self.begin(executor, self.spec(kill_own_process), signum)).error
        assert error is not None
        assert error.kind is ErrorKind.SYSTEM
        assert (await self.begin(executor, self.spec(echo), 8)).data == 8
        hold.let_go()
        assert (await beside).data == 7

    @pytest.mark.spec("EXE-05")
    async def test_a_slot_is_free_again_after_a_timeout(self, executor: ExecutorProtocol) -> None:
        """Where code can be killed, as many time out as there are workers, and the next ones run."""
        if not executor.abilities.kills:
            return
        holds = [self.hold() for _ in range(self.workers)]
        for ended in [self.begin(executor, hold.spec, timeout_s=SHORT_S) for hold in holds]:
            error = (await ended).error
            assert error is not None
            assert error.kind is ErrorKind.TIMEOUT
        assert (await self.begin(executor, self.spec(echo), 7)).data == 7

    # --- capacity and life --------------------------------------------------------------------------------------------

    async def test_requests_run_side_by_side(self, executor: ExecutorProtocol) -> None:
        """As many as there are workers run at once."""
        holds = [self.hold() for _ in range(self.workers)]
        running = [self.begin(executor, hold.spec, place) for place, hold in enumerate(holds)]
        for hold in holds:
            await self.started(hold)
        for hold in reversed(holds):
            hold.let_go()
        assert [(await one).data for one in running] == list(range(self.workers))

    @pytest.mark.spec("EXE-06")
    async def test_what_is_too_much_is_rejected_unrun(self, executor: ExecutorProtocol) -> None:
        """Beyond workers and queue a request is `rejected` at once; what was queued runs when there is room."""
        if self.queue_limit is None:
            return
        holds = [self.hold() for _ in range(self.workers + self.queue_limit)]
        running = [self.begin(executor, hold.spec, place) for place, hold in enumerate(holds)]
        for hold in holds[: self.workers]:
            await self.started(hold)
        error = (await self.begin(executor, self.raising(AssertionError("it ran")))).error
        assert error is not None
        assert error.kind is ErrorKind.REJECTED
        for hold in holds:
            hold.let_go()
        assert [(await one).data for one in running] == list(range(len(holds)))

    async def test_it_counts_what_it_does(self, executor: ExecutorProtocol) -> None:
        """Its numbers say how much runs, how much waits and how much has ended, also by name where it limits each."""
        done, size = executor.stats().done, self.workers + (self.queue_limit or 0)
        holds = [self.hold() for _ in range(size)]
        running = [self.begin(executor, hold.spec) for hold in holds]
        for hold in holds[: self.workers]:
            await self.started(hold)
        name = holds[0].spec.name if executor.abilities.has_own_limits else None
        stats = executor.stats(name)
        assert (stats.active, stats.queued) == (self.workers, size - self.workers)
        assert stats.max_workers in (None, self.workers)
        for hold in holds:
            hold.let_go()
        await asyncio.gather(*running)
        stats = executor.stats()
        assert (stats.active, stats.queued, stats.done - done) == (0, 0, size)

    async def test_a_closed_executor_is_not_healthy(self, executor: ExecutorProtocol) -> None:
        """Its health says whether it would run a request, and why not."""
        assert (await self.begin(executor, self.spec(echo))).success
        assert executor.health() == ExecutorHealth()
        await executor.shutdown()
        health = executor.health()
        assert not health.is_healthy
        assert health.problem
        await executor.start()
        assert executor.health().is_healthy

    async def test_a_queued_request_can_be_canceled(self, executor: ExecutorProtocol) -> None:
        """A request that waits for a worker is canceled without having run."""
        if self.queue_limit is None:
            return
        holds = [self.hold() for _ in range(self.workers)]
        running = [self.begin(executor, hold.spec) for hold in holds]
        for hold in holds:
            await self.started(hold)
        host = self.host()
        queued = self.begin(executor, self.raising(AssertionError("it ran")), host=host)
        await asyncio.sleep(0)
        host.run.request_cancel()
        error = (await queued).error
        assert error is not None
        assert error.kind is ErrorKind.CANCELED
        for hold in holds:
            hold.let_go()
        await asyncio.gather(*running)

    async def test_shutdown_waits_for_what_runs(self, executor: ExecutorProtocol) -> None:
        """`shutdown(wait=True)` returns when what runs has ended, and takes nothing new meanwhile."""
        hold = self.hold()
        running = self.begin(executor, hold.spec, 7)
        await self.started(hold)
        closing = asyncio.get_running_loop().create_task(executor.shutdown(wait=True))
        await asyncio.sleep(0)
        error = (await self.begin(executor, self.spec(echo))).error
        assert error is not None
        assert error.kind is ErrorKind.REJECTED
        assert not closing.done()
        hold.let_go()
        await closing
        assert (await running).data == 7

    async def test_two_may_shut_it_down(self, executor: ExecutorProtocol) -> None:
        """Everyone who waits for a shutdown hears of its end, also two at once."""
        hold = self.hold()
        running = self.begin(executor, hold.spec, 7)
        await self.started(hold)
        loop = asyncio.get_running_loop()
        closing = [loop.create_task(executor.shutdown(wait=True)) for _ in range(2)]
        await asyncio.sleep(0)
        hold.let_go()
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*closing)
        assert (await running).data == 7

    async def test_shutdown_need_not_wait(self, executor: ExecutorProtocol) -> None:
        """`shutdown(wait=False)` returns at once; what runs goes on and is answered."""
        hold = self.hold()
        running = self.begin(executor, hold.spec, 7)
        await self.started(hold)
        await executor.shutdown(wait=False)
        hold.let_go()
        assert (await running).data == 7

    async def test_it_can_be_started_again(self, executor: ExecutorProtocol) -> None:
        """After a shutdown a start opens it, whatever still runs from before; that counts until it has ended."""
        hold = self.hold()
        running = self.begin(executor, hold.spec, 7)
        await self.started(hold)
        await executor.shutdown(wait=False)
        await executor.start()
        async with asyncio.timeout(PATIENCE_S):
            for payload in range(3):
                assert (await self.begin(executor, self.spec(echo), payload)).data == payload
            closing = asyncio.get_running_loop().create_task(executor.shutdown(wait=True))
            await asyncio.sleep(0)
            assert not closing.done()
            hold.let_go()
            await closing
        assert (await running).data == 7
