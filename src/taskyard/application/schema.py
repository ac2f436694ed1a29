"""The tables of a store that is not open: their version, and bringing them up to date."""

from __future__ import annotations

from taskyard.application.documents import Document
from taskyard.application.errors import NothingToMigrate, StoreNotShared
from taskyard.application.opening import check_write_lock, describe_store
from taskyard.ports.clock import SystemClock
from taskyard.ports.store import MigratingStore, Schema
from taskyard.settings import make_store
from taskyard.yard import Yard


class SchemaDocument(Document, frozen=True, kw_only=True):
    """The version of the tables before and after the call, 0 if there were none, and the newest that this program
    knows. `applied` and `pending` name migrations, and the bundle if it was replaced or is outdated."""

    before: int
    after: int
    newest: int
    applied: tuple[str, ...] = ()
    pending: tuple[str, ...] = ()


async def schema_status(yard: Yard) -> SchemaDocument:
    """Look at the tables and change nothing. Raises `StoreNotShared`, `NothingToMigrate`, `StoreTooNew`."""
    found = await _migrating_store(yard).schema()
    return SchemaDocument(before=found.version, after=found.version, newest=found.newest, pending=found.pending)


async def migrate(yard: Yard) -> SchemaDocument:
    """Bring the tables up to date, in one transaction. Raises `WriteLockHeld` as well."""
    store = _migrating_store(yard)
    check_write_lock(yard)
    found: Schema = await store.migrate()
    return SchemaDocument(before=found.version, after=found.newest, newest=found.newest, applied=found.pending)


def _migrating_store(yard: Yard) -> MigratingStore:
    name = describe_store(yard)
    if name == "memory://":
        raise StoreNotShared
    store = make_store(yard.where, SystemClock()) if yard.where is None or isinstance(yard.where, str) else yard.where
    if not isinstance(store, MigratingStore):
        raise NothingToMigrate(name)
    return store
