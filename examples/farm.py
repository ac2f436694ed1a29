"""A farm of two simulated phones in strict order, one task per account at a time: python examples/farm.py"""

import asyncio

from taskyard import ExecutorService, Task
from taskyard.devices import Device, GameAccount, SimulatedDevice

service = ExecutorService(devices=[SimulatedDevice(1, name="emu-1", latency_s=0.5), SimulatedDevice(2, name="emu-2")])


@service.consumer(name="daily")
async def daily(device: Device, account: GameAccount, level: int = 1) -> int | str:
    await device.shell("am start game")
    return account.account_id


async def main() -> None:
    async with service:
        assert await service.enqueue(Task(source="daily"), GameAccount(7)) is True
        assert await service.enqueue(Task(source="daily"), GameAccount(7)) is False  # queued or running already
        print(
            await service.queue_info(),
            await service.running_info(),
            await service.is_running(7),
            await service.is_queued(7, "daily"),
        )


if __name__ == "__main__":
    asyncio.run(main())
