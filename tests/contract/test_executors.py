"""Every executor, held to the one contract."""

import asyncio
import functools
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from typing import Any

import pytest

from taskyard.execution.code_loop import loop_here
from taskyard.execution.inline import InProcessExecutor
from taskyard.execution.isolated import IsolatedProcessPoolExecutor
from taskyard.execution.mock import MockExecutor, NoopExecutor
from taskyard.execution.pool_settings import PoolSettings
from taskyard.execution.process import ProcessPoolExecutor
from taskyard.execution.router import ExecutionDispatcher
from taskyard.execution.thread import ThreadExecutor
from taskyard.model.algorithm import AlgorithmSpec
from taskyard.model.execution import ErrorKind, ExecutionError, ExecutionResult
from taskyard.ports.consumer import Consumer
from taskyard.ports.executor import ExecutionRequest, ExecutorProtocol, RequestServer
from taskyard.testing.contract import AnswerContract, CodeContract, ExecutorContract
from taskyard.testing.executor_contract import PATIENCE_S


async def swallow(_: object) -> str:
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        return "late"
    return "never"


async def swallow_at(gate: Callable[..., Any], raised: BaseException | None, payload: object) -> str:
    """Wait there, and make something else of a cancellation."""
    try:
        await gate(payload)
    except asyncio.CancelledError:
        if raised is not None:
            raise raised from None
        return "late"
    return "never"


async def fall_over(_: object) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        raise RuntimeError("in the clean-up")


async def leak(_: object) -> None:
    inner = asyncio.get_running_loop().create_future()
    inner.cancel()
    await inner


class Left:
    """Of the last run on this loop."""

    task: asyncio.Task[None] | None = None


async def leave_behind(_: object) -> None:
    Left.task = asyncio.create_task(asyncio.sleep(600))


async def see_what_is_left(_: object) -> tuple[bool, bool]:
    assert Left.task is not None
    return Left.task.cancelled(), Left.task.get_loop() is asyncio.get_running_loop()


class AsyncContract(ExecutorContract):
    """What async code may rely on wherever it runs."""

    is_async = True

    async def test_code_that_swallows_its_deadline_timed_out_all_the_same(self, executor: ExecutorProtocol) -> None:
        """Code that catches the cancellation of its deadline and returns late is answered as `timeout`."""
        error = await self._error(executor, swallow, timeout_s=0.001)
        assert error.kind is ErrorKind.TIMEOUT

    async def test_code_that_raises_at_its_deadline_timed_out_all_the_same(self, executor: ExecutorProtocol) -> None:
        """Code that raises something else when its deadline interrupts it is answered as `timeout`."""
        error = await self._error(executor, fall_over, timeout_s=0.001)
        assert error.kind is ErrorKind.TIMEOUT

    async def test_a_cancellation_nobody_asked_for_is_an_error(self, executor: ExecutorProtocol) -> None:
        """Code that lets a CancelledError of something it awaited through has failed, with that."""
        error = await self._error(executor, leak)
        assert (error.kind, error.type) == (ErrorKind.RUNTIME, "CancelledError")

    @pytest.mark.parametrize("raised", [None, ValueError("instead")], ids=["returns", "raises"])
    async def test_a_cancel_that_is_swallowed_leaves_nothing_behind(
        self, executor: ExecutorProtocol, raised: BaseException | None
    ) -> None:
        """Whatever the code makes of a cancel, the caller's own task is not marked as cancelled."""
        hold, host = self.hold(), self.host()
        spec = self._spec(functools.partial(swallow_at, hold.spec.call, raised))

        async def submit() -> tuple[bool, int]:
            task = asyncio.current_task()
            host.run.belongs_to(task)
            request = ExecutionRequest(spec=spec, payload=None, request_id="r", run=host.run)
            result = await executor.submit(request)
            assert task is not None
            return result.success, task.cancelling()

        running = asyncio.get_running_loop().create_task(submit())
        await self.started(hold)
        host.run.request_cancel()
        assert await running == (raised is None, 0)

    async def _error(self, executor: ExecutorProtocol, call: Callable[..., Any], **fields: Any) -> ExecutionError:
        result = await self.begin(executor, self._spec(call), **fields)
        assert result.error is not None
        return result.error

    def _spec(self, call: Callable[..., Any]) -> Consumer:
        return Consumer(name="code", encode=str, call=call, is_async=True, executor="any")


