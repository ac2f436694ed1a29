"""Workers without a nursery: each is a fresh interpreter, a child of the host. For systems that are not Linux.

Nothing here needs /proc, prctl, memfd or descriptor passing. What that costs: a start takes as long as an interpreter
does, one thread per worker waits for its end, and what a worker's code puts into a session of its own is out of reach.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from typing import NoReturn

from taskyard.execution.boot import start_interpreter, take_signals
from taskyard.execution.starting import LOST

HAS_WAITID = hasattr(os, "waitid")
"""Not on macOS before Python 3.13: what a worker leaves in its group is not killed there when it ends by itself."""


class SpawnedWorker:
    """A worker in a session of its own. Its group is killed with it."""

    def __init__(self, process: subprocess.Popen[bytes], wire: socket.socket, lifeline: socket.socket) -> None:
        self.wire = wire
        self._process, self._lifeline = process, lifeline
        self._lock = threading.Lock()

    def watch(self, loop: asyncio.AbstractEventLoop, on_gone: Callable[[int], None]) -> None:
        def wait() -> None:
            status = self._bury()
            self._lifeline.close()
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
                loop.call_soon_threadsafe(on_gone, status)

        try:
            threading.Thread(target=wait, name="taskyard-spawned", daemon=True).start()
        except BaseException:
            self.kill()
            self._bury()  # takes about a millisecond, now that it is killed
            self._lifeline.close()
            self.wire.close()
            raise

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _bury(self) -> int:
        """Wait for its end and kill the rest of its group; its wait status. Until `wait` has returned, its number is no
        other's, and may be signalled."""
        if not HAS_WAITID:
            return _to_status(self._process.wait())
        try:
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:  # the host ignores SIGCHLD: nothing is left of it, and `wait` would say 0
            is_lost = True
        else:
            is_lost = False
            self._signal(signal.SIGKILL)
        with self._lock:
            code = self._process.wait()
        return LOST if is_lost else _to_status(code)

    def _signal(self, signum: signal.Signals) -> None:
        with self._lock, contextlib.suppress(ProcessLookupError, PermissionError):
            if self._process.returncode is None:
                os.killpg(self._process.pid, signum)


def _to_status(code: int) -> int:
    """As `waitpid` has it: what a signal did in the low byte, an exit code above it."""
    return -code if code < 0 else code << 8


class Spawner:
    def spawn(self, preload: tuple[str, ...] = ()) -> SpawnedWorker:
        """There is no process to have modules in advance; a worker imports what it needs."""
        wire, worker_end = socket.socketpair()
        lifeline, worker_line = socket.socketpair()
        try:
            with worker_end, worker_line:
                process = start_interpreter("taskyard.execution.spawner", [worker_end.fileno(), worker_line.fileno()])
        except BaseException:
            wire.close()
            lifeline.close()
            raise
        wire.setblocking(False)
        return SpawnedWorker(process, wire, lifeline)


def main(fd: int, lifeline_fd: int) -> NoReturn:
    """In the worker."""
    from taskyard.execution.worker_main import serve

    code = 1
    try:
        take_signals()
        for inherited in (fd, lifeline_fd):
            os.set_inheritable(inherited, False)
        _end_with_host(socket.socket(fileno=lifeline_fd))
        serve(fd)
        code = 0
    finally:
        os._exit(code)


def _end_with_host(lifeline: socket.socket) -> None:
    """A thread that ends the worker's group when the host is gone, in the middle of a call if need be."""

    def wait() -> None:
        with contextlib.suppress(OSError):
            lifeline.recv(1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, name="taskyard-lifeline", daemon=True).start()
