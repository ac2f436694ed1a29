"""Adding tasks on a connection of the user's own, inside of the transaction that is open there.

What a connection may be: asyncpg's, or SQLAlchemy's asynchronous connection or session over asyncpg. SQLAlchemy itself
is never imported; it is known by what it can do.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import asyncpg
import msgspec

from taskyard.errors import (
    InvalidInput,
    NotInTransaction,
    OtherDatabase,
    StaleTransaction,
    StoreDenied,
    StoreUnavailable,
    UnusableConnection,
    hide_password,
)
from taskyard.model.task import DedupeScope, TaskRecord
from taskyard.ports.store import Add, Added
from taskyard.stores.postgres.connection import Connection
from taskyard.stores.postgres.errors import describe, is_replaced, typed_errors
from taskyard.stores.postgres.rows import find_unstorable
from taskyard.stores.postgres.turn import answered
from taskyard.stores.records import NEW_TASK_FIELDS, POSTGRES, TASK

ROUTINE = "taskyard.submit_1("
"""The server names it like this if it does not exist: Taskyard is not in this database. If another routine does not
exist, the bundle is being replaced."""

SUBMIT = f"SELECT {ROUTINE}$1)"

REPLACED = (
    "the routines of the store were replaced by those of another Taskyard during this submit; nothing of the "
    "transaction is stored. Roll it back and run it again"
)

CLOSED = "this connection is closed; submit while it is open"

AUTOCOMMIT = (
    "no transaction is open on this connection: at its isolation level, AUTOCOMMIT, `begin()` opens none, so give it "
    "another"
)

OTHER_LOOP = (
    "a connection belongs to the event loop it was made on, and this yard is open on another; give one that was made "
    "on the yard's own"
)

LOOK_S, LOOK_CAP_S = 0.002, 0.05
"""How long after a submit it is looked for the first time whether its transaction has ended, and how far apart the
looks, each twice as long as the last, may come to be."""


class Transactions:
    """Notices when transactions that we submitted in have ended, and calls `ended`. The driver knows without asking the
    server. An end right before another transaction may escape it: those who would hear of it look by themselves."""

    def __init__(self, ended: Callable[[], None]) -> None:
        self._ended = ended
        self._open: set[Connection] = set()
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, conn: Connection) -> None:
        self._open.add(conn)
        self._look_after(LOOK_S)

    def close(self) -> None:
        self._open.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _look_after(self, pause_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(pause_s, self._look, pause_s)

    def _look(self, pause_s: float) -> None:
        over = {conn for conn in self._open if _is_over(conn)}
        self._open -= over
        if over:
            self._ended()
        if self._open:
            self._look_after(min(2 * pause_s, LOOK_CAP_S))


def _is_over(conn: Connection) -> bool:
    try:
        return conn.is_closed() or not conn.is_in_transaction()
    except asyncpg.InterfaceError:
        return True  # it has gone back to its pool


async def add_within(
    given: object, add: Add, now: datetime, *, url: str, where: str, transactions: Transactions
) -> list[Added]:
    """`where` is which database the store at `url` is."""
    said, begin = encode(add, where), _show_begin(given)
    with _named_errors(url, begin=begin):
        conn = await _find_connection(given)
        if not conn.is_in_transaction():
            raise NotInTransaction(begin=begin)
        answer = msgspec.json.decode(await conn.fetchval(SUBMIT, said))
    if answer.get("why") == "elsewhere":
        raise OtherDatabase(hide_password(url))
    added = answered(add, answer, now)
    if isinstance(added, Exception):
        raise added
    transactions.watch(conn)
    return added


def encode(add: Add, where: str) -> str:
    for record in add.records:
        if (why := find_unstorable(record)) is not None:
            raise InvalidInput(f"task {record.uuid} cannot be stored: {why}")
    said: dict[str, Any] = {"where": where, "dedupe": add.dedupe, "tasks": [_task(record) for record in add.records]}
    if (claim := add.parent) is not None:
        said["parent"] = {"id": claim.record.id, "token": claim.token, "attempt": claim.attempt}
    return msgspec.json.encode(said).decode()


_to_new_row = TASK.writer(POSTGRES, NEW_TASK_FIELDS)


def _task(record: TaskRecord) -> dict[str, Any]:
    task = dict(zip(NEW_TASK_FIELDS, _to_new_row(record), strict=True))
    # The other scopes never come here, except as the default, `pending`.
    is_key_idle = record.dedupe_scope is DedupeScope.KEY_IDLE
    return task | {"dedupe_scope": DedupeScope.KEY_IDLE} if is_key_idle else task


async def _find_connection(given: Any) -> Connection:
    """asyncpg's connection inside of what was given."""
    if isinstance(given, asyncpg.Connection):  # or one of a pool, which says that it is one
        if given.is_closed():
            raise UnusableConnection(CLOSED)
        _refuse_other_loop(given)
        return given
    if not _awaits(given, "get_raw_connection") and not _awaits(given, "connection"):
        raise UnusableConnection(_unknown(given))
    try:
        return await _find_inside(given)
    except Exception as exc:
        if _could_not_connect(exc):
            raise UnusableConnection(_unconnected(exc)) from exc
        if not _is_sqlalchemys(exc):
            raise
        raise UnusableConnection(_unusable(exc)) from exc


