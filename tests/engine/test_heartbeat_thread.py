"""The heartbeat on its own thread, in real time: what a task may do to the event loop, and what it may not (P16)."""

import asyncio
import contextlib
import ctypes
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable

import pytest

from taskyard.cluster.heartbeat import Heartbeat, InThread
from taskyard.engine import Engine, EngineSettings
from taskyard.execution.inline import InProcessExecutor
from taskyard.model.task import TaskRecord, new_uuid
from taskyard.ports.clock import SystemClock
from taskyard.ports.consumer import Consumer
from taskyard.ports.store import Add
from taskyard.testing.probes import Probes
from tests.engine.leases import TimedLease, TimedStore

LEASE_S = 2.0
"""Long enough for a thread to get its turn on a busy machine."""


@contextlib.asynccontextmanager
async def serving(
    consume: Callable[[TaskRecord], object], lease_s: float
) -> AsyncIterator[tuple[Engine, TimedStore, Probes]]:
    clock, probes = SystemClock(), Probes()
    store = TimedStore(clock, lease_s)
    consumer = Consumer(name="work", encode=str, call=consume, is_async=True, executor="inline")
    engine = Engine(
        store,
        clock=clock,
        consumers={"work": consumer},
        executors={"inline": InProcessExecutor()},
        settings=EngineSettings(),
        sinks=probes.sinks,
    )
    await engine.start()
    try:
        yield engine, store, probes
    finally:
        await engine.stop(grace_s=0.0)


def a_task() -> Add:
    now = SystemClock().now()
    return Add([TaskRecord(uuid=new_uuid(), consumer="work", due_at=now, created_at=now, updated_at=now)])


def sleep_on_the_loop(seconds: float) -> None:
    time.sleep(seconds)


def compute_on_the_loop(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        sum(range(1000))


def hold_the_gil(seconds: float) -> None:
    """As C code does that forgets to give it up."""
    ctypes.PyDLL(None).usleep(ctypes.c_uint(int(seconds * 1e6)))


@pytest.mark.slow
@pytest.mark.parametrize("block", [sleep_on_the_loop, compute_on_the_loop])
async def test_a_blocked_event_loop_loses_no_lease(block):
    """A task that keeps the event loop for longer than the lease, while the GIL changes hands, costs its node nothing:
    the beats go on, and its result is recorded."""

    async def consume(record: TaskRecord) -> str:
        block(1.5 * LEASE_S)
        return "done"

    async with serving(consume, LEASE_S) as (engine, store, _):
        incarnation = engine.incarnation
        [added] = await engine.add(a_task())
        outcome = await asyncio.wait_for(engine.outcome(added.uuid), 30)
        assert outcome.state == "completed"
        assert list(store.leases) == [incarnation]
        lease = store.leases[incarnation]
        assert not lease.is_given_up
        assert lease.beats >= 3
        assert engine.refused == 0


@pytest.mark.slow
async def test_a_gil_that_is_held_longer_than_the_lease_loses_it(caplog):
    """A task that lets nothing else run for longer than the lease is given up by the others, hears of it, is cut short,
    and cannot write; the node goes on under another incarnation and runs the task again."""
    began: list[int] = []
    over = asyncio.Event()

    async def consume(record: TaskRecord) -> str:
        began.append(record.attempt)
        if len(began) > 1:
            return "done"
        hold_the_gil(1.5 * LEASE_S)
        # The others have taken the task over by now, and this node has not heard of it.
        await store.rescue(engine.incarnation)
        try:
            await asyncio.Event().wait()
        finally:
            over.set()
        return "stale"

    async with serving(consume, LEASE_S) as (engine, store, probes):
        old = engine.incarnation
        [added] = await engine.add(a_task())
        await asyncio.wait_for(over.wait(), 30)
        assert await probes.fenced.next() == old
        new = await probes.rejoined.next()
        outcome = await asyncio.wait_for(engine.outcome(added.uuid), 30)
        assert (outcome.state, outcome.result) == ("completed", '"done"')
        assert store.leases[old].longest_s > LEASE_S
        assert new != old
        assert began == [1, 2]
        assert engine.refused == 1
        assert "has lost its lease" in caplog.text


async def test_a_loop_that_never_runs_again_is_shown_and_stops_the_beat(caplog):
    """From its thread the heartbeat sees that the loop hangs, shows in which line, and beats no more."""
    lease = TimedLease(0.5)
    clock = SystemClock()
    lost: list[str] = []
    heartbeat = Heartbeat(lease, clock=clock, began_mono=clock.monotonic(), stall_s=0.3, lost=lost.append)
    shown = threading.Event()

    class Watch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "has not run for" in record.getMessage():
                shown.set()

    watch = Watch()
    logging.getLogger("taskyard").addHandler(watch)
    beating = InThread(heartbeat)
    try:
        assert shown.wait(20)  # the loop stands still here
        before = lease.beats
        time.sleep(0.3)
        assert lease.beats == before
    finally:
        logging.getLogger("taskyard").removeHandler(watch)
        await beating.stop()
    assert "assert shown.wait(20)" in caplog.text
    assert lost == []


async def test_the_thread_ends_when_it_is_told_although_its_store_hangs():
    """A beat that hangs, and a connection that cannot be closed, do not keep the thread."""

    class Hanging(TimedLease):
        is_hanging = threading.Event()

        async def beat(self) -> bool:
            self.is_hanging.set()
            await asyncio.Event().wait()
            return True

        async def close(self) -> None:
            await asyncio.Event().wait()

    lease = Hanging(60.0)
    clock = SystemClock()
    beating = InThread(Heartbeat(lease, clock=clock, began_mono=clock.monotonic(), stall_s=60.0, lost=lambda why: None))
    await asyncio.to_thread(lease.is_hanging.wait)
    await beating.stop()
    assert not [thread for thread in threading.enumerate() if thread.name == "taskyard-heartbeat"]
