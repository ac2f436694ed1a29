"""The host's side of the nursery: starts it when it is first needed, asks it for workers, notices when it is gone.

One for the whole process, whatever loops and pools there are; it belongs to no event loop, and no call here waits for
an answer. One that does not answer is replaced. The host gets one child, the nursery, and nothing else: no signal
handler, no subreaper, no `waitpid(-1)`.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import logging
import os
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import msgspec

from taskyard.execution.boot import start_interpreter
from taskyard.execution.keeper import GONE, GONE_FORMAT, HEARD, KILL, LOST, TERM
from taskyard.execution.nursery_main import HEAD, KEEPER_PATIENCE_S, Preload, PutDown, Request, Spawn

NURSERY_PATIENCE_S = 5.0
"""How long the nursery may take to hear that a keeper must be put down, before it is killed and replaced, which ends
all its workers. It takes about a millisecond, on a machine that is not overloaded."""

PRELOAD_S = 60.0
"""The same while it imports modules, which takes as long as it takes."""

SEND_S = 1
"""Seconds that a request may wait for room in the nursery's socket, which has room for hundreds."""

log = logging.getLogger("taskyard")

_encode = msgspec.msgpack.Encoder().encode


class WorkerHandle(Protocol):
    """A worker's process, as its pool sees it. `on_gone` is called once, on the loop, when the process and everything
    it started are gone, with its wait status. If `watch` raises, the process is being ended, and its wire is closed.
    `terminate` and `kill` may be called at any time, and more than once."""

    wire: socket.socket

    def watch(self, loop: asyncio.AbstractEventLoop, on_gone: Callable[[int], None]) -> None: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


class NurseryWorker:
    """A worker under a keeper, steered over the keeper's control."""

    def __init__(
        self, nursery: Nursery, home: NurseryProcess, number: int, wire: socket.socket, control: socket.socket
    ) -> None:
        self.wire = wire
        self._nursery, self._home, self._number, self._control = nursery, home, number, control
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_gone: Callable[[int], None] | None = None
        self._patience: asyncio.TimerHandle | None = None

    def watch(self, loop: asyncio.AbstractEventLoop, on_gone: Callable[[int], None]) -> None:
        try:
            loop.add_reader(self._control, self._hear)
        except BaseException:
            self._control.close()  # its keeper takes that for our end
            self.wire.close()
            raise
        self._loop, self._on_gone = loop, on_gone

    def terminate(self) -> None:
        self._tell(TERM)

    def kill(self) -> None:
        self._tell(KILL)
        if self._loop is not None and self._patience is None and self._on_gone is not None:
            self._patience = self._loop.call_later(KEEPER_PATIENCE_S, self._put_down, self._loop)

    def _tell(self, what: bytes) -> None:
        with contextlib.suppress(OSError):  # it is gone, or its socket is full of the same word
            self._control.send(what)

    def _put_down(self, loop: asyncio.AbstractEventLoop) -> None:
        """Code of a worker can stop or kill its keeper. Then the nursery sweeps."""
        self._nursery.put_down(self._home, self._number)
        self._patience = loop.call_later(NURSERY_PATIENCE_S, self._replace_nursery, loop)

    def _replace_nursery(self, loop: asyncio.AbstractEventLoop) -> None:
        """It does not even answer. With it goes its keeper, if there is one, and so this worker is gone for certain."""
        left_s = self._nursery.replace(self._home)
        if left_s > 0:
            self._patience = loop.call_later(left_s, self._replace_nursery, loop)

    def _hear(self) -> None:
        try:
            said = self._control.recv(64)
        except BlockingIOError:
            return
        except ConnectionResetError:
            said = b""
        if said.startswith(HEARD):  # the nursery is there; what cannot be ended, it cannot end either
            self._cancel_patience()
            said = said.lstrip(HEARD)
            if not said:
                return
        # Without a last word, keeper and nursery were both killed; the kernel has killed the worker then.
        status: int = GONE_FORMAT.unpack_from(said)[1] if said.startswith(GONE) else LOST
        on_gone, self._on_gone = self._on_gone, None
        self._cancel_patience()
        if self._loop is not None:
            self._loop.remove_reader(self._control)
        self._control.close()
        if on_gone is not None:
            on_gone(status)

    def _cancel_patience(self) -> None:
        if self._patience is not None:
            self._patience.cancel()


