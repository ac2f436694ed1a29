"""What a run on a device leaves behind, and the bounds of it."""

import asyncio
import json
import logging

import numpy as np
import pytest

from taskyard import RetryPolicy, Yard, current_run
from taskyard.devices import Device, current_device, recording, run_on_device
from taskyard.devices.device import CURRENT_DEVICE
from taskyard.errors import DeviceError, DeviceLost, InvalidInput, NoCurrentRun, TaskFailed
from taskyard.model.attempt import ARTIFACT_DATA_BYTES
from taskyard.model.execution import ErrorKind
from tests.devices.painted import Kept, PaintedAdapter, make_device, started
from tests.devices.test_templates import EMPTY, START, STARTING, paint, to_png

SCREENS = [to_png(paint(text=f"{number}")) for number in range(8)]


async def look_at(device: Device, adapter: PaintedAdapter, *screens: bytes) -> None:
    for png in screens:
        adapter.png = png
        await device.screenshot()


@pytest.mark.spec("DEV-09")
async def test_the_last_screens_before_a_failure_are_kept():
    """A run that fails keeps the last three different screens that it saw, and the one at the end."""
    adapter, kept = PaintedAdapter(), Kept()
    device = make_device(adapter)

    async def work():
        await look_at(device, adapter, *SCREENS[:5], SCREENS[4], SCREENS[4])
        adapter.png = SCREENS[7]
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await run_on_device(device, work, keep=kept)
    assert {name: png for name, png in kept.items() if name != "steps.json"} == {
        "before-failure-1.png": SCREENS[2],
        "before-failure-2.png": SCREENS[3],
        "before-failure-3.png": SCREENS[4],
        "failure.png": SCREENS[7],
    }


async def test_a_run_that_succeeds_keeps_what_it_was_asked_to():
    """Without a failure only the screenshots with a name are kept, each as it was last."""
    adapter, kept = PaintedAdapter(), Kept()
    device = make_device(adapter)

    async def work():
        await look_at(device, adapter, *SCREENS[:3])
        await device.screenshot(name="lobby")
        adapter.png = SCREENS[3]
        await device.screenshot(name="lobby")

    await run_on_device(device, work, keep=kept)
    assert kept.keys() == {"steps.json", "lobby.png"}
    assert kept["lobby.png"] == SCREENS[3]


async def test_a_run_without_steps_leaves_nothing():
    """A run that never used its device has no artifacts."""
    kept = Kept()

    async def work():
        return 1

    assert await run_on_device(make_device(PaintedAdapter()), work, keep=kept) == 1
    assert kept == {}


async def test_a_screenshot_of_a_failed_wait_is_kept_once():
    """The screen that a failed wait has kept is not kept again when the run ends with it."""
    adapter, kept = PaintedAdapter(EMPTY), Kept()
    device = make_device(adapter)
    with pytest.raises(DeviceError):
        await run_on_device(device, lambda: device.tap(START), keep=kept)
    assert kept.keys() == {"steps.json", "step-001-wait-for-start.png", "failure.png"}


async def test_a_device_that_is_lost_is_not_asked_for_its_screen():
    """The last screens of a device that is lost are kept without asking it for another one."""
    adapter, kept = PaintedAdapter(), Kept()
    device = make_device(adapter)

    async def work():
        await look_at(device, adapter, SCREENS[0])
        adapter.is_lost = True
        await device.tap(1, 2)

    with pytest.raises(DeviceLost):
        await run_on_device(device, work, keep=kept)
    assert adapter.calls == ["screenshot", "tap 1 2"]
    assert kept.keys() == {"steps.json", "before-failure-1.png"}


async def test_a_device_that_hangs_does_not_hold_up_the_end(monkeypatch):
    """The screenshot at the end of a run that was cancelled has a time limit."""
    monkeypatch.setattr("taskyard.devices.consumer.FINAL_SCREENSHOT_S", 0.01)
    adapter, kept = PaintedAdapter(), Kept()
    adapter.hangs = {"pull", "screenshot"}
    device = make_device(adapter)
    task = await started(adapter, run_on_device(device, lambda: device.pull("/big"), keep=kept), "pull /big")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert kept.keys() == {"steps.json"}


async def test_screenshots_are_bounded(caplog):
    """A run keeps so many screenshots, none too large, and says in its log which it does not keep."""
    adapter, kept = PaintedAdapter(STARTING), Kept()
    device = make_device(adapter)

    async def work():
        for number in range(recording.SCREENSHOTS_KEPT + 2):
            await device.screenshot(name=f"screen-{number:02}")
        await device.screenshot(name="screen-00")  # one more of a name that is kept
        adapter.png = b"x" * (recording.SCREENSHOT_BYTES + 1)
        await device.screenshot(name="screen-01")
        raise ValueError("broken")

    with caplog.at_level(logging.WARNING), pytest.raises(ValueError, match="broken"):
        await run_on_device(device, work, keep=kept)
    assert sum(name.startswith("screen-") for name in kept) == recording.SCREENSHOTS_KEPT
    assert kept["screen-01.png"] == STARTING
    assert "before-failure-1.png" in kept
    assert "failure.png" not in kept
    assert "screenshot screen-20 is not kept: a run keeps 20" in caplog.text
    assert f"screenshot screen-01.png is not kept: it has {recording.SCREENSHOT_BYTES + 1} bytes" in caplog.text


