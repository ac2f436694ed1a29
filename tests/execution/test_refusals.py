"""Exceptions that refuse attributes: their caller gets them, or a stand-in, and never waits for ever."""

import pytest

from taskyard import ExecutorManager, RetryPolicy, TaskFailed, Yard
from taskyard.futures import CannotCross, ProcessPool, RemoteError
from taskyard.ports.explain import explain
from tests.execution import refusals
from tests.execution.kinds import PATIENCE_S

EVERY = pytest.mark.parametrize("kind", refusals.EVERY, ids=lambda kind: kind.__name__)
FUNCTIONS = pytest.mark.parametrize("function", [refusals.fail, refusals.fail_async], ids=["plain", "async"])
EXECUTORS = pytest.mark.parametrize("executor", ["inline", "thread", "process", "isolated"])

NO_RETRY = RetryPolicy(max_retries=0)


def expected(kind: type[Exception]) -> type[Exception]:
    return kind if kind in refusals.RETURNING else RemoteError


@pytest.fixture(scope="module")
def pool():
    with ProcessPool(1) as pool:
        yield pool


@EVERY
@FUNCTIONS
def test_a_future_gets_it(pool, function, kind):
    """A future of a pool raises the exception, or `RemoteError` if it cannot be rebuilt."""
    raised = pool.submit(function, kind).exception(PATIENCE_S)
    assert type(raised) is expected(kind)
    assert "7" in str(raised)


def test_a_frozen_dataclass_comes_back_whole(pool):
    """A frozen dataclass that is an exception has its fields in the host, and the worker's traceback as its cause."""
    raised = pool.submit(refusals.fail, refusals.Frozen).exception(PATIENCE_S)
    assert raised.code == 7
    assert "in fail" in str(raised.__cause__)


def test_the_name_of_the_function_does_not_matter(pool):
    """A future is done even if the name of its function cannot be read."""
    assert isinstance(pool.submit(refusals.Nameless()).exception(PATIENCE_S), CannotCross)


@EVERY
@FUNCTIONS
async def test_the_manager_raises_it(function, kind):
    """`run_cpu_intensive` raises the exception, or `RemoteError` if it cannot be rebuilt."""
    async with ExecutorManager() as manager:
        with pytest.raises(expected(kind), match="7"):
            await manager.run_cpu_intensive(function, kind)


@EVERY
async def test_the_manager_raises_it_from_a_thread(kind):
    """`run_io_intensive` raises the exception itself."""
    async with ExecutorManager() as manager:
        with pytest.raises(kind):
            await manager.run_io_intensive(refusals.fail, kind)


@EXECUTORS
@pytest.mark.parametrize("function", [refusals.fail_by_name, refusals.fail_by_name_async], ids=["plain", "async"])
async def test_a_task_fails_with_it(executor, function, monkeypatch):
    """A task whose code raises such an exception fails with its class, on every executor."""
    # pytest lets a handler raise when it cannot format a record. Elsewhere `logging` prints that, and goes on.
    monkeypatch.setattr("taskyard.execution.runner.log.propagate", False)
    yard = Yard("memory://")
    consumer = yard.consumer(executor=executor, retry=NO_RETRY)(function)
    async with yard:
        for kind in refusals.EVERY:
            with pytest.raises(TaskFailed) as failed:
                await (await consumer.submit(kind.__name__)).result(timeout_s=PATIENCE_S)
            assert failed.value.error_type == kind.__name__


def test_an_unreadable_traceback_is_explained():
    """An error is explained even if the exception does not show its traceback."""
    with pytest.raises(refusals.UnreadableTraceback) as raised:
        refusals.fail(refusals.UnreadableTraceback)
    assert explain(raised.value).types[0] == "UnreadableTraceback"
