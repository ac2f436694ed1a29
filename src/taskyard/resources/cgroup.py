"""Control groups: the folders where the kernel keeps the limits of this process and of the groups around it.

Every limit on the way up binds, so all groups from the process's own to the topmost visible one are listed. Versions 1
and 2 may be there at once. Nothing here raises: what cannot be read or understood sets no limit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")

UNIFIED = ""
"""Where version 1 has the name of a controller, version 2, which has one tree for all, has none."""

_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Group:
    """`folder` is where its files are, `name` the same path as this process calls it."""

    folder: Path
    name: str

    def read(self, file: str) -> str:
        return read_text(self.folder / file).strip()


@dataclass(frozen=True, slots=True)
class _Mount:
    """A tree of groups, or a part of one, at `point`; `top` is the group that one finds there."""

    controllers: frozenset[str]
    top: tuple[str, ...]
    point: str

    def find_way(self, path: tuple[str, ...]) -> tuple[str, ...] | None:
        """From `point` down to the group at `path`, if it is below."""
        way = path[len(self.top) :]
        return None if path[: len(self.top)] != self.top or ".." in way else way


def list_groups(controller: str, root: Path) -> list[Group]:
    """The groups that may limit this process with `controller`, its own first, then those around it."""
    paths = _read_paths(root)
    mounts = list(_read_mounts(root))
    groups: list[Group] = []
    for name in (controller, UNIFIED):
        if name in paths:
            groups += _climb(paths[name], [mount for mount in mounts if name in mount.controllers], root)
    return groups


def _climb(path: tuple[str, ...], mounts: Sequence[_Mount], root: Path) -> Iterator[Group]:
    ways = [(mount, way) for mount in mounts if (way := mount.find_way(path)) is not None]
    # A container may show its process outside of all that it can see ("/../..", or the host's path). What it does see
    # then counts: that is where its runtime sets the limits, and a budget too small does less harm than one too large.
    for mount, way in ways or [(mount, ()) for mount in mounts[:1]]:
        for depth in range(len(way), -1, -1):
            name = "/".join([mount.point.rstrip("/"), *way[:depth]]) or "/"
            yield Group(root / name.lstrip("/"), name)


def _read_paths(root: Path) -> dict[str, tuple[str, ...]]:
    """The process's group for each controller, from lines such as `4:cpu,cpuacct:/docker/4f2a` and `0::/user.slice`."""
    paths: dict[str, tuple[str, ...]] = {}
    for line in read_text(root / "proc/self/cgroup").split("\n"):
        _, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if colon:
            paths |= dict.fromkeys(controllers.split(","), _parts(path))
    return paths


def _read_mounts(root: Path) -> Iterator[_Mount]:
    """From lines such as `33 25 0:29 /docker/4f2a /sys/fs/cgroup/cpu ro,nosuid master:11 - cgroup cgroup rw,cpu`."""
    for line in read_text(root / "proc/self/mountinfo").split("\n"):
        place, _, system = line.partition(" - ")
        places, systems = place.split(" "), system.split(" ")
        if len(places) < 5 or len(systems) < 3 or systems[0] not in ("cgroup", "cgroup2"):
            continue
        controllers = [UNIFIED] if systems[0] == "cgroup2" else systems[2].split(",")
        yield _Mount(frozenset(controllers), _parts(_unescape(places[3])), _unescape(places[4]))


def _parts(path: str) -> tuple[str, ...]:
    return tuple(part for part in path.split("/") if part)


def _unescape(path: str) -> str:
    """The kernel writes a space in a path as `\\040`."""
    return _OCTAL.sub(lambda found: chr(int(found[1], 8)), path)


def read_text(path: Path) -> str:
    """The file's text; empty where it is missing or may not be read."""
    try:
        return path.read_text("utf-8", errors="replace")
    except (OSError, ValueError):  # ValueError: a path with a null character
        return ""
