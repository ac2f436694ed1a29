"""`taskyard watch`: the live view of a store on a terminal, or one line an event in a pipe."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import TypeVar

import msgspec
from rich.console import Console, RenderableType
from rich.live import Live

from taskyard.application.event_documents import EventDocument
from taskyard.application.events import standing_event
from taskyard.application.interface import Application
from taskyard.application.overview_documents import OverviewDocument
from taskyard.cli.console import complain, json_text, make_console, say_json, show
from taskyard.cli.errors import DONE, REFUSED, UsageError
from taskyard.cli.frame import Frame
from taskyard.cli.session import Target, opened_application
from taskyard.cli.story import ProgressFilter, print_event
from taskyard.cli.text import clock_time
from taskyard.errors import StoreBusy, StoreUnavailable
from taskyard.model.event import ANY_EVENT, EventFilter
from taskyard.model.state import ENDED, TaskState

D = TypeVar("D")

FRAME_S = 0.2
"""Seconds between frames: clocks and countdowns move with every frame, the overview changes with the store."""

LINES_S = 0.1
"""Seconds between two looks for new events: on a busy store one look covers many."""

ACTIVE_STATES = frozenset({
    TaskState.CREATED, TaskState.QUEUED, TaskState.RUNNING, TaskState.RETRYING, TaskState.INTERRUPTED,
})  # fmt: skip
"""States that a task leaves by itself, and soon. A task that waits for its time or for a person does not count."""

Header = Callable[[int], tuple[Iterable[RenderableType], int]]
"""For a width: what is above the frame, and how many lines that takes."""


async def watch(
    target: Target, refs: Sequence[str], where: EventFilter, *, once: bool, until_idle: bool, as_json: bool
) -> int:
    """Until Ctrl-C, until nothing is left to do, or until the named tasks have finished. With a filter there are lines
    only: the live view shows the whole store."""
    if once and where != ANY_EVENT:
        raise UsageError("--once shows where everything stands; leave --kind, --queue and --consumer out, or --once")
    async with opened_application(target) as application:
        if once:
            _print_frame(await application.overview.get(refs), application.store, as_json=as_json)
            return DONE
        watcher = Watcher(refs, until_idle)
        try:
            with canceled_by_sigterm():
                if as_json or where != ANY_EVENT or not sys.stdout.isatty():
                    printer = EventPrinter(application, where, as_json=as_json)
                    await printer.start(refs)
                    printer.note("watching", application.store)
                    overviews = application.overview.watch(refs, min_interval_s=LINES_S)
                    await printer.follow(overviews, watcher.is_over)
                else:
                    documents = application.overview.watch(refs, min_interval_s=FRAME_S)
                    await LiveView(make_console(), title=application.store).run(documents, watcher.is_over)
        except asyncio.CancelledError:
            return DONE  # Ctrl-C is the usual way to leave
        return watcher.exit_code()


class Watcher:
    """Decides when a watch is over: when the named tasks have finished, or with `until_idle` when nothing is active."""

    def __init__(self, refs: Sequence[str], until_idle: bool) -> None:
        self._refs, self._until_idle = tuple(refs), until_idle
        self._counts: dict[TaskState, int] = {}

    def is_over(self, seen: OverviewDocument) -> bool:
        self._counts = seen.counts
        if seen.away_since is not None:
            return False
        if self._refs:
            return all(state in ENDED for state in seen.counts)
        return self._until_idle and not any(n for state, n in seen.counts.items() if state in ACTIVE_STATES)

    def exit_code(self) -> int:
        """Whether the named tasks have all completed."""
        done = not self._refs or all(state is TaskState.COMPLETED for state in self._counts)
        return DONE if done else REFUSED


@contextlib.contextmanager
def canceled_by_sigterm() -> Iterator[None]:
    """Inside, SIGTERM ends the command as Ctrl-C does, and the cursor comes back."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


def _print_frame(seen: OverviewDocument, title: str, *, as_json: bool) -> None:
    if as_json:
        say_json(seen)
        return
    console = make_console()
    show(console, LiveView(console, title=title).draw(seen, height=max(24, console.height)))


# --- the live view ----------------------------------------------------------------------------------------------------


def no_header(width: int) -> tuple[Iterable[RenderableType], int]:
    return (), 0


