"""How many connections the cores and the environment make."""

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskyard.resources.cpu import cpu_budget
from taskyard.resources.database import ENVIRONMENT, MAX_OVERFLOW, POOL_SIZE, database_pool
from tests.resources.trees import HOST, v2

pytestmark = pytest.mark.spec("MGR-11")

NAMES = (ENVIRONMENT, POOL_SIZE, MAX_OVERFLOW)


def test_the_variables_have_the_names_of_the_design():
    """Who sets them elsewhere can set them here."""
    assert NAMES == ("ENVIRONMENT", "DB_POOL_SIZE", "DB_MAX_OVERFLOW")


@pytest.mark.parametrize(
    ("cores", "size", "overflow"), [(1, 10, 5), (2, 20, 10), (3, 30, 15), (4, 30, 20), (5, 30, 20), (64, 30, 20)]
)
@pytest.mark.parametrize("environment", ["production", "PRODUCTION", " prod "])
def test_production_follows_the_cores(environment, cores, size, overflow):
    """Ten connections a core and five on top, at most thirty and twenty."""
    pool = database_pool({ENVIRONMENT: environment}, cores=cores)
    assert (pool.size, pool.overflow, pool.most) == (size, overflow, size + overflow)


@pytest.mark.parametrize("environ", [{}, {ENVIRONMENT: ""}, {ENVIRONMENT: "development"}, {ENVIRONMENT: "test"}])
@pytest.mark.parametrize("cores", [1, 2, 64])
def test_everywhere_else_there_are_few(environ, cores):
    """Ten and ten, however many cores there are."""
    pool = database_pool(environ, cores=cores)
    assert (pool.size, pool.overflow) == (10, 10)


@pytest.mark.parametrize("environment", ["production", "development"])
def test_a_variable_sets_its_own_number_and_no_other(environment):
    """What is asked for is taken, up as well as down, and named as the source; no overflow is a number too."""
    plain = database_pool({ENVIRONMENT: environment}, cores=2)
    pool = database_pool({ENVIRONMENT: environment, POOL_SIZE: " 77 "}, cores=2)
    assert (pool.size, pool.size_source) == (77, POOL_SIZE)
    assert (pool.overflow, pool.overflow_source) == (plain.overflow, plain.overflow_source)
    pool = database_pool({ENVIRONMENT: environment, MAX_OVERFLOW: "0"}, cores=2)
    assert (pool.overflow, pool.overflow_source) == (0, MAX_OVERFLOW)
    assert (pool.size, pool.size_source) == (plain.size, plain.size_source)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (POOL_SIZE, "0"),
        (POOL_SIZE, "-3"),
        (POOL_SIZE, "many"),
        (MAX_OVERFLOW, "-1"),
        (POOL_SIZE, "1.5"),
        (POOL_SIZE, "9" * 11),
    ],
)
def test_what_makes_no_sense_is_told_and_not_used(name, value, caplog):
    """The default stands, and a warning names the variable and its value."""
    with caplog.at_level(logging.WARNING):
        assert database_pool({name: value}, cores=4) == database_pool({}, cores=4)
    assert f"{name} is {value!r}" in caplog.text


def test_a_container_counts_its_own_cores(tmp_path):
    """Two CPUs of a host with 64 make the connections of two."""
    root = v2(tmp_path, "/", {".": {"cpu.max": "200000 100000"}})
    cores = cpu_budget(root=root, allowed=HOST).cores
    assert database_pool({ENVIRONMENT: "production"}, cores=cores).size == 20


@given(
    environ=st.fixed_dictionaries({}, optional={name: st.text(max_size=8) for name in NAMES}),
    cores=st.integers(1, 1024),
)
def test_there_is_always_a_connection(environ, cores):
    """Whatever the environment holds, the pool has at least one connection, and never less than none on top."""
    pool = database_pool(environ, cores=cores, warn=lambda text: None)
    assert pool.size >= 1
    assert pool.overflow >= 0
