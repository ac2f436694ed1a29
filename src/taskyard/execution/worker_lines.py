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
    """Sends lines to the host: each at once, and from `BURST_LINES` on together at the end of each `LINES_EVERY_S`."""

    def __init__(self, call: int, channel: Channel) -> None:
        super().__init__(utc_now)
        self._call, self._channel = call, channel
        self._burst = 0
        self._burst_until_mono = float("-inf")
        self._ticker: threading.Timer | None = None
        self._has_ended = False

    def _flush_soon(self) -> None:
        if self._has_ended or self._channel.is_sending_here:
            return  # a finalizer prints in the middle of a frame: the line goes with the next one
        now_mono = time.monotonic()
        if now_mono >= self._burst_until_mono:
            self._burst, self._burst_until_mono = BURST_LINES, now_mono + LINES_EVERY_S
        if self._burst > 0:
            self._send()
        elif self._ticker is None:
            self._ticker = threading.Timer(self._burst_until_mono - now_mono, self._tick)
            self._ticker.daemon = True
            self._ticker.start()

    def _tick(self) -> None:
        with self._lock:
            self._ticker = None
            if not self._has_ended:
                self._send()

    def _send(self) -> None:
        lines = self._buffer.take()
        if lines:
            self._burst -= len(lines)
            self._channel.send(Kind.LINES, self._call, _encode(lines))

    def finish(self) -> None:
        with self._lock:
            if self._ticker is not None:
                self._ticker.cancel()
            self._finish_all()
            self._send()
            self._has_ended = True
