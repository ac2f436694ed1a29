"""`taskyard run` and `taskyard worker`: starting, telling, stopping."""

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from taskyard import Yard
from taskyard.cli.session import Target
from taskyard.cli.worker import WorkerOptions, run_worker
from taskyard.model.state import TaskState
from taskyard.testing.samples import a_record, an_add
from tests.cli.shell import LONG_S, Shell


def test_a_worker_says_what_it_serves(shell: Shell) -> None:
    """The banner names the store and every consumer with its limit and queue; SIGTERM ends an idle worker with 0."""
    worker = shell.start_worker()
    worker.hear("stop ")
    for text in ("sqlite:///work.db", "add × 4", "boom × 1 on cpu"):
        assert text in worker.said
    worker.signal(signal.SIGTERM)
    assert worker.end() == 0


def test_a_verbose_worker_tells_of_every_run(shell: Shell) -> None:
    """With --verbose each run is a line when it starts and one, with its duration, when it ends; data is escaped."""
    worker = shell.start_worker("-v")
    good, bad = shell.seed(("add", {"a": 1}), ("boom", {"why": "\x1b[2Jbad\nluck"}))
    worker.hear(f"completed add {good}  in ")
    line = worker.hear(f"failed    boom {bad}  after ")
    assert r"\x1b[2Jbad" in line
    worker.signal(signal.SIGINT)
    assert worker.end() == 0
    assert "Traceback" not in worker.said
    assert "\x1b" not in worker.said


def test_a_quiet_worker_still_tells_of_failures(shell: Shell) -> None:
    """Without --verbose a failure is one line, without its traceback, which the store keeps."""
    worker = shell.start_worker()
    (uuid,) = shell.seed(("boom", {"why": "bad luck"}))
    assert uuid in worker.hear("bad luck")
    worker.signal(signal.SIGTERM)
    assert worker.end() == 0
    assert "Traceback" not in worker.said


def test_a_stop_lets_what_runs_end(shell: Shell) -> None:
    """After a signal nothing new starts, and what runs may end within the grace."""
    worker = shell.start_worker("-v", "--grace", "60")
    (running,) = shell.seed(("until", {"path": str(shell.folder / "gate")}))
    worker.hear("until has begun")
    worker.signal(signal.SIGTERM)
    worker.hear("stopping: waiting up to 1 min for 1 task")
    (late,) = shell.seed(("add", {"a": 1}))
    (shell.folder / "gate").touch()
    assert worker.end() == 0
    assert f"completed until {running}" in worker.said
    assert shell.record(running).state is TaskState.COMPLETED
    assert shell.record(late).state is TaskState.QUEUED


def test_a_second_signal_stops_at_once(shell: Shell) -> None:
    """The second signal interrupts what runs and gives it back: no attempt is used up, and the exit code is 0."""
    worker = shell.start_worker("-v", "--grace", "600")
    (uuid,) = shell.seed(("hold", {}))
    worker.hear("hold has begun")
    worker.signal(signal.SIGINT)
    worker.hear("stopping: ")
    worker.signal(signal.SIGINT)
    assert worker.end() == 0
    record = shell.record(uuid)
    assert (record.state, record.attempt) == (TaskState.QUEUED, 0)


def test_what_cannot_be_stopped_is_left_behind(shell: Shell) -> None:
    """A thread that never ends does not keep the process: exit code 1, and the next worker takes its task back."""
    worker = shell.start_worker("-v", "--grace", "600")
    (uuid,) = shell.seed(("stubborn", {}))
    worker.hear("stubborn has begun")
    worker.signal(signal.SIGTERM)
    worker.hear("stopping: ")
    worker.signal(signal.SIGTERM)
    worker.hear("stopping: at once; 1 task interrupted")
    assert worker.end() == 1
    assert "cannot be stopped" in worker.said
    following = shell.start_worker("-v")
    following.hear(f"started   stubborn {uuid}  attempt 2")


def test_a_worker_whose_store_is_gone_does_not_say_that_all_is_well(shell: Shell) -> None:
    """When the store no longer takes what ends, the worker says so, and its exit code is 1."""
    worker = shell.start_worker("-v")
    shell.path.unlink()
    assert "restart everything that uses the store" in worker.hear("was removed or replaced")
    worker.signal(signal.SIGTERM)
    assert worker.end() == 1
    assert "stopped: not all finished tasks are saved" in worker.said
    assert worker.said.count("was removed or replaced") == 1


def test_code_that_ignores_its_cancellation_does_not_keep_the_process(shell: Shell) -> None:
    """One signal and the grace are enough: a coroutine that swallows its cancellation cannot hold up the end."""
    worker = shell.start_worker("-v", "--grace", "0.1")
    shell.seed(("deaf", {}))
    worker.hear("deaf has begun")
    worker.signal(signal.SIGTERM)
    assert worker.end() == 1
    assert "cannot be stopped" in worker.said
    assert "all finished tasks are saved" not in worker.said


@pytest.fixture
def levels() -> Iterator[None]:
    """A worker in this process says how much is logged; afterwards it is as before."""
    log = logging.getLogger("taskyard")
    before = log.level
    yield
    log.setLevel(before)


@pytest.mark.anyio
@pytest.mark.usefixtures("levels")
async def test_a_worker_that_ends_by_an_error_gives_back_what_it_holds(shell: Shell) -> None:
    """However a worker ends, unless it is killed, what it runs ends or goes back first: no task is left claimed."""
    options = WorkerOptions(grace_s=0.0, verbose=False, live=False)
    with contextlib.chdir(shell.folder):
        serving = asyncio.create_task(run_worker(Target(shell.url, "tests.cli.sample_app:yard"), options))
        async with Yard(f"sqlite:///{shell.path}").client() as other:
            await other.store.turn("nobody", adds=[an_add(a_record(consumer="hold"))])
            started = await anext(other.events(after=0, kinds="running"))
            serving.cancel()
            await asyncio.wait({serving})
            record = await other.handle(started.uuid).record()
    assert (serving.cancelled(), record.state, record.attempt) == (True, TaskState.QUEUED, 0)


def test_a_worker_whose_words_nobody_reads_goes_on(shell: Shell) -> None:
    """When the reader of its log goes away, a verbose worker goes on, and ends with 0 when it is asked to."""
    reads, writes = os.pipe()
    worker = subprocess.Popen(
        [sys.executable, "-m", "taskyard.cli", "worker", "app:yard", "-v"],
        cwd=shell.folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=writes, text=True,
    )  # fmt: skip
    os.close(writes)
    assert worker.stdout is not None
    try:
        assert "is running" in worker.stdout.readline()
        os.close(reads)
        for a in ("1", "2"):
            shell.ok("submit", "add", f"a={a}", "--app", "app:yard", "--wait")
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(LONG_S) == 0
    finally:
        worker.kill()
        worker.wait()
        worker.stdout.close()