async def _find_inside(given: Any) -> Connection:
    """That of SQLAlchemy's."""
    begin = _show_begin(given)
    if not _awaits(given, "get_raw_connection"):
        given = await given.connection()  # that of a session, in the transaction it has or begins now
    if given.closed:
        raise UnusableConnection(CLOSED)
    raw = await given.get_raw_connection()
    conn = raw.driver_connection
    if not isinstance(conn, asyncpg.Connection):
        raise UnusableConnection(_unknown(conn))
    _refuse_other_loop(conn)
    if not conn.is_in_transaction():
        # SQLAlchemy begins its transaction with the first statement of its own.
        await given.exec_driver_sql("SELECT 1")
    if not conn.is_in_transaction() and getattr(raw.dbapi_connection, "autocommit", False):
        raise NotInTransaction(AUTOCOMMIT, begin)
    return conn


def _show_begin(given: object) -> str:
    """How a transaction is begun on it."""
    if _awaits(given, "get_raw_connection"):
        return "connection.begin()"
    return "session.begin()" if _awaits(given, "connection") else "connection.transaction()"


def _refuse_other_loop(conn: Any) -> None:
    """Before anything is asked: an answer would be waited for where it never comes."""
    if conn._loop is not asyncio.get_running_loop():
        raise UnusableConnection(OTHER_LOOP)


def _awaits(given: object, name: str) -> bool:
    return inspect.iscoroutinefunction(getattr(type(given), name, None))


def _is_sqlalchemys(exc: Exception) -> bool:
    return type(exc).__module__.partition(".")[0] == "sqlalchemy"


def _could_not_connect(exc: Exception) -> bool:
    """Whether an engine of SQLAlchemy's has no connection to give: its database refuses, which is an error of no
    statement, or is not there, or all of its pool are in use, for which it has a TimeoutError of its own."""
    if _is_sqlalchemys(exc):
        return type(exc).__name__ == "TimeoutError" or getattr(exc, "statement", "") is None
    return isinstance(exc, OSError | asyncpg.PostgresError)


def _unknown(given: object) -> str:
    give = (
        "give a connection of asyncpg's, or an AsyncConnection or AsyncSession of SQLAlchemy's on postgresql+asyncpg://"
    )
    if isinstance(given, asyncpg.Pool):
        give = "give one of its connections, as in `async with pool.acquire() as connection, connection.transaction():`"
    return f"{type(given).__module__}.{type(given).__qualname__} cannot carry a task; {give}"


def _unusable(exc: Exception) -> str:
    return f"this connection cannot be used ({_first_line(exc)}); submit while it is open and does nothing else"


def _unconnected(exc: Exception) -> str:
    why = _first_line(getattr(exc, "orig", None) or exc)
    return (
        f"your own engine gives no connection ({why}); see to its address, its server and its pool, or leave "
        f"`connection` out and the task is stored at once"
    )


def _first_line(exc: Exception) -> str:
    return str(exc).partition("\n")[0]


@contextmanager
def _named_errors(url: str, *, begin: str) -> Iterator[None]:
    """What goes wrong on a connection that is not ours."""
    with typed_errors(url):
        try:
            yield
        except asyncpg.InterfaceError as exc:
            raise UnusableConnection(_unusable(exc)) from exc
        except asyncpg.InFailedSQLTransactionError:
            why = "the transaction on this connection has failed and must be rolled back"
            raise NotInTransaction(why, begin) from None
        except asyncpg.InvalidSchemaNameError as exc:
            raise OtherDatabase(hide_password(url)) from exc
        except (asyncpg.UndefinedFunctionError, asyncpg.InternalServerError) as exc:
            if not is_replaced(exc, 0):
                raise
            if ROUTINE in str(exc):
                raise OtherDatabase(hide_password(url)) from exc
            raise StoreUnavailable(REPLACED) from exc
        except asyncpg.ReadOnlySQLTransactionError as exc:
            why = "the transaction on this connection is read-only; submit in one that may write"
            raise UnusableConnection(why) from exc
        except asyncpg.SerializationError as exc:
            raise StaleTransaction from exc
        except asyncpg.InsufficientPrivilegeError as exc:
            hint = "let the user of this connection submit with `GRANT USAGE ON SCHEMA taskyard TO …`"
            raise StoreDenied(hide_password(url), describe(exc), hint) from exc
