"""Large bodies in memfds: how their parts lie in one, and how one is used again.

The pages of a fresh memfd cost twice as much as the copy into them. So the host keeps the one it has sent to a worker
and writes the next body into it, but only after the worker has said, with the answer, that nothing there lies in it any
more. Without that word the host lets go of it, and the worker has it as long as it likes: no memory changes under code
that still looks at it.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Iterator, Sequence

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
        self.borrower = call
        return os.dup(self._fd)

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
