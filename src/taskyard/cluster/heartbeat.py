"""A node's beats: the loop around `Pulse`, and the thread it runs in.

The thread has an event loop and a connection of its own, so that neither a task that blocks the node's event loop nor a
store at work holds up a beat; only code that keeps the GIL can. It never touches what runs: that it is lost, it says
once, to whoever owns it, and ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from taskyard.cluster.pulse import TRUSTED, Act, Pulse
from taskyard.errors import StoreError
from taskyard.ports.clock import Clock
from taskyard.ports.store import Lease

log = logging.getLogger("taskyard")

T = TypeVar("T")

CLOSE_S = 1.0
"""How long letting go of a connection may take; the next one does not wait for it."""

END_S = 2.0
"""How long the end of a node waits for its thread, which may be stuck in a connection."""

LOOK_S = 1.0
"""So soon after the machine was suspended, at the latest, it is looked whether the lease has passed meanwhile."""

FRAMES = 40
"""Of each thread, the innermost, when a loop that hangs is shown."""


class Heartbeat:
    """`lost` is called once, on the thread or task that runs this, with what happened. `ticked_mono` is set by the loop
    that is watched; a loop that is over is not watched any more if it is set to infinity."""

    def __init__(
        self, lease: Lease, *, clock: Clock, began_mono: float, stall_s: float, lost: Callable[[str], None]
    ) -> None:
        self._lease, self._clock, self._lost = lease, clock, lost
        self._pulse = Pulse(lease.lease_s, stall_s=stall_s, began_mono=began_mono)
        self.ticked_mono = began_mono
        self._misses = 0
        self._is_open = self._has_dumped = False
        self._closing: asyncio.Future[None] | None = None

    async def run(self) -> None:
        """Beat until the lease is lost, or until cancelled."""
        try:
            self._lost(await self._until_lost())
        finally:
            self._let_go()
            if self._closing is not None:
                await self._closing

    async def _until_lost(self) -> str:
        try:
            while (why := await self._step()) is None:
                pass
        except Exception:
            log.exception("the heartbeat of this node failed")
            return "its heartbeat failed"
        return why

    async def _step(self) -> str | None:
        """One act; why the lease is lost, if it is."""
        now = self._clock.monotonic()
        step = self._pulse.next(now, self.ticked_mono)
        if step.act is not Act.STALLED and self._has_dumped:
            self._has_dumped = False
            log.warning("the event loop of this node runs again")
        if step.act is Act.LOST:
            return f"no beat was heard for {TRUSTED * self._lease.lease_s:.3g} s"
        if step.act is Act.BEAT:
            return await self._beat(now, step.until_mono)
        if step.act is Act.STALLED:
            self._show_stall(now - self.ticked_mono)
        await self._clock.wait(asyncio.Event(), min(step.until_mono, now + LOOK_S))
        return None

    async def _beat(self, sent_mono: float, until_mono: float) -> str | None:
        try:
            is_known = await self._within(self._say(), until_mono)
        except Exception as error:
            self._missed(error)
            self._let_go()
            return None
        if not is_known:
            return "the other nodes have given it up"
        if self._misses:
            log.warning("the beat of this node is heard again, after %d that were not", self._misses)
            self._misses = 0
        self._pulse.heard(sent_mono)
        return None

    async def _say(self) -> bool:
        if self._closing is not None:
            await self._closing
            self._closing = None
        if not self._is_open:
            self._is_open = True  # also if it fails: there may be something to close
            await self._lease.open()
        return await self._lease.beat()

    def _missed(self, error: Exception) -> None:
        self._pulse.missed(self._clock.monotonic())
        self._misses += 1
        if self._misses == 1:
            bug = None if isinstance(error, StoreError | TimeoutError | OSError) else error
            log.warning("the beat of this node was not heard: %s", str(error) or type(error).__name__, exc_info=bug)

    def _let_go(self) -> None:
        """Close the connection, without waiting for that: it may take its time, and the verdict does not."""
        if self._is_open:
            self._is_open = False
            self._closing = asyncio.ensure_future(self._close())

    async def _close(self) -> None:
        with contextlib.suppress(Exception):
            await self._within(self._lease.close(), self._clock.monotonic() + CLOSE_S)

    async def _within(self, doing: Coroutine[Any, Any, T], until_mono: float) -> T:
        """What it answers, or TimeoutError; it is cancelled then, and not waited for."""
        task = asyncio.ensure_future(doing)
        over = asyncio.Event()
        task.add_done_callback(_ignore)  # should nobody be left to ask it
        task.add_done_callback(lambda _: over.set())
        try:
            await self._clock.wait(over, until_mono)
            if task.done():
                return task.result()
        finally:
            task.cancel()
        raise TimeoutError("the store did not answer in time")

    def _show_stall(self, stalled_s: float) -> None:
        if not self._has_dumped:
            self._has_dumped = True
            log.error(
                "the event loop of this node has not run for %.0f s, so it beats no more: others take its tasks over "
                "when its lease has passed. What its threads do:\n%s",
                stalled_s,
                all_stacks(),
            )


def _ignore(task: asyncio.Future[Any]) -> None:
    if not task.cancelled():
        task.exception()


def all_stacks() -> str:
    """What every thread of this process is doing."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = []
    for ident, frame in sys._current_frames().items():
        lines = traceback.format_stack(frame)[-FRAMES:]
        stacks.append(f"thread {names.get(ident, 'of another runtime')} ({ident}):\n{''.join(lines)}")
    return "\n".join(stacks)


# --- where it runs ----------------------------------------------------------------------------------------------------


class Beating(Protocol):
    """A heartbeat under way."""

    async def stop(self) -> None:
        """End it, if it has not ended."""
        ...


class InThread:
    """The heartbeat on a thread of its own. A daemon: a process that ends is not alive, whatever its thread does."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        self._loop = asyncio.new_event_loop()
        self._beating = self._loop.create_task(heartbeat.run())
        self._host = asyncio.get_running_loop()
        self._over = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="taskyard-heartbeat", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with contextlib.suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._beating)
            if left := asyncio.all_tasks(self._loop):  # tries that were given up, and take their time to end
                _, still = self._loop.run_until_complete(asyncio.wait(left, timeout=CLOSE_S))
                for task in still:  # given up for good, which is nothing to be logged as an error
                    task._log_destroy_pending = False  # type: ignore[attr-defined]
        finally:
            self._loop.close()
            with contextlib.suppress(RuntimeError):  # the host's loop may be over before us
                self._host.call_soon_threadsafe(self._over.set)

    async def stop(self) -> None:
        with contextlib.suppress(RuntimeError):  # it has ended by itself
            self._loop.call_soon_threadsafe(self._beating.cancel)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await self._over.wait()
            self._thread.join()


class InTask:
    """The heartbeat on the event loop it is to watch: for simulations, where there is one loop and no thread."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        self._beating = asyncio.get_running_loop().create_task(heartbeat.run(), name="taskyard-heartbeat")

    async def stop(self) -> None:
        self._beating.cancel()
        await asyncio.gather(self._beating, return_exceptions=True)
