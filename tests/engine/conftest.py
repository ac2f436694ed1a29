import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest

from tests.engine.support import Rig


@pytest.fixture
async def start_rig(anyio_backend: str) -> AsyncIterator[Callable[..., Awaitable[Rig]]]:
    """Engines, made with the settings a test asks for, started, and stopped at its end."""
    rigs: list[Rig] = []

    async def start(**settings: Any) -> Rig:
        rig = Rig(**settings)
        rigs.append(rig)
        await rig.engine.start()
        return rig

    yield start
    for rig in rigs:
        rig.store.away = None
        stopping = asyncio.create_task(rig.engine.stop(grace_s=0.0))
        while not stopping.done():
            rig.clock.advance(1.0)
            await asyncio.sleep(0)
        await stopping


@pytest.fixture
async def rig(start_rig: Callable[..., Awaitable[Rig]]) -> Rig:
    return await start_rig()


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = [
        thread for thread in threading.enumerate() if thread not in before and not thread.name.startswith("asyncio")
    ]
    for thread in left:
        thread.join(10)  # the test has let it go, and the machine may be busy
    assert not [thread for thread in left if thread.is_alive()]
