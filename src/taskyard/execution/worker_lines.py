"""The log lines of an attempt in a worker process, on their way to its host."""

from __future__ import annotations

import threading
import time

import msgspec

from taskyard.execution.channel import Channel
from taskyard.execution.run_lines import LINES_EVERY_S, AttemptLines, utc_now
from taskyard.execution.wire import Kind

BURST_LINES = 50
"""Lines that a worker process sends at once in each `LINES_EVERY_S`, so that a kill loses none of them. The others wait
for the end of that time."""

_encode = msgspec.msgpack.Encoder().encode


class WorkerLines(AttemptLines):
    """Sends lines to the host: each at once, and from `BURST_LINES` on together at the end of each `LINES_EVERY_S`.

    One thread sends at a time, so that lines arrive in order. Others do not wait for it, except at the end of the run:
    a finalizer that prints may run in the middle of sending, and in a thread that has any other lock. The thread that
    sends also sends the lines that come meanwhile."""

    def __init__(self, call: int, channel: Channel) -> None:
        super().__init__(utc_now)
        self._call, self._channel = call, channel
        self._burst = 0
        self._burst_until_mono = float("-inf")
        self._ticker: threading.Timer | None = None
        self._sending = threading.Lock()
        self._is_asked = self._has_ended = False

    def _flush_soon(self) -> None:
        ticker = None
        with self._lock:
            if self._has_ended:
                return
            now_mono = time.monotonic()
            if now_mono >= self._burst_until_mono:
                self._burst, self._burst_until_mono = BURST_LINES, now_mono + LINES_EVERY_S
            is_due = self._burst > 0
            if not is_due and self._ticker is None:
                ticker = self._ticker = threading.Timer(self._burst_until_mono - now_mono, self._tick)
                ticker.daemon = True
        if is_due:
            self._send()
        elif ticker is not None:
            ticker.start()

    def _tick(self) -> None:
        self._ticker = None
        self._send()

    def _send(self) -> None:
        self._is_asked = True
        # Race: the thread that sends may have taken the lines before ours came. It looks at the flag once more after it
        # has let go of the lock, and we set the flag before we find the lock taken.
        while self._is_asked and self._sending.acquire(blocking=False):
            try:
                self._is_asked = False
                if not self._has_ended:
                    self._send_waiting()
            finally:
                self._sending.release()

    def _send_waiting(self) -> None:
        with self._lock:
            lines = self._buffer.take()
            self._burst -= len(lines)
        if lines:
            self._channel.send(Kind.LINES, self._call, _encode(lines))

    def finish(self) -> None:
        with self._lock:
            ticker = self._ticker
            self._finish_all()
        if ticker is not None:
            ticker.cancel()
        with self._sending:
            self._send_waiting()
            self._has_ended = True
