"""One worker, as its pool sees it: what it is busy with, what it may take, how it ends.

Reads and writes of the wire happen in callbacks of the event loop: no task and no thread for a call. The first call in
flight is the one that runs; those behind it are known not to have begun, because answers come in order.
"""

from __future__ import annotations

import asyncio
import logging
import math
import select
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from taskyard.execution.calls import PendingCall
from taskyard.execution.relay import relay
from taskyard.execution.shared import Lender
from taskyard.execution.starting import WorkerHandle
from taskyard.execution.wire import (
    CALL,
    IS_ALONE,
    IS_FREE,
    IS_NAMED,
    IS_NEW,
    IS_SPENT,
    RESULT,
    Frame,
    Kind,
    NoRoom,
    Outgoing,
    Reader,
    WireError,
    encode,
    widen,
)
from taskyard.model.execution import ErrorKind, ExecutionError, ExecutionResult
from taskyard.ports.explain import UNRETURNED, explain, fault, in_words

log = logging.getLogger("taskyard")

LAST_WORD_S = 1.0
"""How long a worker whose wire has ended may take to be found dead, which says why; it takes about a millisecond."""

MOST_READS = 64
"""More than it takes to read all that the socket of a worker holds."""

SAID_OF_RUNS = frozenset({Kind.PROGRESS, Kind.NOTE, Kind.CHECKPOINT, Kind.LINES, Kind.ARTIFACT})

_decode_error = msgspec.msgpack.Decoder(ExecutionError).decode


class Owner(Protocol):
    """The pool. Each is called on the loop, from a callback of the worker's."""

    def ready(self, worker: HostedWorker) -> None: ...

    def answered(self, worker: HostedWorker, call: PendingCall, result: ExecutionResult) -> None: ...

    def gone(self, worker: HostedWorker, status: int) -> None: ...


