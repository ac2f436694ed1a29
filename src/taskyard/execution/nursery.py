"""The host's side of the nursery: starts it when it is first needed, asks it for workers, notices when it is gone.

One for the whole process, whatever loops and pools there are; it belongs to no event loop, and no call here waits for
an answer. The host gets one child, the nursery, and nothing else: no signal handler, no subreaper, no `waitpid(-1)`.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from typing import Protocol

import msgspec

from taskyard.execution.boot import start_interpreter
from taskyard.execution.keeper import GONE_FORMAT, KILL, LOST, TERM
from taskyard.execution.nursery_main import LENGTH, Preload, PutDown, Request, Spawn

KEEPER_PATIENCE_S = 0.5
"""How long a keeper may take to end its tree before it is put down itself; it takes about a millisecond."""

_encode = msgspec.msgpack.Encoder().encode


class WorkerHandle(Protocol):
    """A worker's process, as its pool sees it. `on_gone` is called once, on the loop, when the process and everything
    it started are gone, with its wait status. `terminate` and `kill` may be called at any time, and more than once."""

    wire: socket.socket

    def watch(self, loop: asyncio.AbstractEventLoop, on_gone: Callable[[int], None]) -> None: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


class NurseryWorker:
    """A worker under a keeper, steered over the keeper's control."""

    def __init__(self, nursery: Nursery, number: int, wire: socket.socket, control: socket.socket) -> None:
        self.wire = wire
        self._nursery, self._number, self._control = nursery, number, control
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_gone: Callable[[int], None] | None = None
        self._patience: asyncio.TimerHandle | None = None

    def watch(self, loop: asyncio.AbstractEventLoop, on_gone: Callable[[int], None]) -> None:
        self._loop, self._on_gone = loop, on_gone
        loop.add_reader(self._control, self._hear)

    def terminate(self) -> None:
        self._tell(TERM)

    def kill(self) -> None:
        self._tell(KILL)
        if self._loop is not None and self._patience is None and self._on_gone is not None:
            self._patience = self._loop.call_later(KEEPER_PATIENCE_S, self._put_down)

    def _tell(self, what: bytes) -> None:
        with contextlib.suppress(OSError):  # it is gone, or its socket is full of the same word
            self._control.send(what)

    def _put_down(self) -> None:
        """Code of a worker can stop or kill its keeper. Then the nursery sweeps."""
        self._nursery.put_down(self._number)

    def _hear(self) -> None:
        try:
            said = self._control.recv(GONE_FORMAT.size)
        except BlockingIOError:
            return
        except ConnectionResetError:
            said = b""
        # Without a last word, keeper and nursery were both killed; the kernel has killed the worker then.
        status: int = GONE_FORMAT.unpack(said)[1] if len(said) == GONE_FORMAT.size else LOST
        on_gone, self._on_gone = self._on_gone, None
        if self._patience is not None:
            self._patience.cancel()
        if self._loop is not None:
            self._loop.remove_reader(self._control)
        self._control.close()
        if on_gone is not None:
            on_gone(status)


class Nursery:
    """Starts its process at the first spawn, and again when it has died."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._numbers = itertools.count(1)
        self._preloaded: tuple[str, ...] = ()
        # In a fork of the host this nursery is the parent's, and another thread may hold the lock for ever.
        os.register_at_fork(after_in_child=self._leave_to_parent)

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def preload(self, modules: tuple[str, ...]) -> None:
        """Have these modules in every worker from now on, imported once. They must not start threads."""
        with self._lock:
            fresh = tuple(name for name in modules if name not in self._preloaded)
            self._preloaded += fresh
            if fresh and self._sock is not None:
                self._send(Preload(fresh))

    def spawn(self) -> NurseryWorker:
        """A worker that is starting. Raises `OSError` when there are no descriptors or processes to be had."""
        wire, worker_end = socket.socketpair()
        control, keeper_end = socket.socketpair()
        wire.setblocking(False)
        control.setblocking(False)
        number = next(self._numbers)
        try:
            with self._lock, worker_end, keeper_end:
                self._ask(Spawn(number), [worker_end.fileno(), keeper_end.fileno()])
        except BaseException:
            wire.close()
            control.close()
            raise
        return NurseryWorker(self, number, wire, control)

    def _ask(self, request: Spawn, fds: list[int]) -> None:
        if self._process is None or self._process.poll() is not None:
            self._begin()
        try:
            self._send(request, fds)
        except (BrokenPipeError, ConnectionResetError):
            self._begin()  # Race: it died after we looked
            self._send(request, fds)

    def _send(self, request: Request, fds: list[int] | None = None) -> None:
        if self._sock is None:
            raise BrokenPipeError("there is no nursery")
        data = _encode(request)
        data = LENGTH.pack(len(data)) + data
        if fds:
            sent = socket.send_fds(self._sock, [data], fds)
            data = data[sent:]
        self._sock.sendall(data)

    def _begin(self) -> None:
        self._forget()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = start_interpreter("taskyard.execution.nursery_main", [theirs.fileno()], os.getpid())
        self._sock = ours
        if self._preloaded:
            self._send(Preload(self._preloaded))

    def put_down(self, number: int) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._send(PutDown(number))

    def _forget(self) -> None:
        if self._sock is not None:
            self._sock.close()
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=0)
        self._sock = self._process = None

    def close(self, *, patience_s: float = 6.0) -> None:
        """End it and all its workers, and wait for that. The next spawn starts another."""
        with self._lock:
            process = self._process
            if self._sock is not None:
                self._sock.close()
            self._sock = self._process = None
        if process is not None:
            try:
                process.wait(timeout=patience_s)
            except subprocess.TimeoutExpired:
                os.kill(process.pid, signal.SIGKILL)
                process.wait()

    def _leave_to_parent(self) -> None:
        self._lock = threading.Lock()
        if self._sock is not None:
            self._sock.close()
        if self._process is not None:
            self._process.returncode = 0  # not ours to wait for
        self._sock = self._process = None


NURSERY = Nursery()
atexit.register(NURSERY.close)
