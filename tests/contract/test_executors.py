"""Every executor, held to the one contract."""

import asyncio
import subprocess
import sys
import textwrap

from taskyard.execution.inline import InProcessExecutor
from taskyard.execution.isolated import IsolatedProcessPoolExecutor
from taskyard.execution.mock import MockExecutor, NoopExecutor
from taskyard.execution.pool_settings import PoolSettings
from taskyard.execution.process import ProcessPoolExecutor
from taskyard.execution.router import ExecutionDispatcher
from taskyard.execution.thread import ThreadExecutor
from taskyard.model.algorithm import AlgorithmSpec
from taskyard.model.execution import ErrorKind, ExecutionRequest
from taskyard.ports.consumer import Consumer
from taskyard.ports.executor import ExecutorProtocol
from taskyard.testing.contract import AnswerContract, ExecutorContract


class TestInProcessExecutor(ExecutorContract):
    is_async = True
    queue_limit = None

    def make_executor(self) -> ExecutorProtocol:
        return InProcessExecutor()

    async def test_code_that_swallows_its_deadline_timed_out_all_the_same(self, executor: ExecutorProtocol) -> None:
        """Code that catches the cancellation of its deadline and returns late is answered as `timeout`."""

        async def deaf(_: object) -> str:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                return "late"
            return "never"

        error = await self._error(executor, deaf, timeout_s=0.001)
        assert error.kind is ErrorKind.TIMEOUT

    async def test_code_that_raises_at_its_deadline_timed_out_all_the_same(self, executor: ExecutorProtocol) -> None:
        """Code that raises something else when its deadline interrupts it is answered as `timeout`."""

        async def angry(_: object) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                raise RuntimeError("in the clean-up")

        error = await self._error(executor, angry, timeout_s=0.001)
        assert error.kind is ErrorKind.TIMEOUT

    async def test_a_cancellation_nobody_asked_for_is_an_error(self, executor: ExecutorProtocol) -> None:
        """Code that lets a CancelledError of something it awaited through has failed, with that."""

        async def leaky(_: object) -> None:
            inner = asyncio.get_running_loop().create_future()
            inner.cancel()
            await inner

        error = await self._error(executor, leaky)
        assert (error.kind, error.type) == (ErrorKind.RUNTIME, "CancelledError")

    async def _error(self, executor, call, **fields):
        spec = Consumer(name="code", encode=str, call=call, is_async=True, executor="inline")
        result = await self.begin(executor, spec, **fields)
        assert result.error is not None
        return result.error


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


class TestMockExecutor(AnswerContract):
    def make_executor(self) -> ExecutorProtocol:
        return MockExecutor({"code": 7})


class TestNoopExecutor(AnswerContract):
    def make_executor(self) -> ExecutorProtocol:
        return NoopExecutor()


class RoutedContract(AnswerContract):
    """The dispatcher in front of an executor, asked for an algorithm."""

    place: str

    def make_executor(self) -> ExecutorProtocol:
        dispatcher = ExecutionDispatcher(place=self.place)
        dispatcher.install(pass_on_async if self.place == "inline" else pass_on, spec=AlgorithmSpec("code"))
        return dispatcher

    async def test_it_can_what_its_place_can(self, executor: ExecutorProtocol) -> None:
        """A dispatcher with one place has that place's abilities."""
        kills = self.place in ("process", "isolated")
        assert (executor.abilities.kills, executor.abilities.isolates) == (kills, kills)
        assert executor.abilities.runs_code is (self.place not in ("mock", "noop"))


def pass_on(payload: int) -> int:
    return payload


async def pass_on_async(payload: int) -> int:
    return payload


class TestRoutedInline(RoutedContract):
    place = "inline"


class TestRoutedThread(RoutedContract):
    place = "thread"


class TestRoutedProcess(RoutedContract):
    place = "process"


class TestRoutedIsolated(RoutedContract):
    place = "isolated"


class TestRoutedNoop(RoutedContract):
    place = "noop"


class TestThreadExecutor(ExecutorContract):
    is_async = False

    def make_executor(self) -> ExecutorProtocol:
        return ThreadExecutor(max_workers=self.workers, queue_limit=1)

    async def test_threads_are_started_on_demand(self) -> None:
        """No thread is started before there is work, and none is started while one is free."""
        executor = ThreadExecutor(max_workers=4)
        assert len(executor._threads) == 0
        for _ in range(5):
            await executor.submit(ExecutionRequest(spec=self.spec(lambda payload: payload), payload=1, request_id="r"))
        assert len(executor._threads) == 1
        await executor.shutdown()

    def test_a_stuck_thread_does_not_hold_up_the_end_of_the_process(self) -> None:
        """A process whose thread never ends exits all the same."""
        code = textwrap.dedent("""
            import asyncio, threading
            from taskyard.execution.thread import ThreadExecutor
            from taskyard.model.execution import ExecutionRequest
            from taskyard.ports.consumer import Consumer

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
        subprocess.run([sys.executable, "-c", code], check=True, timeout=20)
