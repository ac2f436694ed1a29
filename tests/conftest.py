"""What every test stands on: async tests run on asyncio, and Hypothesis knows three sizes of effort."""

import os

import pytest
from hypothesis import HealthCheck, settings

# Before any test module imports one of them by its own name: `taskyard.testing.contract` would then come too late.
pytest.register_assert_rewrite(
    "taskyard.testing.answer_contract", "taskyard.testing.executor_contract", "taskyard.testing.store_contract"
)

# The machine may be busy with the rest of the suite, so no single example is timed.
settings.register_profile("small", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("large", settings.get_profile("small"), max_examples=5_000)
settings.register_profile("torture", settings.get_profile("small"), max_examples=100_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "small"))


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