class HostedWorker:
    def __init__(
        self, process: WorkerHandle, loop: asyncio.AbstractEventLoop, owner: Owner, *, shares: bool, load_s: float
    ) -> None:
        self.pid: int | None = None
        self.calls: deque[PendingCall] = deque()
        self.served = self.place = 0
        self.is_ready = self.is_spent = self.is_dying = self.is_retiring = self._is_silent = False
        self.late: list[PendingCall] = []
        """Answered after it had been decided that their worker must die for them."""
        self.complaint: ExecutionError | None = None
        """Why it ended, where it is known better than by its status."""
        self._process, self._loop, self._owner = process, loop, owner
        self._shares, self._load_s = shares, load_s
        self._wire, self._reader = process.wire, Reader(shares=shares)
        self._lender = Lender(loop)
        self._unsent: deque[tuple[Outgoing, PendingCall | None]] = deque()
        self._known: set[tuple[str, str]] = set()
        self._functions: dict[Callable[..., Any], int] = {}
        self._deadline_mono = time.monotonic() + load_s
        self._timer: asyncio.TimerHandle | None = None
        self._timer_mono = math.inf
        widen(self._wire)
        process.watch(loop, self._gone)
        self._arm()

    def set_up(self, setup: Outgoing) -> None:
        """Listen to it, and tell it what it is to be. Where that fails it ends as if it had failed to start."""
        try:
            self._loop.add_reader(self._wire, self._readable)
            self.send(setup)
        except Exception as exc:
            self.complaint = fault(f"a worker process could not be started: {exc}")
            self.kill()

    # --- calls --------------------------------------------------------------------------------------------------------

    def give(self, call: PendingCall, *, is_alone: bool = False) -> None:
        """Send the call; raises what pickling it raises, and has then sent nothing. `is_alone`: no other call runs."""
        number, marks = None, call.marks
        if is_alone:
            marks |= IS_ALONE
        if call.is_by_name:
            number = self._functions.get(call.function)
            marks |= IS_NAMED
        call.is_new = number is None and call.key not in self._known
        if call.is_new:
            marks |= IS_NEW
        out = encode(CALL, call.number, call.body(number), marks, shares=self._shares, lender=self._lender)
        call.worker = self
        if call.is_new:
            self._known.add(call.key)
        self.calls.append(call)
        self.served += 1
        if len(self.calls) == 1:
            self._begin(call)
        if not self.send(out, call):
            call.is_undelivered = True

    def _begin(self, call: PendingCall) -> None:
        """The worker turns to this call now."""
        call.begin()
        # What must be imported first has the time of a start, not of the call.
        limit_s = call.load_s(self._load_s) if call.is_new else call.timeout_s
        if limit_s is None:
            self._deadline_mono = math.inf
        else:
            self._deadline_mono = time.monotonic() + limit_s
            self._arm()

    def ask(self, call: PendingCall) -> None:
        """Tell the code that it should end."""
        self.send(encode(Kind.CANCEL, call.number))

    def terminate(self) -> None:
        """SIGTERM for it and its group. Nobody knows when it arrives, so no other call may begin here."""
        self.is_spent = True
        self._process.terminate()

    def kill(self) -> None:
        """End it and everything it started, now. Its calls are answered when that is done."""
        self.is_dying = True
        self._process.kill()

    def retire(self, within_s: float) -> None:
        """It has nothing to do, and shall end by itself."""
        self.is_retiring = True
        self.send(encode(Kind.EXIT))
        self._deadline_mono = time.monotonic() + within_s
        self._arm()

    # --- time ---------------------------------------------------------------------------------------------------------

    def _arm(self) -> None:
        """One timer per worker, moved only to an earlier time: calls with one timeout do not touch it at all, and it
        looks at the real deadline when it fires."""
        if self._deadline_mono >= self._timer_mono:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_mono = self._deadline_mono
        # A millisecond on top: loops round their clocks, and a deadline must not be found to lie ahead.
        delay_s = max(0.0, self._deadline_mono - time.monotonic()) + 0.001
        self._timer = self._loop.call_later(delay_s, self._fire)

    def _fire(self) -> None:
        self._timer, self._timer_mono = None, math.inf
        self._catch_up()
        if time.monotonic() < self._deadline_mono:
            if self._deadline_mono < math.inf:
                self._arm()
            return
        if self.is_dying and not self._is_silent:
            return
        if self._is_silent:
            self.complaint = fault("its worker process closed its wire")
        elif not self.is_ready and not self.is_retiring:
            self.complaint = fault(f"a worker process did not start within {self._load_s:g} s")
        elif self.calls:
            self.calls[0].expire(self._load_s)
        self.kill()

    def _catch_up(self) -> None:
        """Read what has arrived: an answer that came in time counts, though a host that was stopped meanwhile finds
        its timers first. Not for ever: who never stops talking must not be waited for."""
        poll = select.poll()
        poll.register(self._wire, select.POLLIN)
        for _ in range(MOST_READS):
            if self.is_dying or time.monotonic() < self._deadline_mono or not poll.poll(0):
                return
            self._readable()

    # --- the wire -----------------------------------------------------------------------------------------------------

    def send(self, out: Outgoing, call: PendingCall | None = None) -> bool:
        """Send it, the frame of `call` if there is one; False if it has to wait for room, or nobody is there to read it
        any more."""
        if not self._unsent:
            try:
                if out.send(self._wire):
                    return True
            except BlockingIOError:
                pass
            except OSError:
                out.drop()  # what is left to know comes by `_gone`
                return False
            self._loop.add_writer(self._wire, self._writable)
        out.own()
        self._unsent.append((out, call))
        return False

    def _writable(self) -> None:
        try:
            while self._unsent:
                out, call = self._unsent[0]
                if not out.send(self._wire):
                    return
                if call is not None:
                    call.is_undelivered = False
                self._unsent.popleft()
        except BlockingIOError:
            return
        except OSError:
            self._drop_unsent()
        self._loop.remove_writer(self._wire)

    def _drop_unsent(self) -> None:
        while self._unsent:
            self._unsent.popleft()[0].drop()

    def _readable(self) -> None:
        if self._read():
            return
        self._loop.remove_reader(self._wire)
        if not self.is_dying:
            self.is_dying = self._is_silent = True
            self._deadline_mono = time.monotonic() + LAST_WORD_S
            self._arm()

    def _read(self) -> bool:
        """Read once and act on it; whether there may be more."""
        try:
            is_open = self._reader.receive(self._wire)
            while (frame := self._reader.next()) is not None:
                self._heed(frame)
        except BlockingIOError:
            return True
        except ConnectionResetError:
            return False
        except NoRoom as exc:
            self.complaint = fault(f"what its worker process said could not be received here: {exc}")
            self.kill()
            return False
        except WireError as exc:
            self.complaint = fault(f"its worker process wrote what is no answer: {exc}")
            self.kill()
            return False
        return is_open

    def _heed(self, frame: Frame) -> None:
        """Who listens may fail: the frames behind this one, an answer among them, must be read all the same. By
        whatever it raises: a SystemExit would end the loop, and every call on it."""
        try:
            if frame.kind is RESULT:
                self._answer(frame, self._result(frame))
            else:
                self._take(frame)
        except WireError:
            raise
        except BaseException:
            log.exception("what a worker process said could not be passed on")

    def _take(self, frame: Frame) -> None:
        kind = frame.kind
        if kind is Kind.ERROR:
            self._take_error(frame)
        elif kind is Kind.READY:
            self.pid, self.is_ready = _load(frame, int), True
            if not self.is_retiring:
                self._deadline_mono = math.inf
            self._owner.ready(self)
        elif kind is Kind.STARTED:
            self._started_new(self._running(frame))
        elif kind is Kind.LOG:
            relay(_load(frame, tuple))
        elif kind in SAID_OF_RUNS:
            said = _load(frame, object)
            if self.calls and self.calls[0].number == frame.call:  # else a thread has outlived the call it speaks of
                self.calls[0].hear(kind, said)
        else:
            raise WireError(f"{kind.name} from a worker")

    def _started_new(self, call: PendingCall) -> None:
        """What the call names is imported: its time begins, and from here on a number stands for its function. To
        pickle one by its name costs more than the rest of a short call."""
        call.is_new = False
        if call.is_by_name:
            self._functions[call.function] = len(self._functions)
        self._begin(call)

    def _running(self, frame: Frame) -> PendingCall:
        if not self.calls or self.calls[0].number != frame.call:
            raise WireError("of a call that is not running")
        return self.calls[0]

    def _result(self, frame: Frame) -> ExecutionResult:
        try:
            value = frame.load()
        except BaseException as exc:  # its code is anybody's, and may even call `sys.exit`
            error = explain(exc)
            message = f"its result could not be read back from the worker process: {in_words(exc)}"
            details = {UNRETURNED: True}
            error = ExecutionError(kind=ErrorKind.SYSTEM, message=message, types=error.types, details=details)
            return self._failed(frame, error)
        return ExecutionResult(
            success=True, data=value, started_at=frame.started_at, ended_at=frame.ended_at, worker_pid=self.pid
        )

    def _take_error(self, frame: Frame) -> None:
        try:
            error = _decode_error(_load(frame, bytes))
        except msgspec.DecodeError as exc:
            raise WireError(f"an error that is none: {exc}") from None
        if frame.call == 0 and not self.is_ready:
            self.complaint = error
            return
        self._answer(frame, self._failed(frame, error))

    def _failed(self, frame: Frame, error: ExecutionError) -> ExecutionResult:
        return ExecutionResult(
            success=False, error=error, started_at=frame.started_at, ended_at=frame.ended_at, worker_pid=self.pid
        )

    def _answer(self, frame: Frame, result: ExecutionResult) -> None:
        call = self._running(frame)
        self.calls.popleft()
        if self._lender.borrower == call.number:
            self._lender.take_back(is_free=bool(frame.marks & IS_FREE))
        if call.is_new:
            self._known.discard(call.key)  # it could not be loaded: the next try has the time of a start again
        if self.is_dying and call.verdict is not None:
            self.late.append(call)  # it is being killed for this call, which is answered when that is done
            return
        if frame.marks & IS_SPENT:
            self.is_spent = True
        self._deadline_mono = math.inf
        if self.calls:
            self._begin(self.calls[0])
        self._owner.answered(self, call, result)

    # --- the end ------------------------------------------------------------------------------------------------------

    def _gone(self, status: int) -> None:
        self.is_dying = True
        # What it managed to say before it died counts.
        while self._read_rest():
            pass
        self._loop.remove_reader(self._wire)
        self._loop.remove_writer(self._wire)
        if self._timer is not None:
            self._timer.cancel()
        self._drop_unsent()
        self._lender.close()
        self._reader.close()
        self._wire.close()
        self._owner.gone(self, status)

    def _read_rest(self) -> bool:
        try:
            if not self._reader.receive(self._wire):
                return False
            while (frame := self._reader.next()) is not None:
                self._heed(frame)
        except (OSError, WireError):
            return False
        return True


def _load(frame: Frame, expected: type) -> Any:
    try:
        value = frame.load()
    except BaseException as exc:
        raise WireError(f"a body that is none: {type(exc).__name__}") from None
    if not isinstance(value, expected):
        raise WireError(f"a body of the wrong type: {type(value).__name__}")
    return value
