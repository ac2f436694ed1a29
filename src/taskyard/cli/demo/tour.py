"""The tour: a store, a web server, a worker, and the script played on them while a person watches."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import sys
import tempfile
from asyncio.subprocess import PIPE
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from taskyard.application.errors import StoreNotShared
from taskyard.application.opening import find_app, is_shared, open_application
from taskyard.application.task_documents import TaskDocument
from taskyard.application.worker import WorkerProcess
from taskyard.cli.asking import asker
from taskyard.cli.console import make_console, show
from taskyard.cli.demo.script import FULL, SMALL, Script
from taskyard.cli.formatting import counts_text, state_symbol, summary_text
from taskyard.cli.live import LINES_S, EventPrinter, LiveView
from taskyard.cli.text import clean, duration, short_id
from taskyard.cli.worker import StopSignals
from taskyard.model.event import ANY_EVENT
from taskyard.model.state import ENDED, TaskState

APP = "taskyard.demo.app:yard"

MIN_QUEUED = 6
"""More work is submitted while fewer tasks than this are queued."""

GRACE_S = 3.0
"""Seconds for what still runs when the tour is over. After Ctrl-C there is no grace: it goes back to the store."""

FINISH_S = 6.0
"""Seconds for the submitted tasks to finish. What does not is left in the store, which is the point of one."""

CAPTION_CHARS = 180
"""Characters of the longest caption, with some room for words that do not fit a line."""


async def tour(store: str | None, *, seconds: float, small: bool) -> int:
    folder = Path(tempfile.mkdtemp(prefix="taskyard-demo-"))
    url = store or f"sqlite:///{folder / 'demo.db'}"
    yard = find_app(url, APP).yard
    if not is_shared(yard):
        raise StoreNotShared
    # Failures belong to the tour: its view and its summary show them.
    logging.getLogger("taskyard").addHandler(logging.NullHandler())
    logging.getLogger("taskyard").propagate = False
    files = Path(tempfile.mkdtemp(prefix="files-", dir=folder))
    console, signals, worker = make_console(), StopSignals(), WorkerProcess(yard)
    try:
        with signals.installed():
            async with _server(files) as server_url, _running(worker, signals):
                scale = SMALL if small else FULL.fit_to(seconds)
                script = Script(worker.application(asker()), files, server_url, scale)
                await _watch(script, console, signals, seconds=seconds, url=url)
            async with open_application(yard, actor=asker()) as application:
                tasks = await application.tasks.get_many(script.tasks)
    except BaseException:
        shutil.rmtree(files)
        raise
    if all(task.state in ENDED for task in tasks):
        shutil.rmtree(files)  # otherwise the remaining tasks need them
    show(console, summary(script, tasks, url))
    return 0


@contextlib.asynccontextmanager
async def _server(folder: Path) -> AsyncIterator[str]:
    """The web server of the demo, in a process of its own; its address. It ends when its input is closed, also if this
    process dies."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "taskyard.demo.server", str(folder), stdin=PIPE, stdout=PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield (await process.stdout.readline()).decode().strip()
    finally:
        process.stdin.close()
        await process.wait()


@contextlib.asynccontextmanager
async def _running(worker: WorkerProcess, signals: StopSignals) -> AsyncIterator[None]:
    await worker.start()
    try:
        yield
    finally:
        await worker.stop(grace_s=0.0 if signals.stop_requested.is_set() else GRACE_S)


