"""What the page on logs and sinks shows is run as it stands there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import taskyard.telemetry
from taskyard.model.move import Move
from taskyard.model.task import Claim
from taskyard.ports.sink import KINDS, SLOW_S, RunFailed, RunStarted
from taskyard.telemetry.logs import LOG_FIELDS, log_fields
from taskyard.testing.samples import NOON, a_record
from tests.docs.blocks import TOP, blocks
from tests.scenario.processes import environment

PAGE = TOP / "docs" / "TELEMETRY.md"


def run(name: str, folder: Path) -> str:
    """What a program of the page prints."""
    (program,) = [block for block in blocks(PAGE) if block.file == name]
    (folder / name).write_text(program.text, "utf-8")
    done = subprocess.run(
        [sys.executable, name], cwd=folder, env=environment(), capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_sink_of_one_s_own(tmp_path):
    """The sink of the page runs as it is printed, and says what the page says."""
    printed = run("outcomes.py", tmp_path)
    assert printed == "divide failed: cannot divide 6 by 0\n{'completed': 2, 'failed': 1}\n"
    for line in printed.splitlines():
        assert f"`{line}`" in PAGE.read_text("utf-8")


@pytest.mark.spec("EXE-12")
def test_json_logs(tmp_path):
    """The program with JSON logs prints two lines that are objects, with the fields that the page shows and without the
    secret."""
    printed = run("json_logs.py", tmp_path)
    assert "hunter22" not in printed
    started, failed = [json.loads(line) for line in printed.splitlines()]
    (shown,) = [json.loads(block.text) for block in blocks(PAGE) if block.text.startswith("{")]
    assert failed.keys() == shown.keys()
    assert {name: failed[name] for name in ("level", "consumer", "status", "error_type", "attempt")} == {
        "level": "error",
        "consumer": "login",
        "status": "failed",
        "error_type": "ValueError",
        "attempt": 1,
    }
    assert failed["message"].partition(" from ")[2] == shown["message"].partition(" from ")[2]
    assert "raise ValueError" in failed["exception"]
    assert (started["status"], started["requestId"]) == ("started", failed["requestId"])


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
    """Each attribute of a log record about a run is in the table, and the list of their names leaves out the record of
    the task, which has its arguments."""
    text = PAGE.read_text("utf-8")
    claim = Claim(a_record(), 1, 1)
    started, failed = RunStarted(claim, None, NOON), RunFailed(claim, None, Move.completed(at=NOON))
    found = {*log_fields(started), *log_fields(failed), "algorithm", "version", "worker_pid", "error_type"}
    assert found - {"task_record"} == set(LOG_FIELDS)
    for field in found:
        assert f"`{field}`" in text
