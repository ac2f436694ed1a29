"""Captures what code inside a run logs and prints, and passes it to that run. Everything else passes untouched.

State of the process: `sys.stdout` and `sys.stderr` are replaced by streams that write to the old ones, and
`Logger.callHandlers` by a function that calls the old one. A line is made of a record after its handlers had it: by
then filters of the logger have let it through, and filters of the logger and of handlers have hidden secrets in it. A
factory of records would come before the filters. A handler on the root logger would switch off `logging.basicConfig`
and the handler of last resort, would be removed by `dictConfig`, and would miss loggers that do not propagate.

Not captured: what child processes write, and what goes to a descriptor or to `sys.stdout.buffer` directly. In a worker
process everything belongs to the run there, except what threads write that an earlier run has left behind. Elsewhere a
thread that the code starts belongs to no run, unless it runs in a copy of the context, as with `asyncio.to_thread`.
"""

from __future__ import annotations

import concurrent.futures.thread
import logging
import os
import sys
import threading
from types import FrameType
from typing import Any

from taskyard.execution.context import CURRENT, BaseRun
from taskyard.model.attempt import LineOrigin

OWN_LOGGERS = frozenset({"taskyard", "taskyard.run"})
"""Records of the engine are no lines of the run; those of `current_run().log` are lines already."""

LOGGING_DEPTH = 16
"""Frames between a handler's `handle` and the `write` of its stream, at most."""

_HANDLE = logging.Handler.handle.__code__

_POOL_FILE = concurrent.futures.thread.__file__

_exception_text = logging.Formatter().formatException


class _Capture:
    """Whether this process captures, and for which run."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users = 0
        self.worker_run: BaseRun | None = None
        self.known_threads: set[threading.Thread] = set()
        self.left_threads: set[threading.Thread] = set()
        """Known ones were there when the run began; those left behind were started by an earlier run."""
        self.streams: dict[LineOrigin, _Stream] = {}
        self.log_tap: _LogTap | None = None

    def find_run(self) -> BaseRun | None:
        if not self.users:
            return None
        run = CURRENT.get(None)
        if run is None:
            run = self.worker_run
            if run is None or threading.current_thread() in self.left_threads:
                return None
        return None if run.has_ended else run


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


class _LogTap:
    """Stands in for `Logger.callHandlers`: tells the current run what was logged."""

    def __init__(self, call_handlers: Any) -> None:
        self.call_handlers = call_handlers
        self.is_active = True

        def tapped(logger: logging.Logger, record: logging.LogRecord) -> None:
            try:
                call_handlers(logger, record)
            finally:
                if self.is_active and record.levelno >= logging.INFO:
                    run = _capture.find_run()
                    if run is not None and record.name not in OWN_LOGGERS:
                        _tell(run, record)

        self.tapped: Any = tapped


def _tell(run: BaseRun, record: logging.LogRecord) -> None:
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
        tap = _capture.log_tap = _LogTap(logging.Logger.callHandlers)
        logging.Logger.callHandlers = tap.tapped  # type: ignore[method-assign]
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
    """The last call puts back what was there. What something else has put in place of ours since stays."""
    with _capture.lock:
        _capture.users -= 1
        if _capture.users:
            return
        sys.stdout, sys.stderr = _unwrap(sys.stdout), _unwrap(sys.stderr)
        _capture.streams.clear()
        tap, _capture.log_tap = _capture.log_tap, None
        if tap is not None:
            tap.is_active = False
            if logging.Logger.callHandlers is tap.tapped:
                logging.Logger.callHandlers = tap.call_handlers  # type: ignore[method-assign]


def _unwrap(stream: Any) -> Any:
    return stream._stream if isinstance(stream, _Stream) else stream


def set_worker_run(run: BaseRun | None) -> None:
    """In a worker process: everything that is written from now on belongs to this run, except what threads write that
    an earlier run has left behind. None: the run has ended."""
    _capture.worker_run = run
    busy = _list_busy_threads()
    if run is None:
        _capture.left_threads = busy - _capture.known_threads
    else:
        _capture.left_threads &= busy
        _capture.known_threads = busy - _capture.left_threads


def _list_busy_threads() -> set[threading.Thread]:
    """Threads, without those of a `ThreadPoolExecutor` that wait for work: those belong to the run that gives it."""
    threads = set(threading.enumerate())
    if len(threads) == 1:
        return threads
    frames = sys._current_frames()
    return {thread for thread in threads if not _waits_for_work(frames.get(thread.ident or 0))}


def _waits_for_work(frame: FrameType | None) -> bool:
    return frame is not None and frame.f_code.co_filename == _POOL_FILE


def _forget() -> None:
    """In a forked child: its lines are no lines of the run, and another thread may hold the lock for ever."""
    _capture.lock = threading.Lock()
    _capture.users, _capture.worker_run = 0, None
    if _capture.log_tap is not None:
        _capture.log_tap.is_active = False


os.register_at_fork(after_in_child=_forget)
