"""Large bodies in memfds: how their parts lie in one, and how one is used again.

The pages of a fresh memfd cost twice as much as the copy into them. So the host keeps the one it has sent to a worker
and writes the next body into it, but only after the worker has said, with the answer, that nothing there lies in it any
more. Without that word the host lets go of it, and the worker has it as long as it likes: no memory changes under code
that still looks at it.

A mapping holds no descriptor: a program may keep thousands of results, but not thousands of descriptors.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import mmap
import os
import sys
from collections.abc import Callable, Iterator, Sequence

try:
    import fcntl
except ImportError as exc:
    raise ImportError(
        "taskyard does not run on Windows: its worker processes and its store need what only Unix systems have; "
        "use Linux (WSL is one) or macOS"
    ) from exc

Bytes = bytes | bytearray | memoryview

ALIGNMENT = 64
"""What vector instructions like arrays to begin at."""

KEPT_S = 5.0
"""How long a memfd is kept that no call needs."""

MOST_KEPT = 256 << 20
"""Bytes that are kept for one worker. A larger memfd is used once."""


def places(sizes: Sequence[int]) -> Iterator[int]:
    """Where parts of these sizes begin."""
    place = 0
    for size in sizes:
        yield place
        place += -(-size // ALIGNMENT) * ALIGNMENT


def share(parts: Sequence[Bytes]) -> int:
    """A sealed memfd with all parts, each at its alignment."""
    fd = os.memfd_create("taskyard", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, _write(fd, parts))
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def is_sealed(fd: int) -> bool:
    """Whether it is a memfd that nobody can shrink any more."""
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:
        return False


if sys.version_info >= (3, 13):

    def map_memory(fd: int, size: int) -> mmap.mmap:
        """Its first `size` bytes, without keeping the descriptor."""
        return mmap.mmap(fd, size, trackfd=False)

else:
    _MAP_FIXED = 0x10

    def map_memory(fd: int, size: int) -> mmap.mmap:
        """Its first `size` bytes, without keeping the descriptor. What `mmap` makes of one keeps a copy of it, so it
        makes memory of no file, and the file's is put into its place: it is still given back as one."""
        mapped = mmap.mmap(-1, size)
        place = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        flags, protection = mmap.MAP_SHARED | _MAP_FIXED, mmap.PROT_READ | mmap.PROT_WRITE
        if _libc_mmap()(place, size, protection, flags, fd, 0) != place:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return mapped

    @functools.cache
    def _libc_mmap() -> Callable[..., int | None]:
        function = ctypes.CDLL(None, use_errno=True).mmap
        number = ctypes.c_int
        function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, number, number, number, ctypes.c_long)
        function.restype = ctypes.c_void_p
        found: Callable[..., int | None] = function
        return found


def _write(fd: int, parts: Sequence[Bytes]) -> int:
    """Write all parts; where they end."""
    end = 0
    for start, part in zip(places([len(part) for part in parts]), parts, strict=True):
        end, left = start, memoryview(part)
        while left:
            written = os.pwrite(fd, left, end)
            end += written
            left = left[written:]
    return end


class Lender:
    """The memfd that is kept for one worker. `borrower` is the call that it is lent to."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.borrower: int | None = None
        self._loop = loop
        self._fd: int | None = None
        self._size = 0
        self._timer: asyncio.TimerHandle | None = None

    def share(self, parts: Sequence[Bytes], call: int) -> int:
        """A descriptor of a memfd with all parts, to send with this call and close."""
        sizes = [len(part) for part in parts]
        size = list(places(sizes))[-1] + sizes[-1]
        if self.borrower is not None or size > MOST_KEPT:
            return share(parts)
        if self._fd is not None and size <= self._size:
            _write(self._fd, parts)
        else:
            self.close()
            self._fd, self._size = share(parts), size
        if self._timer is not None:
            self._timer.cancel()
        lent = os.dup(self._fd)  # first: where that fails, nobody has borrowed anything
        self.borrower = call
        return lent

    def take_back(self, *, is_free: bool) -> None:
        """Its borrower has answered; `is_free`: and has let go of it."""
        self.borrower = None
        if is_free:
            self._timer = self._loop.call_later(KEPT_S, self.close)
        else:
            self.close()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
