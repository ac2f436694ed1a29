"""Captures what code inside a run logs and prints, and passes it to that run. Everything else passes untouched.

State of the process: `sys.stdout` and `sys.stderr` are replaced by streams that write to the old ones, and the factory
of log records is replaced by one that calls the old one. A factory, not a handler on the root logger: a handler there
would switch off `logging.basicConfig` and the handler of last resort, would be removed by `dictConfig`, and would miss
loggers that do not propagate.

Not captured: what child processes write, and what goes to a descriptor or to `sys.stdout.buffer` directly. In a worker
process everything belongs to the run there. Elsewhere a thread that the code starts belongs to no run, unless it runs
in a copy of the context, as with `asyncio.to_thread`.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from types import FrameType
from typing import Any

from taskyard.execution.context import CURRENT, RunContext
from taskyard.model.attempt import LineOrigin

OWN_LOGGERS = frozenset({"taskyard", "taskyard.run"})
"""Records of the engine are no lines of the run; those of `current_run().log` are lines already."""

LOGGING_DEPTH = 16
"""Frames between a handler's `handle` and the `write` of its stream, at most."""

_HANDLE = logging.Handler.handle.__code__

_exception_text = logging.Formatter().formatException


class _Capture:
    """Whether this process captures, and for which run."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users = 0
        self.worker_run: RunContext | None = None
        self.streams: dict[LineOrigin, _Stream] = {}
        self.factory: _RecordFactory | None = None

    def find_run(self) -> RunContext | None:
        if not self.users:
            return None
        run = CURRENT.get(None)
        if run is None:
            run = self.worker_run
        return None if run is None or run.ended else run


_capture = _Capture()


class _Stream:
    """A standard stream that also tells the current run what is written to it."""

    def __init__(self, stream: Any, origin: LineOrigin) -> None:
        self._stream, self._origin = stream, origin

    def write(self, text: str) -> int:
        written: int = self._stream.write(text)
        run = _capture.find_run()
        if run is not None and not _is_in_handler(sys._getframe(1)):
            run.print_text(self._origin, text)
        return written

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __repr__(self) -> str:
        return repr(self._stream)


def _is_in_handler(frame: FrameType | None) -> bool:
    """Whether a handler of `logging` writes: its record is a line already."""
    for _ in range(LOGGING_DEPTH):
        if frame is None:
            return False
        if frame.f_code is _HANDLE:
            return True
        frame = frame.f_back
    return False


class _RecordFactory:
    """Makes log records as the factory before it, and tells the current run about them."""

    def __init__(self, make: Any) -> None:
        self._make = make
        self.is_active = True

    def __call__(self, *args: Any, **kwargs: Any) -> logging.LogRecord:
        record: logging.LogRecord = self._make(*args, **kwargs)
        # A record that came from a worker process has no level at this moment.
        if self.is_active and type(record.levelno) is int and record.levelno >= logging.INFO:
            run = _capture.find_run()
            if run is not None and record.name not in OWN_LOGGERS:
                _tell(run, record)
        return record


def _tell(run: RunContext, record: logging.LogRecord) -> None:
    try:
        text = record.getMessage()
        if record.exc_info:
            text = f"{text}\n{_exception_text(record.exc_info)}"
    except Exception:
        text = str(record.msg)  # the arguments do not fit: `logging` complains of that itself
    run.log_line(record.levelno, text, "logging")


def start_capture() -> None:
    """Capture from now on. Each call needs one of `stop_capture`."""
    with _capture.lock:
        _capture.users += 1
        if _capture.users > 1:
            return
        _capture.factory = _RecordFactory(logging.getLogRecordFactory())
        logging.setLogRecordFactory(_capture.factory)
    keep_capturing()


def keep_capturing() -> None:
    """Capture the standard streams again if something has replaced them. Cheap: it is called for every run."""
    streams = _capture.streams
    if sys.stdout is streams.get("stdout") and sys.stderr is streams.get("stderr"):
        return
    with _capture.lock:
        if _capture.users:
            sys.stdout = _wrap(sys.stdout, "stdout")
            sys.stderr = _wrap(sys.stderr, "stderr")


def _wrap(stream: Any, origin: LineOrigin) -> Any:
    if stream is None or isinstance(stream, _Stream):
        return stream
    wrapped = _capture.streams[origin] = _Stream(stream, origin)
    return wrapped


def stop_capture() -> None:
    """The last call puts back what was there. A stream or factory that something else has replaced since stays."""
    with _capture.lock:
        _capture.users -= 1
        if _capture.users:
            return
        sys.stdout, sys.stderr = _unwrap(sys.stdout), _unwrap(sys.stderr)
        _capture.streams.clear()
        factory, _capture.factory = _capture.factory, None
        if factory is not None:
            factory.is_active = False
            if logging.getLogRecordFactory() is factory:
                logging.setLogRecordFactory(factory._make)


def _unwrap(stream: Any) -> Any:
    return stream._stream if isinstance(stream, _Stream) else stream


def set_worker_run(run: RunContext | None) -> None:
    """In a worker process: everything that is written from now on, by any thread, belongs to this run."""
    _capture.worker_run = run


def _forget() -> None:
    """In a forked child: its lines are no lines of the run, and another thread may hold the lock for ever."""
    _capture.lock = threading.Lock()
    _capture.users, _capture.worker_run = 0, None
    if _capture.factory is not None:
        _capture.factory.is_active = False


os.register_at_fork(after_in_child=_forget)
