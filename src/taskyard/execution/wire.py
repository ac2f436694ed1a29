"""Frames between the host and a worker, over a socket that nothing else knows of.

A frame is a head of fixed size and a body: a pickle of protocol 5, or the sizes of several parts and these, the pickle
and the buffers it left out. Large parts are written to a memfd instead, whose descriptor travels with the frame: the
other side maps it, and what it unpickles lies in that mapping, writable, without a copy. Nothing here waits or starts a
thread.

What is read is judged before it is used: lengths are bounded, and a memfd that its sender could still shrink is refused
(touching the lost part would kill the reader). Whatever does not fit raises `WireError`: that worker ends, nobody else.
"""

from __future__ import annotations

import array
import contextlib
import errno
import mmap
import os
import pickle
import socket
import struct
import weakref
from collections import deque
from enum import IntEnum
from typing import Any

import msgspec

from taskyard.execution.shared import Bytes, Lender, is_sealed, map_memory, places, share

SHARED_FROM = 4 << 20
"""Bytes of body from which a memfd is used. Below, two copies through the socket cost less than fresh pages."""

APART_FROM = 32 << 10
"""Bytes from which a buffer is sent beside the pickle instead of being copied into it."""

MOST_APART = 1000
"""Buffers beside one pickle; the rest goes into it. Keeps the vector within what sendmsg takes."""

INLINE_LIMIT = 64 << 20
"""Bytes of body a peer that has memfds may send through the socket: far more than it has reason to."""

PLAIN_LIMIT = 16 << 30
"""The same for a peer without memfds, which sends everything through the socket."""

SCRATCH = 256 << 10
SOCKET_BUFFER = 4 << 20

HEAD = struct.Struct("<BBHQQdd")
"""Kind, marks, number of parts (0: the body is the pickle), call, bytes of the body, and of answers when the call
began and ended, in POSIX seconds. One step to write and one to read; msgpack would need a length before it."""

_MOST_FDS = 4
_ANCILLARY = socket.CMSG_SPACE(_MOST_FDS * array.array("i").itemsize)
_CLOEXEC = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))


class WireError(Exception):
    """What came over the wire is no frame of ours: end the worker that sent it."""


class NoRoom(WireError):
    """What came cannot be taken: this process has no descriptor or no memory for it. No fault of who sent it."""


class Kind(IntEnum):
    """What a frame says. To the worker: SETUP (first of all), CALL, CANCEL (of the call it names)
    and EXIT; the others come from it."""

    CALL = 1
    CANCEL = 2
    EXIT = 3
    READY = 4
    STARTED = 5
    RESULT = 6
    ERROR = 7
    PROGRESS = 8
    NOTE = 9
    LOG = 10
    SETUP = 11
    CHECKPOINT = 12
    LINES = 13
    ARTIFACT = 14


CALL, CANCEL, EXIT, RESULT = Kind.CALL, Kind.CANCEL, Kind.EXIT, Kind.RESULT
"""Those that every call asks for: to name one by its class costs 70 ns on Python 3.11."""


_KINDS = {int(kind): kind for kind in Kind}

IS_NEW = 1
"""Of a call: the worker may have to import what it names, and says when that is done (STARTED)."""

NAMES_MAIN = 2
"""Of a call: it names something in the host's script."""

IS_SPENT = 4
"""Of an answer: the worker should be replaced."""

KEEPS_EXCEPTION = 8
"""Of a call: what it raises is wanted as it is, pickled, beside its text."""

IS_FREE = 16
"""Of an answer: nothing in the worker lies any more in the memfd that came with the call."""

IS_NAMED = 32
"""Of a call: its function crosses as a name, and keeps a number from the first such call on."""

IS_SHARED = 64
"""Its parts lie in the memfd that comes with it."""

IS_ALONE = 128
"""Of a call: the pool runs no other, so that its worker may stay awake for the next."""

_SCRIPT_NAMES = (b"\x8c\x08__main__", b"\x8c\x0b__mp_main__")
"""Those of the host's script, in the host and in a worker that is host to others, as pickle writes a short text: the
same letters inside a longer one do not count."""


class Bulk:
    """Bytes that are to travel beside the pickle: plain `bytes` would be copied into it."""

    __slots__ = ("data",)

    def __init__(self, data: bytes | bytearray) -> None:
        self.data = data

    def __reduce__(self) -> tuple[type, tuple[pickle.PickleBuffer]]:
        return type(self.data), (pickle.PickleBuffer(self.data),)

    @staticmethod
    def of(value: Any) -> Any:
        """`value`, or, if it is many bytes, the same in a form that is not copied."""
        if type(value) in (bytes, bytearray) and len(value) >= APART_FROM:
            return Bulk(value)
        return value