class OwnLoopContract(AsyncContract):
    """Away from the host's loop, async code has one of its own."""

    async def test_the_loop_stays_and_what_runs_on_it_does_not(self, executor: ExecutorProtocol) -> None:
        """A worker keeps its loop from one call to the next; a task that a call leaves behind is cancelled."""
        assert (await self.begin(executor, self._spec(leave_behind))).success
        assert (await self.begin(executor, self._spec(see_what_is_left))).data == (True, True)


class TestInProcessExecutor(AsyncContract):
    queue_limit = None

    def make_executor(self) -> ExecutorProtocol:
        return InProcessExecutor()

    async def test_code_that_cancels_itself_leaves_its_caller_alone(self, executor: ExecutorProtocol) -> None:
        """A cancel that comes from inside of the code reaches the code, or nobody."""
        host = self.host()

        async def ask(_: object) -> str:
            host.run.request_cancel()
            await asyncio.sleep(0)
            return "ended"

        async def ask_last(_: object) -> str:
            host.run.request_cancel()
            return "ended"

        async def submit(call: Callable[..., Any]) -> ExecutionResult:
            host.run.belongs_to(asyncio.current_task())
            host.run.cancel_requested = False
            request = ExecutionRequest(spec=self._spec(call), payload=None, request_id="r", run=host.run)
            result = await executor.submit(request)
            await asyncio.sleep(0)
            return result

        error = (await asyncio.create_task(submit(ask))).error
        assert error is not None
        assert error.kind is ErrorKind.CANCELED
        assert (await asyncio.create_task(submit(ask_last))).data == "ended"


class TestInProcessExecutorPlain(CodeContract):
    is_async = False

    def make_executor(self) -> ExecutorProtocol:
        return InProcessExecutor()

    async def test_a_plain_function_runs_on_the_loop(self, executor: ExecutorProtocol) -> None:
        """It runs in the loop's own thread, in the task that submits it."""
        spec = self.spec(lambda _: (threading.get_ident(), asyncio.current_task()))
        submitted = self.begin(executor, spec)
        assert (await submitted).data == (threading.get_ident(), submitted)

    async def test_nobody_can_stop_it(self, executor: ExecutorProtocol) -> None:
        """It is told to no one that it was stopped: past its deadline it is answered `timeout`, when it has ended."""
        ended: list[str] = []

        def linger(_: object) -> None:
            threading.Event().wait(0.01)
            ended.append("by itself")

        error = (await self.begin(executor, self.spec(linger), timeout_s=0.001)).error
        assert not executor.abilities.kills
        assert ended == ["by itself"]
        assert error is not None
        assert error.kind is ErrorKind.TIMEOUT


SMALL_POOL = PoolSettings(
    max_workers=ExecutorContract.workers,
    queue_limit=1,
    cancel_grace_s=0.05,
    term_grace_s=0.05,
    preload=("taskyard.testing.executor_contract",),  # it imports pytest, which takes a worker a third of a second
)


class TestProcessPoolExecutor(ExecutorContract):
    is_async = False
    is_remote = True

    def make_executor(self) -> ExecutorProtocol:
        return ProcessPoolExecutor(settings=SMALL_POOL)


class TestPortableProcessPoolExecutor(ExecutorContract):
    is_async = False
    is_remote = True

    def make_executor(self) -> ExecutorProtocol:
        return ProcessPoolExecutor(settings=SMALL_POOL, portable=True)


class TestIsolatedProcessPoolExecutor(ExecutorContract):
    is_async = False
    is_remote = True

    def make_executor(self) -> ExecutorProtocol:
        return IsolatedProcessPoolExecutor(lambda _: SMALL_POOL)


class TestProcessPoolExecutorAsync(OwnLoopContract):
    is_remote = True

    def make_executor(self) -> ExecutorProtocol:
        return ProcessPoolExecutor(settings=SMALL_POOL)


class TestMockExecutor(AnswerContract):
    def make_executor(self) -> ExecutorProtocol:
        return MockExecutor({"code": 7})


class TestNoopExecutor(AnswerContract):
    def make_executor(self) -> ExecutorProtocol:
        return NoopExecutor()


