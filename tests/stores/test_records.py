"""The one description of a record against the databases that store it."""

from collections.abc import Iterator
from pathlib import Path

import apsw
import asyncpg
import pytest

from taskyard.model.task import Mark
from taskyard.ports.clock import SystemClock
from taskyard.stores.postgres import PostgresStore
from taskyard.stores.records import (
    ARTIFACT,
    ATTEMPT,
    AUDIT,
    CARRIED_FIELDS,
    CLAIM_FIELDS,
    LINE,
    NEW_TASK_FIELDS,
    POSTGRES,
    RELATIONS,
    SQLITE,
    TASK,
    Description,
    Dialect,
    Kind,
)
from taskyard.stores.sqlite import SqliteStore

INTEGERS = {"smallint", "integer", "bigint"}

Columns = dict[str, tuple[str, bool]]
"""By name: the type, and whether it may be null."""


def described(description: Description, names: Iterator[str] | tuple[str, ...], dialect: Dialect) -> Columns:
    fields = (description.fields[name] for name in names)
    return {field.name: (dialect.types[field.kind], field.is_nullable) for field in fields}


@pytest.fixture
async def sqlite(tmp_path: Path) -> apsw.Connection:
    store = SqliteStore(tmp_path / "work.db", clock=SystemClock())
    await store.open()
    await store.close()
    return apsw.Connection(str(tmp_path / "work.db"), flags=apsw.SQLITE_OPEN_READONLY)


def sqlite_columns(conn: apsw.Connection, table: str) -> Columns:
    rows = conn.execute(f"SELECT name, type, \"notnull\" OR pk FROM pragma_table_info('{table}')")
    return {str(name): (str(kind), not is_set) for name, kind, is_set in rows}


async def test_sqlite_has_the_fields_of_a_task(sqlite):
    """Every field of a task is a column of SQLite, with its type; one column more is the store's own."""
    found = sqlite_columns(sqlite, "task")
    assert found.pop("fifo_bucket") == ("TEXT", True)
    assert found == described(TASK, TASK.columns, SQLITE)


async def test_sqlite_has_the_fields_of_an_attempt(sqlite):
    """Every field of an attempt is a column of SQLite; a row is written when the attempt has finished."""
    found = sqlite_columns(sqlite, "attempt")
    assert found.pop("task") == ("INTEGER", False)
    assert found.pop("finished_at") == ("INTEGER", False)
    assert found.pop("account") == ("TEXT", True)  # for the history of devices
    assert found == described(ATTEMPT, tuple(name for name in ATTEMPT.columns if name != "finished_at"), SQLITE)


OUTPUTS = pytest.mark.parametrize(("table", "description"), [("attempt_line", LINE), ("artifact", ARTIFACT)])


@OUTPUTS
async def test_sqlite_has_the_fields_of_outputs(sqlite, table, description):
    """Every field of a log line and of an artifact is a column of SQLite, beside its task and its attempt."""
    found = sqlite_columns(sqlite, table)
    assert found.pop("task") == found.pop("token") == ("INTEGER", False)
    assert found == described(description, description.columns, SQLITE)


@OUTPUTS
async def test_postgresql_has_the_fields_of_outputs(postgres, table, description):
    """The same for PostgreSQL."""
    found = await postgres_columns(postgres, table)
    assert found.pop("task") == found.pop("token") == ("bigint", False)
    assert found == described(description, description.columns, POSTGRES)


@pytest.fixture
async def postgres(postgres_url: str):
    store = PostgresStore(postgres_url, clock=SystemClock())
    await store.open()
    await store.close()
    conn = await asyncpg.connect(postgres_url)
    yield conn
    await conn.close()


async def postgres_columns(conn: asyncpg.Connection, table: str) -> Columns:
    rows = await conn.fetch(
        "SELECT attname, format_type(atttypid, NULL), NOT attnotnull FROM pg_attribute "
        "WHERE attrelid = $1::regclass AND attnum > 0 AND NOT attisdropped",
        f"taskyard.{table}",
    )
    return {name: ("bigint" if kind in INTEGERS else kind, nullable) for name, kind, nullable in rows}


async def test_postgresql_has_the_fields_of_a_task(postgres):
    """Every field of an unfinished task is a column of `task` or of `task_relation`."""
    relations = await postgres_columns(postgres, "task_relation")
    assert relations.pop("id") == ("bigint", False)
    assert relations == described(TASK, RELATIONS, POSTGRES)
    found = await postgres_columns(postgres, "task")
    assert found.pop("fifo_bucket") == ("text", True)
    assert found.pop("lane") == ("text", False)
    assert found == described(TASK, TASK.select(without=Mark.RELATION | Mark.FINAL), POSTGRES)


async def test_postgresql_has_the_fields_of_a_finished_task(postgres):
    """Every field that a finished task keeps is a column of `finished`."""
    found = await postgres_columns(postgres, "finished")
    assert found.items() >= described(TASK, CARRIED_FIELDS, POSTGRES).items()
    kept = set(TASK.select(without=Mark.RELATION | Mark.LIVE)) - {"updated_at"}
    own = {"previous_state", "run_token", "run_node", "run_worker_pid", "run_device"}
    assert found.keys() == kept | own


@pytest.mark.parametrize(("name", "fields"), [("new_tasks_1", NEW_TASK_FIELDS), ("claims_1", CLAIM_FIELDS)])
async def test_wire_types_have_the_fields_in_order(postgres, name, fields):
    """Composite types list the fields of the description in its order: Python encodes and decodes by position."""
    rows = await postgres.fetch(
        "SELECT attname, format_type(atttypid, NULL) FROM pg_attribute "
        "WHERE attrelid = (SELECT typrelid FROM pg_type WHERE typname = $1) AND attnum > 0 ORDER BY attnum",
        name,
    )
    assert tuple(row[0] for row in rows) == fields
    assert all(kind.endswith("[]") for _, kind in rows)


def test_a_cold_field_needs_no_column():
    """Fields that no rule reads are one JSON column."""
    assert TASK.fields["extra"].kind is Kind.DOCUMENT


async def test_sqlite_has_the_fields_of_an_audit_entry(sqlite):
    """Every field of an entry of the audit record is a column of SQLite."""
    assert sqlite_columns(sqlite, "audit") == described(AUDIT, AUDIT.columns, SQLITE)


async def test_postgresql_has_the_fields_of_an_audit_entry(postgres):
    """Every field of an entry of the audit record is a column of PostgreSQL."""
    assert await postgres_columns(postgres, "audit") == described(AUDIT, AUDIT.columns, POSTGRES)
