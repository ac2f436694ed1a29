"""The few things only Linux offers, for the processes that need them: never called in the host."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterable

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

_libc = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """Orphans among the descendants of this process become its children, not those of process 1."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def signal_at_end_of_parent(signum: int) -> None:
    """Get `signum` when the parent ends. What counts for the kernel is the end of the thread that forked: from a parent
    with threads it may come early, and comes again when the next thread ends, the last one's end included."""
    _libc.prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)


def die_with_parent(parent: int) -> None:
    """Be killed when `parent`, which must be single-threaded, ends; at once if it has."""
    signal_at_end_of_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def set_name(name: str) -> None:
    """What `ps` and `top` show, at most 15 characters."""
    _libc.prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def keep_freed_memory(size: int) -> None:
    """Let malloc keep up to `size` freed bytes: megabytes that come and go with every call are not worth the page
    faults. glibc only."""
    mallopt = getattr(_libc, "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, size)
        mallopt(_M_TRIM_THRESHOLD, size)


def children() -> list[int]:
    """The direct children of this process, which has one thread. May miss some while others end."""
    me = os.getpid()
    try:
        with open(f"/proc/self/task/{me}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except FileNotFoundError:  # a kernel built without that file
        return [int(name) for name in os.listdir("/proc") if name.isdigit() and _parent(name) == me]


def _parent(pid: str) -> int:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def kill_hard(pid: int) -> None:
    """SIGKILL for a process and its group. For the group it is atomic: no member can fork its way out of it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        group = os.getpgid(pid)
        if group != os.getpgid(0):
            os.killpg(group, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
