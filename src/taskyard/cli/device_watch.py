"""`taskyard device watch`: the devices live on a terminal, or one line for each change in a pipe."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from datetime import UTC, datetime

from rich.console import Console
from rich.live import Live

from taskyard.application.device_documents import DeviceOverview, PoolDocument
from taskyard.application.interface import Application
from taskyard.cli.console import make_console, say_json, show
from taskyard.cli.device_frame import DeviceFrame
from taskyard.cli.errors import DONE
from taskyard.cli.live import canceled_by_sigterm, note, read_latest
from taskyard.cli.session import Target, opened_application
from taskyard.cli.story import print_event
from taskyard.cli.text import clean, clock_time
from taskyard.model.event import DEVICE_KINDS, EventFilter, EventKind

FRAME_S = 0.5
"""Seconds between frames, and between two readings at least: times are shown in whole seconds."""

ONCE_LINES = 24
"""Lines of a single frame at least, also on a lower terminal: nothing scrolls it."""

LINE_KINDS = DEVICE_KINDS | {
    EventKind.STARTED, EventKind.COMPLETED, EventKind.FAILED, EventKind.CANCELED, EventKind.RETRYING,
    EventKind.INTERRUPTED,
}  # fmt: skip
"""Kinds of events that are printed as lines."""


async def watch_devices(target: Target, pool: str | None, *, once: bool, as_json: bool) -> int:
    """Until Ctrl-C."""
    async with opened_application(target) as application:
        if once:
            _print_once(await application.devices.overview(pool), application.store, as_json=as_json)
            return DONE
        try:
            with canceled_by_sigterm():
                if as_json or not sys.stdout.isatty():
                    await _print_lines(application, pool, as_json=as_json)
                else:
                    documents = application.devices.watch(pool, min_interval_s=FRAME_S)
                    await _show_live(make_console(), application.store, documents)
        except asyncio.CancelledError:
            return DONE  # Ctrl-C is the usual way to leave
    return DONE


def _print_once(seen: DeviceOverview, title: str, *, as_json: bool) -> None:
    if as_json:
        say_json(seen)
        return
    console = make_console()
    height = max(ONCE_LINES, console.height)
    frame = DeviceFrame(seen, title=title, width=console.width, height=height, now=datetime.now(UTC))
    show(console, frame.draw())


async def _show_live(console: Console, title: str, documents: AsyncIterator[DeviceOverview]) -> None:
    latest: list[DeviceOverview] = []
    reading = asyncio.create_task(read_latest(latest, documents))
    live = Live(console=console, auto_refresh=False, vertical_overflow="crop")
    try:
        with live:
            while True:
                if latest:
                    # One line is left free: a frame as high as the window would scroll it.
                    frame = DeviceFrame(
                        latest[0], title=title, width=console.width, height=console.height - 1, now=datetime.now(UTC)
                    )
                    live.update(frame.draw(), refresh=True)
                if reading.done():
                    return reading.result()
                await asyncio.wait({reading}, timeout=FRAME_S)
    finally:
        reading.cancel()
        await asyncio.wait({reading})


def _states_text(pool: PoolDocument) -> str:
    """`phones 1 down, 3 idle`."""
    counts = ", ".join(f"{n:,} {state}" for state, n in pool.states.items())
    return f"{clean(pool.name)} {counts or 'no devices'}"


async def _print_lines(application: Application, pool: str | None, *, as_json: bool) -> None:
    """What happens to the devices and their tasks, as it happens; first what the devices do now."""
    seen = await application.devices.overview(pool)
    pools = {one.name for one in seen.pools}
    states = "; ".join(_states_text(one) for one in seen.pools)
    note("watching", f"{application.store} since {clock_time(seen.at)}: {states or 'no devices'}", as_json=as_json)
    console = make_console()
    async for event in application.events.subscribe(EventFilter(kinds=LINE_KINDS, queue=pool)):
        if event.kind in DEVICE_KINDS:
            pools.add(event.queue)  # a pool that has come into being since
        elif event.queue not in pools:
            continue
        if as_json:
            say_json(event, pretty=False)
        else:
            print_event(console, event)