class RoutedContract(AnswerContract):
    """The dispatcher in front of an executor, asked for an algorithm."""

    place: str
    is_async = False

    def make_executor(self) -> RequestServer:
        dispatcher = ExecutionDispatcher(place=self.place)
        dispatcher.install(pass_on_async if self.is_async else pass_on, spec=AlgorithmSpec("code"))
        return dispatcher

    async def test_it_can_what_its_place_can(self, executor: RequestServer) -> None:
        """A dispatcher with one place has that place's abilities."""
        kills = self.place in ("process", "isolated")
        assert (executor.abilities.kills, executor.abilities.isolates) == (kills, kills)
        assert executor.abilities.runs_code is (self.place not in ("mock", "noop"))


def pass_on(payload: int) -> int:
    return payload


async def pass_on_async(payload: int) -> int:
    return payload


class TestRoutedInline(RoutedContract):
    place, is_async = "inline", True


class TestRoutedInlinePlain(RoutedContract):
    place = "inline"


class TestRoutedThread(RoutedContract):
    place = "thread"


class TestRoutedThreadAsync(RoutedContract):
    place, is_async = "thread", True


class TestRoutedProcess(RoutedContract):
    place = "process"


class TestRoutedIsolated(RoutedContract):
    place = "isolated"


class TestRoutedIsolatedAsync(RoutedContract):
    place, is_async = "isolated", True


class TestRoutedNoop(RoutedContract):
    place = "noop"


class TestThreadExecutorAsync(OwnLoopContract):
    def make_executor(self) -> ExecutorProtocol:
        return ThreadExecutor(max_workers=self.workers, queue_limit=1)

    async def test_what_is_left_at_the_end_holds_up_who_waits_only(self, executor: ExecutorProtocol) -> None:
        """When a thread ends, code may have something left to do: `shutdown(wait=False)` does not wait for it, one that
        waits does, and that one can be cancelled and asked again."""
        ending, gate, ended = threading.Event(), threading.Event(), threading.Event()

        async def close() -> None:
            ending.set()
            gate.wait(PATIENCE_S)
            ended.set()

        async def prepare(_: object) -> None:
            loop_here().at_close(close)

        assert (await self.begin(executor, self._spec(prepare))).success
        async with asyncio.timeout(PATIENCE_S):
            await executor.shutdown(wait=False)
            await asyncio.to_thread(ending.wait, PATIENCE_S)
            waiting = asyncio.get_running_loop().create_task(executor.shutdown(wait=True))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert not ended.is_set()
            gate.set()
            await executor.shutdown(wait=True)
        assert ended.is_set()


class TestThreadExecutor(ExecutorContract):
    is_async = False

    def make_executor(self) -> ExecutorProtocol:
        return ThreadExecutor(max_workers=self.workers, queue_limit=1)

    async def test_threads_are_started_on_demand(self) -> None:
        """No thread is started before there is work, and none is started while one is free."""
        executor = ThreadExecutor(max_workers=4)
        assert len(executor._crew.threads) == 0
        for _ in range(5):
            await executor.submit(ExecutionRequest(spec=self.spec(lambda payload: payload), payload=1, request_id="r"))
        assert len(executor._crew.threads) == 1
        await executor.shutdown()

    def test_sizes_are_checked(self) -> None:
        """What is no size is refused by name, as everywhere."""
        with pytest.raises(TypeError, match="max_workers must be a whole number"):
            ThreadExecutor(max_workers=1.5)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="queue_limit must be at least 0"):
            ThreadExecutor(queue_limit=-1)

    def test_a_stuck_thread_does_not_hold_up_the_end_of_the_process(self) -> None:
        """A process whose thread never ends exits all the same."""
        code = textwrap.dedent("""
            import asyncio, threading
            from taskyard.execution.thread import ThreadExecutor
            from taskyard.ports.consumer import Consumer
            from taskyard.ports.executor import ExecutionRequest

            async def main():
                executor = ThreadExecutor(max_workers=1)
                began = threading.Event()
                def stuck(_):
                    began.set()
                    threading.Event().wait()
                spec = Consumer(name="stuck", encode=str, call=stuck, is_async=False, executor="thread")
                task = asyncio.create_task(executor.submit(ExecutionRequest(spec=spec, payload=None, request_id="r")))
                await asyncio.sleep(0)
                began.wait()
                await executor.shutdown(wait=False)

            asyncio.run(main())
        """)
        assert subprocess.run([sys.executable, "-c", code], check=False, timeout=20).returncode == 0
