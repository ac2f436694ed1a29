"""The work on a device as a list of steps."""

import json
from types import MappingProxyType
from typing import Any

import pytest

from taskyard.devices import DeviceConsumer, GameAccount, Screenshot, Shell, Tap, WaitFor, WaitGone
from taskyard.errors import InvalidConsumer, TemplateNotSeen
from tests.devices.painted import Kept, PaintedAdapter, make_device
from tests.devices.test_templates import EMPTY, START, STARTING, paint, to_png

NONSENSE: Any = 5


class Stepwise(DeviceConsumer):
    name = "stepwise"
    templates = MappingProxyType({"start": START})
    steps = (
        Shell("am start game"),
        WaitFor("start"),
        Tap(START),
        WaitGone("start"),
        Tap(at=(3, 4)),
        Screenshot("lobby"),
    )


@pytest.mark.spec("DEV-08", "DEV-19")
async def test_a_list_of_steps_is_done_in_order():
    """A consumer with steps needs no code: they are done one by one, and its screenshot is kept."""
    adapter, kept = PaintedAdapter(STARTING), Kept()

    def tapped(x: int, y: int) -> None:
        adapter.png = EMPTY

    adapter.on_tap = tapped
    assert Stepwise().parameters == []
    Stepwise().check()
    assert await Stepwise().run(make_device(adapter), GameAccount(7), {}, keep=kept) is None
    touched = [call for call in adapter.calls if call != "screenshot"]
    assert touched == ["shell am start game", "tap 250 140", "tap 3 4"]
    assert kept["lobby.png"] == EMPTY
    assert {step["phase"] for step in json.loads(kept["steps.json"])["steps"]} == {"execute"}


async def test_an_optional_step_that_fails_is_passed_over():
    """The step after an optional one that failed is done, and the run is completed."""

    class Popup(DeviceConsumer):
        name = "popup"
        steps = (Tap(START, timeout_s=0, optional=True), Shell("go on"))

    adapter, kept = PaintedAdapter(to_png(paint(text=""))), Kept()
    await Popup().run(make_device(adapter), None, {}, keep=kept)
    assert adapter.calls == ["screenshot", "shell go on"]
    assert kept.keys() == {"steps.json"}


async def test_a_step_that_fails_ends_the_run():
    """The steps after one that failed are not done, and the error is that of the step."""

    class Strict(DeviceConsumer):
        name = "strict"
        steps = (WaitFor(START, timeout_s=0), Shell("never"))

    adapter = PaintedAdapter(EMPTY)
    with pytest.raises(TemplateNotSeen):
        await Strict().run(make_device(adapter), None, {})
    assert "shell never" not in adapter.calls


@pytest.mark.parametrize(
    ("steps", "why"),
    [
        ([Tap("stop")], "step 1, .*no template is called 'stop'"),
        ([WaitFor("start"), WaitGone("stop")], "step 2"),
        ([Tap()], "either a template or at"),
        ([Tap("start", at=(1, 2))], "either a template or at"),
        ([Tap(at=NONSENSE)], "x and y in pixels"),
        ([WaitFor("start", timeout_s=-1)], "timeout_s"),
        ([Shell(NONSENSE)], "command"),
        ([Screenshot("a/b")], "path separators"),
        (["start"], "step 1 must be a Tap"),
    ],
)
def test_steps_that_can_never_work_are_refused(steps: Any, why):
    """A step with an unknown template, or with nonsense, is refused when its class is defined."""
    with pytest.raises(InvalidConsumer, match=why):
        type("Broken", (DeviceConsumer,), {"name": "broken", "templates": {"start": START}, "steps": steps})


def test_steps_and_execute_exclude_each_other():
    """A class that has both, or templates that are none, is refused when it is defined."""

    async def execute(self, device, account): ...

    with pytest.raises(InvalidConsumer, match="steps and execute"):
        type("Both", (Stepwise,), {"execute": execute})
    with pytest.raises(InvalidConsumer, match="map names to Template objects"):
        type("Paths", (DeviceConsumer,), {"templates": {"start": "start.png"}})
