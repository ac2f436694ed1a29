"""The pipeline of a run on a device: the work, its cleanup, and what becomes of steps that failed."""

import asyncio
import json

import pytest

from taskyard.devices import DeviceConsumer, GameAccount, consumer, run_on_device
from taskyard.errors import CleanupFailed, DeviceError, DeviceLost, InvalidConsumer, StepFailed
from tests.devices.painted import Kept, PaintedAdapter, make_device, started


def steps_of(kept: Kept):
    document = json.loads(kept["steps.json"])
    return [(step["name"], step["phase"], step["outcome"]) for step in document["steps"]]


class Daily(DeviceConsumer):
    """Says on the device what it does."""

    name = "daily"

    async def prepare(self, device, account):
        await device.shell(f"install {account.account_id}")

    async def ensure_ui(self, device):
        await device.restart_app()

    async def execute(self, device, account, level: int = 1):
        return await device.shell(f"play {level}")

    async def cleanup(self, device, account, **args):
        await device.shell(f"stop {args}")


@pytest.mark.spec("DEV-08", "DEV-19")
async def test_the_parts_of_a_consumer_run_in_order():
    """A run calls prepare, ensure_ui, execute and cleanup, each with the arguments that it names."""
    adapter, kept = PaintedAdapter(), Kept()
    result = await Daily().run(make_device(adapter), GameAccount(7), {"level": 3}, keep=kept)
    assert result == "PLAY 3"
    assert adapter.calls == ["shell install 7", "restart_app", "shell play 3", "shell stop {'level': 3}"]
    assert [phase for _, phase, _ in steps_of(kept)] == ["prepare", "ensure_ui", "execute", "cleanup"]
    assert json.loads(kept["steps.json"])["phases"].keys() == {"prepare", "ensure_ui", "execute", "cleanup"}


@pytest.mark.spec("DEV-08")
@pytest.mark.parametrize("part", ["prepare", "ensure_ui", "execute"])
async def test_cleanup_runs_after_a_failure(part):
    """Cleanup runs whichever part failed, and the run ends with the error of that part."""

    async def fail(*_args, **_kwargs):
        raise ValueError("broken")

    adapter, daily = PaintedAdapter(), Daily()
    setattr(daily, part, fail)
    with pytest.raises(ValueError, match="broken"):
        await daily.run(make_device(adapter), GameAccount(7), {})
    assert adapter.calls[-1] == "shell stop {}"


@pytest.mark.spec("DEV-08")
@pytest.mark.parametrize("how", ["cancel", "timeout"])
async def test_cleanup_runs_after_a_cancellation(how):
    """A run that is cancelled, or past its timeout, in the middle of a step still cleans up on the device."""
    adapter, kept = PaintedAdapter(), Kept()
    adapter.hangs = {"restart_app"}
    running = Daily().run(make_device(adapter), GameAccount(7), {}, keep=kept)
    if how == "timeout":
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await running
    else:
        task = await started(adapter, running, "restart_app")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert adapter.calls[-1] == "shell stop {}"
    assert steps_of(kept)[1] == ("restart_app", "ensure_ui", "canceled")
    assert steps_of(kept)[-1] == ("shell 'stop {}'", "cleanup", "ok")


@pytest.mark.spec("DEV-08")
async def test_cleanup_runs_when_the_device_is_lost():
    """The loss of the device is the error of the run, even though its cleanup fails as well."""
    adapter, kept = PaintedAdapter(), Kept()
    adapter.is_lost = True
    with pytest.raises(DeviceLost, match="emu-1 is gone"):
        await Daily().run(make_device(adapter), GameAccount(7), {}, keep=kept)
    assert steps_of(kept)[-1] == ("shell 'stop {}'", "cleanup", "failed")


async def test_a_cancellation_during_the_cleanup_waits_for_it():
    """A second cancellation does not interrupt the cleanup, and the run still ends with the first error."""
    gate, adapter = asyncio.Event(), PaintedAdapter()
    device = make_device(adapter)

    async def work():
        raise ValueError("broken")

    async def cleanup():
        await device.shell("stop")
        await gate.wait()
        await device.shell("stopped")

    task = await started(adapter, run_on_device(device, work, cleanup=cleanup), "shell stop")
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    gate.set()
    with pytest.raises(ValueError, match="broken"):
        await task
    assert adapter.calls[-1] == "shell stopped"


