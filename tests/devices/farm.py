"""Services and pools for tests: consumers that wait to be let go, and a way to await what a farm comes to."""

import asyncio
import inspect
from collections.abc import Callable
from contextlib import asynccontextmanager

from taskyard import ExecutorService, Yard
from taskyard.device_pool import DevicePool
from taskyard.devices import Device, GameAccount, SimulatedDevice

PATIENCE_S = 20


async def eventually(yard: Yard, holds: Callable[[], object]) -> object:
    """The first true answer of `holds`, asked whenever something happens, and now and then."""
    async with asyncio.timeout(PATIENCE_S):
        with yard._engine.changes() as changes:
            while True:
                changes.clear()
                answer = holds()
                if inspect.isawaitable(answer):
                    answer = await answer
                if answer:
                    return answer
                try:
                    async with asyncio.timeout(0.05):
                        await changes.wait()
                except TimeoutError:
                    pass


class Work:
    """Consumers that say when they begin, and go on when they are told to. `order` is what has begun."""

    def __init__(self) -> None:
        self.order: list[tuple[str, int | str, str]] = []
        self.begun: asyncio.Queue[tuple[str, int | str, str]] = asyncio.Queue()
        self.go = asyncio.Semaphore(0)

    def let_go(self, count: int = 1_000) -> None:
        for _ in range(count):
            self.go.release()

    async def do(self, name: str, device: Device, account: GameAccount) -> int | str:
        one = (name, account.account_id, device.name)
        self.order.append(one)
        self.begun.put_nowait(one)
        await self.go.acquire()
        return account.account_id

    async def next(self) -> tuple[str, int | str, str]:
        async with asyncio.timeout(PATIENCE_S):
            return await self.begun.get()


def phones(count: int, **settings) -> list[SimulatedDevice]:
    """So many phones, `emu-1` and so on."""
    return [SimulatedDevice(n, name=f"emu-{n}", **settings) for n in range(1, count + 1)]


def add_consumers(pool: ExecutorService | DevicePool, work: Work) -> None:
    @pool.consumer(name="daily")
    async def daily(device: Device, account: GameAccount, level: int = 1) -> int | str:
        return await work.do("daily", device, account)

    @pool.consumer(name="weekly")
    async def weekly(device: Device, account: GameAccount) -> int | str:
        return await work.do("weekly", device, account)


@asynccontextmanager
async def serving(url, work: Work | None = None, *, devices=2, **settings):
    """A service with some phones, and the consumers `daily` and `weekly`, when all of its phones are up."""
    given = phones(devices) if isinstance(devices, int) else devices
    service = ExecutorService(devices=given, store=url, heartbeat_s=1.0, **settings)
    if work is not None:
        add_consumers(service, work)
    async with service:
        await eventually(service.yard, lambda: len(service.pool.places.ready()) == len(given))
        yield service
        if work is not None:
            work.let_go()
