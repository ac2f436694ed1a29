"""The log lines of one attempt, from the code that writes them to the store.

`AttemptLines` makes lines of what is logged and printed. What becomes of them depends on where the code runs: here
`HostLines` reports them to the store; in a worker process `WorkerLines` sends them to the host. Both are bounded, and
thin out what comes too often: a tight loop of prints costs neither the host nor other runs much.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import msgspec

from taskyard.model.attempt import LINE_CHARS, LINES_KEPT, LineBuffer, LineOrigin, LogLevel, LogLine, cut_line

if TYPE_CHECKING:
    from taskyard.execution.run_handle import RunHandle, RunHost

LINES_EVERY_S = 0.25
"""Lines go to the store at most this often, those of a worker process in larger groups also to its host."""

MANY_LINES_EVERY_S = 2.0
"""The same for an attempt that has written more than `LINES_KEPT` lines: the store keeps only the latest of them."""

_MICROSECOND = timedelta(microseconds=1)

_LEVELS: tuple[tuple[int, LogLevel], ...] = (
    (logging.CRITICAL, "critical"),
    (logging.ERROR, "error"),
    (logging.WARNING, "warning"),
    (logging.INFO, "info"),
)


def level_name(level: int) -> LogLevel:
    """A level of `logging` as a line has it."""
    return next((name for least, name in _LEVELS if level >= least), "debug")


def utc_now() -> datetime:
    return datetime.now(UTC)


class AttemptLines:
    """Safe to use from any thread. The lock can be taken twice by one thread: a finalizer that prints may run anywhere,
    also in here. While a thread has the lock it waits for nothing else: a finalizer may need this lock in any place."""

    def __init__(self, now: Callable[[], datetime]) -> None:
        self._now = now
        self._lock = threading.RLock()
        self._buffer = LineBuffer()
        self._unfinished: dict[LineOrigin, str] = {}
        self._last_at: datetime | None = None

    def add(self, level: LogLevel, text: str, origin: LineOrigin) -> None:
        """A line, or several that belong together."""
        with self._lock:
            self._append(level, text, origin)
        self._flush_soon()

    def add_lines(self, lines: Iterable[LogLine]) -> None:
        """Lines that were made elsewhere."""
        with self._lock:
            for line in lines:
                at = self._next_at(line.at)
                text = cut_line(line.text)
                same = at == line.at and text == line.text
                self._buffer.append(line if same else msgspec.structs.replace(line, at=at, text=text))
        self._flush_soon()

    def write(self, origin: LineOrigin, text: str) -> None:
        """Text that was printed. It becomes a line when its end is printed."""
        with self._lock:
            has_lines = self._split(origin, text)
        if has_lines:
            self._flush_soon()

    def _split(self, origin: LineOrigin, text: str) -> bool:
        """Whether a line was finished."""
        *lines, rest = (self._unfinished.get(origin, "") + text).rsplit("\n", LINES_KEPT + 1)
        if len(lines) > LINES_KEPT:  # the first part has all lines before those
            self._buffer.drop(lines.pop(0).count("\n") + 1, self._next_at())
        for line in lines:
            self._finish_line(origin, line)
        if len(rest) > LINE_CHARS:
            rest = cut_line(_visible(rest))
        self._unfinished[origin] = rest
        return bool(lines)

    def _finish_line(self, origin: LineOrigin, text: str) -> None:
        text = _visible(text)
        if text and not text.isspace():
            self._append("info" if origin == "stdout" else "warning", text, origin)

    def _append(self, level: LogLevel, text: str, origin: LineOrigin) -> None:
        self._buffer.append(LogLine(self._next_at(), level, cut_line(text), origin))

    def _next_at(self, at: datetime | None = None) -> datetime:
        """The present time, or `at`, made later than that of the line before: the store knows a line by its time."""
        at = self._now() if at is None else at
        if self._last_at is not None and at <= self._last_at:
            at = self._last_at + _MICROSECOND
        self._last_at = at
        return at

    def _finish_all(self) -> None:
        unfinished, self._unfinished = self._unfinished, {}
        for origin, text in unfinished.items():
            self._finish_line(origin, text)

    def _flush_soon(self) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        """The attempt has ended: pass on everything that is left."""
        raise NotImplementedError


def _visible(text: str) -> str:
    """What a terminal shows of a line: a carriage return begins it anew, as progress bars do."""
    text = text.rstrip("\r")
    return text[text.rfind("\r") + 1 :]


class HostLines(AttemptLines):
    """Reports lines to the store: the first at once, then all that have come every `LINES_EVERY_S`."""

    def __init__(self, run: RunHandle, host: RunHost) -> None:
        super().__init__(host.now)
        self._run, self._host = run, host
        self._timer: asyncio.TimerHandle | None = None
        self._is_armed = False
        self._sent = 0

    def _flush_soon(self) -> None:
        # Armed until a flush finds nothing: a thread in a tight loop wakes the event loop once, not for every line.
        with self._lock:
            was_armed, self._is_armed = self._is_armed, True
        if not was_armed:
            self._host.call(self._flush)

    def _flush(self) -> None:
        """On the loop."""
        with self._lock:
            lines = self._buffer.take()
            self._is_armed = bool(lines) and not self._run.has_ended
            if not self._is_armed:
                return
        self._report(lines)
        every_s = LINES_EVERY_S if self._sent <= LINES_KEPT else MANY_LINES_EVERY_S
        self._timer = self._host.loop.call_later(every_s, self._flush)

    def _report(self, lines: tuple[LogLine, ...]) -> None:
        self._sent += len(lines)
        self._run.send(self._run.make_report(lines=lines))

    def finish(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        with self._lock:
            self._finish_all()
            lines = self._buffer.take()
        if lines:
            self._report(lines)