async def test_a_run_that_is_cancelled_in_its_cleanup_is_cancelled():
    """If the work was done, a cancellation during the cleanup takes effect after it."""
    gate, adapter = asyncio.Event(), PaintedAdapter()
    device = make_device(adapter)

    async def work():
        return 1

    async def cleanup():
        await device.shell("stop")
        await gate.wait()

    task = await started(adapter, run_on_device(device, work, cleanup=cleanup), "shell stop")
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_cleanup_that_hangs_is_given_up(monkeypatch):
    """A cleanup that ignores its timeout and its cancellation does not hold up the run, nor use the device later."""
    monkeypatch.setattr(consumer, "ABANDON_S", 0.01)
    adapter, gate = PaintedAdapter(), asyncio.Event()
    device = make_device(adapter)
    refused: asyncio.Future[DeviceError] = asyncio.get_running_loop().create_future()

    async def work():
        return 1

    async def cleanup():
        while not gate.is_set():
            try:
                await gate.wait()
            except asyncio.CancelledError:
                continue
        try:
            await device.shell("late")
        except DeviceError as exc:
            refused.set_result(exc)

    with pytest.raises(CleanupFailed, match=r"within 0\.01 s"):
        await run_on_device(device, work, cleanup=cleanup, cleanup_timeout_s=0.01)
    gate.set()
    assert "has ended" in str(await refused)
    assert adapter.calls == []


@pytest.mark.parametrize("error", [ValueError("odd"), DeviceLost("gone"), asyncio.CancelledError(), SystemExit(1)])
async def test_a_failed_cleanup_fails_the_run(error):
    """A run whose work was done and whose cleanup failed is a failure that says so; it is not done again elsewhere."""

    async def work():
        return 1

    async def cleanup():
        raise error

    with pytest.raises(CleanupFailed, match="the work was done") as failed:
        await run_on_device(make_device(PaintedAdapter()), work, cleanup=cleanup)
    cause = failed.value.__cause__
    assert cause is error or f"it raised {type(error).__name__}" in str(cause) or str(cause) == "it was cancelled"
    assert not isinstance(failed.value, DeviceLost)


@pytest.mark.parametrize("again", [False, True])
async def test_a_cancellation_at_any_moment_is_cleaned_up_after(again):
    """Whenever a run is cancelled, once or again and again, its cleanup runs once and to its end, and the run ends."""
    outcomes = set()
    for moment in range(60):
        adapter, kept = PaintedAdapter(b"screen"), Kept()
        device = make_device(adapter)

        async def work(device=device):
            for _ in range(5):
                await device.shell("work")
            return 1

        async def cleanup(device=device):
            for _ in range(5):
                await device.shell("clean")

        task = asyncio.create_task(run_on_device(device, work, cleanup=cleanup, keep=kept))
        for _ in range(moment):
            await asyncio.sleep(0)
        while not task.done():
            task.cancel()
            await asyncio.sleep(0)
            if not again:
                break
        await asyncio.wait([task])
        outcomes.add(task.cancelled())
        if adapter.calls:  # else it was cancelled before its first step
            assert adapter.calls.count("shell clean") == 5
            assert adapter.calls[-1] == "shell clean"
            assert "steps.json" in kept
            with pytest.raises(DeviceError, match="has ended"):
                await device.shell("late")
    assert outcomes == {True, False}


async def test_code_that_exits_is_cleaned_up_after():
    """Even after a SystemExit of the code the cleanup runs, and the run ends with it."""
    device = make_device(PaintedAdapter())

    async def work():
        raise SystemExit(3)

    async def cleanup():
        await device.shell("stop")

    with pytest.raises(SystemExit):
        await run_on_device(device, work, cleanup=cleanup)
    assert [step.phase for step in device.steps] == ["cleanup"]


@pytest.mark.spec("DEV-08")
async def test_a_run_with_a_failed_step_is_never_completed():
    """Code that handles the error of a step does not complete the run."""
    device, kept = make_device(PaintedAdapter()), Kept()

    async def work():
        try:
            await device.shell("false")
        except DeviceError:
            return 1

    with pytest.raises(StepFailed, match=r"shell 'false' failed.*exit status 1.*optional"):
        await run_on_device(device, work, keep=kept)
    assert steps_of(kept) == [("shell 'false'", "execute", "failed")]


