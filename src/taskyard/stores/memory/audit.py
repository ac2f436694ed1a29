"""The audit record in memory."""

from __future__ import annotations

from datetime import datetime
from itertools import islice

import msgspec

from taskyard.model.audit import AuditEntry, AuditFilter, counted, is_worth_keeping


class AuditLog:
    def __init__(self) -> None:
        self._entries: dict[str, AuditEntry] = {}
        """By call, oldest first."""
        self._last = 0

    def note(self, entry: AuditEntry | None, matched: int, changed: int) -> None:
        """A command has looked at some tasks, and changed some of them."""
        if entry is not None and is_worth_keeping(entry, changed):
            known = self._entries.get(entry.uuid) or self._numbered(entry)
            self._entries[entry.uuid] = counted(known, matched, changed)

    def put(self, entry: AuditEntry) -> None:
        known = self._entries.get(entry.uuid)
        number = self._numbered(entry).id if known is None else known.id
        self._entries[entry.uuid] = msgspec.structs.replace(entry, id=number)

    def _numbered(self, entry: AuditEntry) -> AuditEntry:
        self._last += 1
        return msgspec.structs.replace(entry, id=self._last, matched=0, changed=0)

    def list_all(self, where: AuditFilter, before_id: int | None, limit: int) -> list[AuditEntry]:
        found = (
            entry
            for entry in reversed(self._entries.values())
            if (before_id is None or entry.id < before_id) and where.matches(entry)
        )
        return list(islice(found, limit))

    def prune(self, before: datetime, limit: int) -> int:
        old = sorted((entry for entry in self._entries.values() if entry.at < before), key=lambda e: (e.at, e.id))
        for entry in old[:limit]:
            del self._entries[entry.uuid]
        return min(len(old), limit)
