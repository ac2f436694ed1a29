"""The memory budget, on recorded machines; and what a process holds."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskyard.resources.memory import MemoryBudget, find_memory_high, memory_budget
from tests.resources.trees import GB, MEMINFO, NO_LIMIT_V1, PHYSICAL, plant, v1, v2

WHOLE = MemoryBudget(PHYSICAL, "physical memory")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return plant(tmp_path, {"proc/meminfo": MEMINFO})


@pytest.mark.spec("MGR-12")
def test_a_limit_of_version_2_is_found(root):
    """The limit of a container is its budget, with where it is set."""
    v2(root, "/", {".": {"memory.max": f"{2 * GB}\n"}})
    assert memory_budget(root=root) == MemoryBudget(2 * GB, "cgroup limit in /sys/fs/cgroup")


@pytest.mark.spec("MGR-12")
def test_a_limit_of_version_1_is_found(root):
    """The same with version 1, where only a part of the tree is mounted."""
    v1(root, "/docker/4f2a", {"memory/memory.limit_in_bytes": f"{2 * GB}\n"}, top="/docker/4f2a")
    assert memory_budget(root=root) == MemoryBudget(2 * GB, "cgroup limit in /sys/fs/cgroup/memory")


@pytest.mark.spec("MGR-12")
def test_the_tightest_ancestor_counts(root):
    """A group cannot use more than the groups around it."""
    groups = {"a": {"memory.max": f"{GB}"}, "a/b": {"memory.max": "max"}, "a/b/c": {"memory.max": f"{3 * GB}"}}
    v2(root, "/a/b/c", groups)
    assert memory_budget(root=root) == MemoryBudget(GB, "cgroup limit in /sys/fs/cgroup/a")


@pytest.mark.parametrize("text", ["max", "0", "-1", "", "much", NO_LIMIT_V1, "9" * 5000])
def test_a_limit_that_is_none_is_left_out(text, root):
    """`max`, zero, the huge number of version 1 and what makes no sense are no limit."""
    v2(root, "/", {".": {"memory.max": text}})
    assert memory_budget(root=root) == WHOLE
    v1(root, "/", {"memory/memory.limit_in_bytes": text})
    assert memory_budget(root=root) == WHOLE


def test_the_huge_number_is_no_budget(tmp_path):
    """Where physical memory is unknown, a group without limit does not make it endless."""
    v1(tmp_path, "/", {"memory/memory.limit_in_bytes": NO_LIMIT_V1})
    assert memory_budget(root=tmp_path) is None


def test_an_override_lowers_and_never_raises(root):
    """What is asked for counts where it is the smallest bound."""
    assert memory_budget(MemoryBudget(GB, "said so"), root=root) == MemoryBudget(GB, "said so")
    assert memory_budget(MemoryBudget(2 * PHYSICAL, "said so"), root=root) == WHOLE


def test_without_proc_nothing_is_known(tmp_path):
    """Where nothing tells there is no budget, unless one is asked for."""
    assert memory_budget(root=tmp_path) is None
    assert memory_budget(MemoryBudget(GB, "said so"), root=tmp_path) == MemoryBudget(GB, "said so")


def test_the_high_mark_is_no_limit(root):
    """`memory.high` slows down and does not kill: it is told apart from the budget."""
    groups = {"a": {"memory.high": f"{GB}"}, "a/b": {"memory.max": f"{3 * GB}", "memory.high": f"{2 * GB}"}}
    v2(root, "/a/b", groups)
    assert memory_budget(root=root) == MemoryBudget(3 * GB, "cgroup limit in /sys/fs/cgroup/a/b")
    assert find_memory_high(root=root) == MemoryBudget(GB, "memory.high in /sys/fs/cgroup/a")


def test_no_high_mark_is_none(root):
    """`max` is no mark."""
    assert find_memory_high(root=v2(root, "/", {".": {"memory.high": "max"}})) is None


@given(st.text(max_size=50), st.text(max_size=50))
def test_no_file_can_break_it(total, limit):
    """Whatever the files hold, the answer is none or more than nothing."""
    with tempfile.TemporaryDirectory() as name:
        root = v2(Path(name), "/", {".": {"memory.max": limit}})
        plant(root, {"proc/meminfo": f"MemTotal:{total}"})
        found = memory_budget(root=root)
    assert found is None or found.bytes > 0
