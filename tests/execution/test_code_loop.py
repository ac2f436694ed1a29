"""Async code on a loop of its own: ends, leftovers and what is kept."""

import asyncio
import contextvars
import threading

import pytest

from taskyard.execution.code_loop import CodeLoop, close_loop_here, find_loop_here, loop_here

seen: contextvars.ContextVar[str] = contextvars.ContextVar("seen")


@pytest.fixture
def loop():
    made = CodeLoop()
    yield made
    made.close()


async def give(value):
    await asyncio.sleep(0)
    if isinstance(value, BaseException):
        raise value
    return value


@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()])
def test_what_code_raises_comes_out_and_the_loop_goes_on(loop, error):
    """Whatever the code raises is raised to the caller, with no frame of asyncio in its traceback."""
    with pytest.raises(type(error)) as raised:
        loop.run(give(error))
    assert raised.value is error
    assert "asyncio" not in str([entry.path for entry in raised.traceback])
    assert loop.run(give(7)) == 7


def test_the_code_sees_the_context_of_its_caller(loop):
    """Variables are those at the time of the call, not those of the first."""
    for value in ("one", "two"):
        seen.set(value)
        assert loop.run(give_seen()) == value


async def give_seen():
    return seen.get()


def test_what_is_left_behind_cleans_up_before_the_call_ends(loop, caplog):
    """A task that outlives its call is cancelled, awaited, and heard if it fails at that."""
    cleaned = []

    async def linger():
        try:
            await asyncio.sleep(600)
        finally:
            await asyncio.sleep(0)
            cleaned.append("up")
            raise OSError("while cleaning")

    async def leave():
        task = asyncio.create_task(linger())
        await asyncio.sleep(0)
        return task

    assert loop.run(leave()).done()
    assert cleaned == ["up"]
    assert "left behind failed" in caplog.text


def test_an_interrupted_loop_lets_its_code_clean_up(loop):
    """A signal that hits the loop between two steps of the code ends it as a cancel does."""
    cleaned = []

    async def wait():
        asyncio.get_running_loop().call_soon(_terminate)
        try:
            await asyncio.sleep(600)
        finally:
            cleaned.append("up")

    with pytest.raises(SystemExit):
        loop.run(wait())
    assert cleaned == ["up"]


def _terminate():
    raise SystemExit("terminated")


def test_a_thread_has_one_loop_until_it_ends():
    """It is the same for every call of a thread, known to be its only while code runs on it, and closed with what it
    was asked to close, the last first."""
    closed = []

    async def close(name):
        closed.append(name)

    async def look():
        return find_loop_here()

    def work():
        mine = loop_here()
        assert loop_here() is mine
        assert find_loop_here() is None
        assert mine.run(look()) is mine
        for name in ("first", "second"):
            mine.at_close(lambda name=name: close(name))
        close_loop_here()
        closed.append(loop_here() is not mine)
        close_loop_here()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert closed == ["second", "first", True]
