"""The audit record in SQLite: written in the transaction of the command it records, and read."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import apsw

from taskyard.model.audit import PYTHON, AuditEntry, AuditFilter, is_worth_keeping, split_actor
from taskyard.stores.records import AUDIT, SQLITE, to_us

_COLUMNS = tuple(name for name in AUDIT.columns if name != "id")
_INSERT = f"INSERT INTO audit ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))}) ON CONFLICT (uuid) DO "
_ADD = _INSERT + "UPDATE SET matched = matched + excluded.matched, changed = changed + excluded.changed"
_REPLACE = _INSERT + (
    "UPDATE SET matched = excluded.matched, changed = excluded.changed, is_finished = excluded.is_finished, "
    "details = excluded.details"
)
_to_counted_row = AUDIT.writer(SQLITE, _COLUMNS, {"matched": "matched", "changed": "changed"}, "matched, changed")
_to_entry = AUDIT.reader(SQLITE)


def note(conn: apsw.Connection, entry: AuditEntry | None, matched: int, changed: int) -> None:
    """A command has looked at some tasks, and changed some of them."""
    if entry is not None and is_worth_keeping(entry, changed):
        conn.execute(_ADD, _to_counted_row(entry, matched, changed))


def put(conn: apsw.Connection, entry: AuditEntry) -> None:
    conn.execute(_REPLACE, _to_counted_row(entry, entry.matched, entry.changed))


def list_audit(conn: apsw.Connection, where: AuditFilter, before_id: int | None, limit: int) -> list[AuditEntry]:
    terms, values = ["id < ?"], list[Any]([1 << 62 if before_id is None else before_id])
    via, actor = (None, None) if where.actor is None else split_actor(where.actor)
    for term, value in (
        ("actor = ?", actor),
        ("via = ?", None if via == PYTHON else via),
        ("command IN (SELECT value FROM json_each(?))", json.dumps(where.commands) if where.commands else None),
        ("kind IN (SELECT value FROM json_each(?))", json.dumps(where.kinds) if where.kinds else None),
        ("target = ?", where.target),
        ("at >= ?", None if where.since is None else to_us(where.since)),
    ):
        if value is not None:
            terms.append(term)
            values.append(value)
    sql = f"SELECT {', '.join(AUDIT.columns)} FROM audit WHERE {' AND '.join(terms)} ORDER BY id DESC LIMIT ?"
    return [_to_entry(row) for row in conn.execute(sql, (*values, limit))]


def prune(conn: apsw.Connection, before: datetime, limit: int) -> int:
    conn.execute(
        "DELETE FROM audit WHERE id IN (SELECT id FROM audit WHERE at < ? ORDER BY at, id LIMIT ?)",
        (to_us(before), limit),
    )
    return conn.changes()
