"""Numbered migrations: `sql/<database>/NNNN_name.sql`, applied in order, each once."""

from __future__ import annotations

from importlib import resources
from importlib.resources.abc import Traversable

from taskyard.model.state import TaskState, sql_guard
from taskyard.ports.store import Schema


def migrations(database: str) -> list[tuple[int, str]]:
    """(number, SQL) of every migration for `database`, in order."""
    found = _files(database)
    return [(int(file.name[:4]), _fill(file.read_text(encoding="utf-8"))) for file in found]


def schema_at(version: int, database: str) -> Schema:
    """What lies between that version and the newest."""
    names = [file.name.removesuffix(".sql") for file in _files(database)]
    pending = tuple(name for name in names if int(name[:4]) > version)
    return Schema(version=version, newest=int(names[-1][:4]), pending=pending)


def _files(database: str) -> list[Traversable]:
    folder = resources.files("taskyard.stores") / "sql" / database
    return sorted((f for f in folder.iterdir() if f.name.endswith(".sql")), key=lambda file: file.name)


def _fill(sql: str) -> str:
    created = f"'{TaskState.CREATED}'"
    return sql.replace("{{illegal_start}}", sql_guard(created, "NEW.state")).replace(
        "{{illegal_move}}", sql_guard("OLD.state", "NEW.state")
    )
