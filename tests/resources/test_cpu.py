"""The CPU budget, on recorded machines."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskyard.resources.cpu import CpuBudget, allowed_cpus, count_cpus, cpu_budget
from tests.resources.trees import HOST, V2_MOUNT, plant, v1, v2

pytestmark = pytest.mark.spec("MGR-12")

SERVICE = "/system.slice/yard.service"


def budget(root: Path, override: CpuBudget | None = None) -> CpuBudget:
    return cpu_budget(override, root=root, allowed=HOST)


# --- where the limits are ---------------------------------------------------------------------------------------------


def docker_v2(root: Path) -> Path:
    return v2(root, "/", {".": {"cpu.max": "200000 100000\n", "cpuset.cpus.effective": "0-63\n"}})


def systemd_v2(root: Path) -> Path:
    groups = {
        "system.slice": {"cpu.max": "max 100000\n"},
        "system.slice/yard.service": {"cpu.max": "200000 100000\n"},
    }
    return v2(root, SERVICE, groups)


def tight_slice_v2(root: Path) -> Path:
    groups = {
        "system.slice": {"cpu.max": "100000 50000\n"},
        "system.slice/yard.service": {"cpu.max": "800000 100000\n"},
    }
    return v2(root, SERVICE, groups)


def docker_v1(root: Path) -> Path:
    files = {"cpu,cpuacct/cpu.cfs_quota_us": "200000\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"}
    return v1(root, "/docker/4f2a", files, top="/docker/4f2a")


def tight_pod_v1(root: Path) -> Path:
    pod = "cpu,cpuacct/kubepods/pod7"
    files = {
        f"{pod}/cpu.cfs_quota_us": "200000\n",
        f"{pod}/cpu.cfs_period_us": "100000\n",
        f"{pod}/4f2a/cpu.cfs_quota_us": "-1\n",
        f"{pod}/4f2a/cpu.cfs_period_us": "100000\n",
    }
    return v1(root, "/kubepods/pod7/4f2a", files)


def hybrid(root: Path) -> Path:
    docker_v1(root)
    with (root / "proc/self/mountinfo").open("a") as mounts:
        mounts.write(V2_MOUNT.replace("/sys/fs/cgroup", "/sys/fs/cgroup/unified"))
    return plant(root, {"sys/fs/cgroup/unified/cgroup.controllers": "\n"})


def host_path_v1(root: Path) -> Path:
    """The process is named by its path on the host, which cannot be seen inside."""
    files = {"cpu,cpuacct/cpu.cfs_quota_us": "200000\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"}
    return v1(root, "/docker/4f2a", files)


def outside_v2(root: Path) -> Path:
    """Seen from its namespace, the process is in a group beside it."""
    return v2(root, "/../../other", {".": {"cpu.max": "200000 100000\n"}})


def mount_from_outside_v2(root: Path) -> Path:
    """The mount was made outside the namespace, so it begins above the namespace's own top."""
    mounts = V2_MOUNT.replace(" / /sys", " /../.. /sys")
    return v2(root, "/../../job", {"job": {"cpu.max": "200000 100000\n"}}, mounts=mounts)


def cpuset_v2(root: Path) -> Path:
    return v2(root, "/", {".": {"cpu.max": "max 100000\n", "cpuset.cpus": "\n", "cpuset.cpus.effective": "3,17\n"}})


def cpuset_v1(root: Path) -> Path:
    return v1(root, "/docker/4f2a", {"cpuset/cpuset.cpus": "0-1\n"}, top="/docker/4f2a")


def effective_cpuset_v1(root: Path) -> Path:
    files = {"cpuset/cpuset.cpus": "0-7\n", "cpuset/cpuset.effective_cpus": "6-7\n"}
    return v1(root, "/docker/4f2a", files, top="/docker/4f2a")


def quota_alone_v2(root: Path) -> Path:
    return v2(root, "/", {".": {"cpu.max": "200000\n"}})


def odd_names_v2(root: Path) -> Path:
    mounts = V2_MOUNT.replace("/sys/fs/cgroup", "/sys/fs/my\\040groups")
    v2(root, "/a:b/c (deleted)", {}, mounts=mounts)
    return plant(root, {"sys/fs/my groups/a:b/cpu.max": "200000 100000\n"})


