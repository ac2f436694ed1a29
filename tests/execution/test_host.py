"""The host and its processes: nothing outlives the host, and the host stays what it was."""

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import zipapp
from pathlib import Path

import pytest

from taskyard.execution.nursery import NURSERY
from taskyard.model.execution import ErrorKind
from tests.execution import misdeeds, no_fork
from tests.execution.census import descendants, ended, is_alive
from tests.execution.conftest import nursery_pid

ROOT = Path(__file__).parents[2]
PR_GET_CHILD_SUBREAPER = 37


# --- the end of the host ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["nursery", "forks", "portable"])
async def test_nothing_outlives_a_host_that_is_killed(tmp_path, way):
    """After kill -9 of the host the nursery, keepers, workers and what their code has hidden are gone, also when a
    forked child of the host keeps copies of its sockets. (Without a nursery what has hidden itself is out of reach.)"""
    command = [sys.executable, "-m", "tests.execution.host", tmp_path, way]
    host = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    assert host.stdout is not None
    with host.stdout:
        everybody = json.loads(await asyncio.to_thread(host.stdout.readline))
    spared = {"hidden"} if way == "portable" else {"child"}
    try:
        assert all(is_alive(pid) for pid in everybody.values())
        host.kill()
        async with asyncio.timeout(5):
            for name, pid in everybody.items():
                if name not in spared:
                    await ended(pid)
        host.wait()
    finally:
        for name in spared & everybody.keys():
            os.kill(everybody[name], signal.SIGKILL)


@pytest.mark.parametrize("stopped", [["nursery"], ["keeper"], ["keeper", "nursery"]], ids="+".join)
async def test_nothing_that_is_stopped_outlives_a_host(tmp_path, stopped):
    """After kill -9 of the host all is gone soon, though somebody has stopped the processes that see to it."""
    command = [sys.executable, "-m", "tests.execution.host", tmp_path, "nursery"]
    host = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    assert host.stdout is not None
    with host.stdout:
        everybody = json.loads(await asyncio.to_thread(host.stdout.readline))
    try:
        for name in stopped:
            os.kill(everybody[name], signal.SIGSTOP)
        host.kill()
        host.wait()
        async with asyncio.timeout(4):
            for pid in everybody.values():
                await ended(pid)
    finally:
        for name in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(everybody[name], signal.SIGCONT)


async def test_nothing_outlives_a_host_that_ends(tmp_path):
    """A host that just ends, with its pool open and a call running, leaves nothing and waits for nothing."""
    command = [sys.executable, "-m", "tests.execution.host", tmp_path, "ends"]
    done = await asyncio.to_thread(
        subprocess.run, command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=True
    )
    for pid in json.loads(done.stdout).values():
        await ended(pid)
    assert "Traceback" not in done.stderr


# --- the end of the nursery -------------------------------------------------------------------------------------------


async def test_a_nursery_that_is_killed(desk, make_pipe, tmp_path):
    """When the nursery is killed its workers and all they hid are gone, running calls are answered `system`, and the
    next call gets a new one."""
    worker = await desk.value(misdeeds.pid)
    hidden, began = tmp_path / "hidden", make_pipe("began")
    call = desk.begin(misdeeds.act_hidden, str(hidden), misdeeds.say_and_hang, (began.path,))
    await began.wait()
    old = nursery_pid()
    everybody = descendants(old)
    os.kill(old, signal.SIGKILL)
    result = await call.future
    assert result.error is not None
    assert result.error.kind is ErrorKind.SYSTEM
    assert {worker, int(hidden.read_text())} <= everybody
    for pid in everybody:
        await ended(pid)
    assert await desk.value(misdeeds.add, 1, 2) == 3
    assert nursery_pid() != old


async def test_a_nursery_that_is_killed_while_workers_start(open_fresh):
    """All those starts failed at once, which is one mishap: the calls that wait get new workers."""
    desk = open_fresh(max_workers=4)
    await desk.value(misdeeds.pid)
    desk.begin(misdeeds.hang)
    nursery = desk.pool._starter.find_pid()
    os.kill(nursery, signal.SIGSTOP)
    calls = [desk.begin(misdeeds.add, number, 1) for number in range(3)]
    os.kill(nursery, signal.SIGKILL)
    assert [(await call.future).data for call in calls] == [1, 2, 3]


async def test_a_nursery_that_is_replaced_is_gone(open_fresh):
    """One that was given up, stopped as it may be, is dead and waited for before another takes its place."""
    desk = open_fresh()
    await desk.value(misdeeds.pid)
    nursery = desk.pool._starter
    old = nursery.find_pid()
    os.kill(old, signal.SIGSTOP)
    nursery._begin(())
    assert nursery.find_pid() != old
    assert not os.path.exists(f"/proc/{old}")