class LiveView:
    """Draws overviews on a console. `header` may change from frame to frame. The last frame stays on the screen unless
    `stays` is false."""

    def __init__(self, console: Console, *, title: str, header: Header = no_header, stays: bool = True) -> None:
        self._console, self._title, self._header, self._stays = console, title, header, stays

    def draw(self, seen: OverviewDocument, *, height: int | None = None) -> RenderableType:
        width = self._console.width
        above, lines = self._header(width)
        # One line is left free: a frame as high as the window would scroll it.
        room = height or self._console.height - 1
        title = self._title
        if seen.away_since is not None:
            title += f" · away since {clock_time(seen.away_since)}"
        frame = Frame(seen, title=title, width=width, height=room, now=datetime.now(UTC))
        return frame.draw(above=above, lines_above=lines)

    async def run(
        self, documents: AsyncIterator[OverviewDocument], is_over: Callable[[OverviewDocument], bool]
    ) -> None:
        """Draw the latest overview until one is over, or there are no more."""
        latest: list[OverviewDocument] = []
        reading = asyncio.create_task(read_latest(latest, documents))
        live = Live(console=self._console, auto_refresh=False, vertical_overflow="crop", transient=not self._stays)
        try:
            with live:
                while True:
                    if latest:
                        live.update(self.draw(latest[0]), refresh=True)
                        if is_over(latest[0]):
                            return None
                    if reading.done():
                        return reading.result()
                    await asyncio.wait({reading}, timeout=FRAME_S)
        finally:
            reading.cancel()
            await asyncio.wait({reading})


async def read_latest(latest: list[D], documents: AsyncIterator[D]) -> None:
    """Keep the last document in `latest`."""
    async for document in documents:
        latest[:] = [document]


# --- lines ------------------------------------------------------------------------------------------------------------


class EventPrinter:
    """Prints one line for each event, for pipes and logs. Call `start` first."""

    def __init__(self, application: Application, where: EventFilter, *, as_json: bool = False) -> None:
        self._application, self._where, self._as_json = application, where, as_json
        self._console, self._progress, self._cursor = make_console(), ProgressFilter(), 0

    async def start(self, refs: Sequence[str] = ()) -> None:
        """Begin with the next event. For named tasks, print the state of each, and then only their events."""
        self._cursor = (await self._application.events.read()).last
        if not refs:
            return
        ids = await self._application.tasks.resolve(refs)
        self._where = msgspec.structs.replace(self._where, uuids=frozenset(ids))
        for task in await self._application.tasks.get_many(ids):
            self._print(standing_event(task, self._cursor))

    async def follow(
        self, documents: AsyncIterator[OverviewDocument], is_over: Callable[[OverviewDocument], bool]
    ) -> None:
        """Print events whenever there is a new overview, until one is over. Also say when the store is away."""
        away_since: datetime | None = None
        async for seen in documents:
            if seen.away_since != away_since:
                self.note("note", _away_text(seen))
                away_since = seen.away_since
            # The overview comes first: what is over by then has all its events on the pages that follow.
            over = is_over(seen)
            if away_since is None and await self.print_new() and over:
                return

    async def print_new(self) -> bool:
        """Print the events since the last call; whether the store answered. If not, the next overview says so."""
        while True:
            try:
                page = await self._application.events.read(self._where, after=self._cursor)
            except (StoreUnavailable, StoreBusy):
                return False
            if page.missed:
                self.note("note", "some events were missed: the store had already dropped them")
            for event in page.events:
                self._print(event)
            if page.last == self._cursor:
                return True
            self._cursor = page.last

    def note(self, kind: str, text: str) -> None:
        note(kind, text, as_json=self._as_json)

    def _print(self, event: EventDocument) -> None:
        if not self._progress.lets_through(event):
            return
        if self._as_json:
            say_json(event, pretty=False)
        else:
            print_event(self._console, event)


def note(kind: str, text: str, *, as_json: bool) -> None:
    """What the command says of itself, on standard error."""
    if as_json:
        print(json_text({kind: text}, pretty=False), file=sys.stderr, flush=True)
    else:
        complain(kind, text)


def _away_text(seen: OverviewDocument) -> str:
    if seen.away_since is None:
        return "the store is back"
    return f"the store is away since {clock_time(seen.away_since)}: {seen.away_reason}"