TWO_CPUS = [
    pytest.param(docker_v2, "cgroup quota of 2 CPUs in /sys/fs/cgroup", id="docker-v2"),
    pytest.param(systemd_v2, f"cgroup quota of 2 CPUs in /sys/fs/cgroup{SERVICE}", id="systemd-v2"),
    pytest.param(tight_slice_v2, "cgroup quota of 2 CPUs in /sys/fs/cgroup/system.slice", id="tight-slice-v2"),
    pytest.param(docker_v1, "cgroup quota of 2 CPUs in /sys/fs/cgroup/cpu,cpuacct", id="docker-v1"),
    pytest.param(tight_pod_v1, "cgroup quota of 2 CPUs in /sys/fs/cgroup/cpu,cpuacct/kubepods/pod7", id="tight-pod-v1"),
    pytest.param(hybrid, "cgroup quota of 2 CPUs in /sys/fs/cgroup/cpu,cpuacct", id="hybrid"),
    pytest.param(host_path_v1, "cgroup quota of 2 CPUs in /sys/fs/cgroup/cpu,cpuacct", id="host-path-v1"),
    pytest.param(outside_v2, "cgroup quota of 2 CPUs in /sys/fs/cgroup", id="outside-v2"),
    pytest.param(mount_from_outside_v2, "cgroup quota of 2 CPUs in /sys/fs/cgroup/job", id="mount-from-outside-v2"),
    pytest.param(cpuset_v2, "cpuset of 2 CPUs in /sys/fs/cgroup", id="cpuset-v2"),
    pytest.param(cpuset_v1, "cpuset of 2 CPUs in /sys/fs/cgroup/cpuset", id="cpuset-v1"),
    pytest.param(effective_cpuset_v1, "cpuset of 2 CPUs in /sys/fs/cgroup/cpuset", id="effective-cpuset-v1"),
    pytest.param(quota_alone_v2, "cgroup quota of 2 CPUs in /sys/fs/cgroup", id="quota-alone-v2"),
    pytest.param(odd_names_v2, "cgroup quota of 2 CPUs in /sys/fs/my groups/a:b", id="odd-names-v2"),
]


@pytest.mark.parametrize(("machine", "source"), TWO_CPUS)
def test_a_limit_is_found_and_named(machine, source, tmp_path):
    """However two CPUs of 64 are given to a process, the budget is two, and says where the limit is set."""
    assert budget(machine(tmp_path)) == CpuBudget(2, source)


def test_groups_of_others_do_not_count(tmp_path):
    """A tighter limit in a group beside ours, or below it, is not ours."""
    groups = {
        "ours": {"cpu.max": "400000 100000\n"},
        "ours/below": {"cpu.max": "100000 100000\n"},
        "beside": {"cpu.max": "100000 100000\n"},
    }
    assert budget(v2(tmp_path, "/ours", groups)).cpus == 4


def test_a_mount_of_another_group_does_not_count(tmp_path):
    """Where our own group can be seen, another container's that is mounted somewhere sets no limit."""
    other = V2_MOUNT.replace(" / /sys/fs/cgroup", " /other /mnt/other")
    v2(tmp_path, "/ours", {"ours": {"cpu.max": "400000 100000\n"}}, mounts=other + V2_MOUNT)
    plant(tmp_path, {"mnt/other/cpu.max": "100000 100000\n"})
    assert budget(tmp_path).cpus == 4


# --- what sets none ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["max 100000", "max", "0 100000", "-1 100000", "-2 -1", "200000 0", "", "two of them", "1 2 3", "9" * 5000],
)
def test_a_quota_that_is_none_is_left_out(text, tmp_path):
    """`max`, zero, a negative number and what makes no sense are no quota."""
    assert budget(v2(tmp_path, "/", {".": {"cpu.max": text}})) == HOST


@pytest.mark.parametrize(("quota", "period"), [("-1", "100000"), ("0", "100000"), ("200000", "0"), ("", ""), ("x", "")])
def test_a_quota_of_version_1_that_is_none_is_left_out(quota, period, tmp_path):
    """The same with the two files of version 1."""
    files = {"cpu,cpuacct/cpu.cfs_quota_us": quota, "cpu,cpuacct/cpu.cfs_period_us": period}
    assert budget(v1(tmp_path, "/", files)) == HOST


def test_a_file_that_is_missing_sets_no_limit(tmp_path):
    """Without /proc, without groups, or without their files, what the scheduler allows counts."""
    assert budget(tmp_path) == HOST
    assert budget(plant(tmp_path, {"proc/self/cgroup": "0::/\n"})) == HOST
    assert budget(plant(tmp_path, {"proc/self/mountinfo": V2_MOUNT})) == HOST


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that any user can reach: those of `tmp_path` are closed to others."""
    with tempfile.TemporaryDirectory(prefix="taskyard-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def no_rights() -> Iterator[None]:
    """Root may read everything; for this test we are somebody else."""
    before = os.geteuid()
    os.seteuid(before or 65534)
    yield
    os.seteuid(before)


def test_a_file_that_may_not_be_read_sets_no_limit(open_folder, request):
    """Permission denied on one group's file leaves the limits of the others."""
    groups = {"slice": {"cpu.max": "300000 100000\n"}, "slice/job": {"cpu.max": "100000 100000\n"}}
    v2(open_folder, "/slice/job", groups)
    (open_folder / "sys/fs/cgroup/slice/job/cpu.max").chmod(0)
    request.getfixturevalue("no_rights")
    assert budget(open_folder).cpus == 3


