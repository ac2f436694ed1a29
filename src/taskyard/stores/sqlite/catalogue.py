"""The specifications of consumers in SQLite: written in the transactions of nodes, and read."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import apsw
import msgspec

from taskyard.model.catalogue import ConsumerSpec, SpecKey, StoredSpec, list_spare
from taskyard.model.node import Node
from taskyard.stores.records import from_us, to_us


def publish(conn: apsw.Connection, specs: Sequence[ConsumerSpec], now: datetime) -> None:
    """Store these, and forget what the nodes no longer need."""
    conn.executemany(
        "INSERT INTO consumer (name, hash, spec, seen_at) VALUES (?, ?, ?, ?) "
        "ON CONFLICT (name, hash) DO UPDATE SET seen_at = excluded.seen_at",
        [(spec.name, spec.hash, msgspec.json.encode(spec).decode(), to_us(now)) for spec in specs],
    )
    rows: Any = conn.execute("SELECT name, hash, seen_at FROM consumer").fetchall()
    if not rows:
        return
    nodes = [msgspec.json.decode(info, type=Node) for (info,) in _infos(conn)]
    keys = [SpecKey(name, hash_, from_us(seen_at)) for name, hash_, seen_at in rows]
    spare = [(key.name, key.hash) for key in list_spare(keys, nodes, now=now)]
    conn.executemany("DELETE FROM consumer WHERE name = ? AND hash = ?", spare)


def _infos(conn: apsw.Connection) -> list[tuple[str]]:
    rows: Any = conn.execute("SELECT info FROM node").fetchall()
    return rows  # type: ignore[no-any-return]


def see(conn: apsw.Connection, incarnation: str, now: datetime) -> None:
    """The node leaves or changes, and has had its specifications until now."""
    conn.execute(
        "UPDATE consumer SET seen_at = ?2 WHERE (name, hash) IN ("
        "SELECT s.key, s.value FROM node, json_each(node.info, '$.specs') AS s WHERE node.incarnation = ?1)",
        (incarnation, to_us(now)),
    )


def list_specs(conn: apsw.Connection) -> list[StoredSpec]:
    rows: Any = conn.execute("SELECT spec, seen_at FROM consumer ORDER BY name, seen_at DESC, hash")
    return [
        StoredSpec(spec=msgspec.json.decode(spec, type=ConsumerSpec), seen_at=from_us(seen_at))
        for spec, seen_at in rows
    ]
