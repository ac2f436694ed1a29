"""The store in one SQLite file: the embedded default. Several processes of one machine may share it."""

from taskyard.stores.sqlite.store import SqliteStore

__all__ = ["SqliteStore"]
