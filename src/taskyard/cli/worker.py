"""`taskyard run` and `taskyard worker`: run a yard's tasks until a signal, or until the worker is drained.

The library installs no signal handlers, no event loop and no logging; this process does.
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

from taskyard.application.interface import Application
from taskyard.application.opening import FoundYard
from taskyard.application.worker import ServedConsumer, StopReport, WorkerInfo, WorkerProcess
from taskyard.cli.asking import asker
from taskyard.cli.console import make_console, show
from taskyard.cli.errors import DONE, REFUSED
from taskyard.cli.formatting import counts_text
from taskyard.cli.logs import set_up_logging
from taskyard.cli.session import Target, note_if_slow
from taskyard.cli.text import clean, counted, duration
from taskyard.errors import StoreError
from taskyard.model.task import DEFAULT_QUEUE

T = TypeVar("T")

STATUS_EVERY_S = 0.5

FORCED_STOP_S = 3.0
"""Seconds after the second signal. What has not ended by then cannot be stopped, and the process exits."""

Notify = Callable[[str, str], None]


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """`live` keeps a status line on the screen, `verbose` logs every run. A worker that is not `live` ends once it is
    drained and runs nothing; one that is waits for a signal."""

    grace_s: float
    verbose: bool
    live: bool


def run_loop(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run `main` on uvloop where there is one."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        return asyncio.run(main())
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main())


async def run_worker(target: Target, options: WorkerOptions) -> int:
    found = target.find_yard(needs_app=True)
    console = make_console()
    has_status_line = options.live and console.is_terminal
    log_console = console if has_status_line else make_console(stderr=True)
    set_up_logging(log_console, verbose=options.verbose)
    worker = WorkerProcess(found.yard, logs_runs=options.verbose)
    signals, notify = StopSignals(), partial(_notify, log_console)
    async with contextlib.AsyncExitStack() as stack:
        # Before the start: from the moment the worker has joined, a process that is killed leaves a node behind.
        stack.enter_context(signals.installed())
        if not await _start(found, worker, signals, notify):
            return DONE
        try:
            show(console, banner(worker.info, options))
            if has_status_line:
                await stack.enter_async_context(_status_line(worker.application(asker()), console))
            await _wait_until_stopped(worker, options, signals, notify)
        except BaseException:
            # Tasks may have been claimed: they end, or go back to the store, before the process ends.
            await _stop(worker, options, signals, notify)
            raise
        return await _stop(worker, options, signals, notify)


async def _start(found: FoundYard, worker: WorkerProcess, signals: StopSignals, notify: Notify) -> bool:
    """Whether the worker has started. A stop request during the start gives up what is not done yet."""
    starting = asyncio.create_task(note_if_slow(found, worker.start()))
    stop_requested = asyncio.create_task(signals.stop_requested.wait())
    try:
        await asyncio.wait({starting, stop_requested}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stop_requested.cancel()
        starting.cancel()  # unless it is done
        await asyncio.wait({starting}, timeout=FORCED_STOP_S)
    if not starting.done():
        notify("stopped", "before it had started, while the store does not answer; if it has joined, others give it up")
        _exit_process()
    if starting.cancelled():
        notify("stopped", "before it had started")
        return False
    starting.result()
    return True


async def _wait_until_stopped(
    worker: WorkerProcess, options: WorkerOptions, signals: StopSignals, notify: Notify
) -> None:
    """Until a signal, or until a drain has left nothing to do."""
    stop_requested = asyncio.create_task(signals.stop_requested.wait())
    drained = asyncio.create_task(worker.wait_drained())
    try:
        await asyncio.wait({stop_requested, drained}, return_when=asyncio.FIRST_COMPLETED)
        if drained.done() and options.live:
            notify("drained", "nothing runs here any more; `taskyard node drain --undo` takes it back, Ctrl-C stops it")
            await stop_requested
        elif drained.done():
            notify("drained", "nothing runs here any more")
    finally:
        for task in (stop_requested, drained):
            task.cancel()


def _notify(console: Console, kind: str, text: str) -> None:
    """A note on the console, above the status line if there is one. If its reader is gone, the worker stops as it would
    have."""
    with contextlib.suppress(OSError, SystemExit):
        console.print(Text.assemble((f"{kind}: ", "yellow"), text), soft_wrap=not console.is_terminal)


# --- stopping ---------------------------------------------------------------------------------------------------------


class StopSignals:
    """Counts signals. The first requests a stop, the second a stop that does not wait."""

    def __init__(self) -> None:
        self.stop_requested, self.force_requested = asyncio.Event(), asyncio.Event()

    def _on_signal(self) -> None:
        if self.stop_requested.is_set():
            self.force_requested.set()
        self.stop_requested.set()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)


async def _stop(worker: WorkerProcess, options: WorkerOptions, signals: StopSignals, notify: Notify) -> int:
    """Start nothing new and wait for what runs; at the second signal, or after the grace, give it back."""
    if worker.running:
        running = counted(worker.running, "task")
        text = f"waiting up to {duration(options.grace_s)} for {running} to end; the same signal again stops at once"
        notify("stopping", text)
    stopping = asyncio.create_task(worker.stop(grace_s=options.grace_s))
    force = asyncio.create_task(signals.force_requested.wait())
    await asyncio.wait({stopping, force}, return_when=asyncio.FIRST_COMPLETED)
    force.cancel()
    if not stopping.done():
        if worker.running:
            running = counted(worker.running, "task")
            text = f"at once; {running} interrupted, and left behind if that takes longer than"
            notify("stopping", f"{text} {duration(FORCED_STOP_S)}")
        worker.interrupt()
        await asyncio.wait({stopping}, timeout=FORCED_STOP_S)
    if not stopping.done():
        notify("stopping", f"{_unstopped_text(worker.running)}; another worker will take over")
        _exit_process()
    return _report_stop(await stopping, notify)


def _report_stop(report: StopReport, notify: Notify) -> int:
    if report.unstopped:
        notify("stopped", f"{_unstopped_text(report.unstopped)}; another worker will take over")
        _exit_process()
    if not report.all_results_saved:
        notify("stopped", "not all finished tasks are saved; see the lines above, and `taskyard doctor`")
        return REFUSED
    notify("stopped", "all finished tasks are saved")
    return DONE


def _unstopped_text(running: int) -> str:
    return f"{counted(running, 'task')} cannot be stopped" if running else "the store does not take the last results"


def _exit_process() -> NoReturn:
    """The end of the process frees its claims: on a file at once, on PostgreSQL when its lease has passed. A normal
    exit would wait for a thread, or for code that swallows its cancellation."""
    sys.stdout.flush()
    os._exit(REFUSED)


# --- on the screen ----------------------------------------------------------------------------------------------------


def banner(info: WorkerInfo, options: WorkerOptions) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    note = " (gone when this process ends)" if info.store == "memory://" else ""
    table.add_row("  store", Text(clean(info.store) + note))
    table.add_row("  node", Text(clean(f"{info.name} ({info.incarnation[:8]})")))
    table.add_row("  consumers", _consumers(info.consumers))
    table.add_row("  stop", Text(f"Ctrl-C; running tasks have {duration(options.grace_s)} to end", "dim"))
    title = Text.assemble(("Taskyard", "bold"), (f" {info.version}", "dim"), "  is running")
    return Group(title, table)


def _consumers(consumers: tuple[ServedConsumer, ...]) -> Text:
    if not consumers:
        return Text("none: this yard has nothing to run", "yellow")
    names = [
        Text.assemble(
            (clean(consumer.name), "bold"),
            # A pool has no place before its devices have answered.
            f" × {consumer.concurrency}" if consumer.concurrency else "",
            (f" on {clean(consumer.queue)}" if consumer.queue != DEFAULT_QUEUE else "", "dim"),
        )
        for consumer in consumers
    ]
    return Text(", ").join(names)


@contextlib.asynccontextmanager
async def _status_line(application: Application, console: Console) -> AsyncIterator[None]:
    """One line at the bottom that is always current; what is logged or printed goes above it."""
    with Live(console=console, auto_refresh=False, transient=True) as live:
        task = asyncio.create_task(_keep_status(application, live))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _keep_status(application: Application, live: Live) -> None:
    away = Text("the store does not answer", "yellow")
    try:
        async for overview in application.overview.watch(min_interval_s=STATUS_EVERY_S):
            rate = Text(f"   {overview.rate:.1f} tasks/s", "dim")
            status = away if overview.away_since is not None else Text.assemble(counts_text(overview.counts), rate)
            live.update(status, refresh=True)
    except StoreError:
        live.update(away, refresh=True)
