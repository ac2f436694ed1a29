"""`QueueController`: everything a person can do to one queue, as a value to hold in the hand."""

from __future__ import annotations

from typing import Protocol

from taskyard.model.control import Pause, QueueCommand, Resume, SetConcurrency, StopAfterCurrent
from taskyard.model.given import check_count, check_name, check_text
from taskyard.ports.store import QueueStatus

CODE = "code"
"""Who speaks where nobody says who."""


class Steering(Protocol):
    """What a controller needs: a store's verbs, and that they take effect on this node at once."""

    async def control(self, queue: str, command: QueueCommand, *, by: str) -> QueueStatus: ...

    async def queues(self) -> list[QueueStatus]: ...


class QueueController:
    """One queue, as people steer it, from any process. What is said is kept with `by`, the time and the reason, and
    survives restarts; every answer is the queue as it is then."""

    def __init__(self, name: str, steering: Steering, *, by: str = CODE) -> None:
        self.name = check_name("the name of a queue", name)
        self._steering, self._by = steering, check_name("by", by)

    def __repr__(self) -> str:
        return f"QueueController({self.name!r})"

    async def status(self) -> QueueStatus:
        """Its rules, what people have said about it, and what it holds."""
        known = {status.name: status for status in await self._steering.queues()}
        return known.get(self.name) or QueueStatus.empty(self.name)

    async def pause(self, *, reason: str = "") -> QueueStatus:
        """Start nothing more; what runs goes on."""
        return await self._say(Pause(check_text("reason", reason)))

    async def resume(self) -> QueueStatus:
        """Start tasks again; takes back a stop as well, while it lasts and afterwards."""
        return await self._say(Resume())

    async def stop_after_current(self, *, reason: str = "") -> QueueStatus:
        """Pause, and be `stopping` until what runs has ended."""
        return await self._say(StopAfterCurrent(check_text("reason", reason)))

    async def set_concurrency(self, concurrency: int | None, *, reason: str = "") -> QueueStatus:
        """Run at most so many at once, whatever the queue's own rules say; None goes back to those."""
        if concurrency is not None:
            check_count("concurrency", concurrency, least=1, hint=", or None for the queue's own rule")
        return await self._say(SetConcurrency(concurrency, check_text("reason", reason)))

    async def _say(self, command: QueueCommand) -> QueueStatus:
        return await self._steering.control(self.name, command, by=self._by)
