"""What every test stands on: async tests run on asyncio, Hypothesis knows three sizes of effort, and there is a
PostgreSQL server for who asks for a database."""

import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from taskyard.testing.postgres import ELSEWHERE, FAST, Databases, Server

# Before any test module imports one of them by its own name: `taskyard.testing.contract` would then come too late.
pytest.register_assert_rewrite(
    "taskyard.testing.answer_contract",
    "taskyard.testing.code_contract",
    "taskyard.testing.device_contract",
    "taskyard.testing.executor_contract",
    "taskyard.testing.store_contract",
)

# A shell that starts the tests in the background has SIGINT ignored, and programs that they start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The machine may be busy with the rest of the suite, so no single example is timed.
settings.register_profile("small", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("large", settings.get_profile("small"), max_examples=5_000)
settings.register_profile("torture", settings.get_profile("small"), max_examples=100_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "small"))


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def databases() -> Iterator[Databases]:
    """A server of this test process's own, so that no other test's transactions are in the way; or the one named by
    `TASKYARD_TEST_POSTGRES`. Without any, tests fail: they are never left out."""
    elsewhere = os.environ.get(ELSEWHERE)
    if elsewhere:
        databases = Databases(elsewhere)
        yield databases
        databases.close()
        return
    server = Server(settings=FAST)
    try:
        server.start()
        yield Databases(server.url)
    finally:
        server.stop()


@pytest.fixture
def postgres_url(databases: Databases) -> str:
    """The address of a database with our schema and nothing in it."""
    return databases.empty()