async def test_keeper_and_nursery_killed_together(desk):
    """When both are killed at once the call is answered all the same, and the pool goes on."""
    worker, keeper = await desk.value(misdeeds.pid), await desk.value(misdeeds.keeper)
    call = desk.begin(misdeeds.hang)
    everybody = descendants(nursery_pid())
    os.kill(nursery_pid(), signal.SIGSTOP)  # so that it cannot come between
    os.kill(keeper, signal.SIGKILL)
    os.kill(nursery_pid(), signal.SIGKILL)
    error = (await call.future).error
    assert error is not None
    assert error.kind is ErrorKind.SYSTEM
    assert worker in everybody
    for pid in everybody:
        await ended(pid)
    assert await desk.value(misdeeds.add, 1, 2) == 3


async def test_a_keeper_that_is_stopped_when_the_nursery_is_killed(desk):
    """It goes on, and ends what it keeps."""
    worker, keeper = await desk.value(misdeeds.pid), await desk.value(misdeeds.keeper)
    call = desk.begin(misdeeds.hang)
    os.kill(keeper, signal.SIGSTOP)
    os.kill(nursery_pid(), signal.SIGKILL)
    async with asyncio.timeout(4):
        assert (await call.future).error is not None
        await ended(worker)
        await ended(keeper)


async def test_a_keeper_that_gets_no_process(open_fresh, tmp_path, monkeypatch, capfd):
    """When no process is to be had for the worker itself, calls are answered `system`, quietly, and it goes on when one
    is to be had again."""
    full = tmp_path / "full"
    full.touch()
    monkeypatch.setenv(no_fork.PATH, str(full))
    desk = open_fresh(preload=("tests.execution.no_fork",))
    error = (await desk.ask(misdeeds.pid)).error
    assert error is not None
    assert error.kind is ErrorKind.SYSTEM
    assert error.message == "a worker process was lost before it was ready (3 starts in a row have failed)"
    full.unlink()
    assert await desk.value(misdeeds.add, 1, 2) == 3
    assert capfd.readouterr().err == ""


async def test_a_fork_of_the_host_leaves_the_nursery_alone(desk):
    """A forked child of the host has no nursery, and its end does not end the parent's."""
    nursery = (await desk.value(misdeeds.keeper)) and nursery_pid()
    child = os.fork()
    if child == 0:
        os._exit(1 if NURSERY.pids else 0)
    assert os.waitpid(child, 0) == (child, 0)
    assert await desk.value(misdeeds.add, 1, 2) == 3
    assert nursery_pid() == nursery


# --- the host stays what it was ---------------------------------------------------------------------------------------


async def test_the_host_is_left_as_it_was(desk):
    """Signal handlers, the wakeup descriptor, the loop's policy and the host's own children are not touched, it is no
    subreaper, and only the nursery is added to its children."""
    seen = []
    mine = subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"], stdin=subprocess.DEVNULL)
    before = signal.signal(signal.SIGCHLD, lambda *_: seen.append(1))
    try:
        handlers = [signal.getsignal(number) for number in signal.valid_signals()]
        policy, wakeup = asyncio.get_event_loop_policy(), signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(wakeup)
        await desk.value(misdeeds.pid)
        await desk.ask(misdeeds.hang, timeout_s=0.02)
        await desk.ask(misdeeds.segfault)
        assert [signal.getsignal(number) for number in signal.valid_signals()] == handlers
        assert asyncio.get_event_loop_policy() is policy
        assert signal.set_wakeup_fd(wakeup) == wakeup
        subreaper = ctypes.c_int(-1)
        assert ctypes.CDLL(None).prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(subreaper), 0, 0, 0) == 0
        assert subreaper.value == 0
        assert mine.wait() == 7
        await desk.pool.shutdown()
        assert nursery_pid() in descendants(os.getpid())
    finally:
        signal.signal(signal.SIGCHLD, before)


async def test_a_host_that_ignores_its_children(open_desk):
    """Where the system tells a host nothing of how its children end, no exit code is made up, and the pool goes on."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        desk = open_desk(portable=True, max_workers=1, spare=False)
        error = (await desk.ask(os._exit, 3)).error
        assert (error.kind, error.message) == (ErrorKind.SYSTEM, "its worker process was lost")
        assert await desk.value(abs, -1) == 1
        await desk.pool.shutdown()
    finally:
        signal.signal(signal.SIGCHLD, before)


# --- scripts ----------------------------------------------------------------------------------------------------------

SCRIPT = """
import asyncio, dataclasses, os, sys
from taskyard.execution.calls import PendingCall
from taskyard.execution.pool_settings import PoolSettings
from taskyard.execution.process import make_pool

print("read by", "host" if __name__ == "__main__" else "worker", flush=True)

@dataclasses.dataclass
class Point:
    x: int

    @classmethod
    def origin(cls):
        return cls(0)

def move(point, by):
    assert isinstance(point, Point), type(point)
    return Point(point.x + by)

async def main():
    settings = PoolSettings(max_workers=1, spare=False, preload=("multiprocessing",))  # which has ideas about __main__
    pool = make_pool(settings, portable="portable" in sys.argv)
    moved = await pool.submit(PendingCall(move, (Point(1), 2)))
    assert moved.success, moved.error
    assert isinstance(moved.data, Point) and moved.data == Point(3), moved.data
    origin = await pool.submit(PendingCall(Point.origin))
    assert origin.data == Point(0), origin
    await pool.shutdown()
    print("done")

