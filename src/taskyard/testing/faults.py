"""Points at which a process can be made to die on purpose, and a board that shows where it was when it did.

The production code knows nothing of this: `Faults.install` wraps a few methods of the engine and of the stores on disk,
in the process that is to die and nowhere else. PostgreSQL commits by itself: there `written` is before a turn is sent,
`commit` after that, `committed` when it was answered. Which point, and at which passing of it, comes with the
environment: `TASKYARD_FAULT=settle.commit:17` ends the process with SIGKILL at the 17th COMMIT that carries a settle.

For a process that somebody else kills there is the board: a small file, mapped into memory, that says what the process
is doing. Its pages outlive the process, so the killer reads there where the signal struck.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import mmap
import os
import signal
import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from taskyard.execution.runner import Runner
from taskyard.queueing.dispatcher import Dispatcher
from taskyard.queueing.inbox import Inbox
from taskyard.stores.sqlite.core import SqliteCore
from taskyard.stores.sqlite.writer import Writer

VARIABLE = "TASKYARD_FAULT"

PHASES = ("submit", "claim", "run", "settle")

POINTS = (
    "submit.asked",  # handed to the inbox
    "submit.written",  # in the transaction
    "submit.commit",  # before its COMMIT
    "submit.committed",  # after it, and nobody knows yet
    "submit.answered",  # the submitter's future is resolved, the submitter has not seen it
    "claim.written",
    "claim.commit",
    "claim.committed",
    "claim.started",  # the runner has the claim, the code has not begun
    "run.began",  # passed by the code under test itself, like the two below
    "run.middle",
    "run.ending",
    "settle.asked",
    "settle.written",
    "settle.commit",
    "settle.committed",
    "settle.answered",
)


def phase_of(point: str) -> str:
    return point.partition(".")[0]


class Faults:
    """`last_words(point)` is called just before the process kills itself."""

    def __init__(
        self,
        spec: str = "",
        *,
        last_words: Callable[[str], None] = lambda _: None,
        board: Board | None = None,
    ) -> None:
        point, _, nth = spec.partition(":")
        if point and point not in POINTS:
            raise ValueError(f"{point!r} is no fault point; there are {', '.join(POINTS)}")
        self._point, self._nth = point, int(nth or 1)
        self._passed: Counter[str] = Counter()
        self._last_words = last_words
        self._board = board

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ, **options: Any) -> Faults:
        return cls(environ.get(VARIABLE, ""), **options)

    def passing(self, point: str) -> None:
        """This point is passed now: the end, if it is the one and the time has come."""
        if point != self._point:
            return
        self._passed[point] += 1
        if self._passed[point] == self._nth:
            self._last_words(point)
            os.kill(os.getpid(), signal.SIGKILL)

    # --- where the points are -----------------------------------------------------------------------------------------

    def install(self) -> None:
        """Wrap the methods at which points lie, for the rest of this process's life."""
        self._watch_store()
        if importlib.util.find_spec("asyncpg") is not None:
            self._watch_postgres()
        self._watch_loop()

    def _watch_postgres(self) -> None:
        from taskyard.stores.postgres import PostgresStore

        board = self._board or Board()

        async def turn(inner: Callable[..., Any], *args: Any, **asked: Any) -> Any:
            parts = [phase for phase, name in _CARRIED if asked.get(name)]
            for phase in parts:
                board.step(phase)
                self.passing(f"{phase}.written")
            sending = asyncio.ensure_future(inner(*args, **asked))
            try:
                await asyncio.sleep(0)  # as far as it gets without an answer
                for phase in parts:
                    self.passing(f"{phase}.commit")
                turned = await sending
            finally:
                sending.cancel()
                board.step("")
            for phase in parts:
                if phase != "claim" or turned.claims:
                    self.passing(f"{phase}.committed")
            return turned

        _wrap(PostgresStore, "turn", turn)

    def _watch_store(self) -> None:
        board = self._board or Board()
        parts: list[str] = []  # what the transaction holds that the writer thread is in

        def part(phase: str, does: Callable[[Any], object]) -> Callable[..., Any]:
            def around(inner: Callable[..., Any], *args: Any) -> Any:
                board.step(phase)
                answer = inner(*args)
                if does(answer):
                    parts.append(phase)
                    self.passing(f"{phase}.written")
                return answer

            return around

        def commit(inner: Callable[..., Any], *args: Any) -> None:
            for phase in parts:
                board.step(phase)
                self.passing(f"{phase}.commit")
            inner(*args)
            for phase in parts:
                self.passing(f"{phase}.committed")
            board.step("claim" if "claim" in parts else "")
            parts.clear()

        def roll_back(inner: Callable[..., Any], *args: Any) -> None:
            parts.clear()
            board.step("")
            inner(*args)

        _wrap(SqliteCore, "_settle", part("settle", bool))
        _wrap(SqliteCore, "_insert_tasks", part("submit", lambda _: True))
        _wrap(SqliteCore, "_start", part("claim", bool))
        _wrap(Writer, "_commit", commit)
        _wrap(Writer, "_roll_back", roll_back)

    def _watch_loop(self) -> None:
        board = self._board or Board()

        def add(inner: Callable[..., Any], *args: Any) -> Any:
            answer = inner(*args)
            board.count("submit", 1)
            self.passing("submit.asked")
            return answer

        def start(inner: Callable[..., Any], *args: Any) -> None:
            board.step("")
            board.count("run", 1)
            self.passing("claim.started")
            inner(*args)

        def settle(inner: Callable[..., Any], *args: Any) -> None:
            board.count("run", -1)
            board.count("settle", 1)
            inner(*args)
            self.passing("settle.asked")

        def finish(inner: Callable[..., Any], dispatcher: Dispatcher, batch: Any, *args: Any) -> None:
            inner(dispatcher, batch, *args)
            for phase, things in (("submit", batch.waiting), ("settle", batch.settles)):
                if things:
                    board.count(phase, -len(things))
                    self.passing(f"{phase}.answered")

        _wrap(Inbox, "add", add)
        _wrap(Inbox, "settle", settle)
        _wrap(Dispatcher, "_finish", finish)
        _wrap(Runner, "start", start)


