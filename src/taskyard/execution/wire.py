"""Frames between the host and a worker, over a socket that nothing else knows of.

A frame is a prefix (two lengths), a msgpack `Head` and a body: a pickle of protocol 5 and the buffers it left out. A
large body is written to a memfd instead, whose descriptor travels with the frame: the other side maps it, and what it
unpickles lies in that mapping, writable, without a copy. Nothing here waits or starts a thread.

What is read is judged before it is used: lengths are bounded, and a memfd that its sender could still shrink is refused
(touching the lost part would kill the reader). Whatever does not fit raises `WireError`: that worker ends, nobody else.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import mmap
import os
import pickle
import socket
import struct
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Any

import msgspec

SHARED_FROM = 4 << 20
"""Bytes of body from which a memfd is used. Below, two copies through the socket cost less than fresh pages."""

APART_FROM = 32 << 10
"""Bytes from which a buffer is sent beside the pickle instead of being copied into it."""

MOST_APART = 1000
"""Buffers beside one pickle; the rest goes into it. Keeps the head small and the vector within what sendmsg takes."""

INLINE_LIMIT = 64 << 20
"""Bytes of body a peer that has memfds may send through the socket: far more than it has reason to."""

PLAIN_LIMIT = 16 << 30
"""The same for a peer without memfds, which sends everything through the socket."""

HEAD_LIMIT = 64 << 10
SCRATCH = 256 << 10
SOCKET_BUFFER = 4 << 20
ALIGNMENT = 64
"""What vector instructions like arrays to begin at."""

_PREFIX = struct.Struct("<IQ")
_MOST_FDS = 4
_ANCILLARY = socket.CMSG_SPACE(_MOST_FDS * array.array("i").itemsize)
_UNTRACKED: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
"""Older mappings keep a descriptor each, until nothing lies in them any more."""

_CLOEXEC = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))


class WireError(Exception):
    """What came over the wire is no frame of ours: end the worker that sent it."""


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


CALL, RESULT = Kind.CALL, Kind.RESULT
"""Those of every call: to name one by its class costs 70 ns on Python 3.11."""


class Head(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """`sizes` are those of the pickle and of the buffers beside it; `marks` is a sum of the flags below; the times are
    POSIX seconds, of results."""

    kind: Kind
    call: int
    sizes: tuple[int, ...]
    is_shared: bool = False
    marks: int = 0
    started_at: float = 0.0
    ended_at: float = 0.0


_encode_head = msgspec.msgpack.Encoder().encode
_decode_head = msgspec.msgpack.Decoder(Head).decode

IS_NEW = 1
"""Of a call: the worker may have to import what it names, and says when that is done (STARTED)."""

NAMES_MAIN = 2
"""Of a call: it names something in the host's script."""

IS_SPENT = 4
"""Of an answer: the worker should be replaced."""

KEEPS_EXCEPTION = 8
"""Of a call: what it raises is wanted as it is, pickled, beside its text."""

IS_NAMED = 32
"""Of a call: its function crosses as a name, and keeps a number from the first such call on."""

_MAIN = b"\x8c\x08__main__"
"""The name of the host's script as pickle writes a short text: the same letters inside a longer one do not count."""

Bytes = bytes | bytearray | memoryview


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
) -> Outgoing:
    """The frame that says this; raises what pickling `value` raises. `shares`: large bodies may go through a memfd."""
    apart: list[pickle.PickleBuffer] = []

    def keep_inside(buffer: pickle.PickleBuffer) -> bool:
        if len(apart) >= MOST_APART or buffer.raw().nbytes < APART_FROM:
            return True
        apart.append(buffer)
        return False

    body = pickle.dumps(value, 5, buffer_callback=keep_inside)
    if kind is CALL and _MAIN in body:
        marks |= NAMES_MAIN
    size = len(body)
    if not apart and (size < SHARED_FROM or not shares):
        head = _encode_head(Head(kind, call, (size,), False, marks, started_at, ended_at))
        return Outgoing([_PREFIX.pack(len(head), size) + head + body])
    parts: list[Bytes] = [body, *(buffer.raw() for buffer in apart)]
    sizes = tuple(map(len, parts))
    is_shared = shares and sum(sizes) >= SHARED_FROM
    head = _encode_head(Head(kind, call, sizes, is_shared, marks, started_at, ended_at))
    if is_shared:
        return Outgoing([_PREFIX.pack(len(head), 0) + head], _share(parts))
    return Outgoing([_PREFIX.pack(len(head), sum(sizes)) + head, *parts])


