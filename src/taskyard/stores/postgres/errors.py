"""What goes wrong at the driver or the server, by our names."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import asyncpg

from taskyard.errors import (
    InvalidInput,
    OutcomeUnknown,
    StoreBusy,
    StoreDenied,
    StoreFull,
    StoreUnavailable,
    StoreUnreachable,
    StoreUrlInvalid,
    hide_password,
)

LOST = (
    OSError,
    asyncpg.InterfaceError,
    asyncpg.PostgresConnectionError,
    asyncpg.OperatorInterventionError,  # the server was shut down, or a query canceled
    asyncpg.InternalServerError,
    asyncpg.InternalClientError,
)
"""After one of these it is not known what became of a statement that was sent. TimeoutError is an OSError."""


_NO_TEXT = (asyncpg.CharacterNotInRepertoireError, asyncpg.UntranslatableCharacterError)
"""A character that the database cannot store, such as NUL."""

_DROPPED = (asyncpg.UndefinedTableError, asyncpg.UndefinedFunctionError, asyncpg.InvalidSchemaNameError)
"""All that we ask for was made before anything is asked."""

REPLACED_TRIES = 5
"""How often a call is sent that comes to a routine which does not exist. While the SQL bundle is replaced that happens
once or twice; after that the routine is missing."""

_OPTIONS_REFUSED = (
    asyncpg.UndefinedObjectError,
    asyncpg.InvalidParameterValueError,
    asyncpg.CantChangeRuntimeParamError,
)
"""What follows the ? and is not for the driver is a setting for the server, which does not know it."""

NO_CONNECTION_LEFT = (
    "the server has no connection left for us: raise max_connections or the limit of the user, lower DB_POOL_SIZE and "
    "DB_MAX_OVERFLOW, or run fewer nodes"
)


@contextmanager
def connecting(url: str) -> Iterator[None]:
    try:
        yield
    except (asyncpg.InvalidPasswordError, asyncpg.InvalidAuthorizationSpecificationError) as exc:
        raise StoreDenied(
            hide_password(url), describe(exc), "correct the user and the password in the address"
        ) from exc
    except asyncpg.InvalidCatalogNameError as exc:
        name = urlsplit(url).path.lstrip("/") or urlsplit(url).username or ""
        hint = f"create it with `createdb {name}`, or correct the address"
        raise StoreDenied(hide_password(url), describe(exc), hint) from exc
    except asyncpg.InsufficientPrivilegeError as exc:
        raise StoreDenied(hide_password(url), describe(exc), "give this user the right to connect") from exc
    except asyncpg.ClientConfigurationError as exc:
        raise StoreUrlInvalid(url, f"correct its options: {hide_password(describe(exc))}") from exc
    except _OPTIONS_REFUSED as exc:
        raise StoreDenied(hide_password(url), describe(exc), "correct the options after the ? in the address") from exc
    except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError) as exc:
        raise StoreUnreachable(hide_password(url), describe(exc), *_list_hints(url, exc)) from exc


def _list_hints(url: str, exc: Exception) -> list[str]:
    """What to correct, unless it is that the server is away."""
    parts = urlsplit(url)
    is_missing_file = isinstance(exc, FileNotFoundError) and "ssl" in parts.query
    if isinstance(exc, ssl.SSLError) or is_missing_file or "SSL upgrade" in str(exc):
        return ["correct sslmode and the certificates in the address, or set up TLS at the server"]
    if isinstance(exc, socket.gaierror):
        hint = "correct the host in the address"
        if "@" not in parts.netloc and "@" in url:
            hint += "; if it is a part of the password, write %2F for a / in that, %23 for a #, %3F for a ?"
        return [hint]
    if isinstance(exc, asyncpg.TooManyConnectionsError):
        return [NO_CONNECTION_LEFT]
    if isinstance(exc, asyncpg.TargetServerAttributeNotMatched):
        return ["correct that option, or name all of the servers, as in ?host=a,b&port=5432,5432"]
    return []


@contextmanager
def typed_errors(url: str, *, writes: bool = False) -> Iterator[None]:
    """What goes wrong in a statement, by our names. Of a statement that writes, the outcome may not be known."""
    try:
        yield
    except asyncpg.DiskFullError as exc:
        raise StoreFull(hide_password(url)) from exc
    except (asyncpg.LockNotAvailableError, asyncpg.TransactionRollbackError) as exc:
        raise busy(url) from exc
    except _NO_TEXT as exc:
        raise InvalidInput(f"this cannot be stored: {describe(exc)}") from exc
    except asyncpg.ReadOnlySQLTransactionError as exc:
        raise read_only(url) from exc
    except asyncpg.InsufficientPrivilegeError as exc:
        hint = "give this user all rights on the schema taskyard, or use the user that owns it"
        raise StoreDenied(hide_password(url), describe(exc), hint) from exc
    except _DROPPED as exc:
        hint = "what is Taskyard's was dropped; restore it from a backup, or make it anew and empty: `taskyard migrate`"
        raise StoreUnavailable(f"the store {hide_password(url)} refused: {describe(exc)}; {hint}") from exc
    except LOST as exc:
        if writes:
            raise OutcomeUnknown(describe(exc)) from exc
        raise StoreUnavailable(f"the store {hide_password(url)} did not answer: {describe(exc)}") from exc
    except asyncpg.PostgresError as exc:
        raise StoreUnavailable(f"the store {hide_password(url)} refused: {describe(exc)}") from exc


def is_replaced(error: BaseException | None, n: int) -> bool:
    """Whether the call with this number, counted from 0, is to be sent again: it came to a routine that does not exist,
    as when the SQL bundle is replaced while the call is in flight. Nothing of the call was written: no routine calls
    another after its commit."""
    # The server has two ways to say it. The second has no code of its own; internal messages are never translated.
    is_gone = isinstance(error, asyncpg.UndefinedFunctionError) or (
        isinstance(error, asyncpg.InternalServerError) and str(error.message).startswith(_GONE)
    )
    return is_gone and n + 1 < REPLACED_TRIES


_GONE = "cache lookup failed for function"


def busy(url: str) -> StoreBusy:
    return StoreBusy(hide_password(url), "by another session; see whether `taskyard doctor` names it")


def read_only(url: str) -> StoreDenied:
    hint = "give the address of the primary, or of all servers with ?host=…&target_session_attrs=read-write"
    return StoreDenied(hide_password(url), "it is read-only, as a standby is", hint)


def describe(exc: BaseException) -> str:
    """In one line. What the server has to say in detail may be a row, with all that is in it."""
    if type(exc) is asyncpg.InternalClientError:
        return "the connection was lost"  # the driver tells of its own states
    if isinstance(exc, asyncpg.TargetServerAttributeNotMatched):
        return "no server there is what target_session_attrs asks for"
    if isinstance(exc, asyncpg.PostgresError) and exc.message:
        return str(exc.message)
    return str(exc) or ("no answer in time" if isinstance(exc, TimeoutError) else type(exc).__name__)
