"""Consumers with parts, steps and templates on the devices of a real service and store."""

import asyncio
import json
from typing import Any

import pytest

from taskyard import ExecutorService, Task
from taskyard.devices import (
    Device,
    DeviceConsumer,
    GameAccount,
    Screenshot,
    Shell,
    SimulatedDevice,
    Tap,
    Template,
    WaitGone,
    cut_image,
)
from taskyard.devices.simulated_screen import SCREENS

ACCOUNT = GameAccount(7)


def template(screen: str, label: str) -> Template:
    """Cut from the screen of a simulated phone."""
    phone = SimulatedDevice(9)
    phone.phone.screen = screen
    (button,) = [button for button in SCREENS[screen].buttons if button.label == label]
    return Template(cut_image(phone.draw(), *button[1:5]), name=label)


START, PLAY, CLAIM = template("home", "Start"), template("title", "Play"), template("lobby", "Claim")


class Daily(DeviceConsumer):
    """Writes down what it does; waits for `goes_on` in its work."""

    name = "daily"
    cleanup_timeout_s = 5

    def __init__(self) -> None:
        self.done: list[str] = []
        self.works, self.goes_on, self.cleans = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def execute(self, device: Device, account: GameAccount, level: int = 1) -> str:
        await device.tap(START)
        self.done.append(f"work on {device.name}")
        self.works.set()
        await self.goes_on.wait()
        await device.tap_when(PLAY)
        return f"level {level}"

    async def cleanup(self, device: Device, account: GameAccount) -> None:
        self.done.append(f"cleanup on {device.name}")
        self.cleans.set()
        await device.shell("am force-stop game")


async def ended(service: ExecutorService, *, runs: int = 1) -> list[Any]:
    """The runs, oldest first, once there are so many and all have ended."""
    while True:
        found = await service.task_runs()
        if len(found) >= runs and all(run.finished_at is not None for run in found):
            return found[::-1]
        await asyncio.sleep(0.01)


async def steps_of(service: ExecutorService, run: Any, attempt: int | None = None) -> list[tuple[str, str, str]]:
    document = json.loads(await service.yard.read_artifact(run.task_id, "steps.json", attempt))
    return [(step["phase"], step["name"], step["outcome"]) for step in document["steps"]]


@pytest.mark.spec("DEV-08", "DEV-09", "DEV-19")
async def test_a_consumer_with_parts_runs_in_a_pool(tmp_path):
    """A run of the class form leaves its result, and its steps as an artifact in the store."""
    daily = Daily()
    daily.goes_on.set()
    phone = SimulatedDevice(1, name="emu-1")
    async with ExecutorService([phone], registry=[daily], store=tmp_path / "farm.db") as farm:
        assert await farm.enqueue(Task(source="daily", args={"level": 3}), ACCOUNT)
        (run,) = await ended(farm)
        assert (run.status, run.artifacts, run.worker_id) == ("completed", ("steps.json",), "emu-1")
        assert await farm.yard.handle(run.task_id).result() == "level 3"
        assert await steps_of(farm, run) == [
            ("execute", "wait_for 'Start'", "ok"),
            ("execute", "tap 'Start'", "ok"),
            ("execute", "wait_for 'Play'", "ok"),
            ("execute", "tap 'Play'", "ok"),
            ("cleanup", "shell 'am force-stop game'", "ok"),
        ]


@pytest.mark.spec("DEV-19")
async def test_a_consumer_that_is_a_list_of_steps_runs_in_a_pool():
    """A list of steps is a consumer without code, whose screenshot is an artifact of the attempt."""

    class Claims(DeviceConsumer):
        name = "claims"
        steps = (Shell("am start game"), Tap(PLAY), WaitGone(PLAY), Screenshot("news"))

    phone = SimulatedDevice(1)
    async with ExecutorService([phone], registry=[Claims()]) as farm:
        assert await farm.enqueue(Task(source="claims"), ACCOUNT)
        (run,) = await ended(farm)
        assert (run.status, run.artifacts) == ("completed", ("news.png", "steps.json"))
        assert phone.phone.screen == "news"


@pytest.mark.spec("DEV-08", "DEV-09")
async def test_a_step_that_fails_fails_the_task():
    """The attempt of a task whose template does not appear has the screen as an artifact, and is not done again."""

    class Claims(DeviceConsumer):
        name = "claims"
        steps = (Tap(CLAIM, timeout_s=0.05), Shell("am start game"))

    phone = SimulatedDevice(1)
    async with ExecutorService([phone], registry=[Claims()]) as farm:
        assert await farm.enqueue(Task(source="claims"), ACCOUNT)
        (run,) = await ended(farm)
        assert run.status == "failed"
        assert "did not see 'Claim' within 0.05 s; best match 0." in run.error
        assert {"failure.png", "step-001-wait-for-Claim.png", "steps.json"} >= set(run.artifacts) >= {"steps.json"}
        assert await farm.yard.read_artifact(run.task_id, "step-001-wait-for-Claim.png")


@pytest.mark.spec("DEV-08")
async def test_a_task_that_is_canceled_cleans_up():
    """A cancel of a running task ends it after its cleanup on the device, and keeps its steps."""
    daily, phone = Daily(), SimulatedDevice(1, name="emu-1")
    async with ExecutorService([phone], registry=[daily]) as farm:
        assert await farm.enqueue(Task(source="daily"), ACCOUNT)
        await daily.works.wait()
        (item,) = await farm.running_info()
        await farm.yard.handle(item["task_id"]).cancel()
        (run,) = await ended(farm)
        assert run.status == "canceled"
        assert daily.done == ["work on emu-1", "cleanup on emu-1"]
        assert phone.phone.screen == "home"
        assert (await steps_of(farm, run))[-1] == ("cleanup", "shell 'am force-stop game'", "ok")


@pytest.mark.spec("DEV-08", "DEV-11")
async def test_a_task_whose_device_is_lost_cleans_up_and_goes_to_another():
    """A device that vanishes during a run ends that run after its cleanup, and another device does the task."""
    daily, phones = Daily(), {n: SimulatedDevice(n, name=f"emu-{n}") for n in (1, 2)}
    async with ExecutorService(phones.values(), registry=[daily], heartbeat_s=0.2) as farm:
        assert await farm.enqueue(Task(source="daily"), ACCOUNT)
        await daily.works.wait()
        (item,) = await farm.running_info()
        lost, other = item["emulator_id"], 3 - item["emulator_id"]
        phones[lost].disconnect()
        await daily.cleans.wait()
        daily.goes_on.set()
        runs = await ended(farm, runs=2)
        assert [(run.emulator_id, run.status) for run in runs][-1] == (other, "completed")
        assert runs[0].emulator_id == lost
        assert daily.done[:2] == [f"work on emu-{lost}", f"cleanup on emu-{lost}"]
        assert daily.done[2:] == [f"work on emu-{other}", f"cleanup on emu-{other}"]
