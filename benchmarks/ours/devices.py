"""Device pools: simulated phones on a yard, whose calls take no longer than they are told to."""

import asyncio
import gc
import inspect
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.ours.places import FILE, persisted, url_of
from benchmarks.reading import Reading, percentile
from taskyard import Task, Yard, current_run
from taskyard.device_pool import DevicePool
from taskyard.devices import Device, GameAccount, SimulatedDevice
from taskyard.model.state import TaskState

POOL = "phones"
HEARTBEAT_S = 10.0
"""The default."""

TIMEOUT_S = 120.0
POLL_S = 0.005
WARM_UP = 50


def _phones(count: int, latency_s: float = 0.0) -> list[SimulatedDevice]:
    return [SimulatedDevice(number, name=f"phone-{number}", latency_s=latency_s) for number in range(1, count + 1)]


async def _until_ready(pool: DevicePool, names: Iterable[str]) -> None:
    """Until a task would start on each of these devices."""
    changed, missing = asyncio.Event(), set(names)
    stop = pool.places.subscribe(changed.set)
    async with asyncio.timeout(TIMEOUT_S):
        while missing := missing - {place.name for place in pool.places.ready()}:
            changed.clear()
            await changed.wait()
    stop()


async def _completed(yard: Yard) -> int:
    counts = await yard.store.count()
    return sum(number for (_, state), number in counts.items() if state is TaskState.COMPLETED)


async def _until_completed(yard: Yard, count: int) -> int:
    async with asyncio.timeout(TIMEOUT_S):
        while (done := await _completed(yard)) < count:  # noqa: ASYNC110 -- nothing tells when a store holds n results
            await asyncio.sleep(POLL_S)
    return done


async def _held(url: str, counted: int) -> int:
    """What the database holds, or what the store in memory held before its end."""
    return await persisted(url, TaskState.COMPLETED) if url.startswith(FILE) else counted


# --- throughput ------------------------------------------------------------------------------------------------------


def drain(folder: Path, count: int, devices: int, dsn: str | None = None) -> Reading:
    """No-op tasks a second, on devices."""
    return uvloop.run(_drain(url_of(folder, dsn), count, devices))


async def _drain(url: str, count: int, devices: int) -> Reading:
    yard = Yard(url, max_running=devices)
    pool = yard.device_pool(POOL, devices=_phones(devices))

    @pool.consumer
    async def noop(device: Device, account: GameAccount) -> None:
        pass

    async with yard:
        await _until_ready(pool, pool.definitions)
        return await _worked_off(url, yard, POOL, noop, [{"account": GameAccount(n)} for n in range(count)])


def plain_drain(folder: Path, count: int, devices: int, dsn: str | None = None) -> Reading:
    """No-op tasks a second, on a plain consumer that runs as many at once."""
    return uvloop.run(_plain_drain(url_of(folder, dsn), count, devices))


async def _plain_drain(url: str, count: int, slots: int) -> Reading:
    yard = Yard(url, max_running=slots)

    @yard.consumer(concurrency=slots)
    async def noop(number: int) -> None:
        pass

    async with yard:
        return await _worked_off(url, yard, "default", noop, [{"number": number} for number in range(count)])


async def _worked_off(
    url: str, yard: Yard, queue: str, consumer: Any, arguments: list[dict[str, Any]], *, late: int = 0
) -> Reading:
    """All are queued first; the time is that from the resume of the queue to the last result in the store, of all but
    those that are `late`."""
    await yard.queue(queue).pause()
    await consumer.submit_many(arguments)
    gc.collect()
    began = time.perf_counter()
    await yard.queue(queue).resume()
    await _until_completed(yard, len(arguments) - late)
    elapsed = time.perf_counter() - began
    done = await _until_completed(yard, len(arguments))
    await yard.stop()
    return Reading((len(arguments) - late) / elapsed, given=len(arguments), held=await _held(url, done))


# --- a device that hangs ---------------------------------------------------------------------------------------------


def others(folder: Path, count: int, devices: int, hanging: int, task_s: float, dsn: str | None = None) -> Reading:
    """Tasks a second of healthy devices, beside `hanging` others: each of those hangs in the first task that it gets,
    and from then on in its health checks, and still takes connections. The tasks that it took end later, elsewhere."""
    return uvloop.run(_others(url_of(folder, dsn), count, devices, hanging, task_s))


async def _others(url: str, count: int, devices: int, hanging: int, task_s: float) -> Reading:
    yard = Yard(url, max_running=devices + hanging)
    phones = _phones(devices + hanging, latency_s=task_s)
    pool = yard.device_pool(POOL, devices=phones, heartbeat_s=1.0)
    bad = {phone.name: phone for phone in phones[:hanging]}
    ran: Counter[str] = Counter()

    @pool.consumer
    async def short(device: Device, account: GameAccount) -> None:
        if device.name in bad:
            bad[device.name].hang(connects=True)
        await device.tap(1, 1)
        ran[device.name] += 1

    async with yard:
        await _until_ready(pool, pool.definitions)
        accounts = [{"account": GameAccount(number)} for number in range(count)]
        reading = await _worked_off(url, yard, POOL, short, accounts, late=hanging)
    if any(ran[name] for name in bad):
        raise RuntimeError("a device that was to hang has ended a task")
    return reading


# --- back after an outage --------------------------------------------------------------------------------------------


def outages(folder: Path, devices: int, each: int, heartbeat_s: float, beats: float, hangs: bool) -> Reading:
    """The longest time from the end of an outage until the device is idle, and `also` the p50. An outage lasts for
    `beats` heartbeats: the connection is broken, or nothing answers."""
    return uvloop.run(_outages(devices, each, heartbeat_s, beats, hangs))


