"""`taskyard demo`."""

import re
import signal
import subprocess
import sys
import time
import zlib
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

from taskyard.cli.demo.tour import GRACE_S
from tests.cli.shell import LONG_S, Shell
from tests.cli.test_watch import ERASED


def test_the_demo_shows_every_way_a_task_can_go(shell: Shell) -> None:
    """A tour ends by itself with 0: tasks complete, one fails, one is canceled, some are tried again, one waits for its
    time; and the store it names can be looked at afterwards."""
    done = shell.ok("demo", "--once", TMPDIR=str(shell.folder))
    for text in (
        "started     compress",
        "progress    compress",
        "completed   hash",
        "retrying    fetch",
        "Busy: the server answered 503",
        "failed      verify",
        "canceled    compress",
        "completed   inventory",
        "That was the tour",
    ):
        assert text in done.out
    assert re.search(r"✔ 14 completed +✘ 1 failed +⊘ 1 canceled", done.out)
    store = re.search(r"export TASKYARD_STORE=(\S+)", done.out)
    assert store is not None
    show = re.search(r"taskyard (show \w+)", done.out)
    assert show is not None
    assert "ValueError" in shell.here(*show[1].split(), TASKYARD_STORE=store[1]).out
    assert [entry.name for entry in shell.folder.glob("taskyard-demo-*/*") if entry.is_dir()] == ["demo.db-yard"]


def test_the_view_of_the_demo_goes_before_its_summary(shell: Shell) -> None:
    """On a terminal the live view is wiped at the end: what ran in its last frame has ended in the summary. Where
    `taskyard` is no command, the summary says how to make it one."""
    done = shell.on_a_terminal("demo", "--once", TMPDIR=str(shell.folder), PATH="/nowhere")
    assert done.code == 0
    view, _, summary = done.out.partition("That was the tour")
    assert ERASED in view.rpartition("JUST FINISHED")[2]
    assert "/bin/activate" in summary


def test_ctrl_c_ends_the_demo_at_once(shell: Shell) -> None:
    """Ctrl-C does not wait for what runs: it goes back to the store, and the summary says how to go on with it."""
    demo = shell.start("demo", "--store", shell.url)
    demo.hear("progress    compress")
    began = time.monotonic()
    demo.signal(signal.SIGINT)
    assert demo.end() == 0
    assert time.monotonic() - began < GRACE_S
    assert "not done yet" in demo.said
    assert "run what is queued" in demo.said
    counts = shell.here("ls", "--store", shell.url, "--json").json["counts"]
    assert counts["queued"] >= 1
    assert "running" not in counts


def test_the_ledger_of_the_demo_is_in_order(shell: Shell) -> None:
    """Tasks of one key run one after the other, in the order they were submitted."""
    shell.ok("demo", "--once", "--store", shell.url)
    listed = shell.here("ls", "--consumer", "ledger", "--store", shell.url, "--json").json
    assert [task["result"]["line"] for task in reversed(listed["tasks"])] == [1, 2, 3]
    assert [task["args"]["entry"] for task in reversed(listed["tasks"])] == ["entry 1", "entry 2", "entry 3"]


def test_the_web_server_of_the_demo_ends_with_the_tour(tmp_path: Path) -> None:
    """It serves a file compressed, refuses a busy one twice, and ends when its input is closed, as by a tour that
    dies."""
    (tmp_path / "chapter.txt").write_text("once upon a time " * 10_000)
    server = subprocess.Popen(
        [sys.executable, "-m", "taskyard.demo.server", str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert server.stdin is not None
    assert server.stdout is not None
    address = urlsplit(server.stdout.readline().strip())

    def get(path: str) -> tuple[int, bytes]:
        connection = HTTPConnection(address.hostname or "", address.port, timeout=LONG_S)
        connection.request("GET", path)
        answer = connection.getresponse()
        status, body = answer.status, answer.read()
        connection.close()
        return status, body

    status, body = get("/files/chapter.txt")
    assert (status, zlib.decompress(body)) == (200, (tmp_path / "chapter.txt").read_bytes())
    assert [get("/busy/chapter.txt")[0] for _ in range(3)] == [503, 503, 200]
    assert get("/files/none.txt")[0] == 404
    server.stdin.close()
    assert server.wait(timeout=LONG_S) == 0
    server.stdout.close()
