"""A node of a farm for tests: serves devices until it is killed. Arguments: the store, then the numbers of devices."""

import asyncio
import sys

from taskyard import ExecutorService, Task
from taskyard.devices import Device, GameAccount, SimulatedDevice


async def main(url: str, first: int, count: int, accounts: int) -> None:
    devices = [SimulatedDevice(n, name=f"emu-{n}") for n in range(first, first + count)]
    service = ExecutorService(devices=devices, store=url, heartbeat_s=1.0)
    begun = asyncio.Queue[str]()

    @service.consumer(name="daily")
    async def daily(device: Device, account: GameAccount) -> None:
        begun.put_nowait(f"{account.account_id} {device.name}")
        await asyncio.Event().wait()

    async with service:
        for n in range(accounts):
            assert await service.enqueue(Task(source="daily"), GameAccount(n))
        while True:
            print(await begun.get(), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:])))
