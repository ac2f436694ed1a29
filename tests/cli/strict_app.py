"""An app whose consumers refuse arguments in ways of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from taskyard import BaseTaskConsumer, Task, Yard

yard = Yard("sqlite:///work.db")


@dataclass
class Size:
    """A nested argument."""

    x: int


@yard.consumer
def shrink(where: Size) -> None:
    """Takes an object."""


class Bell(BaseTaskConsumer):
    """Its `produce` wants an argument `n`."""

    name = "bell"

    def produce(self, args: dict[str, Any]) -> Task:
        return Task(source=self.name, args={"n": int(args["n"])})

    async def consume(self, task: Task) -> None: ...


yard.register(Bell())
