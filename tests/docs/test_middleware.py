"""What the page on middleware shows is run as it stands there."""

from __future__ import annotations

import subprocess
import sys

import pytest

from taskyard.queueing.submit_middleware import TaskDraft
from tests.docs.blocks import TOP, blocks
from tests.scenario.processes import environment

PAGE = TOP / "docs" / "MIDDLEWARE.md"

SHOWS = {
    "tenants.py": (
        "session closed\ncharge for acme: ok\n5 in the session of acme\nan amount of more than 1000 needs a signature\n"
    )
}


@pytest.mark.parametrize("name", SHOWS)
@pytest.mark.spec("SCH-29")
def test_the_programs_run(tmp_path, name):
    """Each program runs as it is printed, and says what it should."""
    (program,) = [block for block in blocks(PAGE) if block.file == name]
    (tmp_path / name).write_text(program.text, "utf-8")
    done = subprocess.run(
        [sys.executable, name], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=50, check=False
    )
    assert (done.returncode, done.stdout) == (0, SHOWS[name]), done.stderr


def test_every_setter_is_on_the_page():
    """What middleware may set of a task is named there."""
    text = PAGE.read_text("utf-8")
    settable = [name for name, one in vars(TaskDraft).items() if isinstance(one, property) and one.fset is not None]
    assert len(settable) == 5
    assert [name for name in settable if f"`{name}`" not in text] == []
