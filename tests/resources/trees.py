"""Machines as recorded: the files of /proc and /sys that tell how much one may use, planted in a folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from taskyard.resources.cpu import CpuBudget

HOST = CpuBudget(64, "affinity of 64 CPUs")
"""What the scheduler of a large host allows to every container on it."""

GB = 1 << 30
NO_LIMIT_V1 = "9223372036854771712"

MEMINFO = "MemTotal:       263856124 kB\nMemFree:        201839476 kB\nHugepagesize:       2048 kB\n"
PHYSICAL = 263856124 * 1024

V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup ro,nosuid,nodev,noexec,relatime - cgroup2 cgroup rw,nsdelegate\n"

V1_MOUNTS = """\
22 1 253:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw
26 25 0:22 {top} /sys/fs/cgroup/systemd ro,nosuid,nodev master:9 - cgroup cgroup rw,xattr,name=systemd
30 25 0:27 {top} /sys/fs/cgroup/memory ro,nosuid,nodev master:16 - cgroup cgroup rw,memory
33 25 0:30 {top} /sys/fs/cgroup/cpu,cpuacct ro,nosuid,nodev master:19 - cgroup cgroup rw,cpu,cpuacct
34 25 0:31 {top} /sys/fs/cgroup/cpuset ro,nosuid,nodev master:20 - cgroup cgroup rw,cpuset
"""

V1_PATHS = "9:cpuset:{path}\n8:cpu,cpuacct:{path}\n5:memory:{path}\n1:name=systemd:{path}\n0::/\n"


def plant(root: Path, files: Mapping[str, str]) -> Path:
    """Write the files below `root`, which then stands for a machine."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    return root


def v2(root: Path, path: str, groups: Mapping[str, Mapping[str, str]], *, mounts: str = V2_MOUNT) -> Path:
    """A machine with version 2 alone, where this process is in the group `path`."""
    files = {f"sys/fs/cgroup/{group}/{name}": text for group, of in groups.items() for name, text in of.items()}
    return plant(root, {"proc/self/cgroup": f"0::{path}\n", "proc/self/mountinfo": mounts, **files})


def v1(root: Path, path: str, files: Mapping[str, str], *, top: str = "/") -> Path:
    """A machine with version 1, where this process is in the group `path` and the mounts begin at the group `top`."""
    under = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    paths, mounts = V1_PATHS.format(path=path), V1_MOUNTS.format(top=top)
    return plant(root, {"proc/self/cgroup": paths, "proc/self/mountinfo": mounts, **under})
