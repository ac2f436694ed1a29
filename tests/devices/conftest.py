"""A real adb server for the tests of adapters, apart from all others on this machine, and the stores that farms use."""

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


@pytest.fixture(params=["memory", "sqlite", "postgresql"])
def url(request, tmp_path):
    """Each kind of store."""
    match request.param:
        case "memory":
            return "memory://"
        case "sqlite":
            return f"sqlite:///{tmp_path}/farm.db"
        case _:
            return request.getfixturevalue("postgres_url")
