"""The worker: reads calls from its wire and runs them one after the other, in its main thread; what an async function
returns, on an event loop there.

Standard output and error stay those of the host, standard input is empty, and the wire has a descriptor above all
three: whatever user code prints, it cannot reach the protocol. What a call raises is answered as text; what cannot be
answered (a result that does not pickle) is answered as such. The process ends when the host closes the wire.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import fcntl
import importlib
import io
import logging
import os
import pickle
import random
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from time import time
from typing import Any

import msgspec

from taskyard.errors import NoScript
from taskyard.execution.channel import Channel
from taskyard.execution.code_loop import close_loop_here, finish
from taskyard.execution.context import CURRENT
from taskyard.execution.line_capture import keep_capturing, set_worker_run, start_capture
from taskyard.execution.linux import keep_freed_memory
from taskyard.execution.said import fields_of
from taskyard.execution.scene import Scene, Setting, WorkerSettings, enter, load_main
from taskyard.execution.wire import (
    EXIT,
    IS_ALONE,
    IS_FREE,
    IS_NAMED,
    IS_NEW,
    IS_SPENT,
    KEEPS_EXCEPTION,
    NAMES_MAIN,
    RESULT,
    Bulk,
    Frame,
    Kind,
    encode,
)
from taskyard.execution.worker_run import Call, WorkerRun
from taskyard.model.execution import ErrorKind, ExecutionError
from taskyard.ports.explain import UNLOADED, UNRETURNED, canceled, explain, in_words, with_exception

LOWEST_FD = 10
"""Code that shuffles the standard descriptors, as daemons do, stays clear of this."""

KEEP_FREED = 64 << 20
"""Bytes of freed memory that a worker keeps for its next call."""

PEAK_UNIT = 1 if sys.platform == "darwin" else 1024
"""Bytes that the peak of a process's memory is counted in."""

_encode_error = msgspec.msgpack.Encoder().encode


