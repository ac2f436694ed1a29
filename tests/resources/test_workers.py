"""How many workers the cores and the environment make."""

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskyard.resources.cpu import CpuBudget, cpu_budget
from taskyard.resources.workers import CPU_WORKERS, IO_WORKERS, MAX_WORKERS, find_cpu_override, worker_counts
from tests.resources.trees import HOST, v2

NAMES = (CPU_WORKERS, IO_WORKERS, MAX_WORKERS)


def test_the_variables_have_the_names_of_the_design():
    """Who sets them elsewhere can set them here."""
    assert NAMES == ("CPU_EXECUTOR_WORKERS", "IO_EXECUTOR_WORKERS", "EXECUTOR_GLOBAL_MAX_WORKERS")


@pytest.mark.spec("MGR-02")
@pytest.mark.parametrize(
    ("cores", "cpu", "io"), [(1, 1, 5), (2, 1, 10), (3, 2, 15), (4, 3, 20), (5, 4, 20), (64, 63, 20)]
)
def test_the_defaults_follow_the_cores(cores, cpu, io):
    """One core is left free for the process itself; threads are five a core, at most twenty."""
    counts = worker_counts({}, cores=cores)
    assert (counts.cpu, counts.io) == (cpu, io)


@pytest.mark.spec("MGR-12")
def test_a_container_of_two_cpus_gets_one_worker(tmp_path):
    """Two CPUs of a host with 64 make one CPU worker."""
    root = v2(tmp_path, "/", {".": {"cpu.max": "200000 100000"}})
    assert worker_counts({}, cores=cpu_budget(root=root, allowed=HOST).cores).cpu == 1


@pytest.mark.spec("MGR-03")
def test_the_environment_beats_detection():
    """A variable sizes its own pool and no other, up as well as down, and is named as the source."""
    counts = worker_counts({CPU_WORKERS: "8"}, cores=2)
    assert (counts.cpu, counts.cpu_source) == (8, CPU_WORKERS)
    assert counts.io == 10
    counts = worker_counts({IO_WORKERS: " 1 "}, cores=4)
    assert (counts.io, counts.io_source) == (1, IO_WORKERS)
    assert counts.cpu == 3


@pytest.mark.spec("MGR-03")
@pytest.mark.parametrize(
    ("environ", "cpu", "source"),
    [
        ({MAX_WORKERS: "2"}, 2, MAX_WORKERS),
        ({MAX_WORKERS: "2", CPU_WORKERS: "5"}, 2, MAX_WORKERS),
        ({MAX_WORKERS: "5", CPU_WORKERS: "5"}, 5, CPU_WORKERS),
        ({MAX_WORKERS: "9"}, 3, "cores - 1"),
        ({MAX_WORKERS: "0", CPU_WORKERS: "5"}, 5, CPU_WORKERS),
    ],
)
def test_the_global_maximum_caps_the_cpu_pool(environ, cpu, source):
    """It caps the default and the variable alike, and never raises either."""
    counts = worker_counts(environ, cores=4)
    assert (counts.cpu, counts.cpu_source) == (cpu, source)
    assert counts.io == 20


@pytest.mark.spec("MGR-03")
@pytest.mark.parametrize("value", ["0", "", " ", "00"])
@pytest.mark.parametrize("name", NAMES)
def test_zero_means_the_default(name, value, caplog):
    """Zero, and a variable that is set to nothing, leave it to the default without a word."""
    assert worker_counts({name: value}, cores=4) == worker_counts({}, cores=4)
    assert caplog.records == []


@pytest.mark.spec("MGR-03")
@pytest.mark.parametrize("value", ["-1", "two", "2.5", "1e3", "0x2", "99999999999", "9" * 5000])
@pytest.mark.parametrize("name", NAMES)
def test_a_value_that_makes_no_sense_warns_and_falls_back(name, value, caplog):
    """The default is used, and one log line names the manager, the variable and its value."""
    assert worker_counts({name: value}, cores=4) == worker_counts({}, cores=4)
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(f"[ExecutorManager] {name} is {value!r}")


@pytest.mark.spec("MGR-02", "MGR-03")
@given(
    st.dictionaries(st.sampled_from(NAMES), st.text(max_size=8) | st.integers(-9, 99).map(str)), st.integers(1, 1024)
)
def test_there_is_always_a_worker(environ, cores):
    """Whatever the environment holds, each pool has at least one worker, and the cap holds if it is one."""
    counts = worker_counts(environ, cores=cores, warn=lambda text: None)
    assert counts.cpu >= 1
    assert counts.io >= 1
    cap = environ.get(MAX_WORKERS, "")
    if cap.isascii() and cap.isdigit() and int(cap) > 0:
        assert counts.cpu <= int(cap)


@pytest.mark.spec("MGR-03")
@pytest.mark.parametrize(
    ("value", "found"), [("3", CpuBudget(3, CPU_WORKERS)), ("0", None), ("", None), ("-1", None), ("x", None)]
)
def test_the_variable_bounds_the_budget(value, found, caplog):
    """A number of CPU workers is a bound to the CPU budget; what is none is none, without a second warning."""
    assert find_cpu_override({CPU_WORKERS: value}) == found
    assert caplog.records == []