class NurseryProcess:
    """One process, from its start to its end; `Nursery` lets one thread at a time in here."""

    def __init__(self) -> None:
        self._sock, theirs = socket.socketpair()
        # Who asks has an event loop, which must not wait for a process that is stuck.
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_S, 0))
        try:
            with theirs:
                self._process = start_interpreter("taskyard.execution.nursery_main", [theirs.fileno()], os.getpid())
        except BaseException:
            self._sock.close()
            raise
        self._asked: list[str] = []
        self._imported = 0
        self._asked_mono = 0.0

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def preload(self, modules: Iterable[str]) -> None:
        for name in modules:
            if name not in self._asked:
                self._asked.append(name)
                self._asked_mono = time.monotonic()
                self.send(Preload(name))

    def importing(self) -> list[str]:
        """The modules that it was asked for and has not come to the end of, the first of which it imports now."""
        with contextlib.suppress(OSError):  # it has said nothing, or is gone
            self._imported += len(self._sock.recv(1 << 12, socket.MSG_DONTWAIT))
        return self._asked[self._imported :]

    def may_answer_s(self) -> float:
        """How much longer it may be busy with what it imports."""
        return self._asked_mono + PRELOAD_S - time.monotonic() if self.importing() else 0.0

    def send(self, request: Request, fds: Sequence[int] = (), flags: int = 0) -> None:
        data = _encode(request)
        data = HEAD.pack(len(data), len(fds)) + data
        try:
            if fds:
                data = data[socket.send_fds(self._sock, [data], fds) :]
            self._sock.sendall(data, flags)
        except BlockingIOError:
            raise TimeoutError("the process that starts workers does not answer") from None

    def resume(self) -> None:
        """If somebody has stopped it."""
        self._process.send_signal(signal.SIGCONT)

    def close(self, patience_s: float) -> None:
        """Have it end, with all its workers, and wait for that; kill it when it takes too long."""
        self._sock.close()
        self.resume()
        try:
            self._process.wait(timeout=patience_s)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1.0)  # it takes about a millisecond

    def leave(self) -> None:
        """It is not ours: we are a fork of its host."""
        self._sock.close()
        self._process.returncode = 0


class Nursery:
    """Starts its process at the first spawn, and again when it has died."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._current: NurseryProcess | None = None
        self._numbers = itertools.count(1)
        self._preloaded: list[str] = []
        self._harmful: set[str] = set()
        # In a fork of the host this nursery is the parent's, and another thread may hold the lock for ever.
        os.register_at_fork(after_in_child=self._leave_to_parent)

    @property
    def pid(self) -> int | None:
        return None if self._current is None else self._current.pid

    def preload(self, modules: tuple[str, ...]) -> None:
        """Have these modules in every worker from the next spawn on, imported once. They must not start threads."""
        with self._lock:
            known = self._harmful.union(self._preloaded)
            self._preloaded += [name for name in modules if name not in known]

    def spawn(self) -> NurseryWorker:
        """A worker that is starting. Raises `OSError` when there are no descriptors or processes to be had."""
        wire, worker_end = socket.socketpair()
        control, keeper_end = socket.socketpair()
        wire.setblocking(False)
        control.setblocking(False)
        number = next(self._numbers)
        try:
            with self._lock, worker_end, keeper_end:
                home = self._ask(Spawn(number), [worker_end.fileno(), keeper_end.fileno()])
        except BaseException:
            wire.close()
            control.close()
            raise
        return NurseryWorker(self, home, number, wire, control)

    def _ask(self, request: Spawn, fds: list[int]) -> NurseryProcess:
        current = self._current
        if current is not None and current.is_alive:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # Race: it died after we looked
                return self._tell(current, request, fds)
        return self._tell(self._begin(), request, fds)

    def _tell(self, current: NurseryProcess, request: Spawn, fds: list[int]) -> NurseryProcess:
        current.preload(self._preloaded)
        current.send(request, fds)
        return current

    def _begin(self) -> NurseryProcess:
        if self._current is not None:
            self._drop_harmful(self._current.importing())
            self._current.close(patience_s=0.0)
        self._current = NurseryProcess()
        return self._current

    def _drop_harmful(self, importing: list[str]) -> None:
        """The last one ended while it imported the first of these: perhaps by that, and so would the next one."""
        for name in importing[:1]:
            self._preloaded.remove(name)
            self._harmful.add(name)
            log.warning("the module %s is not preloaded any more: the process that imported it ended meanwhile", name)

    def put_down(self, home: NurseryProcess, number: int) -> None:
        """Have a keeper killed that does not answer."""
        with self._lock, contextlib.suppress(OSError):
            home.resume()
            home.send(PutDown(number), flags=socket.MSG_DONTWAIT)

    def replace(self, home: NurseryProcess) -> float:
        """It does not answer: kill it, and the next spawn starts another. How many seconds it may have before that."""
        with self._lock:
            left_s = home.may_answer_s()
            if left_s <= 0:
                log.warning("the process that starts workers does not answer, and is replaced")
                home.kill()
            return left_s

    def close(self, *, patience_s: float = 6.0) -> None:
        """End it and all its workers, and wait for that. The next spawn starts another."""
        with self._lock:
            current, self._current = self._current, None
        if current is not None:
            current.close(patience_s)

    def _leave_to_parent(self) -> None:
        self._lock = threading.Lock()
        if self._current is not None:
            self._current.leave()
            self._current = None


NURSERY = Nursery()
atexit.register(NURSERY.close)