class Worker:
    def __init__(self, channel: Channel, settings: WorkerSettings, scene: Scene) -> None:
        self._channel, self._settings, self._scene = channel, settings, scene
        self._recycles = settings.recycle_rss is not None
        self._is_terminated = False
        self._running = 0
        self._has_forked = self._has_captured = False
        self._functions: list[Callable[..., Any]] = []
        signal.signal(signal.SIGTERM, self._on_term)

    def serve(self) -> None:
        os.register_at_fork(before=self._on_fork)
        self._channel.send(Kind.READY, value=os.getpid())
        is_alone = False
        while (frame := self._channel.receive(stay_awake=is_alone)) is not None:
            if frame.kind is EXIT:
                return
            self._answer(frame)
            if self._is_terminated:
                return
            is_alone = frame.marks & IS_ALONE > 0
            del frame  # the arguments may lie in it: an idle worker keeps none

    def _on_term(self, _: int, __: object) -> None:
        """Asked to end: as an exception, so that code can clean up. But only if the host has asked the running call to
        end before: a service manager that stops the host sends SIGTERM to everybody, and may leave us our grace."""
        if self._running and self._channel.is_canceled(self._running):
            self._is_terminated = True
            raise SystemExit("terminated")

    def _on_fork(self) -> None:
        self._has_forked = True

    def _answer(self, frame: Frame) -> None:
        number, marks = frame.call, frame.marks
        self._has_forked = False
        try:
            if marks & NAMES_MAIN:
                load_main(self._scene)
            call: Call = frame.load()
        except BaseException as exc:  # what unpickles is the user's code, and may even call `sys.exit`
            is_lost = marks & NAMES_MAIN and not self._scene.has_script and isinstance(exc, AttributeError)
            self._fail(number, _unloadable(NoScript() if is_lost else exc), time())
            return
        named, args, kwargs, card, record_first = call
        function: Any = self._functions[named] if marks & IS_NAMED and isinstance(named, int) else named
        if marks & IS_NEW:
            if marks & IS_NAMED:
                self._functions.append(function)
            self._channel.send(Kind.STARTED, number)
        started_at = time()
        self._running = number
        try:
            if card is None:
                value = self._finish(function(*args, **kwargs))
            else:
                value = self._run(WorkerRun(card, number, self._channel), function, args, kwargs, record_first)
        except BaseException as exc:
            # SystemExit and KeyboardInterrupt too: what a call raises is its answer.
            error = self._explain(exc)
            if marks & KEEPS_EXCEPTION:
                error = with_exception(error, exc)
            self._fail(number, error, started_at)
        else:
            del call, named, function, args, kwargs  # so that the memory they lay in can be seen to be free
            self._return(frame, value, started_at)

    def _run(self, run: WorkerRun, function: Any, args: Any, kwargs: Any, record_first: bool) -> Any:
        """The call, with a run around it."""
        if not self._has_captured:
            self._has_captured = True
            start_capture()
        keep_capturing()
        set_worker_run(run)
        mark = CURRENT.set(run)
        try:
            return self._finish(
                function(run.claim.record, *args, **kwargs) if record_first else function(*args, **kwargs)
            )
        finally:
            run.end()
            set_worker_run(None)
            CURRENT.reset(mark)

    def _finish(self, value: Any) -> Any:
        return finish(value, during=self._steered)

    @contextlib.contextmanager
    def _steered(self, task: asyncio.Task[Any]) -> Iterator[None]:
        """While a coroutine runs, a cancel of the host's cancels it."""
        loop, channel = task.get_loop(), self._channel

        def heed() -> None:
            if channel.is_canceled(self._running):
                task.cancel()
            elif not channel.is_closed:
                return
            loop.remove_reader(channel.fd)

        loop.add_reader(channel.fd, heed)
        loop.call_soon(heed)  # it may have been read already, in one piece with its call
        try:
            yield
        finally:
            loop.remove_reader(channel.fd)

    def _explain(self, exc: BaseException) -> ExecutionError:
        if isinstance(exc, asyncio.CancelledError) and self._channel.is_canceled(self._running):
            return canceled()
        error = explain(exc)
        if isinstance(exc, MemoryError) and self._settings.memory_limit is not None:
            message = f"it wanted more memory than its worker's limit of {self._settings.memory_limit >> 20} MiB"
            return msgspec.structs.replace(error, kind=ErrorKind.SYSTEM, message=message)
        return error

    def _return(self, frame: Frame, value: Any, started_at: float) -> None:
        number = frame.call
        try:
            marks = IS_SPENT if self._recycles and self._is_spent() else 0
            # A process that the code has forked sees the same memory, and nobody knows for how long.
            if frame.mapped is not None and frame.mapped() is None and not self._has_forked:
                marks |= IS_FREE
            out = encode(RESULT, number, Bulk.of(value), marks, started_at, time(), shares=self._channel.shares)
        except BaseException as exc:  # what pickles is the user's code, and may even call `sys.exit`
            self._fail(number, _unreturnable(exc), started_at)
        else:
            self._channel.write(out)

    def _fail(self, number: int, error: ExecutionError, started_at: float) -> None:
        # A worker at its memory limit has little left for the next call.
        is_spent = error.kind is ErrorKind.SYSTEM and "MemoryError" in error.types
        marks = IS_SPENT if is_spent or self._is_spent() else 0
        shares = self._channel.shares
        self._channel.write(encode(Kind.ERROR, number, _encode_error(error), marks, started_at, time(), shares=shares))

    def _is_spent(self) -> bool:
        """Whether the worker has grown too large. The peak is cheap to ask for; only above it the present size is."""
        limit = self._settings.recycle_rss
        if limit is None or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * PEAK_UNIT <= limit:
            return False
        try:
            with open("/proc/self/statm") as file:
                return int(file.read().split()[1]) * resource.getpagesize() > limit
        except OSError:  # not Linux: the peak must do
            return True


