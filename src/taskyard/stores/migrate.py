"""Numbered migrations: `sql/<database>/NNNN_name.sql`, applied in order, each once."""

from __future__ import annotations

from importlib import resources

from taskyard.model.state import TaskState, sql_guard


def migrations(database: str) -> list[tuple[int, str]]:
    """(number, SQL) of every migration for `database`, in order."""
    folder = resources.files("taskyard.stores") / "sql" / database
    found = sorted(f for f in folder.iterdir() if f.name.endswith(".sql"))  # type: ignore[type-var]
    return [(int(file.name[:4]), _fill(file.read_text(encoding="utf-8"))) for file in found]


def _fill(sql: str) -> str:
    created = f"'{TaskState.CREATED}'"
    return sql.replace("{{illegal_start}}", sql_guard(created, "NEW.state")).replace(
        "{{illegal_move}}", sql_guard("OLD.state", "NEW.state")
    )
