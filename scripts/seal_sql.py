"""Writes the checksums of the SQL that are committed: `migrations/SHA256SUMS` and `bundle/SHA256` of each database.

    .venv/bin/python scripts/seal_sql.py               # before the first release: whatever changed
    .venv/bin/python scripts/seal_sql.py --released    # after it: a bundle with a new VERSION, or a new migration

A released migration never changes: add another. A released bundle changes only with a higher number in
`bundle/VERSION`. With `--released` the script refuses anything else, and then writes nothing for either database.
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
    """The version, that of the oldest program which may use it, and the checksum of the rendered text."""
    return f"{bundle.version} {bundle.needs_program} {bundle.checksum}\n"


def sealed_files(database: str) -> tuple[Path, Path]:
    return STORES / database / "sql/migrations/SHA256SUMS", STORES / database / "sql/bundle/SHA256"


def find_fault(database: str) -> str | None:
    """Why this SQL may not replace what was released."""
    sums, one = sealed_files(database)
    bundle, sealed = BUNDLES[database](), one.read_text()
    if not sums_of(list_migrations(database)).startswith(sums.read_text()):
        return f"{database}: a migration that was released changed; add another instead"
    if sum_of(bundle) != sealed and bundle.version <= int(sealed.split()[0]):
        return (
            f"{database}: the bundle changed; give it a number above {sealed.split()[0]} in {one.with_name('VERSION')}"
        )
    return None


def seal(database: str) -> None:
    sums, one = sealed_files(database)
    sums.write_text(sums_of(list_migrations(database)))
    one.write_text(sum_of(BUNDLES[database]()))


def main(arguments: list[str]) -> None:
    if "--released" in arguments:
        faults = [fault for database in BUNDLES if (fault := find_fault(database)) is not None]
        if faults:
            sys.exit("\n".join(faults))
    for database in BUNDLES:
        seal(database)


if __name__ == "__main__":
    main(sys.argv[1:])
