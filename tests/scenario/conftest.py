"""What the scenarios share: a store in memory or in a file, gates, and other processes."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from taskyard import ExecutorManager, get_executor_manager
from tests.execution import deeds
from tests.scenario.gates import Gates, open_gates
from tests.scenario.managers import PATIENCE_S, SMALL
from tests.scenario.processes import Nodes


@pytest.fixture
def file_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'work.db'}"


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def url(request: pytest.FixtureRequest, file_url: str) -> str:
    """The address of an empty store: each test that asks for it runs on memory, on a file and on a database."""
    if request.param == "postgres":
        found: str = request.getfixturevalue("postgres_url")
        return found
    return "memory://" if request.param == "memory" else file_url


@pytest.fixture
async def gates() -> AsyncIterator[Gates]:
    async with open_gates() as gates:
        yield gates


@pytest.fixture
async def nodes(gates: Gates) -> AsyncIterator[Nodes]:
    nodes = Nodes(gates.port)
    try:
        yield nodes
    finally:
        await nodes.end()


@pytest.fixture
async def manager() -> AsyncIterator[ExecutorManager]:
    async with asyncio.timeout(PATIENCE_S):
        async with get_executor_manager(SMALL) as manager:
            yield manager


@pytest.fixture
def stage(tmp_path: Path) -> deeds.Stage:
    return deeds.Stage(tmp_path)
