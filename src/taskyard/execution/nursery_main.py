"""The nursery: one small process per host that forks workers, each under a keeper, and ends with its host.

It has one thread and no event loop, and never runs user code (save the modules it is asked to preload). It learns of
the host's death twice over: its socket ends, and the host's pidfd becomes readable (a forked child of the host may hold
the socket open). It is a subreaper too: if a keeper is killed, what that one kept becomes the nursery's, and is swept.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

import msgspec

from taskyard.execution.boot import take_signals
from taskyard.execution.keeper import END, GONE, GONE_FORMAT, LOST, Wakeups, keep
from taskyard.execution.linux import adopt_orphans, children, close_all, kill_hard, set_name

LENGTH = struct.Struct("<I")


class Spawn(msgspec.Struct, frozen=True, tag=True):
    """Fork a worker. Two descriptors come along: the worker's end of its wire, the keeper's end of its control."""

    worker: int


class PutDown(msgspec.Struct, frozen=True, tag=True):
    """Kill a keeper that does not answer, and sweep what it kept."""

    worker: int


class Preload(msgspec.Struct, frozen=True, tag=True):
    """Import these modules, so that workers forked from now on have them."""

    modules: tuple[str, ...]


Request = Spawn | PutDown | Preload

_decode = msgspec.msgpack.Decoder(Request).decode


SWEEP_AGAIN_MS = 100
"""How soon what could not be ended at once is killed again."""


class Nursery:
    def __init__(self, host: socket.socket, host_pidfd: int | None) -> None:
        self._host, self._host_pidfd = host, host_pidfd
        self._wakeups = Wakeups(signal.SIGCHLD)
        self._keepers: dict[int, tuple[int, int]] = {}
        """By process id: the worker's number and our copy of its control, on which we speak for a dead keeper."""
        self._lost: list[tuple[int, int]] = []
        """The same of keepers that were killed, until nothing is left of what they kept."""
        self._buffer = bytearray()
        self._fds: list[int] = []

    def run(self) -> None:
        poll = select.poll()
        for fd in (self._host.fileno(), self._wakeups.fd, self._host_pidfd):
            if fd is not None:
                poll.register(fd, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll(SWEEP_AGAIN_MS if self._lost else None)}
            self._wakeups.drain()
            if self._host_pidfd in ready:
                return
            if self._host.fileno() in ready and not self._read():
                return
            self._reap()

    def _read(self) -> bool:
        try:
            data, fds, _, _ = socket.recv_fds(self._host, 1 << 16, 64)
        except ConnectionResetError:
            return False
        for fd in fds:
            os.set_inheritable(fd, False)  # `recv_fds` leaves out the flag for it
        self._fds += fds
        self._buffer += data
        while len(self._buffer) >= LENGTH.size:
            (size,) = LENGTH.unpack_from(self._buffer)
            end = LENGTH.size + size
            if len(self._buffer) < end:
                break
            request = _decode(memoryview(self._buffer)[LENGTH.size : end])
            del self._buffer[:end]
            self._do(request)
        return bool(data)

    def _do(self, request: Request) -> None:
        match request:
            case Spawn():
                self._spawn(request)
            case PutDown(worker):
                for pid, (kept, _) in self._keepers.items():
                    if kept == worker:
                        os.kill(pid, signal.SIGKILL)
            case Preload(modules):
                preload(modules)
                gc.freeze()

    def _spawn(self, spawn: Spawn) -> None:
        wire, control = self._fds.pop(0), self._fds.pop(0)
        nursery = os.getpid()
        try:
            pid = os.fork()
        except OSError:
            # No process is to be had: the host is told that this one is gone.
            os.write(control, GONE_FORMAT.pack(GONE, LOST))
            close_all((wire, control))
            return
        if pid == 0:
            # Whatever goes wrong here must end here: further out it would be taken for the end of the nursery.
            try:
                self._let_go(control)
                keep(control, wire, nursery, _work)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        os.close(wire)
        self._keepers[pid] = (spawn.worker, control)

    def _let_go(self, control: int) -> None:
        """In the fork: a keeper must hold nothing of the host or of other workers, or their ends would go unnoticed."""
        self._wakeups.close()
        self._host.close()
        fds = [fd for _, fd in self._keepers.values()] + self._fds
        close_all(fds if self._host_pidfd is None else [*fds, self._host_pidfd])

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                if (kept := self._keepers.pop(pid, None)) is not None:
                    if status == 0:
                        os.close(kept[1])
                    else:
                        self._lost.append(kept)
        if self._lost and self._is_swept():
            for _, control in self._lost:
                with contextlib.suppress(OSError):
                    os.write(control, GONE_FORMAT.pack(GONE, LOST))
                os.close(control)
            self._lost.clear()

    def _is_swept(self) -> bool:
        """Kill every child that is no keeper: a keeper died, and they were its. Whether there was none. Nothing waits
        for them: one that cannot be killed may hold up the slots of the lost, but nobody else's."""
        strays = [pid for pid in children() if pid not in self._keepers]
        for pid in strays:
            kill_hard(pid)
        return not strays

    def end(self) -> None:
        """Every keeper ends what it keeps; then whatever is left goes."""
        for pid in self._keepers:
            os.kill(pid, END)
        self._wait_until(lambda: not self._keepers, within_s=5.0)
        for pid in self._keepers:
            kill_hard(pid)
        self._keepers.clear()
        self._wait_until(self._is_swept, within_s=1.0)

    def _wait_until(self, is_done: Callable[[], bool], *, within_s: float) -> None:
        patience = time.monotonic() + within_s
        self._reap()
        while not is_done() and time.monotonic() < patience:
            select.select([self._wakeups.fd], [], [], 0.05)
            self._wakeups.drain()
            self._reap()


def _work(wire: int) -> None:
    from taskyard.execution.worker_main import serve

    serve(wire)


def preload(modules: tuple[str, ...]) -> None:
    for name in modules:
        # One that cannot be imported here will say so in the worker that needs it.
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def main(host_fd: int, host_pid: int) -> NoReturn:
    try:
        _live(socket.socket(fileno=host_fd), host_pid)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(0)


def _live(host: socket.socket, host_pid: int) -> None:
    set_name("taskyard-nurse")
    adopt_orphans()
    take_signals()
    pidfd = None
    with contextlib.suppress(OSError, AttributeError):  # on an old kernel the socket alone will tell
        pidfd = os.pidfd_open(host_pid)
    if os.getppid() != host_pid:
        return  # the host is gone already, and its number may be another's
    importlib.import_module("taskyard.execution.worker_main")
    # What is here now is shared by all forks: the collector must not touch, and so copy, its pages.
    gc.collect()
    gc.freeze()
    nursery = Nursery(host, pidfd)
    try:
        nursery.run()
    finally:
        nursery.end()
