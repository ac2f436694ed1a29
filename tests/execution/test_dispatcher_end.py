"""The end of a dispatcher: whom it waits for, for how long, and what becomes of the rest."""

import asyncio
import threading

import pytest

from taskyard import Algorithm, AlgorithmContext, ErrorKind
from taskyard.errors import InvalidInput
from tests.execution import algorithms
from tests.execution.asking import PATIENCE_S, begin, spec

pytestmark = pytest.mark.spec("EXE-02")


@pytest.mark.parametrize(
    ("algorithm", "hints"),
    [
        (algorithms.wait, {"executor": "process"}),
        (algorithms.wait, {"isolated_pool": True}),
        (algorithms.wait_for_ever, {"executor": "process"}),
        (algorithms.wait_for_ever, {"executor": "thread"}),
        (algorithms.wait_for_ever, {"executor": "inline"}),
        (algorithms.hurry, {"executor": "thread"}),
    ],
    ids=["process", "isolated", "async-process", "async-thread", "async-inline", "polite-thread"],
)
async def test_what_outlasts_the_grace_is_interrupted(dispatch, hold, algorithm, hints):
    """A run that goes on after the grace is ended, and its caller is answered: `canceled`, unless it ended well."""
    told, held = asyncio.Event(), hold()
    dispatcher = dispatch((algorithm, spec("long", **hints)), on_progress=lambda *_: told.set())
    is_told = algorithm is not algorithms.wait
    running = begin(dispatcher, "long", None if is_told else held.folder)
    async with asyncio.timeout(PATIENCE_S):
        await (told.wait() if is_told else held.began())
        await dispatcher.shutdown(grace_s=0)
        result = await running
    if result.error is None:
        assert (algorithm, result.data) == (algorithms.hurry, "ended by itself")
    else:
        assert result.error.kind is ErrorKind.CANCELED
    assert dispatcher.health()["long"].active == 0


async def test_what_ends_within_the_grace_is_left_alone(dispatch, hold):
    """A shutdown with a grace returns as soon as all has ended, with every answer."""
    dispatcher = dispatch((algorithms.wait, spec("wait", executor="process")))
    held = hold()
    running = begin(dispatcher, "wait", held.folder)
    await held.began()
    closing = asyncio.get_running_loop().create_task(dispatcher.shutdown(grace_s=3600))
    await asyncio.sleep(0)
    held.let_go()
    async with asyncio.timeout(PATIENCE_S):
        await closing
        assert (await running).data == "!"


async def test_a_thread_that_goes_on_is_left_behind(dispatch, hold, monkeypatch, caplog):
    """A thread that nobody can end does not hold up a shutdown with a grace; the log says that it runs on."""
    monkeypatch.setattr("taskyard.execution.router.UNWIND_S", 0.05)
    dispatcher = dispatch((algorithms.wait, spec("wait", executor="thread")))
    held = hold()
    running = begin(dispatcher, "wait", held.folder)
    await held.began()
    async with asyncio.timeout(PATIENCE_S):
        await dispatcher.shutdown(grace_s=0)
    assert not running.done()
    assert "is left behind" in caplog.text
    held.let_go()
    assert (await running).data == "!"


async def test_a_shutdown_that_does_not_wait(dispatch):
    """It does not wait for the `shutdown` of algorithms either, which is done all the same."""
    gate, ended = threading.Event(), threading.Event()

    class Slow(Algorithm):
        spec = spec("slow", executor="thread")

        def run(self, given: int, context: AlgorithmContext) -> int:
            return given

        def shutdown(self) -> None:
            gate.wait(PATIENCE_S)
            ended.set()

    dispatcher = dispatch(Slow)
    assert (await dispatcher.run("slow", 1)).success
    await dispatcher.shutdown(wait=False)
    assert not ended.is_set()
    gate.set()
    assert await asyncio.to_thread(ended.wait, PATIENCE_S)


@pytest.mark.parametrize("grace_s", ["x", -1, float("nan")], ids=str)
async def test_a_grace_that_makes_no_sense(dispatch, grace_s):
    """It is refused, and the dispatcher goes on."""
    dispatcher = dispatch((algorithms.double, spec("double", executor="thread")))
    with pytest.raises(InvalidInput, match="grace_s must "):
        await dispatcher.shutdown(grace_s=grace_s)
    assert (await dispatcher.run("double", 1)).data == 2
