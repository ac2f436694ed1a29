"""Writes the checksums of the SQL that are committed: `migrations/SHA256SUMS` and `bundle/SHA256` of each database.

    .venv/bin/python scripts/seal_sql.py               # before the first release: whatever changed
    .venv/bin/python scripts/seal_sql.py --released    # after it: a bundle with a new VERSION, or a new migration

A released migration never changes: add another. A released bundle changes only with a new number in `bundle/VERSION`.
With `--released` the script refuses both, and writes only what is new.
"""

import sys
from pathlib import Path

from taskyard.stores.migrations import Bundle, Migration, list_migrations
from taskyard.stores.postgres import schema
from taskyard.stores.sqlite import place

STORES = Path(__file__).resolve().parent.parent / "src" / "taskyard" / "stores"

BUNDLES = {"sqlite": place.bundle, "postgres": schema.bundle}


def sums_of(migrations: list[Migration]) -> str:
    """In the form of sha256sum."""
    return "".join(f"{migration.checksum}  {migration.name}.sql\n" for migration in migrations)


def sum_of(bundle: Bundle) -> str:
    """The version, and the checksum of the rendered text."""
    return f"{bundle.version} {bundle.checksum}\n"


def seal(database: str, *, is_released: bool) -> None:
    sums, one = STORES / database / "sql/migrations/SHA256SUMS", STORES / database / "sql/bundle/SHA256"
    migrations, bundle = sums_of(list_migrations(database)), sum_of(BUNDLES[database]())
    if is_released and not migrations.startswith(sums.read_text()):
        sys.exit(f"{database}: a migration that was released changed; add another instead")
    if is_released and one.read_text().split()[0] == bundle.split()[0] and one.read_text() != bundle:
        sys.exit(f"{database}: the bundle changed; give it the next number in {one.with_name('VERSION')}")
    sums.write_text(migrations)
    one.write_text(bundle)


if __name__ == "__main__":
    for database in BUNDLES:
        seal(database, is_released="--released" in sys.argv[1:])
