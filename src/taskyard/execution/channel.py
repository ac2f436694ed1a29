"""The worker's end of its wire: blocking, and safe to send on from any thread of the worker."""

from __future__ import annotations

import contextlib
import functools
import os
import select
import socket
import threading
from collections import deque
from os import getpid
from threading import get_ident
from typing import Any

from taskyard.execution.linger import Linger
from taskyard.execution.wire import CANCEL, Frame, Kind, Outgoing, Reader, encode, widen


class Channel:
    """Only the worker itself speaks here: a process that its code forked, and that came back from the call as well,
    ends without a word."""

    def __init__(self, fd: int, *, shares: bool = False) -> None:
        self.shares = shares
        self._sock = socket.socket(fileno=fd)
        self._sock.setblocking(True)
        widen(self._sock)
        self._reader = Reader(shares=False)  # a setup comes through the socket, whatever its size
        self._arrived: deque[Frame] = deque()
        # Who asks for one that is long over is a thread it left behind: the last few will do.
        self._canceled: deque[int] = deque(maxlen=100)
        self._pid = getpid()
        self.fd, self.is_closed = fd, False
        """`is_closed`: the host has closed its end, and a look at this one has found that out."""
        looks = select.poll()
        looks.register(fd, select.POLLIN)
        self._linger = Linger(functools.partial(looks.poll, 0))
        self._sending, self._receiving = threading.RLock(), threading.Lock()
        self._sender = 0
        self._held: deque[Outgoing] = deque()

    @property
    def is_own(self) -> bool:
        """Whether this process is the worker, and not one that its code has forked."""
        return getpid() == self._pid

    def send(self, kind: Kind, call: int = 0, value: Any = None) -> None:
        """Say something beside an answer; from a forked process it goes unheard."""
        if self.is_own:
            self.write(encode(kind, call, value, shares=self.shares))

    def write(self, out: Outgoing) -> None:
        if getpid() != self._pid:
            os._exit(0)
        if self._sender == get_ident():
            self._held.append(out)  # a finalizer or a signal handler speaks in the middle of our frame: it goes next
            return
        # The lock can be taken twice by one thread: a finalizer may also run right before or after the frame.
        with self._sending:
            self._write(out)
            while self._held:
                self._write(self._held.popleft())

    def _write(self, out: Outgoing) -> None:
        self._sender = get_ident()
        try:
            while not out.send(self._sock):
                pass
        finally:
            self._sender = 0

    def receive(self, *, stay_awake: bool = False) -> Frame | None:
        """The next frame, to be loaded before anything else is done here; None when the host has closed. `stay_awake`:
        it is likely to come soon."""
        with self._receiving:
            while True:
                frame = self._arrived.popleft() if self._arrived else self._reader.next()
                if frame is None:
                    if stay_awake:
                        self._linger.look()
                    if not self._reader.receive(self._sock):
                        return None
                elif frame.kind is not CANCEL:  # a cancel that is read here came too late for the call it names
                    return frame

    def is_canceled(self, call: int) -> bool:
        """Whether the host has asked this call to end. Looks at what has arrived, without waiting: one system call,
        where a thread that reads for us would cost every call two switches."""
        if call not in self._canceled and self.is_own and self._receiving.acquire(blocking=False):
            try:
                self._sort()  # the cancel may have come in one piece with its call
                with contextlib.suppress(BlockingIOError):  # nothing has arrived
                    while self._reader.receive(self._sock, socket.MSG_DONTWAIT):
                        self._sort()
                    self.is_closed = True
            except OSError:
                self.is_closed = True
            finally:
                self._receiving.release()
        return call in self._canceled

    def close(self) -> None:
        self._reader.close()
        self._sock.close()

    def _sort(self) -> None:
        while (frame := self._reader.next()) is not None:
            if frame.kind is CANCEL:
                self._canceled.append(frame.call)
            else:
                self._arrived.append(frame.detached())
