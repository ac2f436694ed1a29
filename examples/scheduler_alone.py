"""The scheduler by itself: consumers as classes in a registry, tasks in memory, fired when they are due.

python examples/scheduler_alone.py
"""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

from taskyard import BaseTaskConsumer, Scheduler, Task, TaskConsumerRegistry


class Bell(BaseTaskConsumer):
    name = "bell"
    concurrent_count = 2

    def __init__(self, rings: int) -> None:
        self.left = rings
        self.silent = asyncio.Event()

    def produce(self, args: dict[str, Any]) -> Task:
        at = datetime.now(UTC) + timedelta(seconds=args["in_s"])
        return Task(source=self.name, args=args, schedule_at=at)

    async def consume(self, task: Task) -> None:
        print("ding", task.args["in_s"])
        self.left -= 1
        if self.left == 0:
            self.silent.set()


async def main() -> None:
    registry, bell = TaskConsumerRegistry(), Bell(rings=3)
    registry.register(bell)
    scheduler = Scheduler(registry)
    await scheduler.start()
    for in_s in (0.3, 0.1, 0.2):  # add_task is synchronous, and may be called from any thread
        scheduler.add_task(bell.produce({"in_s": in_s}))
    await bell.silent.wait()
    await scheduler.stop()


if __name__ == "__main__":
    asyncio.run(main())
