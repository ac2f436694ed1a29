"""What the page on devices shows is run as it stands there."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

from taskyard.device_admin import Devices
from taskyard.devices import DeviceConsumer, consumer, device, image_matching, recording, templates
from taskyard.devices.actor_settings import ActorSettings
from taskyard.devices.pool_settings import PoolSettings
from taskyard.executor_service import ExecutorService
from taskyard.model.device import DeviceState
from taskyard.yard import Yard
from tests.docs.blocks import TOP, blocks
from tests.scenario.processes import environment

PAGE = TOP / "docs" / "DEVICES.md"

SHOWS = {
    "farm.py": "True\nFalse\nTrue\n[(7, 'completed'), (8, 'completed')]\n",
    "pool.py": "3 rows\nTrue\nbo\n1 completed ('steps.json',)\n",
    "game.py": next(block.text for block in blocks(PAGE) if block.mark == "prints: game.py"),
}


@pytest.mark.parametrize("name", SHOWS)
def test_the_programs_run(tmp_path, name):
    """Each program runs as it is printed, and says what it should."""
    (program,) = [block for block in blocks(PAGE) if block.file == name]
    (tmp_path / name).write_text(program.text, "utf-8")
    done = subprocess.run(
        [sys.executable, name], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=50, check=False
    )
    assert (done.returncode, done.stdout) == (0, SHOWS[name]), done.stderr


def test_the_page_has_every_state_and_verb():
    """The page names each state of a device, each verb of `yard.devices`, and the defaults of the code."""
    text = PAGE.read_text("utf-8")
    verbs = [name for name, verb in inspect.getmembers(Devices, inspect.isfunction) if not name.startswith("_")]
    assert [name for name in verbs if f"`{name}(" not in text] == []
    assert [state for state in DeviceState if f"| `{state}` |" not in text] == []
    defaults = inspect.signature(Yard.device_pool).parameters
    assert (defaults["heartbeat_s"].default, ActorSettings().heartbeat_s) == (None, 10)
    assert (defaults["auto_recover"].default, defaults["quarantine_account_after"].default) == (1, 5)
    settings = {name: one.default for name, one in inspect.signature(PoolSettings).parameters.items()}
    assert {name: defaults[name].default for name in settings} == settings
    service = inspect.signature(ExecutorService).parameters
    assert {name: service[name].default for name in settings} == settings
    for stated in ("`heartbeat_s` (10 s)", "`auto_recover` times (once)", "last five runs"):
        assert stated in text


def test_the_limits_of_steps_are_those_of_the_code():
    """The page has the time limits of steps and parts, and the bounds of what a run leaves behind."""
    text = PAGE.read_text("utf-8")
    assert (recording.STEPS_KEPT, recording.SCREENSHOTS_KEPT, recording.SCREENSHOT_BYTES) == (300, 20, 8 << 20)
    assert (recording.LATEST_SCREENSHOTS, consumer.FINAL_SCREENSHOT_S) == (3, 5)
    assert (DeviceConsumer.ensure_ui_timeout_s, DeviceConsumer.cleanup_timeout_s) == (120, 30)
    assert (device.WAIT_TIMEOUT_S, device.POLL_S, device.QUICK_LIMIT_S) == (10, 0.5, 20)
    assert (templates.DEFAULT_THRESHOLD, image_matching.LEAST_PIXELS) == (0.85, 16)
    limits = ("latest 300", "at most 20 screenshots", "above 8 MB", "last three different", "within 5 s", "120 s")
    waits = ("every 0.5 s (`poll_s`) for 10 s", "longer than 20 s", "`threshold` is 0.85", "fewer than 16 pixels")
    for stated in (*limits, *waits, "`cleanup_timeout_s`, 30 s"):
        assert stated in text
