"""Who is alive, by /proc; and waiting for somebody's end without looking again and again."""

import asyncio
import os
import resource
from pathlib import Path


def parents() -> dict[int, int]:
    """Every live process and its parent."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                state, parent = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            if state != "Z":
                found[int(name)] = int(parent)
    return found


def descendants(ancestor: int) -> set[int]:
    """Everybody below `ancestor`, which as a subreaper has all its orphans below it."""
    known = parents()
    found: set[int] = set()
    level = {ancestor}
    while level:
        level = {pid for pid, parent in known.items() if parent in level} - found
        found |= level
    return found


def is_alive(pid: int) -> bool:
    return pid in parents()


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident(pid: int) -> int:
    """Bytes in memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


async def ended(pid: int) -> None:
    """Wait until the process has ended; at once if there is none."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    gone = loop.create_future()
    loop.add_reader(pidfd, lambda: None if gone.done() else gone.set_result(None))
    try:
        async with asyncio.timeout(10):
            await gone
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