class Outgoing:
    """A frame to send: the bytes that are left of it, and the descriptor that goes with the first of them."""

    __slots__ = ("fd", "parts")

    def __init__(self, parts: list[Bytes], fd: int | None = None) -> None:
        self.parts, self.fd = parts, fd

    def send(self, sock: socket.socket) -> bool:
        """Send what the socket takes; whether that was all. Raises what the socket raises."""
        if self.fd is None:
            if len(self.parts) == 1:
                sent = sock.send(self.parts[0])
                if sent == len(self.parts[0]):  # as nearly always
                    self.parts.clear()
                    return True
            else:
                sent = sock.sendmsg(self.parts)
        else:
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [self.fd]))
            sent = sock.sendmsg(self.parts, [rights])
            self.drop()
        while self.parts and sent >= len(self.parts[0]):
            sent -= len(self.parts.pop(0))
        if sent:
            self.parts[0] = memoryview(self.parts[0])[sent:]
        return not self.parts

    def own(self) -> None:
        """It has to wait: what is left of it may lie in buffers of the caller's, who is free to change them."""
        self.parts = [bytes(part) if _may_change(part) else part for part in self.parts]

    def drop(self) -> None:
        """It will not be sent (again): let go of its descriptor."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


def _may_change(part: Bytes) -> bool:
    return type(part.obj if isinstance(part, memoryview) else part) is not bytes


def encode(
    kind: Kind,
    call: int = 0,
    value: Any = None,
    marks: int = 0,
    started_at: float = 0.0,
    ended_at: float = 0.0,
    *,
    shares: bool = True,
    lender: Lender | None = None,
) -> Outgoing:
    """The frame that says this; raises what pickling `value` raises. `shares`: large bodies may go through a memfd;
    `lender` may have one for them."""
    apart: list[pickle.PickleBuffer] = []

    def keep_inside(buffer: pickle.PickleBuffer) -> bool:
        if len(apart) >= MOST_APART or buffer.raw().nbytes < APART_FROM:
            return True
        apart.append(buffer)
        return False

    body = pickle.dumps(value, 5, buffer_callback=keep_inside)
    # Not `in`, which would raise and catch an error inside, to look for a number first.
    if kind is CALL and body.find(b"main__") >= 0 and any(name in body for name in _SCRIPT_NAMES):
        marks |= NAMES_MAIN
    size = len(body)
    if not apart and (size < SHARED_FROM or not shares):
        return Outgoing([HEAD.pack(kind, marks, 0, call, size, started_at, ended_at) + body])
    parts: list[Bytes] = [body, *(buffer.raw() for buffer in apart)]
    sizes = list(map(len, parts))
    table = struct.pack(f"<{len(sizes)}Q", *sizes)
    if shares and sum(sizes) >= SHARED_FROM:
        head = HEAD.pack(kind, marks | IS_SHARED, len(sizes), call, len(table), started_at, ended_at)
        return Outgoing([head + table], share(parts) if lender is None else lender.share(parts, call))
    head = HEAD.pack(kind, marks, len(sizes), call, len(table) + sum(sizes), started_at, ended_at)
    return Outgoing([head + table, *parts])


class Frame(msgspec.Struct, gc=False):
    """One frame as it arrived. Its parts may lie in the reader's own memory: `load` it before the next read, or keep
    what `detached` returns."""

    kind: Kind
    call: int
    marks: int
    started_at: float
    ended_at: float
    parts: list[Bytes]
    lies_in_scratch: bool = False
    mapped: weakref.ref[mmap.mmap] | None = None
    """The memory that its parts lie in, if it is shared, for as long as anything lies in it."""

    def detached(self) -> Frame:
        if not self.lies_in_scratch:
            return self
        parts: list[Bytes] = [bytearray(part) for part in self.parts]
        return msgspec.structs.replace(self, parts=parts, lies_in_scratch=False)

    def load(self) -> Any:
        """The value, once: the frame lets go of its parts. Raises whatever unpickling raises."""
        parts, self.parts = self.parts, []
        if len(parts) == 1:
            return pickle.loads(parts[0])
        if self.lies_in_scratch:  # arrays will lie in these parts, so they must be theirs
            parts = [bytearray(part) for part in parts]
        return pickle.loads(parts[0], buffers=parts[1:])


class Reader:
    """Takes bytes from a socket, as they come, and gives frames."""

    def __init__(self, *, shares: bool = True) -> None:
        self._limit = INLINE_LIMIT if shares else PLAIN_LIMIT
        self._scratch = memoryview(bytearray(SCRATCH))
        self._start = self._end = 0
        self._fds: deque[int] = deque()
        # A frame that is larger than the scratch is collected in a place of its own.
        self._large: Frame | None = None
        self._count = 0
        self._body = memoryview(b"")
        self._filled = 0

    def receive(self, sock: socket.socket, flags: int = 0) -> bool:
        """Read once; False at the end of the stream. Raises `BlockingIOError` when there is nothing yet."""
        if self._large is not None:
            free = self._body[self._filled :]
        else:
            free = self._scratch[self._end :] if self._end else self._scratch
        count, ancillary, found, _ = sock.recvmsg_into([free], _ANCILLARY, flags | _CLOEXEC)
        if ancillary:
            self._take_fds(ancillary)
        if found & socket.MSG_CTRUNC:  # the kernel could not give us the descriptor, and has dropped it
            raise NoRoom(os.strerror(errno.EMFILE))
        if self._large is not None:
            self._filled += count
        else:
            self._end += count
        return count > 0

    def next(self) -> Frame | None:
        """The next frame that is complete, to be used before the reader is used again."""
        start, end = self._start, self._end
        if start == end:
            return None if self._large is None else self._next_large(self._large)
        body_start = start + HEAD.size
        if body_start > end:
            self._make_room(HEAD.size)
            return None
        number, marks, count, call, size, started_at, ended_at = HEAD.unpack_from(self._scratch, start)
        kind = _KINDS.get(number)
        if kind is None or count > MOST_APART + 1 or size > self._limit:
            raise WireError(f"a frame of kind {number} with {count} parts and {size} bytes")
        body_end = body_start + size
        if body_end <= end:
            if body_end == end:
                self._start = self._end = 0
            else:
                self._start = body_end
            frame = Frame(kind, call, marks, started_at, ended_at, [self._scratch[body_start:body_end]], True)
            return self._parted(frame, count) if count else frame
        if HEAD.size + size <= SCRATCH:
            self._make_room(HEAD.size + size)
        else:
            body = self._begin_large(body_start, size)
            self._large, self._count = Frame(kind, call, marks, started_at, ended_at, [body]), count
        return None

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.popleft())

    def _make_room(self, size: int) -> None:
        """Move what is unread to the front if `size` bytes would not fit behind `start`."""
        if self._start + size > SCRATCH:
            unread = bytes(self._scratch[self._start : self._end])
            self._scratch[: len(unread)] = unread
            self._start, self._end = 0, len(unread)

    def _begin_large(self, body_start: int, body_size: int) -> memoryview:
        body = self._body = memoryview(bytearray(body_size))
        self._filled = self._end - body_start
        body[: self._filled] = self._scratch[body_start : self._end]
        self._start = self._end = 0
        return body

    def _next_large(self, frame: Frame) -> Frame | None:
        if self._filled < len(self._body):
            return None
        self._body, self._large = memoryview(b""), None
        return self._parted(frame, self._count) if self._count else frame

    def _parted(self, frame: Frame, count: int) -> Frame:
        """The frame with the parts that its body consists of, or names."""
        body = memoryview(frame.parts.pop())
        place = 8 * count
        if place > len(body):
            raise WireError("a body that is shorter than the sizes of its parts")
        sizes = struct.unpack_from(f"<{count}Q", body)
        if frame.marks & IS_SHARED:
            return self._map(frame, sizes)
        if place + sum(sizes) != len(body):
            raise WireError("parts whose sizes do not fit their body")
        for size in sizes:
            frame.parts.append(body[place : place + size])
            place += size
        return frame

    def _take_fds(self, ancillary: list[tuple[int, int, bytes]]) -> None:
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
                self._fds.extend(fds)
        if len(self._fds) > _MOST_FDS:
            raise WireError("more descriptors than frames")

    def _map(self, frame: Frame, sizes: tuple[int, ...]) -> Frame:
        if not self._fds:
            raise WireError("a frame without its descriptor")
        fd = self._fds.popleft()
        try:
            starts = list(places(sizes))
            size = starts[-1] + sizes[-1]
            if not is_sealed(fd):
                raise WireError("what may shrink, or is no memfd")
            if os.fstat(fd).st_size < size:
                raise WireError("a memfd that is too short")
            mapped = map_memory(fd, size)
        except OSError as exc:
            raise NoRoom(exc.strerror or str(exc)) from None
        except ValueError as exc:
            raise WireError(f"a descriptor that cannot be mapped: {exc}") from None
        finally:
            os.close(fd)
        content = memoryview(mapped)
        frame.parts = [content[start : start + size] for start, size in zip(starts, sizes, strict=True)]
        frame.lies_in_scratch, frame.mapped = False, weakref.ref(mapped)
        return frame


def widen(sock: socket.socket) -> None:
    """Let the kernel hold a large frame, so that it crosses in few steps."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER)