def _unloadable(exc: BaseException) -> ExecutionError:
    error = explain(exc)
    message = f"it could not be loaded in a worker process: {in_words(exc)}"
    return msgspec.structs.replace(error, message=message, details={**error.details, UNLOADED: True})


def _unreturnable(exc: BaseException) -> ExecutionError:
    error = explain(exc)
    message = f"its result could not be sent back from the worker process: {in_words(exc)}"
    details = {UNRETURNED: True}
    return msgspec.structs.replace(error, kind=ErrorKind.SYSTEM, message=message, details=details)


class _Forward(logging.Handler):
    """Log records go to the host, whose handlers decide what becomes of them."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel

    def handle(self, record: logging.LogRecord) -> bool:
        """Without the lock of a handler: a thread that holds it would wait for the wire, and a finalizer that logs in
        the middle of a frame would wait for that thread."""
        passed: Any = self.filter(record)  # from Python 3.12 on it may be another record
        if passed:
            self.emit(passed if isinstance(passed, logging.LogRecord) else record)
        return bool(passed)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
            if not self._channel.is_own:
                sys.stderr.write(f"{text}\n")  # a process that the code has forked has no wire
                return
            fields = fields_of(record)
            if not fields and (run := CURRENT.get(None)) is not None:
                fields = run.log_fields
            said = (record.name, record.levelno, text, record.created, fields)
            self._channel.send(Kind.LOG, 0, said)
        except Exception:
            self.handleError(record)


def _open_channel(fd: int) -> Channel:
    """The worker's end of its wire, clear of the standard descriptors; nothing can be read from standard input."""
    if fd < LOWEST_FD:
        low, fd = fd, fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, LOWEST_FD)
        os.close(low)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return Channel(fd)


def serve(fd: int) -> None:
    """Be a worker on this end of the wire, until the host closes it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    channel = _open_channel(fd)
    try:
        if (frame := channel.receive()) is not None:
            _serve(channel, frame.load())
    except (SystemExit, BrokenPipeError, ConnectionResetError):
        pass
    finally:
        with contextlib.suppress(Exception):
            close_loop_here()
        atexit._run_exitfuncs()
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()


def _serve(channel: Channel, setting: Setting) -> None:
    settings, scene, setup = setting
    channel.shares = settings.shares
    worker = Worker(channel, settings, scene)
    try:
        _prepare(channel, settings, scene, setup)
    except (Exception, SystemExit) as exc:  # an initializer may call `sys.exit`
        error = explain(exc)
        message = f"a worker process could not start: {in_words(exc)}"
        channel.send(
            Kind.ERROR, 0, _encode_error(msgspec.structs.replace(error, kind=ErrorKind.SYSTEM, message=message))
        )
    else:
        worker.serve()


def _prepare(channel: Channel, settings: WorkerSettings, scene: Scene, setup: bytes | None) -> None:
    enter(scene, settings.environ)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # what was printed is out before a crash
    root = logging.getLogger()
    root.addHandler(_Forward(channel))
    root.setLevel(scene.log_level)
    _reseed()
    if settings.shares:
        keep_freed_memory(KEEP_FREED)
    for name in settings.preload:
        _preload(name)
    if settings.memory_limit is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = settings.memory_limit if hard == resource.RLIM_INFINITY else min(settings.memory_limit, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    if setup is not None:
        if b"main__" in setup:
            load_main(scene)
        function, args = pickle.loads(setup)
        finish(function(*args))


def _reseed() -> None:
    """Forks of one nursery would all throw the same dice, NumPy's too if it is preloaded."""
    random.seed()
    if (numpys := sys.modules.get("numpy.random")) is not None:
        numpys.seed()


def _preload(name: str) -> None:
    """The nursery has imported it, unless it could not, or has no part in this."""
    try:
        importlib.import_module(name)
    except (Exception, SystemExit) as exc:
        raise ImportError(f"the module {name!r} in its preload could not be imported: {in_words(exc)}") from exc
