"""`taskyard log`, `taskyard artifact`, and what `taskyard show` says of both."""

from pathlib import Path

import pytest

from taskyard.cli.errors import UsageError
from taskyard.cli.outputs import _as_text
from tests.cli.shell import Shell

PASSWORD = "hunter22"


@pytest.fixture
def uuid(shell: Shell) -> str:
    (uuid,) = shell.seed(("outputs", {"password": PASSWORD}), work=True)
    return uuid


def test_log_prints_the_lines(shell: Shell, uuid: str) -> None:
    """Every line has its time and, unless it is plain information, its level; what could steer a terminal is written
    out, a secret is hidden, and dropped lines are counted."""
    lines = shell.here("log", uuid, "--store", shell.url).out.splitlines()
    assert [line.split("  ", 1)[1] for line in lines] == [
        "a line with \\x1b[31m and ***",
        "… 1,234 lines dropped",
        "warning: careful",
    ]
    assert PASSWORD in shell.here("log", uuid, "--reveal", "--store", shell.url).out


def test_log_can_be_narrowed(shell: Shell, uuid: str) -> None:
    """A number of lines means the latest; an attempt has its own lines."""
    assert "careful" in shell.here("log", uuid, "-n", "1", "--store", shell.url).out
    (line,) = shell.here("log", uuid, "-n", "1", "--attempt", "1", "--json", "--store", shell.url).json["lines"]
    assert (line["attempt"], line["level"], line["text"], line["dropped"]) == (1, "warning", "careful", 0)
    done = shell.here("log", uuid, "--attempt", "2", "--store", shell.url)
    assert (done.code, "has no attempt 2; it has 1 to 1" in done.err) == (1, True)


def test_artifact_writes_the_content(shell: Shell, uuid: str, tmp_path: Path) -> None:
    """An artifact goes to a file as it is, also one that is too large for the store."""
    for name, content in (("raw.bin", bytes(range(256))), ("large.bin", bytes(300 * 1024))):
        shell.here("artifact", uuid, name, "-o", str(tmp_path / name), "--store", shell.url)
        assert (tmp_path / name).read_bytes() == content
    assert shell.ok("artifact", uuid, "note.txt", "--store", shell.url).out == "to be read\n"


def test_an_unknown_artifact_is_told(shell: Shell, uuid: str) -> None:
    """A name that no artifact has is an error that lists the names there are."""
    done = shell.here("artifact", uuid, "other", "--store", shell.url)
    assert done.code != 0
    assert "it has large.bin, note.txt, raw.bin" in done.err


def test_a_terminal_gets_no_binary() -> None:
    """What is not text is refused for a terminal."""
    assert _as_text("a", b"text\n") == "text"
    for content in (b"\xff\xfe", b"a\0b"):
        with pytest.raises(UsageError, match="-o FILE"):
            _as_text("a", content)


def test_show_has_lines_and_artifacts(shell: Shell, uuid: str) -> None:
    """A task is shown with its last lines and with name, size and place of its artifacts."""
    out = shell.here("show", uuid, "--store", shell.url).out
    assert "warning: careful" in out
    assert "… 1,234 lines dropped" in out
    assert "note.txt  11 B  in the store" in out
    assert "work.db-artifacts" in out
    assert PASSWORD not in out
    document = shell.here("show", uuid, "--json", "--store", shell.url).json
    assert [one["name"] for one in document["artifacts"]] == ["large.bin", "note.txt", "raw.bin"]
    assert len(document["lines"]) == 3
    assert document["attempts"][0]["worker_pid"] is None
