"""The store in a PostgreSQL database: any number of nodes on any number of machines.

All that is ours stands in the schema `taskyard`. What must be decided under a lock is decided in the database, by one
call that commits by itself (`sql/bundle`): no lock of ours ever waits for a client. The rest, deciding what a command
means and turning rows into records, is done here.
"""

from taskyard.stores.postgres.store import PostgresStore

__all__ = ["PostgresStore"]
