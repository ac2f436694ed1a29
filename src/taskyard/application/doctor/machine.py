"""The rules for this machine: versions, the file system under a store, free disk space, permissions, and the limits on
CPU, memory and workers."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

from taskyard.application.doctor.findings import Finding, ok, problem, warning
from taskyard.application.formatting import size
from taskyard.resources.cgroup import ROOT
from taskyard.resources.cpu import CpuBudget, cpu_budget
from taskyard.resources.memory import find_memory_high, memory_budget
from taskyard.resources.workers import CPU_WORKERS, WorkerCounts, find_cpu_override, worker_counts
from taskyard.stores.sqlite.place import MOUNTS, NETWORK, filesystem_of
from taskyard.version import VERSION

LOW_BYTES, VERY_LOW_BYTES = 1_000_000_000, 100_000_000
"""Free space below which there is a warning, and below which the next checkpoint may fail."""

VOLATILE = {"tmpfs", "ramfs"}


def check_versions() -> Iterator[Finding]:
    import apsw

    uvloop = "yes" if find_spec("uvloop") is not None else "no"
    python, system = platform.python_version(), f"{platform.system()} {platform.machine()}"
    text = f"{VERSION} on Python {python}, {system}, uvloop: {uvloop}"
    yield ok("taskyard", text, version=VERSION, python=python)
    sqlite, driver = apsw.sqlite_lib_version(), apsw.apsw_version()
    yield ok("sqlite", f"{sqlite} (apsw {driver})", sqlite=sqlite, apsw=driver)


# --- the disk ---------------------------------------------------------------------------------------------------------


def check_file_system(path: Path) -> Iterator[Finding]:
    if not MOUNTS.exists():
        return
    kind = filesystem_of(path.resolve(), MOUNTS.read_text()) or "unknown"
    if kind in NETWORK:
        yield problem(
            "file system",
            f"{kind}, a network file system, where SQLite's locks do not protect the file",
            "move the store to a local disk while nothing uses it",
            file_system=kind,
        )
    elif kind in VOLATILE:
        yield warning(
            "file system",
            f"{kind}, which is in memory: the store is gone when the machine restarts",
            "put the store on a disk, unless that is intended",
            file_system=kind,
        )
    else:
        yield ok("file system", kind, file_system=kind)


def check_disk_space(folder: Path) -> Iterator[Finding]:
    try:
        free = shutil.disk_usage(folder).free
    except OSError as exc:
        yield warning("disk", f"cannot tell how much is free: {exc.strerror}", "check the folder's permissions")
        return
    text = f"{size(free)} free"
    if free < VERY_LOW_BYTES:
        yield problem("disk", text, "free some space: the store will soon refuse tasks", free_bytes=free)
    elif free < LOW_BYTES:
        yield warning("disk", text, "free some space before none is left for the store", free_bytes=free)
    else:
        yield ok("disk", text, free_bytes=free)


def check_permissions(path: Path) -> Iterator[Finding]:
    """Whether this user can write to the store and beside it."""
    refused = [str(place) for place in (path.parent, path, *_beside(path)) if not os.access(place, os.W_OK)]
    if refused:
        yield problem(
            "permissions",
            f"this user (uid {os.geteuid()}) cannot write to {', '.join(refused)}",
            "give this user write permission there, or run as the owner of the store",
            read_only=refused,
        )


def _beside(path: Path) -> list[Path]:
    names = (f"{path.name}-wal", f"{path.name}-shm", f"{path.name}-yard")
    return [place for name in names if (place := path.with_name(name)).exists()]


# --- limits -----------------------------------------------------------------------------------------------------------


def check_limits(
    environ: Mapping[str, str], *, root: Path = ROOT, allowed: CpuBudget | None = None
) -> Iterator[Finding]:
    """CPU, memory and workers that a process started here may use, each with its source."""
    machine = cpu_budget(root=root, allowed=allowed)
    yield _cpu(cpu_budget(find_cpu_override(environ), root=root, allowed=allowed), machine)
    yield from _memory(root)
    yield from _workers(environ, machine.cores)


def _cpu(found: CpuBudget, machine: CpuBudget) -> Finding:
    text = f"{found.cores} usable {'core' if found.cores == 1 else 'cores'}: {found.source}"
    if found != machine:
        text += f"; without it {machine.cores}: {machine.source}"
    return ok("cpu", text, cpus=found.cpus, cores=found.cores, source=found.source)


def _memory(root: Path) -> Iterator[Finding]:
    found, high = memory_budget(root=root), find_memory_high(root=root)
    if found is None:
        yield ok("memory", "this system does not tell how much there is", memory_bytes=None)
    else:
        text = f"{size(found.bytes)}: {found.source}"
        yield ok("memory", text, memory_bytes=found.bytes, source=found.source)
    if high is not None and (found is None or high.bytes < found.bytes):
        text = f"slowed down above {size(high.bytes)}: {high.source}"
        yield ok("memory.high", text, high_bytes=high.bytes, source=high.source)


def _workers(environ: Mapping[str, str], cores: int) -> Iterator[Finding]:
    complaints: list[str] = []
    yield _pool_sizes(worker_counts(environ, cores=cores, warn=complaints.append), cores)
    for complaint in complaints:
        yield warning("pool sizes", complaint, "correct the variable, or leave it out")


def _pool_sizes(counts: WorkerCounts, cores: int) -> Finding:
    text = f"{counts.cpu} for CPU work ({counts.cpu_source}), {counts.io} for I/O ({counts.io_source})"
    data = {
        "cpu_workers": counts.cpu, "cpu_source": counts.cpu_source,
        "io_workers": counts.io, "io_source": counts.io_source,
    }  # fmt: skip
    if counts.cpu > cores:
        hint = f"lower {CPU_WORKERS}: more workers than the {cores} usable here only take turns"
        return warning("pool sizes", text, hint, **data)
    return ok("pool sizes", text, **data)