async def test_a_swallowed_loss_of_the_device_is_still_a_loss():
    """Code that handles a DeviceLost, even as an optional step, still ends with it: another device gets the task."""
    adapter = PaintedAdapter()
    device = make_device(adapter)

    async def work():
        with pytest.raises(DeviceError):
            await device.shell("false")
        adapter.is_lost = True
        with pytest.raises(DeviceLost), device.optional():
            await device.shell("am start game")

    with pytest.raises(DeviceLost):
        await run_on_device(device, work)


async def test_an_optional_step_may_fail():
    """A failure in an optional block ends the block and is recorded; the run goes on and is completed."""
    device, kept = make_device(PaintedAdapter()), Kept()

    async def work():
        with device.optional():
            await device.shell("false")
            raise AssertionError("the block has ended")
        return await device.shell("go on")

    assert await run_on_device(device, work, keep=kept) == "GO ON"
    assert [(step.outcome, step.optional) for step in device.steps] == [("failed", True), ("ok", False)]


async def test_a_step_that_the_code_cancels_is_no_failure():
    """The loser of two concurrent steps is recorded as canceled, and the run is completed."""
    adapter = PaintedAdapter()
    adapter.hangs = {"pull"}
    device = make_device(adapter)

    async def work():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await device.pull("/big")
        return await device.shell("go on")

    assert await run_on_device(device, work) == "GO ON"
    assert [step.outcome for step in device.steps] == ["canceled", "ok"]


async def test_a_task_that_outlives_its_run_cannot_use_the_device():
    """An asyncio task that the code leaves behind is cancelled in its step, and cannot disturb the next run."""
    adapter = PaintedAdapter()
    adapter.hangs = {"pull"}
    device = make_device(adapter)
    left: list[asyncio.Task[bytes]] = []

    async def work():
        left.append(await started(adapter, device.pull("/big"), "pull /big"))
        return 1

    assert await run_on_device(device, work) == 1
    with pytest.raises(asyncio.CancelledError):
        await left[0]
    with pytest.raises(DeviceError, match="has ended"):
        await device.tap(1, 2)


async def test_a_call_that_never_answers_is_the_loss_of_the_device(monkeypatch):
    """A device that is connected and does not answer a call is lost after a time limit."""
    monkeypatch.setattr("taskyard.devices.device.QUICK_LIMIT_S", 0.01)
    adapter = PaintedAdapter()
    adapter.hangs = {"tap"}
    device = make_device(adapter)
    with pytest.raises(DeviceLost, match=r"did not answer within 0\.01 s"):
        await run_on_device(device, lambda: device.tap(1, 2))


async def test_concurrent_steps_take_turns():
    """A device does one thing at a time, whatever its code does at once."""
    adapter = PaintedAdapter()
    adapter.hangs = {"pull"}
    device = make_device(adapter)
    pulling = await started(adapter, device.pull("/big"), "pull /big")
    tapping = asyncio.ensure_future(device.tap(1, 2))
    await asyncio.sleep(0)
    assert adapter.calls == ["pull /big"]
    pulling.cancel()
    await tapping
    assert adapter.calls == ["pull /big", "tap 1 2"]


async def test_ensure_ui_has_a_timeout():
    """An app that does not come up in time fails the run with a message that says which part took too long."""

    class Slow(Daily):
        ensure_ui_timeout_s = 0.01

    adapter = PaintedAdapter()
    adapter.hangs = {"restart_app"}
    with pytest.raises(DeviceError, match=r"ensure_ui did not bring emu-1 to a known screen within 0\.01 s"):
        await Slow().run(make_device(adapter), GameAccount(7), {})
    assert adapter.calls[-1] == "shell stop {}"


def test_a_consumer_that_cannot_work_is_refused():
    """A class without execute, without a name, or with a part that is not async is refused when it is defined."""

    class Empty(DeviceConsumer):
        name = "empty"

    class Nameless(Daily):
        name = ""

    class Impatient(Daily):
        cleanup_timeout_s = 0

    with pytest.raises(InvalidConsumer, match="neither execute nor steps"):
        Empty().check()
    with pytest.raises(InvalidConsumer, match="name must be"):
        Nameless().check()
    with pytest.raises(InvalidConsumer, match="cleanup_timeout_s"):
        Impatient().check()
    with pytest.raises(InvalidConsumer, match=r"cleanup must be written as `async def`"):
        type("Plain", (Daily,), {"cleanup": lambda self, device, account: None})
    Daily().check()
    assert [parameter.name for parameter in Daily().parameters] == ["level"]
