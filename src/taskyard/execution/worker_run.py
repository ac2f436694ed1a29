"""`current_run()` inside a worker process: what it says goes over the wire, and reaches the run it stands for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

import msgspec

from taskyard.execution.channel import Channel
from taskyard.execution.context import BaseRun
from taskyard.execution.progress_values import PROGRESS_INTERVAL_S, clamp_fraction, clip_text, finite_number
from taskyard.execution.run_lines import AttemptLines, utc_now
from taskyard.execution.wire import Kind
from taskyard.execution.worker_lines import WorkerLines
from taskyard.model.attempt import Artifact
from taskyard.model.execution import Fact
from taskyard.model.task import Claim, TaskRecord
from taskyard.ports.executor import RunHandle

_decode_record = msgspec.msgpack.Decoder(TaskRecord).decode


RunCard = tuple[bytes, int, int, str | None]
"""A run as it crosses to a worker: the record as msgpack (a tenth of the price of its pickle), attempt, token, and the
folder for its artifacts."""

Call = tuple[Callable[..., Any] | int, tuple[Any, ...], dict[str, Any], RunCard | None, bool]
"""What a CALL frame holds: function, arguments, the run it is part of, and whether that run's record goes before the
other arguments. A function that this worker has been given before is named by the place it has among the new ones."""


def card_of(run: RunHandle) -> RunCard:
    claim = run.claim
    return msgspec.msgpack.encode(run.remote_record), claim.attempt, claim.token, run.artifact_folder


class WorkerRun(BaseRun):
    """Progress is thinned out here, so that a tight loop of reports costs neither side anything."""

    def __init__(self, card: RunCard, call: int, channel: Channel) -> None:
        record, attempt, token, self._folder = card
        self.claim = Claim(_decode_record(record), attempt, token)
        self._call, self._channel = call, channel
        self._lock = threading.Lock()
        self._latest: tuple[Any, Any, Any, dict[str, Fact]] | None = None
        self._sent_mono = float("-inf")
        self._ticker: threading.Timer | None = None

    @property
    def is_cancelled(self) -> bool:
        return self._channel.is_canceled(self._call)

    @property
    def artifact_folder(self) -> str | None:
        return self._folder

    def now(self) -> datetime:
        return utc_now()

    def report_progress(self, fraction: Any, message: Any, rate: Any, facts: dict[str, Fact]) -> None:
        self._latest = (fraction, message, rate, facts)
        wait_s = self._sent_mono + PROGRESS_INTERVAL_S - time.monotonic()
        if wait_s <= 0:
            self._send_latest()
        elif self._ticker is None:
            # Code that falls silent now must still have its last word heard.
            self._ticker = threading.Timer(wait_s, self._tick)
            self._ticker.daemon = True
            self._ticker.start()

    def save_checkpoint(self, text: str) -> None:
        self._saved_here = text
        self._say(Kind.CHECKPOINT, text)

    def add_remark(self, text: object) -> None:
        self._say(Kind.NOTE, clip_text(text))

    def keep_artifact(self, artifact: Artifact) -> None:
        self._say(Kind.ARTIFACT, msgspec.msgpack.encode(artifact))

    def _make_lines(self) -> AttemptLines:
        return WorkerLines(self._call, self._channel)

    def _say(self, kind: Kind, said: str | bytes) -> None:
        """Not after the end: a thread that the code left behind may still speak, and the next call has begun."""
        with self._lock:
            if not self.has_ended:
                self._channel.send(kind, self._call, said)

    def _tick(self) -> None:
        self._ticker = None
        self._send_latest()

    def _send_latest(self) -> None:
        with self._lock:
            latest, self._latest = self._latest, None
            if latest is None or self.has_ended:
                return
            self._sent_mono = time.monotonic()
            fraction, message, rate, facts = latest
            said = (clamp_fraction(fraction), clip_text(message), finite_number(rate), facts)
            self._channel.send(Kind.PROGRESS, self._call, said)

    def end(self) -> None:
        """The last word goes out before the result does."""
        ticker = self._ticker
        if ticker is not None:
            ticker.cancel()
        self._send_latest()
        if self._lines is not None:
            self._lines.finish()
        with self._lock:
            self.has_ended = True
