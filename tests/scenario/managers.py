"""A small manager, and a call that it holds."""

import asyncio

import pytest

from taskyard.futures import ManagerSettings
from tests.execution import deeds

PATIENCE_S = 30

SMALL = ManagerSettings(cpu_workers=2, io_workers=2)

WAYS = pytest.mark.parametrize("portable", [False, True], ids=["nursery", "portable"])


async def begin(manager, stage, run=None):
    """A call that runs, and its process."""
    task = asyncio.create_task((run or manager.run_cpu_intensive)(deeds.hold, (stage.began, stage.gate), "held"))
    return task, int(await asyncio.to_thread(stage.wait_until_begun))
