"""What the page on schedules shows is run as it stands there, and says what is so."""

from __future__ import annotations

import subprocess
import sys

from taskyard.model.recurrence import Every
from taskyard.model.schedule import Missed, Overlap, Schedule
from taskyard.model.schedule_state import AHEAD
from taskyard.ports.schedules import KEEP_FIRES
from taskyard.scheduling.recurring import DEPUTY_S
from tests.docs.blocks import TOP, blocks
from tests.scenario.processes import environment

PAGE = TOP / "docs" / "SCHEDULES.md"


def test_the_program_runs(tmp_path):
    """It runs as it is printed, and says what it should."""
    (block,) = [block for block in blocks(PAGE) if block.file is not None]
    (tmp_path / "schedules.py").write_text(block.text, "utf-8")
    done = subprocess.run(
        [sys.executable, "schedules.py"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[9, 9, 9, 9]\n['deep scan', 'scan']\n"


def test_the_numbers_and_defaults_are_right():
    """What the documents say of defaults and times is what the code does."""
    plain = Schedule(name="x", rule=Every(60), consumer="y")
    assert (plain.missed, plain.overlap, plain.catch_up_s) == (Missed.ONCE, Overlap.SKIP, 86_400)
    assert f"`grace_s` ({plain.grace_s:g})" in PAGE.read_text("utf-8")
    assert (DEPUTY_S, AHEAD.total_seconds()) == (2, 5)  # "about two seconds later", "more than five seconds ahead"
    for name in ("docs/CLI.md", "docs/adr/0014-one-task-a-fire-time.md"):
        assert f"{KEEP_FIRES:,}" in (TOP / name).read_text("utf-8")