def _share(parts: Sequence[Bytes]) -> int:
    """A sealed memfd with all parts, each at its alignment."""
    fd = os.memfd_create("taskyard", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        end = 0
        for start, part in zip(_places([len(part) for part in parts]), parts, strict=True):
            _write_all(fd, part, start)
            end = start + len(part)
        os.ftruncate(fd, end)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _write_all(fd: int, part: Bytes, start: int) -> None:
    left = memoryview(part)
    while left:
        written = os.pwrite(fd, left, start)
        start += written
        left = left[written:]


def _places(sizes: Sequence[int]) -> Iterator[int]:
    place = 0
    for size in sizes:
        yield place
        place += -(-size // ALIGNMENT) * ALIGNMENT


class Frame:
    """One frame as it arrived. Its parts may lie in the reader's own memory: `load` it before the next read, or keep
    what `detached` returns."""

    __slots__ = ("_lies_in_scratch", "head", "parts")

    def __init__(self, head: Head, parts: list[Bytes], lies_in_scratch: bool = False) -> None:
        self.head, self.parts, self._lies_in_scratch = head, parts, lies_in_scratch

    def detached(self) -> Frame:
        if not self._lies_in_scratch:
            return self
        return Frame(self.head, [bytearray(part) for part in self.parts])

    def load(self) -> Any:
        """The value; raises whatever unpickling it raises."""
        if len(self.parts) == 1:
            return pickle.loads(self.parts[0])
        body, *apart = self.detached().parts  # arrays will lie in these parts, so they must be theirs
        return pickle.loads(body, buffers=apart)


class Reader:
    """Takes bytes from a socket, as they come, and gives frames."""

    def __init__(self, *, shares: bool = True) -> None:
        self._limit = INLINE_LIMIT if shares else PLAIN_LIMIT
        self._scratch = memoryview(bytearray(SCRATCH))
        self._start = self._end = 0
        self._fds: deque[int] = deque()
        # A frame that is larger than the scratch is collected in a place of its own.
        self._head: Head | None = None
        self._body = memoryview(b"")
        self._filled = 0

    def receive(self, sock: socket.socket, flags: int = 0) -> bool:
        """Read once; False at the end of the stream. Raises `BlockingIOError` when there is nothing yet."""
        if self._head is not None:
            free = self._body[self._filled :]
        else:
            free = self._scratch[self._end :] if self._end else self._scratch
        count, ancillary, _, _ = sock.recvmsg_into([free], _ANCILLARY, flags | _CLOEXEC)
        if ancillary:
            self._take_fds(ancillary)
        if self._head is not None:
            self._filled += count
        else:
            self._end += count
        return count > 0

    def next(self) -> Frame | None:
        """The next frame that is complete, to be used before the reader is used again."""
        if self._head is not None:
            return self._next_large(self._head)
        start, end = self._start, self._end
        if start == end:
            self._start = self._end = 0
            return None
        if end - start < _PREFIX.size:
            self._make_room(_PREFIX.size)
            return None
        head_size, body_size = _PREFIX.unpack_from(self._scratch, start)
        if head_size > HEAD_LIMIT or body_size > self._limit:
            raise WireError(f"a frame of {head_size} and {body_size} bytes")
        body_start = start + _PREFIX.size + head_size
        if body_start > end:
            self._make_room(_PREFIX.size + head_size)
            return None
        head = self._decode(self._scratch[start + _PREFIX.size : body_start], body_size)
        self._start = body_start + body_size
        if self._start <= end:
            return self._frame(head, self._scratch[body_start : self._start], True)
        self._start = start
        if _PREFIX.size + head_size + body_size <= SCRATCH:
            self._make_room(_PREFIX.size + head_size + body_size)
        else:
            self._begin_large(head, body_start, body_size)
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

    def _begin_large(self, head: Head, body_start: int, body_size: int) -> None:
        self._head, self._body = head, memoryview(bytearray(body_size))
        self._filled = self._end - body_start
        self._body[: self._filled] = self._scratch[body_start : self._end]
        self._start = self._end = 0

    def _next_large(self, head: Head) -> Frame | None:
        if self._filled < len(self._body):
            return None
        body, self._body, self._head = self._body, memoryview(b""), None
        return self._frame(head, body, False)

    def _decode(self, data: memoryview, body_size: int) -> Head:
        try:
            head = _decode_head(data)
        except msgspec.DecodeError as exc:
            raise WireError(f"a head that is none: {exc}") from None
        sizes = head.sizes
        if len(sizes) == 1 and sizes[0] == body_size:
            return head
        if not sizes or min(sizes) < 0 or (sum(sizes) != body_size and not head.is_shared):
            raise WireError("a head whose sizes do not fit its body")
        return head

    def _frame(self, head: Head, body: memoryview, lies_in_scratch: bool) -> Frame:
        if head.is_shared:
            return Frame(head, self._map(head.sizes))
        if len(head.sizes) == 1:
            return Frame(head, [body], lies_in_scratch)
        parts: list[Bytes] = []
        place = 0
        for size in head.sizes:
            parts.append(body[place : place + size])
            place += size
        return Frame(head, parts, lies_in_scratch)

    def _take_fds(self, ancillary: list[tuple[int, int, bytes]]) -> None:
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
                self._fds.extend(fds)
        if len(self._fds) > _MOST_FDS:
            raise WireError("more descriptors than frames")

    def _map(self, sizes: tuple[int, ...]) -> list[Bytes]:
        if not self._fds:
            raise WireError("a frame without its descriptor")
        fd = self._fds.popleft()
        try:
            places = list(_places(sizes))
            if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise WireError("a memfd that may shrink")
            if os.fstat(fd).st_size < places[-1] + sizes[-1]:
                raise WireError("a memfd that is too short")
            size = places[-1] + sizes[-1]
            mapped = memoryview(mmap.mmap(fd, size, mmap.MAP_SHARED | mmap.MAP_POPULATE, **_UNTRACKED))
        except (OSError, ValueError) as exc:
            raise WireError(f"a descriptor that cannot be mapped: {exc}") from None
        finally:
            os.close(fd)
        return [mapped[place : place + size] for place, size in zip(places, sizes, strict=True)]


def widen(sock: socket.socket) -> None:
    """Let the kernel hold a large frame, so that it crosses in few steps."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER)
