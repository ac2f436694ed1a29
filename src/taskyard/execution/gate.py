"""How many requests of one algorithm are let through at once, and how many may wait for it. Belongs to one loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque

from taskyard.execution.run_handle import RunHandle
from taskyard.model.execution import ExecutionError
from taskyard.ports.explain import canceled, rejected, waited_long

Turn = asyncio.Future[ExecutionError | None]

QUEUE_LIMIT = 1000
"""What may wait where nobody has said how much."""


class Gate:
    """`limit=None` lets everybody through."""

    def __init__(self, limit: int | None, queue_limit: int | None = None) -> None:
        self._limit = limit
        self._queue_limit = QUEUE_LIMIT if queue_limit is None else queue_limit
        self._waiting: deque[Turn] = deque()
        self.active = 0

    @property
    def queued(self) -> int:
        return len(self._waiting)

    async def enter(self, run: RunHandle, wait_s: float | None) -> ExecutionError | None:
        """None when it is this one's turn, and it must `leave` again; otherwise why it never will be."""
        if self._limit is None or self.active < self._limit:
            self.active += 1
            return None
        if len(self._waiting) >= self._queue_limit:
            return rejected(f"{self._limit} of its runs are going on, and its queue is full", "QueueFull")
        return await self._wait(run, wait_s)

    async def _wait(self, run: RunHandle, wait_s: float | None) -> ExecutionError | None:
        loop = asyncio.get_running_loop()
        turn: Turn = loop.create_future()
        self._waiting.append(turn)
        run.set_interrupt(lambda: _answer(turn, canceled("canceled while it waited for its turn")))
        timer = None if wait_s is None else loop.call_later(wait_s, _answer, turn, waited_long(wait_s))
        try:
            verdict = await turn
        except asyncio.CancelledError:
            # Race: `leave` may have given it the turn before the cancel got here. It goes to the next one.
            if turn.done() and not turn.cancelled() and turn.result() is None:
                self.leave()
            raise
        finally:
            run.clear_interrupt()
            if timer is not None:
                timer.cancel()
            with contextlib.suppress(ValueError):
                self._waiting.remove(turn)
        return verdict

    def leave(self) -> None:
        self.active -= 1
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                self.active += 1
                turn.set_result(None)
                return


def _answer(turn: Turn, error: ExecutionError) -> None:
    if not turn.done():
        turn.set_result(error)
