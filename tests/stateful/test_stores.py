"""SQLite held against memory, and both against the rules, over random histories."""

import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.stateful.machine import StoreMachine

EXAMPLES = {"small": 60, "large": 2_000, "torture": 100_000}[os.environ.get("HYPOTHESIS_PROFILE", "small")]


@pytest.mark.slow
@pytest.mark.timeout(60 + EXAMPLES * 5)
@pytest.mark.spec("QUE-01", "QUE-02", "QUE-03", "QUE-05", "QUE-26", "SCH-05", "SCH-08", "SCH-15")
def test_sqlite_and_memory_never_differ():
    """Whatever happens, in whatever order, both stores hold and answer the same, move legally and keep every limit."""
    run_state_machine_as_test(
        StoreMachine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