if __name__ == "__main__" or "unguarded" in sys.argv:
    asyncio.run(main())
"""


def _run(*command, cwd):
    return subprocess.run([sys.executable, *command], cwd=cwd, capture_output=True, text=True, timeout=50, check=False)


@pytest.mark.parametrize("way", [[], ["portable"]], ids=["nursery", "portable"])
@pytest.mark.parametrize(
    "start",
    [["script.py"], ["-m", "script"], ["-m", "app"], ["app"], ["app.pyz"]],
    ids=["file", "module", "package", "folder", "archive"],
)
def test_functions_of_a_script(tmp_path, start, way):
    """Functions and classes of a script's `__main__` work, there and back; the script's own work is not done again."""
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__main__.py").write_text(SCRIPT)
    zipapp.create_archive(tmp_path / "app")
    done = _run(*start, *way, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")) == ["", "done", "read by host", "read by worker"]


@pytest.mark.parametrize("way", [[], ["portable"]], ids=["nursery", "portable"])
def test_nobody_says_a_word_in_development_mode(tmp_path, way):
    """With every warning an error, neither the host nor any process of its pool has one to report."""
    (tmp_path / "script.py").write_text(SCRIPT)
    done = _run("-X", "dev", "-W", "error", "script.py", *way, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


NESTED = """
import dataclasses, os, sys
from taskyard.futures import ProcessPool

@dataclasses.dataclass
class Point:
    x: int

def move(point):
    assert isinstance(point, Point), type(point)
    return Point(point.x + 1)

def move_elsewhere(point, portable):
    with ProcessPool(1, portable=portable, spare=False) as pool:
        return pool.submit(move, point).result(30), pool.submit(os.getppid).result(30)

def main(portable):
    os.chdir("/")
    with ProcessPool(1, portable=portable) as pool:
        moved, parent = pool.submit(move_elsewhere, Point(1), portable).result(30)
    assert moved == Point(2) and parent != os.getpid(), moved
    print("done")

if __name__ == "__main__":
    main("portable" in sys.argv)
"""


@pytest.mark.parametrize("way", [[], ["portable"]], ids=["nursery", "portable"])
@pytest.mark.parametrize("start", [["script.py"], ["-m", "script"], ["app"]], ids=["file", "module", "folder"])
def test_functions_of_a_script_in_a_pool_inside_a_worker(tmp_path, monkeypatch, start, way):
    """They are found there as well."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "script.py").write_text(NESTED)
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__main__.py").write_text(NESTED)
    done = _run(*start, *way, cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("done\n", "")


def test_a_pool_inside_a_worker_knows_the_script_before_its_worker_does(tmp_path):
    """A pool that was opened when the script was not needed yet finds its functions later."""
    (tmp_path / "library.py").write_text(LIBRARY)
    (tmp_path / "script.py").write_text(KEPT)
    done = _run("script.py", cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("2\n", "")


LIBRARY = """
from taskyard.futures import ProcessPool

pool = None

def open_pool():
    global pool
    pool = ProcessPool(1)
    return pool.submit(abs, -1).result(30)
"""

KEPT = """
import library
from taskyard.futures import ProcessPool

def add(number):
    return number + 1

def use_pool():
    return library.pool.submit(add, 1).result(30)

if __name__ == "__main__":
    with ProcessPool(1, spare=False) as pool:
        assert pool.submit(library.open_pool).result(30) == 1
        print(pool.submit(use_pool).result(30))
"""


def test_an_unguarded_script_is_told_so(tmp_path):
    """A script that does its work whenever it is read gets an error that says what to do, instead of doing it again."""
    (tmp_path / "script.py").write_text(SCRIPT)
    done = _run("script.py", "unguarded", cwd=tmp_path)
    assert done.returncode == 1
    assert 'if __name__ == "__main__":' in done.stderr


UNGUARDED = """
from taskyard.futures import ProcessPool

def add(number):
    return number + 1

print(ProcessPool(1).submit(add, 1).result(30))
"""


def test_an_unguarded_script_gets_no_other_advice(tmp_path):
    """The error of a future says that one thing only."""
    (tmp_path / "script.py").write_text(UNGUARDED)
    done = _run("script.py", cwd=tmp_path)
    assert done.stderr.endswith('put what it does under `if __name__ == "__main__":`\n')


def test_functions_of_an_interactive_session(tmp_path):
    """A function that no file holds cannot be found by a worker, and the answer says what to do."""
    done = _run("-c", SCRIPT, cwd=tmp_path)
    assert done.returncode == 1
    assert "could not be loaded in a worker process" in done.stderr
    assert "save it to a file" in done.stderr


def test_functions_on_standard_input(tmp_path):
    """The same from a future, without other advice; what is imported works, whatever text it is given."""
    script = UNGUARDED.replace("print(", 'assert ProcessPool(1).submit(str, "__main__").result(30)\nprint(')
    command = [sys.executable, "-"]
    done = subprocess.run(command, cwd=tmp_path, input=script, capture_output=True, text=True, timeout=50, check=False)
    assert done.stderr.endswith("cannot find it; save it to a file and import it from there\n")
