"""Documents of nodes."""

from __future__ import annotations

from datetime import datetime

from taskyard.application.documents import Document


class NodeDocument(Document, frozen=True, kw_only=True):
    """A process that runs tasks. `draining`: it was asked to take no more tasks. `stopping`: it is about to leave.
    `alive` is false if its process is dead, or if it has been silent for longer than its lease; `beat_at` is its last
    heartbeat, where nodes send any. `clock_ahead_s` is how far its clock was ahead of the store's when it joined."""

    name: str
    incarnation: str
    version: str
    host: str
    pid: int
    queues: tuple[str, ...]
    consumers: tuple[str, ...]
    running: int
    draining: bool
    stopping: bool
    alive: bool
    beat_at: datetime | None
    started_at: datetime | None
    clock_ahead_s: float | None


class DrainReceipt(NodeDocument, frozen=True, kw_only=True):
    """The node that was asked to drain, or to take tasks again. `acknowledged`: it has heard of it, or has left."""

    acknowledged: bool
