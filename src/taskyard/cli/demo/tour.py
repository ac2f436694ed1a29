"""The tour: a store, a server, a yard, and the script played on them while somebody watches."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterable
from functools import partial
from pathlib import Path

from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.text import Text

from taskyard.cli.board import Board
from taskyard.cli.console import make_console, show
from taskyard.cli.demo.script import FULL, SMALL, Script
from taskyard.cli.demo.site import Server
from taskyard.cli.demo.summary import summarize
from taskyard.cli.demo.work import yard
from taskyard.cli.live import LiveView
from taskyard.cli.serving import Stop
from taskyard.cli.story import Teller
from taskyard.cli.watching import print_line
from taskyard.model.state import ENDED, TaskState
from taskyard.yard import Yard

FEED_AT = 6
"""More work is handed in when fewer tasks than this are queued."""

GRACE_S = 3.0
"""For what still runs when the tour is over. Who ends it early does not wait: what runs goes back to the store."""

LAST_S = 6.0
"""How long what was handed in has to end; what has not is left in the store, which is the point of one."""

LONGEST = 180
"""Characters of the longest caption, with some room for words that do not fit a line."""


async def tour(store: str | None, *, seconds: float, small: bool) -> int:
    place = Path(tempfile.mkdtemp(prefix="taskyard-demo-"))
    url = store or f"sqlite:///{place / 'demo.db'}"
    yard.use_store(url)
    # Failures belong to the tour; its view and its summary tell of them.
    logging.getLogger("taskyard").addHandler(logging.NullHandler())
    logging.getLogger("taskyard").propagate = False
    files = Path(tempfile.mkdtemp(prefix="files-", dir=place))
    console, stop, server = make_console(), Stop(), Server(files)
    script = Script(yard, files, server, SMALL if small else FULL.within(seconds))
    try:
        with stop.listening():
            async with server.running(), _running(yard, stop):
                await _watch(script, console, stop, seconds=seconds, url=url)
            async with yard.client():
                records = await script.records()
    except BaseException:
        shutil.rmtree(files)
        raise
    if all(record.state in ENDED for record in records):
        shutil.rmtree(files)  # what is left to do needs them
    show(console, summarize(script, records, url))
    return 0


@contextlib.asynccontextmanager
async def _running(on: Yard, stop: Stop) -> AsyncIterator[None]:
    await on.start()
    try:
        yield
    finally:
        await on.stop(grace_s=0.0 if stop.asked.is_set() else GRACE_S)


async def _watch(script: Script, console: Console, stop: Stop, *, seconds: float, url: str) -> None:
    """Play and show at the same time, until all has ended or a signal came."""
    board = Board(script.yard.store)
    playing = asyncio.create_task(_play(script, board, seconds))
    ended = asyncio.create_task(stop.asked.wait())
    showing = asyncio.create_task(_show(script, board, console, playing, url))
    try:
        await asyncio.wait({ended, showing}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (ended, showing, playing):
            task.cancel()
        outcomes = await asyncio.gather(showing, playing, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome


async def _play(script: Script, board: Board, seconds: float) -> None:
    loop = asyncio.get_running_loop()
    await script.prepare()
    until = loop.time() + seconds
    await script.play()
    round_ = 0
    with script.yard.engine.changes() as changes:
        while loop.time() < until:
            changes.clear()
            counts = await script.yard.store.count()
            if sum(n for (_, state), n in counts.items() if state is TaskState.QUEUED) < FEED_AT:
                await script.go_on(round_)
                round_ += 1
            else:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(until):
                        await changes.wait()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LAST_S):
            await script.finish()


async def _show(script: Script, board: Board, console: Console, playing: asyncio.Task[None], url: str) -> None:
    def is_over() -> bool:
        return playing.done()

    if console.is_terminal:
        # What still runs at the end ends after the last frame, which would contradict the summary below it.
        header = partial(_header, script)
        await LiveView(script.yard, board, console, title=url, header=header, stays=False).run(is_over)
        return
    script.told = lambda text: console.print(Text(f"— {text}"), soft_wrap=True)
    script.told(script.caption)
    teller, cursor = Teller(script.yard.store), (await script.yard.store.events(after=-1)).last
    with script.yard.engine.changes() as changes:
        while True:
            changes.clear()
            await board.look()
            over = is_over()
            page = await script.yard.store.events(after=cursor)
            cursor = page.last
            async for happening in teller.tell(page.events):
                print_line(console, happening)
            if not page.events:
                if over:
                    return
                await _either(changes, playing)


async def _either(changes: asyncio.Event, playing: asyncio.Task[None]) -> None:
    """Until something has changed, or the script has ended."""
    waiting = asyncio.create_task(changes.wait())
    await asyncio.wait({waiting, playing}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()


def _header(script: Script, width: int) -> tuple[Iterable[RenderableType], int]:
    # As high as the longest caption needs it: the frame below must not jump.
    height = 2 + -(-LONGEST // max(20, width - 4))
    panel = Panel(Text(script.caption), title="A tour of Taskyard", title_align="left", height=height, style="cyan")
    return [panel, Text()], height + 1
