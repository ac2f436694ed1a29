"""`sys.exit` in code that runs while a value is pickled, unpickled or set up: reported as what it is."""

import os

import pytest

from taskyard.futures import CannotCross, ProcessPool, WorkerDied
from taskyard.model.execution import ErrorKind
from tests.execution import exits
from tests.execution.kinds import PATIENCE_S

PORTABLE = pytest.mark.parametrize("portable", [False, True], ids=["forked", "portable"])


@PORTABLE
@pytest.mark.parametrize("kind", [exits.ExitsWhenReduced, exits.ExitsWhenStored], ids=lambda kind: kind.__name__)
async def test_while_the_result_is_pickled(open_desk, kind, portable):
    """The error names `SystemExit` and its code, it is `system`, and the same worker serves the next call."""
    desk = open_desk(max_workers=1, spare=False, portable=portable)
    pid = await desk.value(os.getpid)
    error = (await desk.ask(exits.make, kind)).error
    assert (error.kind, error.type) == (ErrorKind.SYSTEM, "SystemExit")
    assert error.message == "its result could not be sent back from the worker process: SystemExit: 7"
    assert await desk.value(os.getpid) == pid


@PORTABLE
async def test_while_an_argument_is_loaded(open_desk, portable):
    """The error names `SystemExit` and its code, and the same worker serves the next call."""
    desk = open_desk(max_workers=1, spare=False, portable=portable)
    pid = await desk.value(os.getpid)
    error = (await desk.ask(print, exits.ExitsWhenLoaded())).error
    assert error.message == "it could not be loaded in a worker process: SystemExit: 7"
    assert await desk.value(os.getpid) == pid


def test_as_a_future():
    """A future raises `CannotCross`, which says that the function has run."""
    with ProcessPool(1) as pool:
        raised = pool.submit(exits.make, exits.ExitsWhenReduced).exception(PATIENCE_S)
        assert isinstance(raised, CannotCross)
        assert raised.has_run
        assert "SystemExit: 7" in str(raised)


def test_in_an_initializer():
    """An initializer that calls `sys.exit` is the reason that a call is given."""
    with ProcessPool(1, initializer=exits.leave, initargs=(7,)) as pool:
        raised = pool.submit(abs, -1).exception(PATIENCE_S)
    assert isinstance(raised, WorkerDied)
    assert "SystemExit: 7" in str(raised)
