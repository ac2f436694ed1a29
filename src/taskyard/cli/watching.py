"""`taskyard watch`: what happens on a store, live; from any process, whoever does the work."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.text import Text

from taskyard.cli.board import Board
from taskyard.cli.console import complain, json_text, make_console, say_json, show
from taskyard.cli.documents import Revealed, error_fields, event_document, task_document
from taskyard.cli.errors import DONE, REFUSED, UsageError
from taskyard.cli.live import LiveView
from taskyard.cli.looks import SIGNS
from taskyard.cli.story import Happening, Teller, subject
from taskyard.cli.target import Target, describe_store, opened, resolve_all
from taskyard.cli.text import clock_time
from taskyard.listening import AWAY, pause
from taskyard.model.event import Event, EventFilter, EventKind
from taskyard.model.state import ENDED, TaskState
from taskyard.model.task import TaskRecord
from taskyard.yard import Yard

STYLES = {EventKind(state): style for state, (_, style) in SIGNS.items() if state is not TaskState.CREATED}


async def watch(
    target: Target, fragments: Sequence[str], where: EventFilter, *, once: bool, until_idle: bool, as_json: bool
) -> int:
    """Until Ctrl-C, until nothing is left to do, or until the tasks named have ended. Of what is asked for by `where`
    there are lines only: the live view shows where everything stands."""
    if once and where != EventFilter():
        raise UsageError("--once shows where everything stands; leave --kind, --queue and --consumer out, or --once")
    async with opened(target.bare()) as yard:
        only = await resolve_all(yard, fragments)
        board = Board(yard.store, only=only)
        if once:
            await _print_frame(yard, board, as_json=as_json)
            return DONE
        try:
            with _ended_by_sigterm():
                if as_json or where != EventFilter() or not sys.stdout.isatty():
                    await Lines(yard, board, only, where, as_json=as_json).run(until_idle=until_idle)
                else:
                    view = LiveView(yard, board, make_console(), title=describe_store(yard))
                    await view.run(lambda: is_over(board, only, until_idle))
        except asyncio.CancelledError:
            return DONE  # Ctrl-C is how one leaves
        return _verdict([await yard.handle(uuid).state() for uuid in only])


def is_over(board: Board, only: Sequence[str], until_idle: bool) -> bool:
    if only:
        return all(state in ENDED for state in board.counts)
    return until_idle and board.is_idle


def _verdict(states: Sequence[TaskState]) -> int:
    return DONE if all(state is TaskState.COMPLETED for state in states) else REFUSED


class _ended_by_sigterm:  # noqa: N801 - reads as what it does
    """Inside, SIGTERM ends the command as Ctrl-C does, and the cursor comes back."""

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)

    def __exit__(self, *exc: object) -> None:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)


async def _print_frame(yard: Yard, board: Board, *, as_json: bool) -> None:
    await board.look()
    if as_json:
        say_json(
            {
                "counts": board.counts,
                "queues": board.queues,
                "workers": board.nodes,
                "running": [task_document(record) for record in board.running],
                "waiting": [task_document(record) for record in board.waiting],
                "ended": [task_document(record) for record in board.ended],
            }
        )
        return
    console = make_console()
    show(console, LiveView(yard, board, console, title=describe_store(yard)).draw(height=max(24, console.height)))


class Lines:
    """One line for each event, for pipes and logs."""

    def __init__(self, yard: Yard, board: Board, only: Sequence[str], where: EventFilter, *, as_json: bool) -> None:
        self._yard, self._board, self._only, self._where, self._as_json = yard, board, only, where, as_json
        self._teller = Teller(yard.store, only=only)
        self._console = make_console()
        self._cursor = 0

    async def run(self, *, until_idle: bool) -> None:
        self._cursor = (await self._yard.store.events(after=-1)).last
        await self._tell([_as_event(self._cursor, await self._yard.handle(uuid).record()) for uuid in self._only])
        self._remark("watching", describe_store(self._yard))
        is_away = False
        with self._yard.engine.changes() as changes:
            while True:
                changes.clear()
                try:
                    over, is_news = await self._look(until_idle)
                except AWAY as error:
                    if not is_away:
                        self._remark("note", f"the store is away since {clock_time(datetime.now(UTC))}: {error}")
                    is_away = True
                    await pause(changes)
                    continue
                if is_away:
                    self._remark("note", "the store is back")
                is_away = False
                if over and not is_news:
                    return
                if not is_news:
                    await changes.wait()

    def _remark(self, kind: str, text: str) -> None:
        if self._as_json:
            print(json_text({kind: text}, pretty=False), file=sys.stderr, flush=True)
        else:
            complain(kind, text)

    async def _look(self, until_idle: bool) -> tuple[bool, bool]:
        """Whether all is over, and whether there was something to tell."""
        # Looked at before the events are read: what is over by then has all its events on this page.
        await self._board.look()
        over = is_over(self._board, self._only, until_idle)
        page = await self._yard.store.events(after=self._cursor)
        if page.missed:
            self._remark("note", "some events were gone before they could be read")
        for event in page.events:
            await self._tell([event])
            self._cursor = event.seq
        self._cursor = page.last
        return over, bool(page.events)

    async def _tell(self, events: Sequence[Event]) -> None:
        async for happening in self._teller.tell([event for event in events if self._where.matches(event)]):
            if self._as_json:
                say_json(_document(happening), pretty=False)
            else:
                print_line(self._console, happening)


def print_line(console: Console, happening: Happening) -> None:
    event = happening.event
    style = STYLES.get(event.kind, "")
    line = Text.assemble(
        (clock_time(event.at), "dim"), "  ", (f"{happening.verb:<10} ", style), subject(event), "  ",
        (happening.detail(), "dim"),
    )  # fmt: skip
    line.rstrip()
    console.print(line, soft_wrap=True)


def _document(happening: Happening) -> dict[str, Any]:
    record, run = happening.record, happening.run
    document = event_document(happening.event)
    if record is not None:
        document["attempt"] = run.attempt if run is not None else record.attempt
        if happening.event.kind is EventKind.PROGRESS:
            document["progress"] = record.progress
    if happening.took_s is not None:
        document["duration_s"] = happening.took_s
    if record is not None and run is not None and run.error is not None and happening.took_s is not None:
        document["error"] = error_fields(run.error, Revealed(record)) | {"traceback": None}
    return document


def _as_event(seq: int, record: TaskRecord) -> Event:
    """Where a task stands, as if it had just come there."""
    kind = EventKind.SUBMITTED if record.state is TaskState.CREATED else EventKind(record.state)
    at = record.started_at if record.state is TaskState.RUNNING else record.finished_at
    return Event(seq, at or record.updated_at, kind, record.uuid, record.consumer, record.queue)
