"""What the page on places shows is run as it stands there."""

from __future__ import annotations

import subprocess
import sys

import pytest

from taskyard.model.blocker import BlockerKind
from taskyard.queueing.blockers import LOOKS_AT_MOST, RECHECK_S, UNBLOCK_AT_ONCE
from taskyard.queueing.checks import CHECK_TIMEOUT_S
from tests.docs.blocks import TOP, blocks
from tests.scenario.processes import environment

PAGE = TOP / "docs" / "PLACES.md"

SHOWS = {
    "gpus.py": "large on gpu-0\nno node has a place for 'train' with model=h100\n",
    "disks.py": "shrunk b.mp4\nit waits for disk /data\nshrunk a.mp4\n",
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


def test_the_numbers_are_those_of_the_code():
    """The page names the limits and the kinds that the code has."""
    text = PAGE.read_text("utf-8")
    assert (LOOKS_AT_MOST, CHECK_TIMEOUT_S, RECHECK_S, UNBLOCK_AT_ONCE) == (10, 2, 30, 20)
    numbers = ("When ten tasks", "within 2 s", "Every 30 s", "batches of 20")
    for stated in (*numbers, *(f"`{kind}`" for kind in BlockerKind)):
        assert stated in text
