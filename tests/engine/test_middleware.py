"""Middleware that goes on after the code of its run has ended."""

import asyncio

import pytest

from taskyard.middleware import ExecutionResult, Middleware, RunContext, RunNext
from taskyard.model.command import Cancel
from taskyard.model.state import TaskState


async def give(record) -> str:
    return "done"


class Hang:
    """Run middleware that hangs after the code."""

    def __init__(self, *, raises: bool = False) -> None:
        self.hangs = asyncio.Event()
        self._raises = raises

    async def __call__(self, run: RunContext, call_next: RunNext) -> ExecutionResult:
        result = await call_next()
        try:
            self.hangs.set()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if self._raises:
                raise OSError("cannot close") from None
            raise
        return result


@pytest.mark.parametrize("raises", [False, True])
async def test_a_cancel_ends_middleware_that_hangs(start_rig, caplog, raises):
    """After the code has ended, a cancel gives the middleware its grace; then it is interrupted, the result of the code
    is stored, and a warning names the middleware."""
    rig = await start_rig(cancel_grace_s=0.02)
    hang = Hang(raises=raises)
    rig.consumer("give", give, middleware=(Middleware(around_run=hang),))
    uuid = await rig.submit("give")
    await hang.hangs.wait()
    await rig.engine.apply([uuid], Cancel(), by="ann")
    outcome = await rig.outcome(uuid)
    assert (outcome.state, outcome.result) == (TaskState.COMPLETED, '"done"')
    assert f"middleware Hang of task {uuid} did not end" in caplog.text


async def test_a_cancel_before_the_code_ended_counts_as_well(start_rig):
    """Middleware that hangs after code that a cancel has ended is interrupted too, and the task is canceled."""
    rig = await start_rig(cancel_grace_s=0.02)
    hang, begun = Hang(), asyncio.Event()

    async def work(record) -> None:
        begun.set()
        await asyncio.Event().wait()

    rig.consumer("work", work, middleware=(Middleware(around_run=hang),))
    uuid = await rig.submit("work")
    await begun.wait()
    await rig.engine.apply([uuid], Cancel(), by="ann")
    assert (await rig.outcome(uuid)).state is TaskState.CANCELED


async def test_a_forced_cancel_gives_no_grace(start_rig):
    """A cancel by force interrupts such middleware at once."""
    rig = await start_rig(cancel_grace_s=3600)
    hang = Hang()
    rig.consumer("give", give, middleware=(Middleware(around_run=hang),))
    uuid = await rig.submit("give")
    await hang.hangs.wait()
    await rig.engine.apply([uuid], Cancel(force=True), by="ann")
    assert (await rig.outcome(uuid)).state is TaskState.COMPLETED