def test_another_file_system_is_no_group(tmp_path):
    """Lines of other mounts, and lines that are cut off, are passed over."""
    mounts = f"22 1 253:1 / / rw - ext4 /dev/vda1 rw\n30 23 0:26 /\na - cgroup2\n{V2_MOUNT}"
    assert budget(v2(tmp_path, "/", {".": {"cpu.max": "200000 100000"}}, mounts=mounts)).cpus == 2


any_text = st.text(st.characters(codec="utf-8") | st.sampled_from("/: \n-,.0123456789\\"), max_size=200)


@given(cgroup=any_text, mounts=any_text, quota=any_text, cpus=any_text)
def test_no_file_can_break_it(cgroup, mounts, quota, cpus):
    """Whatever the files hold, the answer is a budget between nothing and what the scheduler allows."""
    with tempfile.TemporaryDirectory() as name:
        lines = {"proc/self/cgroup": f"0::/\n{cgroup}", "proc/self/mountinfo": V2_MOUNT + mounts}
        files = {"sys/fs/cgroup/cpu.max": quota, "sys/fs/cgroup/cpuset.cpus.effective": cpus}
        found = budget(plant(Path(name), {**lines, **files}))
    assert 0 < found.cpus <= HOST.cpus
    assert 1 <= found.cores <= HOST.cpus


@given(st.lists(st.sampled_from(["..", ".", "job"])))
def test_no_group_name_leads_out_of_the_mount(parts):
    """Whatever the process's group is called, only what is below the mount is read."""
    with tempfile.TemporaryDirectory() as name:
        groups = {".": {"cpu.max": "400000 100000"}, "job": {}, "..": {"cpu.max": "100000 100000"}}
        assert budget(v2(Path(name), "/" + "/".join(parts), groups)).cpus == 4


# --- counting ---------------------------------------------------------------------------------------------------------


@given(st.sets(st.integers(0, 1023), min_size=1))
def test_a_list_of_cpus_is_counted(cpus):
    """A list of single CPUs and ranges, as the kernel writes it, counts every CPU in it."""
    ordered = sorted(cpus)
    starts = [cpu for cpu in ordered if cpu - 1 not in cpus]
    ends = [cpu for cpu in ordered if cpu + 1 not in cpus]
    ranges = (f"{a}" if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))
    assert count_cpus(",".join(ranges)) == len(cpus)


@pytest.mark.parametrize("text", ["", ",", "all", "3-1", "-2", "0-", "0,", "0 1", "0-3:1/2", "1" * 5000])
def test_what_is_no_list_of_cpus_counts_none(text):
    """What the kernel does not write is not guessed at."""
    assert count_cpus(text) == 0


@pytest.mark.parametrize(("cpus", "cores"), [(0.05, 1), (0.5, 1), (1, 1), (1.5, 1), (1.999, 1), (2, 2), (63.9, 63)])
def test_parts_of_a_core_are_not_planned_with(cpus, cores):
    """A quota of 1.5 is one usable core, one of 0.5 too: there is always one."""
    assert CpuBudget(cpus, "").cores == cores


def test_a_broken_quota_is_named_as_it_is(tmp_path):
    """The budget keeps the part of a core that is not planned with, and shows it."""
    found = budget(v2(tmp_path, "/", {".": {"cpu.max": "150000 100000"}}))
    assert found == CpuBudget(1.5, "cgroup quota of 1.5 CPUs in /sys/fs/cgroup")


# --- the scheduler and the override -----------------------------------------------------------------------------------


def test_the_smallest_bound_counts(tmp_path):
    """A quota above what the scheduler allows is none; an override lowers the budget and never raises it."""
    v2(tmp_path, "/", {".": {"cpu.max": "800000 100000"}})
    four = CpuBudget(4, "affinity of 4 CPUs")
    assert cpu_budget(root=tmp_path, allowed=four) == four
    assert budget(tmp_path, CpuBudget(3, "said so")) == CpuBudget(3, "said so")
    assert budget(tmp_path, CpuBudget(9, "said so")).cpus == 8


def test_affinity_is_seen(tmp_path):
    """A process that is pinned to one CPU has a budget of one."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert cpu_budget(root=tmp_path) == CpuBudget(1, "affinity of 1 CPU")
    finally:
        os.sched_setaffinity(0, before)


def test_without_affinity_the_machine_counts(monkeypatch):
    """Where the system knows no affinity, it is the number of CPUs there are."""
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert allowed_cpus() == CpuBudget(8, "machine of 8 CPUs")


@pytest.mark.spec("MGR-02")
def test_an_unknown_number_counts_as_four(monkeypatch, tmp_path):
    """Where nothing tells, four CPUs are assumed, and that is said."""
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert cpu_budget(root=tmp_path) == CpuBudget(4, "number of CPUs unknown, taken as 4")
