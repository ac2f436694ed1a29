"""A real adb server for the tests of adapters, apart from all others on this machine."""

from collections.abc import Iterator

import pytest

from taskyard.testing.adb_server import AdbServer


@pytest.fixture(scope="session")
def adb_server() -> Iterator[AdbServer]:
    """One for each test process. Without the adb binary its tests fail."""
    server = AdbServer()
    server.start()
    yield server
    server.stop()
