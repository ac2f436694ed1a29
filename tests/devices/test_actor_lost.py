"""A run whose device is lost, or whose node loses the device to another one, and what its cleanup may still do."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from datetime import timedelta

import pytest

from taskyard.devices.actor import WorkerActor
from taskyard.devices.consumer import run_on_device
from taskyard.devices.device import current_device
from taskyard.errors import DeviceError, DeviceLost
from taskyard.model.device import DeviceOrders, DeviceState
from taskyard.model.execution import ErrorCode
from taskyard.testing.clock import ManualClock
from tests.devices.test_actor import HEARTBEAT_S, STAMP, begin
from tests.devices.trivial import ScriptedAdapter, an_actor, pass_time, running, settled


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def adapter() -> ScriptedAdapter:
    return ScriptedAdapter()


@pytest.fixture
def actor(adapter: ScriptedAdapter, clock: ManualClock) -> WorkerActor:
    return an_actor(adapter, clock)


class Work:
    """A run with a cleanup, as the consumers of a pool run it. `error` is what the run raised."""

    def __init__(
        self, body: Callable[[], Awaitable[object]], *, cleanup: Callable[[], Awaitable[object]] | None = None
    ) -> None:
        self.error: BaseException | None = None
        self._body, self._cleanup = body, cleanup

    async def __call__(self, _: object) -> object:
        try:
            return await run_on_device(current_device(), self._body, cleanup=self._cleanup)
        except BaseException as error:
            self.error = error
            raise


async def go_on() -> None:
    """Code that ends only if it is interrupted."""
    await asyncio.Event().wait()


@pytest.mark.spec("DEV-10")
async def test_the_run_of_a_device_that_hangs_ends_with_its_loss(
    actor: WorkerActor, adapter: ScriptedAdapter, clock: ManualClock
) -> None:
    """A heartbeat that finds the device lost ends the run with `DeviceLost`, and no screenshot is tried."""
    work = Work(go_on)
    async with running(actor):
        submitted = begin(actor, work)
        await settled()
        adapter.hangs.update(["health", "connect", "screenshot"])
        await pass_time(clock, 2 * HEARTBEAT_S)
        error = (await submitted.result()).error
        assert error is not None
        assert error.code is ErrorCode.DEVICE_LOST
        assert isinstance(work.error, DeviceLost)
        assert str(work.error).startswith("emu-1 is lost: no answer within 4 s")
        assert isinstance(submitted.run.exception, DeviceLost)
        assert adapter.count("screenshot") == 0


async def test_a_cancel_of_a_run_whose_device_is_lost_is_a_cancel(
    actor: WorkerActor, adapter: ScriptedAdapter, clock: ManualClock
) -> None:
    """A person cancels a run, and its device is lost before the run has ended: it is canceled and not run again."""
    work = Work(go_on)
    async with running(actor):
        submitted = begin(actor, work)
        await settled()
        adapter.is_plugged_in = False
        submitted.run.cancel_requested = True
        await pass_time(clock, HEARTBEAT_S)
        error = (await submitted.result()).error
        assert error is not None
        assert isinstance(work.error, DeviceLost)
        assert error.kind == "canceled"


async def test_a_device_that_is_lost_in_the_cleanup_is_told(
    actor: WorkerActor, adapter: ScriptedAdapter, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """The work was done and its device is lost during the cleanup: the log of the run says that it may be done
    again."""

    async def do() -> int:
        return 1

    async def clean_up() -> None:
        await current_device().shell("stop")

    adapter.hangs.add("shell")
    work = Work(do, cleanup=clean_up)
    async with running(actor):
        submitted = begin(actor, work)
        await settled()
        adapter.is_plugged_in = False
        await pass_time(clock, HEARTBEAT_S)
        adapter.let_go.set()
        error = (await submitted.result()).error
        assert error is not None
        assert error.code is ErrorCode.DEVICE_LOST
        assert isinstance(work.error, DeviceLost)
    (line,) = [record for record in caplog.records if "the work was done" in record.getMessage()]
    assert (line.levelno, "done again" in line.getMessage()) == (logging.WARNING, True)


async def test_a_cleanup_that_fails_on_the_device_leads_to_a_check(
    actor: WorkerActor, adapter: ScriptedAdapter
) -> None:
    """The device may be the reason for a cleanup that failed with an error of it: it is checked at once."""

    async def do() -> int:
        return 1

    async def clean_up() -> None:
        raise DeviceError("the screen is black")

    async with running(actor):
        checks = adapter.count("health")
        assert not (await begin(actor, Work(do, cleanup=clean_up)).result()).success
        await settled()
        assert adapter.count("health") == checks + 1


# --- another node may serve the device --------------------------------------------------------------------------------


@pytest.mark.spec("DEV-05")
async def test_a_run_cannot_use_a_device_that_is_revoked(
    actor: WorkerActor, adapter: ScriptedAdapter, clock: ManualClock
) -> None:
    """A cleanup has 2 s. Then the call under way, and each further one, is a `DeviceLost`, and the adapter closes."""
    seen: list[str] = []

    async def clean_up() -> None:
        for command in ("one", "two", "three"):
            try:
                seen.append(await current_device().shell(command))
                adapter.hangs.add("shell")
            except DeviceLost as error:
                seen.append(f"{command}: {error}")

    work = Work(go_on, cleanup=clean_up)
    loop = asyncio.create_task(actor.run_forever())
    await settled()
    submitted = begin(actor, work)
    await settled()
    actor.revoke("this node has lost its lease")
    closing = asyncio.create_task(actor.close(grace_s=0.0))
    await pass_time(clock, 1.75)
    assert (seen, adapter.calls[-1], adapter.active) == (["one"], "shell", 1)
    await pass_time(clock, 0.25)
    reason = "emu-1 is lost: this node has lost its lease"
    assert seen == ["one", f"two: {reason}", f"three: {reason}"]
    assert (adapter.calls[-1], adapter.count("shell"), adapter.active) == ("close", 2, 0)
    assert isinstance(work.error, DeviceLost)
    async with asyncio.timeout(10):
        await asyncio.gather(closing, loop)
    assert (await submitted.result()).error is not None


@pytest.mark.spec("DEV-05")
async def test_a_device_that_is_revoked_is_not_touched(
    actor: WorkerActor, adapter: ScriptedAdapter, clock: ManualClock
) -> None:
    """Code that ignores its interruption keeps the actor, but the actor neither checks nor restarts the device."""
    gate = asyncio.Event()

    async def clean_up() -> None:
        await gate.wait()

    loop = asyncio.create_task(actor.run_forever())
    await settled()
    submitted = begin(actor, Work(go_on, cleanup=clean_up))
    await settled()
    actor.revoke("this node does not serve it any more")
    closing = asyncio.create_task(actor.close(grace_s=0.0))
    await pass_time(clock, 2.0)
    assert adapter.calls[-1] == "close"
    calls = len(adapter.calls)
    await pass_time(clock, 17.0)
    assert len(adapter.calls) == calls
    assert not submitted.task.done()
    await pass_time(clock, 2.0)
    async with asyncio.timeout(10):
        await asyncio.gather(closing, loop)
    gate.set()
    await submitted.result()
    assert len(adapter.calls) == calls


# --- the wall clock ---------------------------------------------------------------------------------------------------


async def test_a_device_that_is_taken_comes_back_by_the_wall_clock(actor: WorkerActor, clock: ManualClock) -> None:
    """Somebody sets the wall clock forward while a device is taken for a time: it is back within 5 s."""
    async with running(actor):
        actor.set_orders(DeviceOrders(taken=STAMP, taken_until=clock.now() + timedelta(seconds=600)))
        await pass_time(clock, 1.0)
        clock.step(600)
        assert (actor.state, actor.takes_tasks) == (DeviceState.DOWN, False)
        await pass_time(clock, 5.0)
        assert (actor.state, actor.takes_tasks) == (DeviceState.IDLE, True)


async def test_a_device_that_is_taken_stays_so_by_the_wall_clock(
    actor: WorkerActor, adapter: ScriptedAdapter, clock: ManualClock
) -> None:
    """Somebody sets the wall clock back while a device is taken for a time: it is not touched until that time."""
    async with running(actor):
        actor.set_orders(DeviceOrders(taken=STAMP, taken_until=clock.now() + timedelta(seconds=60)))
        await settled()
        clock.step(-60)
        await pass_time(clock, 119.0)
        assert (actor.state, adapter.calls[-1]) == (DeviceState.TAKEN, "close")
        await pass_time(clock, 1.25)
        assert actor.state is DeviceState.IDLE
