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
from taskyard.execution.keeper import END, GONE, GONE_FORMAT, HEARD, Wakeups, keep
from taskyard.execution.linux import adopt_orphans, children, close_all, kill_hard, set_name, signal_at_end_of_parent
from taskyard.execution.starting import LOST

HEAD = struct.Struct("<IB")
"""Before each request: its length, and the number of descriptors that come with it."""

IMPORTED = b"I"
"""What the host is told for each module it asked for, whether the import worked or not."""


class Spawn(msgspec.Struct, frozen=True, tag=True):
    """Fork a worker. Two descriptors come along: the worker's end of its wire, the keeper's end of its control."""

    worker: int


class PutDown(msgspec.Struct, frozen=True, tag=True):
    """Kill a keeper that does not answer, and sweep what it kept. The host hears at once that this was heard."""

    worker: int


class Preload(msgspec.Struct, frozen=True, tag=True):
    """Import this module, so that workers forked from now on have it."""

    module: str


Request = Spawn | PutDown | Preload

_decode = msgspec.msgpack.Decoder(Request).decode


KEEPER_PATIENCE_S = 0.5
"""How long a keeper may take to end its tree before it is put down itself; it takes about a millisecond."""

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
        while len(self._buffer) >= HEAD.size:
            size, count = HEAD.unpack_from(self._buffer)
            end = HEAD.size + size
            if len(self._buffer) < end:
                break
            request = bytes(self._buffer[HEAD.size : end])
            del self._buffer[:end]
            own, self._fds = self._fds[:count], self._fds[count:]
            self._heed(request, own)
        return bool(data)

    def _heed(self, request: bytes, fds: list[int]) -> None:
        """Whatever is wrong with one request, others need this process: who asked finds its descriptors closed, which
        is the answer of a start that failed."""
        try:
            self._do(_decode(request), fds)
        except Exception:
            traceback.print_exc()
            close_all(fds)

    def _do(self, request: Request, fds: list[int]) -> None:
        match request:
            case Spawn(worker):
                wire, control = fds
                self._spawn(worker, wire, control)
            case PutDown(worker):
                self._put_down(worker)
            case Preload(module):
                preload(module)
                gc.freeze()
                with contextlib.suppress(OSError):  # it has gone meanwhile
                    self._host.send(IMPORTED, socket.MSG_DONTWAIT)

    def _put_down(self, worker: int) -> None:
        for pid, kept in self._keepers.items():
            if kept[0] == worker:
                os.kill(pid, signal.SIGKILL)
        for number, control in (*self._keepers.values(), *self._lost):
            if number == worker:
                with contextlib.suppress(OSError):
                    os.write(control, HEARD)

    def _spawn(self, worker: int, wire: int, control: int) -> None:
        nursery = os.getpid()
        try:
            pid = os.fork()
        except OSError:
            close_all((wire, control))  # no process is to be had, and so the host is told
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
        self._keepers[pid] = (worker, control)

    def _let_go(self, control: int) -> None:
        """In the fork: a keeper must hold nothing of the host or of other workers, or their ends would go unnoticed."""
        self._wakeups.close()
        self._host.close()
        fds = [fd for _, fd in (*self._keepers.values(), *self._lost)] + self._fds
        close_all(fds if self._host_pidfd is None else [*fds, self._host_pidfd])

    def _bury(self) -> bool:
        """Bury who has ended; whether there was anybody."""
        found = False
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                found = True
                if (kept := self._keepers.pop(pid, None)) is not None:
                    if status == 0:
                        os.close(kept[1])
                    else:
                        self._lost.append(kept)
        return found

    def _reap(self) -> None:
        self._bury()
        if self._lost and self._is_swept():
            for _, control in self._lost:
                with contextlib.suppress(OSError):
                    os.write(control, GONE_FORMAT.pack(GONE, LOST))
                os.close(control)
            self._lost.clear()

    def _is_swept(self) -> bool:
        """Kill every child that is no keeper: a keeper died, and they were its. Whether there was none. Nothing waits
        for them: one that cannot be killed may hold up the slots of the lost, but nobody else's.

        Race: the list may leave out a child while another one ends. So it counts when it has been empty twice, and
        nobody has ended meanwhile.
        """
        quiet = 0
        while quiet < 2:
            strays = [pid for pid in children() if pid not in self._keepers]
            for pid in strays:
                kill_hard(pid)
            if strays:
                return False
            quiet = 0 if self._bury() else quiet + 1
        return True

    def end(self) -> None:
        """Every keeper ends what it keeps; then whatever is left goes."""
        for pid in self._keepers:
            os.kill(pid, END)
            os.kill(pid, signal.SIGCONT)  # it may have been stopped
        self._wait_until(lambda: not self._keepers, within_s=KEEPER_PATIENCE_S)
        for pid in self._keepers:
            kill_hard(pid)
        self._keepers.clear()
        self._wait_until(self._is_swept, within_s=5.0)

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


def preload(module: str) -> None:
    # One that cannot be imported here, or wants to end the process, will say so in the worker that needs it.
    with contextlib.suppress(BaseException):
        importlib.import_module(module)


def main(host_fd: int, host_pid: int) -> NoReturn:
    try:
        with socket.socket(fileno=host_fd) as host:
            _live(host, host_pid)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(0)


def _live(host: socket.socket, host_pid: int) -> None:
    set_name("taskyard-nurse")
    adopt_orphans()
    take_signals()
    # Stopped, it would not see the host's end. That the signal also comes when a thread of the host ends is no harm.
    signal_at_end_of_parent(signal.SIGCONT)
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
