"""The short version of `python -m tests.torture syscalls errors`."""

from pathlib import Path

import pytest

from tests.torture import syscalls

SEED = 6


@pytest.mark.spec("QUE-22", "QUE-23")
@pytest.mark.slow
def test_a_kill_at_a_write_or_sync_loses_nothing(tmp_path: Path) -> None:
    """A process killed at a single write, sync, truncation or lock of submit, claim and finish loses nothing."""
    figures = syscalls.run_kills(tmp_path, trials=8, seed=SEED)
    assert figures.failures == []
    assert figures.trials == 8


@pytest.mark.slow
def test_a_write_or_sync_that_fails_loses_nothing(tmp_path: Path) -> None:
    """A disk that is full or fails for one call is told to the submitter or not noticed, and the work goes on."""
    figures = syscalls.run_errors(tmp_path, trials=6, seed=SEED)
    assert figures.failures == []
    assert figures.trials == 6
