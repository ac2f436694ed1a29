"""What the page on schedules shows is run as it stands there, and says what is so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from taskyard.model.each import FUNCTION_S, LARGEST_LIST, MOST_ITEMS
from taskyard.model.recurrence import Every
from taskyard.model.schedule import Missed, Overlap, Schedule
from taskyard.model.schedule_state import AHEAD, LONGEST_RETRY, RETRY
from taskyard.ports.schedules import KEEP_FIRES
from taskyard.scheduling.recurring import DEPUTY_S
from tests.docs.blocks import TOP, blocks
from tests.scenario.processes import environment

PAGE = TOP / "docs" / "SCHEDULES.md"


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("schedules.py", "[9, 9, 9, 9]\n['deep scan', 'scan']\n"),
        ("accounts.py", "500 0 1500\n500 0\n"),
        ("farm.py", "20 0 40\n"),
    ],
)
def test_the_programs_run(tmp_path: Path, file: str, said: str) -> None:
    """Each runs as it is printed, and says what it should."""
    (block,) = [block for block in blocks(PAGE) if block.file == file]
    (tmp_path / file).write_text(block.text, "utf-8")
    done = subprocess.run(
        [sys.executable, file],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == said


def test_the_numbers_and_defaults_are_right():
    """What the documents say of defaults and times is what the code does."""
    plain = Schedule(name="x", rule=Every(60), consumer="y")
    assert (plain.missed, plain.overlap, plain.catch_up_s) == (Missed.ONCE, Overlap.SKIP, 86_400)
    assert f"`grace_s` ({plain.grace_s:g})" in PAGE.read_text("utf-8")
    assert (DEPUTY_S, AHEAD.total_seconds()) == (2, 5)  # "about two seconds later", "more than five seconds ahead"
    text = PAGE.read_text("utf-8")
    assert f"{MOST_ITEMS:,} items and {LARGEST_LIST:,} bytes" in text
    assert f"`each_timeout_s` ({FUNCTION_S:g})" in text
    assert (RETRY.total_seconds(), LONGEST_RETRY.total_seconds()) == (10, 300)  # "after 10 s", "up to 5 minutes"
    for name in ("docs/CLI.md", "docs/adr/0014-one-task-a-fire-time.md"):
        assert f"{KEEP_FIRES:,}" in (TOP / name).read_text("utf-8")
