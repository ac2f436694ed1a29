"""`DeviceExecutor`: devices as a place to run things, as any other executor."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from taskyard.devices.actor import WorkerActor
from taskyard.devices.work_item import WorkItem
from taskyard.model.execution import ExecutionError, ExecutionResult
from taskyard.ports.clock import Clock, SystemClock
from taskyard.ports.executor import Abilities, ExecutionRequest, ExecutorHealth, ExecutorStats
from taskyard.ports.explain import failed, rejected, waited_long

LEAVE_S = 10.0
"""Seconds: a caller that is cancelled waits so long for the end of async code, which is cancelled as well."""


class DeviceExecutor:
    """A request goes to the device that its task was given. One of no task, or of none that was given a device, goes to
    any that is idle. `actors` are those of the pool, which runs and closes them, and may add and remove some at any
    time."""

    abilities = Abilities()

    def __init__(
        self, actors: Mapping[str, WorkerActor], *, clock: Clock | None = None, leave_s: float = LEAVE_S
    ) -> None:
        self._actors, self._clock, self._leave_s = actors, clock or SystemClock(), leave_s
        self._items: dict[WorkItem, None] = {}
        self._done = 0
        self._is_closed = False

    async def start(self) -> None:
        self._is_closed = False

    async def shutdown(self, *, wait: bool = True) -> None:
        self._is_closed = True
        for item in list(self._items):
            item.refuse(rejected("the devices were shut down before it began"))
        while wait and self._items:
            # Unlike a bare await this leaves the futures alone when it is cancelled.
            await asyncio.wait([item.ended for item in self._items])

    def stats(self, name: str | None = None) -> ExecutorStats:
        active = sum(item.is_started and not item.is_over for item in self._items)
        queued = sum(not item.is_started and not item.is_over for item in self._items)
        return ExecutorStats(len(self._actors), active, queued, self._done)

    def health(self) -> ExecutorHealth:
        if self._is_closed:
            return ExecutorHealth(False, "it is shut down")
        if not any(actor.takes_tasks for actor in self._actors.values()):
            return ExecutorHealth(False, f"none of {len(self._actors)} devices takes a task now")
        return ExecutorHealth()

    async def submit(self, request: ExecutionRequest) -> ExecutionResult:
        if self._is_closed:
            return failed(rejected("the devices are shut down"))
        item, run = WorkItem(request, self._clock), request.run
        if run is not None:
            run.set_interrupt(item.interrupt, kill=item.interrupt if item.is_async else None)
            run.mark_queued()
        refusal = self._hand_over(item)
        if refusal is not None:
            if run is not None:
                run.clear_interrupt()
            return failed(refusal)
        self._items[item] = None
        item.ended.add_done_callback(lambda _: self._on_end(item))
        timer = None
        if request.wait_s is not None:
            late = waited_long(request.wait_s)
            timer = asyncio.get_running_loop().call_later(request.wait_s, item.refuse, late)
        try:
            await item.finished
        except asyncio.CancelledError:
            await self._leave(item)
            raise
        finally:
            if timer is not None:
                timer.cancel()
        return item.result()

    def _hand_over(self, item: WorkItem) -> ExecutionError | None:
        """Put it into the inbox of its device, or say why not."""
        run = item.request.run
        name = None if run is None else run.claim.record.device
        if name is not None:
            actor = self._actors.get(name)
            if actor is None:
                return rejected(f"the device {name!r} is not served here")
            return None if actor.submit(item) else rejected(f"the device {name!r} takes no task now: {actor.state}")
        for actor in sorted(self._actors.values(), key=lambda actor: actor.load):
            if actor.submit(item):
                return None
        return rejected(f"none of {len(self._actors)} devices takes a task now")

    async def _leave(self, item: WorkItem) -> None:
        """Our caller goes. Code that goes on is told, and whoever owns the run must not take it for ended."""
        if item.is_over:
            return
        item.detach()
        item.interrupt()
        if item.device is not None and (actor := self._actors.get(item.device.name)) is not None:
            actor.look()
        if item.is_started and item.is_async:
            ended = asyncio.Event()
            item.ended.add_done_callback(lambda _: ended.set())
            await self._clock.wait(ended, self._clock.monotonic() + self._leave_s)

    def _on_end(self, item: WorkItem) -> None:
        self._items.pop(item, None)
        self._done += 1