async def _watch(script: Script, console: Console, signals: StopSignals, *, seconds: float, url: str) -> None:
    """Play and show at the same time, until all tasks have finished or a signal came."""
    playing = asyncio.create_task(_play(script, seconds))
    stop_requested = asyncio.create_task(signals.stop_requested.wait())
    showing = asyncio.create_task(_show(script, console, playing, url))
    try:
        await asyncio.wait({stop_requested, showing}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (stop_requested, showing, playing):
            task.cancel()
        outcomes = await asyncio.gather(showing, playing, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome


async def _play(script: Script, seconds: float) -> None:
    await script.prepare()
    until = asyncio.get_running_loop().time() + seconds
    await script.play()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout_at(until):
            await _keep_busy(script)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(FINISH_S):
            await script.finish()


async def _keep_busy(script: Script) -> None:
    round_ = 0
    async for seen in script.application.overview.watch(min_interval_s=LINES_S):
        if seen.counts.get(TaskState.QUEUED, 0) < MIN_QUEUED:
            await script.submit_more(round_)
            round_ += 1


async def _show(script: Script, console: Console, playing: asyncio.Task[None], url: str) -> None:
    overviews = script.application.overview.watch(min_interval_s=LINES_S)
    if console.is_terminal:
        # The last frame is erased: what runs in it has finished in the summary below.
        view = LiveView(console, title=url, header=partial(_header, script), stays=False)
        await view.run(overviews, lambda seen: playing.done())
        return
    script.on_caption = lambda text: console.print(Text(f"— {text}"), soft_wrap=True)
    script.on_caption(script.caption)
    printer = EventPrinter(script.application, ANY_EVENT)
    await printer.start()
    following = asyncio.create_task(printer.follow(overviews, lambda seen: False))
    try:
        await asyncio.wait({following, playing}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        following.cancel()
        await asyncio.wait({following})
    await printer.print_new()


def _header(script: Script, width: int) -> tuple[Iterable[RenderableType], int]:
    # As high as the longest caption needs it: the frame below must not jump.
    height = 2 + -(-CAPTION_CHARS // max(20, width - 4))
    panel = Panel(Text(script.caption), title="A tour of Taskyard", title_align="left", height=height, style="cyan")
    return [panel, Text()], height + 1


# --- the summary ------------------------------------------------------------------------------------------------------


def summary(script: Script, tasks: Sequence[TaskDocument], url: str) -> RenderableType:
    """What has become of the submitted tasks, and what to try next."""
    counts = Counter(task.state for task in tasks)
    parts: list[RenderableType] = [
        Text("\nThat was the tour. What was submitted has become:", "bold"),
        counts_text(counts),
        Text(),
        _by_consumer(tasks),
        *_remarks(script, tasks),
        Text(f"\nAll of it is in {clean(url)}. Try:", "bold"),
        _commands(tasks, url),
    ]
    return Group(*parts)


def _by_consumer(tasks: Sequence[TaskDocument]) -> Table:
    table = Table.grid(padding=(0, 3, 0, 0))
    for _ in range(3):
        table.add_column(no_wrap=True)
    for consumer in dict.fromkeys(task.consumer for task in tasks):
        own = [task for task in tasks if task.consumer == consumer]
        ran = [task.duration_s for task in own if task.duration_s is not None]
        done = sum(task.state is TaskState.COMPLETED for task in own)
        retries = sum(task.retries for task in own)
        table.add_row(
            Text(f"  {consumer}", "bold"),
            Text(f"{done} of {len(own)} completed"),
            Text(f"{duration(sum(ran) / len(ran))} each" if ran else "", "dim"),
            Text(f"{retries} retried" if retries else "", "yellow"),
        )
    return table


def _remarks(script: Script, tasks: Sequence[TaskDocument]) -> list[RenderableType]:
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(width=3, justify="right")
    for task in tasks:
        if task.state in ENDED and task.state is not TaskState.COMPLETED:
            why = summary_text(task, task.updated_at, 200)
            table.add_row(state_symbol(task.state), Text.assemble(f"{task.consumer} {task.state}: ", why))
    left = sum(task.state not in ENDED for task in tasks)
    if left:
        stay = "it stays in the store until a worker takes it" if left == 1 else "they stay until a worker takes them"
        table.add_row(state_symbol(TaskState.QUEUED), f"{left} not done yet: {stay}")
    overtaken = _overtaken(script, tasks)
    if overtaken:
        text = f"the urgent task overtook {overtaken} that were submitted before it"
        table.add_row(state_symbol(TaskState.RUNNING), text)
    return [Text(), table] if table.rows else []


def _overtaken(script: Script, tasks: Sequence[TaskDocument]) -> int:
    """How many were submitted before the urgent task and started after it."""
    place = next((place for place, task in enumerate(tasks) if task.uuid == script.urgent), None)
    if place is None or (started_at := tasks[place].started_at) is None:
        return 0
    return sum(
        1
        for task in tasks[:place]
        if task.consumer == tasks[place].consumer and task.attempt
        and task.started_at is not None and task.started_at > started_at
    )  # fmt: skip


def _commands(tasks: Sequence[TaskDocument], url: str) -> RenderableType:
    failed = next((task for task in tasks if task.state is TaskState.FAILED), None)
    lines = [("ls", "what is in the store")]
    if failed is not None:
        lines += [
            (f"show {short_id(failed.uuid)}", "why it failed"),
            (f"retry {short_id(failed.uuid)}", "send it again"),
        ]
    if failed is not None or any(task.state not in ENDED for task in tasks):
        lines.append((f"worker {APP}", "run what is queued"))
    lines.append(("doctor", "is everything well?"))
    where = f"export TASKYARD_STORE={clean(url)}"
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    for command, what in lines:
        table.add_row(Text(f"  taskyard {command}"), Text(f"# {what}", "dim"))
    return Group(*_how_to_call(), Text(f"  {where}"), table)


def _how_to_call() -> list[Text]:
    """How to make `taskyard` a command, if its environment is not activated."""
    if shutil.which("taskyard") is not None or sys.prefix == sys.base_prefix:
        return []
    return [Text(f"  . {clean(os.path.relpath(sys.prefix))}/bin/activate")]
