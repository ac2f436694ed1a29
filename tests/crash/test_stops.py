"""The short version of `python -m tests.torture stops`."""

from pathlib import Path

import pytest

from tests.torture import stops


@pytest.mark.spec("SCH-12")
@pytest.mark.slow
def test_sigterm_uses_up_no_attempt(tmp_path: Path) -> None:
    """A worker that gets SIGTERM under load is gone within its grace, gives back what it held, and costs no attempt."""
    figures = stops.run(tmp_path, trials=5, seed=17)
    assert figures.failures == []
    assert figures.trials == 5
