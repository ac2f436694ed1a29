"""`taskyard run` and `taskyard worker`: a yard and its workers, until a signal says stop.

The library installs no signal handlers, no event loop and no logging; this is the process that may.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, TypeVar

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

import taskyard
from taskyard.cli.board import Board
from taskyard.cli.console import make_console, show
from taskyard.cli.errors import DONE, REFUSED
from taskyard.cli.logs import set_up_logging
from taskyard.cli.looks import counts_text
from taskyard.cli.target import Target, describe_store, patiently, refuse_held
from taskyard.cli.text import clean, counted, duration
from taskyard.errors import NotOpen, StoreError
from taskyard.model.task import DEFAULT_QUEUE
from taskyard.telemetry.logs import RunLog
from taskyard.yard import Yard

T = TypeVar("T")

STATUS_EVERY_S = 0.5

LAST_WAIT_S = 3.0
"""After the second signal: what has not ended by then cannot be stopped, and the process ends over it."""


@dataclass(frozen=True, slots=True)
class Service:
    """How to serve: `live` keeps a line of status on the screen, `verbose` tells of every run. With `ends_drained` the
    process ends when it was drained and has nothing left to run; without, it stays until it is stopped."""

    grace_s: float
    verbose: bool
    live: bool
    ends_drained: bool


def run_loop(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run `main` on uvloop where there is one."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        return asyncio.run(main())
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main())


async def serve(target: Target, service: Service) -> int:
    yard = target.load()
    console = make_console()
    live = service.live and console.is_terminal
    set_up_logging(console if live else make_console(stderr=True), verbose=service.verbose)
    refuse_held(yard)
    if service.verbose:
        yard.add_sink(RunLog())
    stop = Stop()
    tell = partial(_tell, console if live else make_console(stderr=True))
    async with contextlib.AsyncExitStack() as company:
        # Before the start: from the moment it has joined, a process that is killed leaves a node behind.
        company.enter_context(stop.listening())
        if not await _start(yard, stop, tell):
            return DONE
        try:
            show(console, banner(yard, service))
            if live:
                await company.enter_async_context(_status_line(yard, console))
            await _until_over(yard, service, stop, tell)
        except BaseException:
            # Whatever it was, tasks may have been claimed by now: they end, or go back, before the process does.
            await _stop(yard, service, stop, tell)
            raise
        return await _stop(yard, service, stop, tell)


async def _start(yard: Yard, stop: Stop, tell: Callable[[str, str], None]) -> bool:
    """Whether the yard is open. A stop that is asked for meanwhile gives up what has not come to its end."""
    starting = asyncio.create_task(patiently(yard, yard.start()))
    asked = asyncio.create_task(stop.asked.wait())
    try:
        await asyncio.wait({starting, asked}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        asked.cancel()
        starting.cancel()  # unless it is done
        await asyncio.wait({starting}, timeout=LAST_WAIT_S)
    if not starting.done():
        tell("stopped", "before it had started, while the store does not answer; if it has joined, others give it up")
        _exit_over_it()
    if starting.cancelled():
        tell("stopped", "before it had started")
        return False
    starting.result()
    return True


async def _until_over(yard: Yard, service: Service, stop: Stop, tell: Callable[[str, str], None]) -> None:
    """Serve until a signal, or until a drain has left nothing to do."""
    asked, drained = asyncio.create_task(stop.asked.wait()), asyncio.create_task(yard.engine.drained())
    try:
        await asyncio.wait({asked, drained}, return_when=asyncio.FIRST_COMPLETED)
        if drained.done() and not service.ends_drained:
            tell("drained", "nothing runs here any more; take that back with `taskyard node drain --undo`, or stop it")
            await asked
        elif drained.done():
            tell("drained", "nothing runs here any more")
    finally:
        for task in (asked, drained):
            task.cancel()


def _tell(console: Console, kind: str, text: str) -> None:
    """On the console that has the line of status, if there is one: it goes above that line. If nobody reads there any
    more, the worker stops as it would have."""
    with contextlib.suppress(OSError, SystemExit):
        console.print(Text.assemble((f"{kind}: ", "yellow"), text), soft_wrap=not console.is_terminal)


# --- stopping ---------------------------------------------------------------------------------------------------------


class Stop:
    """Counts the signals. The first asks for a stop, the second for one that does not wait."""

    def __init__(self) -> None:
        self.asked, self.hurried = asyncio.Event(), asyncio.Event()

    def _heard(self) -> None:
        if self.asked.is_set():
            self.hurried.set()
        self.asked.set()

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._heard)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)


async def _stop(yard: Yard, service: Service, stop: Stop, tell: Callable[[str, str], None]) -> int:
    """Start nothing new and wait for what runs; at the second signal, or after the grace, give it back."""
    engine = yard.engine
    if engine.running:
        tell(
            "stopping",
            f"waiting up to {duration(service.grace_s)} for {counted(engine.running, 'task')} to end; "
            f"the same signal again stops at once",
        )
    stopping = asyncio.create_task(yard.stop(grace_s=service.grace_s))
    hurry = asyncio.create_task(stop.hurried.wait())
    await asyncio.wait({stopping, hurry}, return_when=asyncio.FIRST_COMPLETED)
    hurry.cancel()
    if not stopping.done():
        if engine.running:
            running, last = counted(engine.running, "task"), duration(LAST_WAIT_S)
            tell("stopping", f"at once; {running} interrupted, and left behind if that takes longer than {last}")
        engine.interrupt()
        await asyncio.wait({stopping}, timeout=LAST_WAIT_S)
    if not stopping.done():
        tell("stopping", f"{_unstoppable(engine.running)}; another worker will take over")
        _exit_over_it()
    await stopping
    if engine.running:
        tell("stopped", f"{_unstoppable(engine.running)}; another worker will take over")
        _exit_over_it()
    if not engine.is_recorded:
        tell("stopped", "not everything that ended is recorded; see the lines above, and `taskyard doctor`")
        return REFUSED
    tell("stopped", "everything that ended is recorded")
    return DONE


def _unstoppable(running: int) -> str:
    return f"{counted(running, 'task')} cannot be stopped" if running else "the store does not take what ended last"


def _exit_over_it() -> NoReturn:
    """The end of the process frees its claims: on a file at once, on PostgreSQL when its lease has passed. Any other
    end would be held up by a thread in it, or by code that swallows its cancellation."""
    sys.stdout.flush()
    os._exit(REFUSED)


# --- on the screen ----------------------------------------------------------------------------------------------------


def banner(yard: Yard, service: Service) -> RenderableType:
    engine = yard.engine
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    store = describe_store(yard)
    table.add_row("  store", Text(clean(store) + (" (gone when this process ends)" if store == "memory://" else "")))
    table.add_row("  node", Text(clean(f"{engine.name} ({engine.incarnation[:8]})")))
    table.add_row("  consumers", _consumers(yard))
    table.add_row("  stop", Text(f"Ctrl-C; what runs then has {duration(service.grace_s)} to end", "dim"))
    title = Text.assemble(("Taskyard", "bold"), (f" {taskyard.__version__}", "dim"), "  is running")
    return Group(title, table)


def _consumers(yard: Yard) -> Text:
    if not yard.consumers:
        return Text("none: this yard has nothing to run", "yellow")
    names = [
        Text.assemble(
            (clean(consumer.name), "bold"),
            f" × {consumer.slots}",
            (f" on {clean(consumer.queue)}" if consumer.queue != DEFAULT_QUEUE else "", "dim"),
        )
        for consumer in yard.consumers.values()
    ]
    return Text(", ").join(names)


@contextlib.asynccontextmanager
async def _status_line(yard: Yard, console: Console) -> AsyncIterator[None]:
    """One line at the bottom that is always current; what is logged or printed goes above it."""
    with Live(console=console, auto_refresh=False, transient=True) as live:
        task = asyncio.create_task(_keep_status(yard, live))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _keep_status(yard: Yard, live: Live) -> None:
    board = Board(yard.store)
    with yard.engine.changes() as changes, contextlib.suppress(NotOpen):
        while True:
            changes.clear()
            try:
                await board.look()
            except StoreError:
                live.update(Text("the store does not answer", "yellow"), refresh=True)
                await asyncio.sleep(2 * STATUS_EVERY_S)
                continue
            rate = Text(f"   {board.rate:.1f} tasks/s", "dim")
            live.update(Text.assemble(counts_text(board.counts), rate), refresh=True)
            await asyncio.sleep(STATUS_EVERY_S)
            if board.rate == 0:
                await changes.wait()
