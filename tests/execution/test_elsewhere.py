"""Systems that are not Linux: what they do not have is hidden from a program and from its workers, which go on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

NOT_LINUX = """
import builtins, ctypes, fcntl, os, resource, signal, socket, sys

sys.platform = "darwin"
for module, names in {
    signal: ("SIGRTMIN", "SIGRTMAX"),
    os: ("memfd_create", "MFD_CLOEXEC", "MFD_ALLOW_SEALING", "pidfd_open", "pipe2", "sched_getaffinity", "waitid"),
    fcntl: ("F_ADD_SEALS", "F_GET_SEALS", "F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_SEAL"),
    socket: ("MSG_CMSG_CLOEXEC",),
}.items():
    for name in names:
        vars(module).pop(name, None)


def hide(function):
    def look(path, *args, **kwargs):
        if isinstance(path, str) and path.startswith("/proc"):
            raise FileNotFoundError(path)
        return function(path, *args, **kwargs)

    return look


builtins.open, os.listdir = hide(open), hide(os.listdir)


class Library(ctypes.CDLL):
    def __getattr__(self, name):
        if name in ("prctl", "mallopt"):
            raise AttributeError(name)
        return super().__getattr__(name)


class Usage:
    def __init__(self, usage):
        self.ru_maxrss = usage.ru_maxrss << 10  # bytes


ctypes.CDLL = Library
getrusage = resource.getrusage
resource.getrusage = lambda who: Usage(getrusage(who))
"""

PROGRAM = """
import operator, os, sys
import taskyard
from taskyard.futures import CallTimedOut, ProcessPool, WorkerDied

if __name__ == "__main__":
    assert not [name for name in sys.modules if name.endswith((".nursery", ".nursery_main", ".keeper"))]
    with ProcessPool(1, recycle_rss=1 << 30) as pool:
        first = pool.submit(os.getpid).result(20)
        assert pool.submit(len, bytes(10_000_000)).result(20) == 10_000_000
        assert len(pool.submit(bytes, 10_000_000).result(20)) == 10_000_000
        assert pool.submit(os.getpid).result(20) == first, "recycled, though it is small"
        assert isinstance(pool.submit(os._exit, 3).exception(20), WorkerDied)
        assert isinstance(pool.submit_within(0.1, __import__("time").sleep, 60).exception(20), CallTimedOut)
        assert pool.submit(abs, -1).result(20) == 1
    with ProcessPool(1, recycle_rss=64 << 20) as pool:
        first = pool.submit(os.getpid).result(20)
        pool.submit(operator.mul, b"x", 80 << 20).result(20)
        assert pool.submit(os.getpid).result(20) != first, "not recycled, though it is large"
    try:
        ProcessPool(1, portable=False)
    except taskyard.InvalidInput as exc:
        print(exc)
"""


@pytest.mark.spec("MGR-08")
def test_a_pool_needs_nothing_that_only_linux_has(tmp_path):
    """Without realtime signals, memfds, prctl and /proc calls run, crash, time out and are counted as anywhere."""
    (tmp_path / "sitecustomize.py").write_text(NOT_LINUX)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = _run(program)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "only Linux has what portable=False needs; leave it out\n"


def test_windows_is_refused_in_words(tmp_path):
    """Who imports the package where there is no `fcntl` reads that Windows is not supported, and what is."""
    program = tmp_path / "program.py"
    program.write_text("import sys\nsys.modules['fcntl'] = None\nimport taskyard.futures")
    assert "ImportError: taskyard does not run on Windows" in _run(program).stderr


def _run(program: Path) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(program.parent)}
    command = [sys.executable, str(program)]
    return subprocess.run(command, check=False, env=environ, capture_output=True, text=True, timeout=60)