async def test_screens_in_memory_are_bounded(monkeypatch):
    """The screens that are remembered in case of a failure have a limit in bytes, save the newest."""
    monkeypatch.setattr(recording, "LATEST_BYTES", 2 * len(SCREENS[0]) + 100)
    adapter, kept = PaintedAdapter(), Kept()
    device = make_device(adapter)
    large = to_png(paint(size=(2000, 2000)))
    await look_at(device, adapter, *SCREENS[:3])
    assert list(device.recording.latest) == SCREENS[1:3]
    await look_at(device, adapter, large)
    assert list(device.recording.latest) == [large]
    assert kept == {}


async def test_steps_are_bounded():
    """Of a run with very many steps the latest are kept, with the number of those that were dropped."""
    adapter, kept = PaintedAdapter(), Kept()
    device = make_device(adapter)

    async def work():
        for number in range(recording.STEPS_KEPT + 5):
            await device.shell(f"{number} {'x' * 1000}")

    await run_on_device(device, work, keep=kept)
    document = json.loads(kept["steps.json"])
    assert document["dropped"] == 5
    assert [step["name"][:8] for step in document["steps"]][:2] == ["shell '5", "shell '6"]
    assert len(kept["steps.json"]) < ARTIFACT_DATA_BYTES


async def test_an_artifact_that_cannot_be_kept_fails_nothing(caplog):
    """A full disk, or one artifact too many, is a warning in the log of the run."""

    def keep(name: str, data: bytes, *, media_type: str) -> None:
        raise InvalidInput(f"artifact {name!r} is one too many")

    device = make_device(PaintedAdapter(STARTING))
    with caplog.at_level(logging.WARNING):
        assert await run_on_device(device, lambda: device.screenshot(name="lobby"), keep=keep) == STARTING
    assert "artifact lobby.png is not kept: artifact 'lobby.png' is one too many" in caplog.text
    assert "artifact steps.json is not kept" in caplog.text


async def test_a_name_that_no_artifact_can_have_is_refused():
    """A screenshot with a path as its name is refused before anything is asked of the device."""
    adapter = PaintedAdapter(STARTING)
    with pytest.raises(InvalidInput, match="path separators"):
        await make_device(adapter).screenshot(name="../lobby")
    assert adapter.calls == []


async def test_steps_are_logged(caplog):
    """A step that fails is a warning with its error; one that may fail is told at INFO, one that is fine at DEBUG."""
    device = make_device(PaintedAdapter())

    async def work():
        await device.shell("go on")
        with device.optional():
            await device.shell("false 1")
        await device.shell("false 2")

    with caplog.at_level(logging.DEBUG, logger="taskyard.devices"), pytest.raises(DeviceError):
        await run_on_device(device, work)
    said = [(record.levelname, record.getMessage()) for record in caplog.records if "step" in record.getMessage()]
    assert said == [
        ("DEBUG", "step shell 'go on': ok"),
        ("INFO", "optional step shell 'false 1' failed: DeviceError: exit status 1"),
        ("WARNING", "step shell 'false 2' failed: DeviceError: exit status 1"),
    ]


def test_outside_of_a_run_there_is_no_device():
    """current_device() raises outside of a run on a device."""
    with pytest.raises(NoCurrentRun):
        current_device()


@pytest.mark.spec("DEV-09")
@pytest.mark.parametrize("store", ["memory", "sqlite"])
async def test_a_store_has_the_artifacts_of_a_run(store, tmp_path):
    """Steps, screenshots and warnings of a run that failed are read back from the store, also when they are files."""
    screen = to_png(np.random.default_rng(1).integers(0, 256, (600, 600, 3), np.uint8))
    assert len(screen) > ARTIFACT_DATA_BYTES  # so it becomes a file
    adapter = PaintedAdapter(screen)
    url = "memory://" if store == "memory" else f"sqlite:///{tmp_path / 'yard.db'}"
    yard = Yard(url, artifacts=tmp_path / "artifacts")

    @yard.consumer(retry=RetryPolicy(max_retries=0))
    async def play(level: int) -> int:
        CURRENT_DEVICE.set(make_device(adapter))
        device = current_device()

        async def work() -> int:
            await device.screenshot(name="lobby")
            await device.wait_for(START, timeout_s=0)
            return level

        return await run_on_device(device, work, keep=current_run().artifact)

    async with yard:
        task = await play.submit(level=3)
        with pytest.raises(TaskFailed) as failed:
            await task.result()
        assert failed.value.kind == ErrorKind.RUNTIME
        assert "did not see 'start' on the screen" in str(failed.value)
        names = [found.artifact.name for found in await yard.artifacts(task)]
        assert names == ["failure.png", "lobby.png", "step-002-wait-for-start.png", "steps.json"]
        for name in names[:3]:
            assert await yard.read_artifact(task, name) == screen
        document = json.loads(await yard.read_artifact(task, "steps.json"))
        assert [(step["name"], step["outcome"]) for step in document["steps"]] == [
            ("screenshot 'lobby'", "ok"),
            ("wait_for 'start'", "failed"),
        ]
        assert document["device"] == "emu-1"
        lines = [found.line.text for found in await yard.log_lines(task)]
        assert any(line.startswith("step wait_for 'start' failed: TemplateNotSeen") for line in lines)