_CARRIED = (("settle", "settles"), ("submit", "adds"), ("claim", "demand"))
"""What a turn may carry, by its arguments."""


def _wrap(owner: type, name: str, around: Callable[..., Any]) -> None:
    inner = getattr(owner, name)  # an AttributeError here says that a point has moved

    @functools.wraps(inner)
    def wrapped(*args: Any, **named: Any) -> Any:
        return around(inner, *args, **named)

    setattr(owner, name, wrapped)


class Board:
    """What a process is doing, where others can read it after its death: the step its writer thread is in, and how many
    submits, runs and settles are under way."""

    _FORM = struct.Struct("=Biii")
    _COUNTED = ("submit", "run", "settle")

    def __init__(self, path: str | Path | None = None) -> None:
        """Without a path, a board that nobody reads."""
        self._counts = dict.fromkeys(self._COUNTED, 0)
        self._step = 0
        self._page: mmap.mmap | None = None
        if path is not None:
            Path(path).write_bytes(bytes(self._FORM.size))
            with open(path, "r+b") as file:
                self._page = mmap.mmap(file.fileno(), self._FORM.size)

    def step(self, phase: str) -> None:
        self._step = PHASES.index(phase) + 1 if phase else 0
        self._show()

    def count(self, phase: str, by: int) -> None:
        self._counts[phase] += by
        self._show()

    def _show(self) -> None:
        if self._page is not None:
            self._FORM.pack_into(self._page, 0, self._step, *self._counts.values())

    @classmethod
    def read(cls, path: str | Path) -> str:
        """The phase in which the process was last seen: that of its transaction, else what it was waiting for, else
        `idle`."""
        try:
            data = Path(path).read_bytes()
            step, submits, runs, settles = cls._FORM.unpack(data)
        except (FileNotFoundError, struct.error):
            return "idle"  # killed before it had a board
        if step:
            return PHASES[step - 1]
        waiting: Sequence[tuple[str, int]] = (("settle", settles), ("submit", submits), ("run", runs))
        return next((phase for phase, count in waiting if count > 0), "idle")
