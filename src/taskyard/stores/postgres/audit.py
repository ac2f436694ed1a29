"""The audit record in PostgreSQL: entries as routines take them, and what is read."""

from __future__ import annotations

from typing import Any

import msgspec

from taskyard.model.audit import PYTHON, AuditEntry, AuditFilter, split_actor
from taskyard.stores.postgres.connection import Connection
from taskyard.stores.records import AUDIT, POSTGRES

PUT = "SELECT taskyard.put_audit_1($1)"
PRUNE = (
    "WITH gone AS (DELETE FROM taskyard.audit WHERE id IN ("
    "SELECT id FROM taskyard.audit WHERE at < least($1, now() - $2::interval) ORDER BY at, id LIMIT $3 "
    "FOR UPDATE SKIP LOCKED) RETURNING 1) "
    "SELECT count(*) FROM gone"
)

_to_entry = AUDIT.reader(POSTGRES)


def encode_entry(entry: AuditEntry | None) -> str | None:
    """As JSON of the columns. The details are text in it: they may hold what `json` of PostgreSQL cannot take out."""
    if entry is None:
        return None
    details = msgspec.json.encode(entry.details).decode()
    return msgspec.json.encode(msgspec.structs.asdict(entry) | {"details": details}).decode()


async def list_audit(conn: Connection, where: AuditFilter, before_id: int | None, limit: int) -> list[AuditEntry]:
    terms, values = ["id < $1"], list[Any]([1 << 62 if before_id is None else before_id])
    via, actor = (None, None) if where.actor is None else split_actor(where.actor)
    for term, value in (
        ("actor = $", actor),
        ("via = $", None if via == PYTHON else via),
        ("command = ANY ($::text[])", list(where.commands) or None),
        ("kind = ANY ($::text[])", list(where.kinds) or None),
        ("target = $", where.target),
        ("at >= $", where.since),
    ):
        if value is not None:
            values.append(value)
            terms.append(term.replace("$", f"${len(values)}"))
    columns = ", ".join(AUDIT.columns)
    sql = f"SELECT {columns} FROM taskyard.audit WHERE {' AND '.join(terms)} ORDER BY id DESC LIMIT {limit:d}"
    return [_to_entry(row) for row in await conn.fetch(sql, *values)]
