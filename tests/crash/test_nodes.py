"""What becomes of the tasks of a node that dies, or is only taken for dead."""

from pathlib import Path

import pytest

from tests.torture import fencing, rescue


@pytest.mark.spec("QUE-23")
def test_a_dead_nodes_task_runs_elsewhere_soon(tmp_path: Path) -> None:
    """A task whose node is killed with SIGKILL is started on another within seconds, time after time."""
    figures = rescue.run(tmp_path, trials=5, seed=4)
    assert figures.failures == []
    assert figures.trials == 5


@pytest.mark.spec("SCH-17")
def test_a_stale_run_commits_nothing(tmp_path: Path) -> None:
    """A node that was stopped while its tasks were given to another can write no result, no note and no new task."""
    figures = fencing.run(tmp_path, trials=2, seed=3)
    assert figures.failures == []
    assert figures.trials == 4


def test_a_store_without_the_token_check_is_noticed(tmp_path: Path) -> None:
    """With a store that lets a stale run settle, the same test turns red."""
    figures = fencing.run(tmp_path, trials=1, seed=3, mutation="drop-the-token-check")
    assert any("stale" in failure or "token" in failure for failure in figures.failures), figures.failures
