"""Workers without a nursery: each is a fresh interpreter, a child of the host. For systems that are not Linux.

Nothing here needs /proc, prctl, memfd or descriptor passing. What that costs: a start takes as long as an interpreter
does, one thread per worker waits for its end, and what a worker's code puts into a session of its own is out of reach.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

_BOOT = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from taskyard.execution.spawner import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)


class SpawnedWorker:
    """A worker in a session of its own. Its group is killed with it."""

    def __init__(self, process: subprocess.Popen[bytes], wire: socket.socket, lifeline: socket.socket) -> None:
        self.wire = wire
        self._process, self._lifeline = process, lifeline
        self._is_gone = False

    def watch(self, loop: asyncio.AbstractEventLoop, on_gone: Callable[[int], None]) -> None:
        def wait() -> None:
            code = self._process.wait()
            self._signal(signal.SIGKILL)
            self._is_gone = True
            self._lifeline.close()
            # As `waitpid` has it: what a signal did in the low byte, an exit code above it.
            status = -code if code < 0 else code << 8
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
                loop.call_soon_threadsafe(on_gone, status)

        threading.Thread(target=wait, name="taskyard-spawned", daemon=True).start()

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, signum: signal.Signals) -> None:
        if not self._is_gone:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signum)


class Spawner:
    def preload(self, modules: tuple[str, ...]) -> None:
        """There is no process to have them in advance; a worker imports what it needs."""

    def spawn(self) -> SpawnedWorker:
        wire, worker_end = socket.socketpair()
        lifeline, worker_line = socket.socketpair()
        try:
            with worker_end, worker_line:
                fds = (worker_end.fileno(), worker_line.fileno())
                flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
                process = subprocess.Popen(
                    [sys.executable, *flags, "-c", _BOOT, json.dumps(sys.path), *map(str, fds)],
                    pass_fds=fds,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
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
