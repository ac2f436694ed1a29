"""The short version of `python -m tests.torture dedupe`."""

from pathlib import Path

import pytest

from tests.torture import dedupe


@pytest.mark.slow
def test_one_task_comes_of_many_submits(tmp_path: Path) -> None:
    """32 clients in four processes submit the same work at once, one process is killed over it: there is one task."""
    figures = dedupe.run(tmp_path, trials=5, seed=19)
    assert figures.failures == []
    assert figures.trials == 5
