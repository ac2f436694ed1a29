"""A disk that runs full under a yard and has room again later, and what the yard must make of it.

The disk is a small file system in memory, mounted for one child alone; where a process may not mount anything, it is a
layer under SQLite that refuses to make files longer.
"""

import asyncio
import ctypes
import os
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from taskyard import TaskHandle, Yard
from taskyard.errors import StoreFull
from taskyard.ports.clock import SystemClock
from taskyard.stores.sqlite import SqliteStore
from taskyard.testing.crashvfs import FullVFS
from taskyard.testing.ledger import Ledger, judge
from tests.torture.verdict import check_file, drain
from tests.torture.work import make_yard

SIZE_KB, BALLAST_KB = 3_000, 2_000
HELD = 3
"""Tasks that run while the disk is full, and end then."""


class Disk(Protocol):
    path: Path
    vfs: str | None

    def fill(self) -> None:
        """No room from soon on."""

    def free(self) -> None:
        """Room again."""


class SmallDisk:
    """A tmpfs in a mount namespace of this process's own, with ballast that can be thrown off."""

    vfs: str | None = None

    def __init__(self, path: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        new_namespace, recursive, private = 0x0002_0000, 0x4000, 0x4_0000
        _check(libc.unshare(new_namespace))
        _check(libc.mount(b"none", b"/", None, recursive | private, None))
        _check(libc.mount(b"none", os.fsencode(path), b"tmpfs", 0, f"size={SIZE_KB}k".encode()))
        self.path = path
        self._ballast = path / "ballast"
        self._ballast.write_bytes(bytes(BALLAST_KB * 1024))

    def fill(self) -> None: ...

    def free(self) -> None:
        self._ballast.unlink()


class PretendedDisk:
    """An ordinary folder, and an SQLite that is told there is no room."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._vfs = FullVFS("full")
        self.vfs: str | None = self._vfs.name

    def fill(self) -> None:
        self._vfs.is_full = True

    def free(self) -> None:
        self._vfs.is_full = False


def _check(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def make_disk(path: Path) -> Disk:
    path.mkdir()
    with suppress(OSError):  # not root
        return SmallDisk(path)
    return PretendedDisk(path)


# --- in the child -----------------------------------------------------------------------------------------------------


async def fill_up(
    disk: Disk, ledger: Ledger, folder: Path, rng: random.Random, say: Callable[[str], None]
) -> list[str]:
    """Everything that went wrong on a disk that runs full."""

    def make() -> Yard:
        return make_yard(folder, ledger, store=SqliteStore(disk.path / "work.db", clock=SystemClock(), vfs=disk.vfs))

    faults: list[str] = []
    async with make() as yard:
        held = [await yard.submit("guard", {"gate": "gate"}) for _ in range(HELD)]
        for handle in held:
            ledger.acknowledged(handle.uuid)
        await _submit(yard, ledger, rng, rng.randint(0, 20))
        disk.fill()
        if not await _submit(yard, ledger, rng, 5_000):
            faults.append("the disk never ran full")
        (folder / "gate").touch()
        refused = 1
        for _ in range(rng.randint(1, 3)):
            refused += await _submit(yard, ledger, rng, 1)
            await asyncio.sleep(0.02)
        disk.free()
        say(f"refused {refused}")
        faults += await _check_recovery(yard, ledger, rng, held)
    missing, stored = await drain(make())
    return faults + missing + judge(ledger.entries(), stored) + check_file(disk.path / "work.db")


async def _submit(yard: Yard, ledger: Ledger, rng: random.Random, count: int) -> bool:
    """Submit up to `count` tasks; whether the store said that it is full. Any other error is raised."""
    for _ in range(count):
        try:
            handle = await yard.submit("breathe", {"ms": 0.1, "pad": "x" * rng.choice((10, 4_000, 40_000))})
        except StoreFull:
            return True
        ledger.acknowledged(handle.uuid)
    return False


async def _check_recovery(yard: Yard, ledger: Ledger, rng: random.Random, held: list[TaskHandle]) -> list[str]:
    """With room again, submits are taken, and what ended meanwhile is settled without anybody's help."""
    try:
        async with asyncio.timeout(15):
            while await _submit(yard, ledger, rng, 1):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            for handle in held:
                await handle.result()
    except TimeoutError:
        return ["15 s after there was room again the work has not resumed"]
    return []
