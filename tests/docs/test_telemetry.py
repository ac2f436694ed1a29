"""What the page on logs and sinks shows is run as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys

import taskyard.telemetry
from taskyard.model.move import Move
from taskyard.model.task import Claim
from taskyard.ports.sink import KINDS, SLOW_S, RunFailed, RunStarted
from taskyard.telemetry.logs import log_fields
from taskyard.testing.samples import NOON, a_record
from tests.docs.blocks import TOP, blocks
from tests.scenario.processes import environment

PAGE = TOP / "docs" / "TELEMETRY.md"


def test_the_program_runs(tmp_path):
    """The sink of the page runs as it is printed, and says what it should."""
    (program,) = [block for block in blocks(PAGE) if block.file == "outcomes.py"]
    (tmp_path / "outcomes.py").write_text(program.text, "utf-8")
    done = subprocess.run(
        [sys.executable, "outcomes.py"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "divide failed: cannot divide 6 by 0\n{'completed': 2, 'failed': 1}\n"
    for line in done.stdout.splitlines():
        assert f"`{line}`" in PAGE.read_text("utf-8")


def test_every_event_is_in_the_table():
    """Each kind of event is named on the page, with all that it has, and can be imported from where the page says."""
    text = PAGE.read_text("utf-8")
    for kind in KINDS:
        assert f"`{kind.__name__}`" in text
        assert getattr(taskyard.telemetry, kind.__name__) is kind
        for field in kind.__struct_fields__:
            assert re.search(rf"`{field}\b", text), field
    assert f"longer than {SLOW_S:g} s" in text


def test_every_log_field_is_in_the_table():
    """Each attribute of a log record about a run is in the table."""
    text = PAGE.read_text("utf-8")
    claim = Claim(a_record(), 1, 1)
    started, failed = RunStarted(claim, None, NOON), RunFailed(claim, None, Move.completed(at=NOON))
    for field in {*log_fields(started), *log_fields(failed), "algorithm", "version", "worker_pid", "error_type"}:
        assert f"`{field}`" in text
