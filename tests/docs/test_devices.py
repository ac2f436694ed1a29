"""What the page on devices shows is run as it stands there."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

from taskyard.device_admin import Devices
from taskyard.devices.actor_settings import ActorSettings
from taskyard.model.device import DeviceState
from taskyard.yard import Yard
from tests.docs.blocks import TOP, blocks
from tests.scenario.processes import environment

PAGE = TOP / "docs" / "DEVICES.md"

SHOWS = {
    "farm.py": "True\nFalse\nTrue\n[(7, 'completed'), (8, 'completed')]\n",
    "pool.py": "3 rows\nTrue\nbo\n1 completed ('steps.json',)\n",
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
    assert defaults["heartbeat_s"].default == ActorSettings().heartbeat_s == 10
    assert (defaults["auto_recover"].default, defaults["quarantine_account_after"].default) == (1, 5)
    for stated in ("`heartbeat_s` (10 s)", "`auto_recover` times (once)", "last five runs"):
        assert stated in text