async def _outages(devices: int, each: int, heartbeat_s: float, beats: float, hangs: bool) -> Reading:
    yard = Yard("memory://")
    phones = _phones(devices)
    pool = yard.device_pool(POOL, devices=phones, heartbeat_s=heartbeat_s)
    times: list[float] = []

    async def suffer(phone: SimulatedDevice) -> None:
        for _ in range(each):
            await asyncio.sleep(random.uniform(0, heartbeat_s))
            (phone.hang if hangs else phone.disconnect)()
            await asyncio.sleep(beats * heartbeat_s)
            if pool.server.actors[phone.name].is_idle():
                raise RuntimeError(f"nobody has noticed the outage of {phone.name}")
            (phone.unhang if hangs else phone.reconnect)()
            began = time.perf_counter()
            await _until_ready(pool, [phone.name])
            times.append(time.perf_counter() - began)

    async with yard:
        await _until_ready(pool, pool.definitions)
        await asyncio.gather(*map(suffer, phones))
    return Reading(max(times), given=devices * each, held=len(times), also={"p50": percentile(times, 50)})


# --- starting --------------------------------------------------------------------------------------------------------


def start(folder: Path, count: int, devices: int, gap_s: float, dsn: str | None = None) -> Reading:
    """p50 from `enqueue` to the first line of the code on an idle device; `also` that of a plain function in a thread,
    from `submit` on the same yard. They take turns."""
    return uvloop.run(_start(url_of(folder, dsn), count, devices, gap_s))


async def _start(url: str, count: int, devices: int, gap_s: float) -> Reading:
    yard = Yard(url, max_running=100)
    pool = yard.device_pool(POOL, devices=_phones(devices))
    started, task = 0.0, ""

    @pool.consumer
    async def on_device(device: Device, account: GameAccount) -> None:
        nonlocal started, task
        started, task = time.perf_counter(), current_run().uuid
        began.set()

    @yard.consumer(executor="thread", concurrency=devices)
    def in_thread(number: int) -> None:
        nonlocal started
        started = time.perf_counter()

    async def enqueue(number: int) -> None:
        began.clear()
        await pool.enqueue(Task(source="on_device"), GameAccount(number))
        await began.wait()
        await yard.handle(task).result(timeout_s=TIMEOUT_S)

    async def submit(number: int) -> None:
        handle = await in_thread.submit(number=number)
        await handle.result(timeout_s=TIMEOUT_S)

    async def measure(work: Callable[[int], Awaitable[None]], number: int) -> float:
        await asyncio.sleep(gap_s)
        asked = time.perf_counter()
        await work(number)
        return started - asked

    began = asyncio.Event()
    async with yard:
        await _until_ready(pool, pool.definitions)
        pairs = [(await measure(enqueue, number), await measure(submit, number)) for number in range(count + WARM_UP)]
        done = await _until_completed(yard, 2 * len(pairs))
    device_s, thread_s = ([pair[side] for pair in pairs[WARM_UP:]] for side in (0, 1))
    return Reading(
        percentile(device_s, 50),
        given=2 * (count + WARM_UP),
        held=await _held(url, done),
        also={"thread": percentile(thread_s, 50)},
    )


# --- many that are idle ----------------------------------------------------------------------------------------------


def farm(folder: Path, devices: int, seconds: float, dsn: str | None = None) -> Reading:
    """Processor time a second of devices that are idle, counted from the moment when all are up; `also` how long that
    took, the memory of each device and of that the part of its simulation, and calls of the store a second."""
    return uvloop.run(_farm(url_of(folder, dsn), devices, seconds))


async def _farm(url: str, devices: int, seconds: float) -> Reading:
    yard = Yard(url, max_running=devices)
    gc.collect()
    before = resident_bytes()
    phones = _phones(devices)
    simulated = resident_bytes() - before
    pool = yard.device_pool(POOL, devices=phones, heartbeat_s=HEARTBEAT_S)
    began = time.perf_counter()
    async with yard:
        await _until_ready(pool, pool.definitions)
        up_s = time.perf_counter() - began
        beats = sum(phone.calls for phone in phones)
        async with _calls_of(yard.store) as calls:
            cpu_s = await cpu_while_idle(seconds)
        beats = sum(phone.calls for phone in phones) - beats
        held = sum(actor.is_idle() for actor in pool.server.actors.values())
        memory = (resident_bytes() - before) / devices
    if beats < 0.9 * devices * seconds / HEARTBEAT_S:
        raise RuntimeError(f"only {beats} health checks in {seconds:.0f} s")
    also = {"up": up_s, "memory": memory, "simulated": simulated / devices, "calls": calls.total() / seconds}
    return Reading(cpu_s, given=devices, held=held, also=also)


async def cpu_while_idle(seconds: float) -> float:
    """Processor time a second, over that time."""
    began, cpu = time.perf_counter(), time.process_time()
    await asyncio.sleep(seconds)
    return (time.process_time() - cpu) / (time.perf_counter() - began)


@asynccontextmanager
async def _calls_of(store: Any) -> AsyncIterator[Counter[str]]:
    """The calls of a store by name, as long as this is open."""
    calls: Counter[str] = Counter()

    def counted(name: str, method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return method(*args, **kwargs)

        return call

    names = [name for name, _ in inspect.getmembers(type(store), inspect.iscoroutinefunction) if name[0] != "_"]
    for name in names:
        setattr(store, name, counted(name, getattr(store, name)))
    yield calls
    for name in names:
        delattr(store, name)


def resident_bytes() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return float(pages * os.sysconf("SC_PAGE_SIZE"))
