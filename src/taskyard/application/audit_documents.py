"""Documents of the audit record."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from taskyard.application.documents import Document
from taskyard.model.audit import TargetKind


class AuditDocument(Document, frozen=True, kw_only=True):
    """One call of a person. `via` says how it was asked: `cli`, `http` or `python`. `target` is the id of a task, the
    name of a queue, schedule, node or device, or an account; for a filter, which is in `details` as `where`, it is the
    queue that the filter names, or empty. `matched` tasks were looked at, `changed` of them were changed. `finished` is
    false while a command for many tasks runs, and stays so if it was interrupted."""

    number: int
    at: datetime
    actor: str
    via: str
    command: str
    kind: TargetKind
    target: str
    reason: str
    details: dict[str, Any]
    matched: int
    changed: int
    finished: bool


class AuditPage(Document, frozen=True, kw_only=True):
    """Entries, newest first. The next page begins before the number `next`; null if this is the last one."""

    entries: tuple[AuditDocument, ...]
    next: int | None
