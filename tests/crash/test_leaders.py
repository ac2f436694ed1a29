"""The short version of `python -m tests.torture leaders pg-leaders`: with these seeds, nodes are both killed and
stopped, for shorter and for longer than the others wait."""

from pathlib import Path

import pytest

from taskyard.testing.postgres import Databases
from tests.torture import leaders


@pytest.mark.slow
@pytest.mark.spec("SCH-17", "SCH-21")
def test_a_leader_that_dies_at_the_fire_second_changes_nothing(tmp_path: Path) -> None:
    """Nodes are killed or stopped when schedules fire, and some all believe that they lead: each fire time has one
    task."""
    figures = leaders.run_part(tmp_path, trials=3, seed=38)
    assert figures.failures == []
    assert figures.counts["fire times"] >= 3 * leaders.SCHEDULES


@pytest.mark.slow
@pytest.mark.spec("SCH-17", "SCH-21")
def test_the_same_on_postgresql(tmp_path: Path, databases: Databases) -> None:
    """The same holds on a database, where a node that is stopped loses its lease."""
    figures = leaders.run_postgres_part(tmp_path, trials=3, seed=10, databases=databases)
    assert figures.failures == []
    assert figures.counts["fire times"] >= 3 * leaders.SCHEDULES


@pytest.mark.slow
def test_a_store_that_fires_without_looking_is_noticed(tmp_path: Path) -> None:
    """Without the unique row and the version, the same test turns red."""
    figures = leaders.run_part(tmp_path, trials=3, seed=9, mutation="fire-without-looking")
    assert any("more than once" in failure for failure in figures.failures), figures.failures


@pytest.mark.slow
def test_a_database_that_fires_without_looking_is_noticed(tmp_path: Path, databases: Databases) -> None:
    """The same on PostgreSQL."""
    figures = leaders.run_postgres_part(
        tmp_path, trials=3, seed=11, databases=databases, mutation="fire-without-looking"
    )
    assert any("more than once" in failure for failure in figures.failures), figures.failures
