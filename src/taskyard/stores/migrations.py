"""Migrations and the SQL bundle of a database: their files, their checksums, and what is to be applied.

A migration (`<database>/sql/migrations/NNNN_name.sql`) is literal SQL: tables, columns, indexes, data. It is applied
once, and its checksum is stored. A bundle (`<database>/sql/bundle/*.sql`) has the routines, types and triggers. Its
files have placeholders, `{{name}}`, which are filled with constants of Python. A bundle has a version and is replaced
as a whole when the stored version is older. Its file `NEEDS_PROGRAM` has the lowest version of a program that may use
it: a program's version is that of its own bundle.

This module knows no driver: the stores read and write their tables `migration` and `bundle` themselves.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from importlib.resources.abc import Traversable

import msgspec

from taskyard.errors import StoreMigrationChanged, StoreTooNew
from taskyard.ports.store import Schema

FIRST_FILE = "types.sql"
"""Loaded before the other files of a bundle: routines name types in their signatures."""

_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")


class Migration(msgspec.Struct, frozen=True):
    number: int
    name: str
    """The file's name without its ending, such as `0001_baseline`."""
    sql: str

    @property
    def checksum(self) -> str:
        return checksum(self.sql)


class Bundle(msgspec.Struct, frozen=True):
    """`sql` is the rendered text of all files."""

    version: int
    sql: str
    needs_program: int = 1

    @property
    def checksum(self) -> str:
        return checksum(self.sql)

    @property
    def name(self) -> str:
        return f"bundle_{self.version}"


class Applied(msgspec.Struct, frozen=True):
    """A row of the table `migration`."""

    number: int
    name: str
    checksum: str


class Installed(msgspec.Struct, frozen=True):
    """The row of the table `bundle`. `objects` names what the bundle brought, and nothing that others made."""

    version: int
    needs_program: int
    checksum: str
    objects: list[str]


def checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


# --- files ------------------------------------------------------------------------------------------------------------


def folder_of(database: str) -> Traversable:
    """The SQL of `sqlite` or `postgres`. Found by path: importing the package would import its driver."""
    return resources.files("taskyard.stores") / database / "sql"


def list_migrations(database: str) -> list[Migration]:
    """All migrations for `database`, in order."""
    files = _sql_files(folder_of(database) / "migrations")
    return [
        Migration(int(file.name[:4]), file.name.removesuffix(".sql"), file.read_text(encoding="utf-8"))
        for file in files
    ]


def newest(database: str) -> int:
    """The number of the last migration."""
    return list_migrations(database)[-1].number


def load_bundle(database: str, values: Mapping[str, str]) -> Bundle:
    """The bundle for `database`, rendered with `values`."""
    folder = folder_of(database) / "bundle"
    version, needs = (int((folder / name).read_text(encoding="utf-8")) for name in ("VERSION", "NEEDS_PROGRAM"))
    files = sorted(_sql_files(folder), key=lambda file: file.name != FIRST_FILE)
    sql = "\n".join(render(file.read_text(encoding="utf-8"), values, file.name) for file in files)
    return Bundle(version, sql, needs)


def render(sql: str, values: Mapping[str, str], name: str) -> str:
    """Fill in the placeholders of the file `name`; `ValueError` for one without a value."""
    if unknown := sorted(set(_PLACEHOLDER.findall(sql)) - values.keys()):
        raise ValueError(f"{name} has placeholders without a value: {', '.join(unknown)}")
    return _PLACEHOLDER.sub(lambda found: values[found[1]], sql)


def _sql_files(folder: Traversable) -> list[Traversable]:
    return sorted((file for file in folder.iterdir() if file.name.endswith(".sql")), key=lambda file: file.name)


# --- what is stored, against what there is ----------------------------------------------------------------------------


def pending(known: Sequence[Migration], version: int) -> list[Migration]:
    """The migrations that a store of that version lacks, in order."""
    return [migration for migration in known if migration.number > version]


def is_outdated(installed: Installed | None, bundle: Bundle) -> bool:
    """Whether `bundle` replaces the installed one. A newer one stays: versions only grow, so two programs of different
    versions do not replace each other's bundle in turn."""
    return installed is None or installed.version < bundle.version


def check_applied(path: str, applied: Iterable[Applied], known: Sequence[Migration]) -> None:
    """Raise `StoreMigrationChanged` if a migration was applied with another text than this program has."""
    ours = {migration.number: migration for migration in known}
    for found in applied:
        migration = ours.get(found.number)
        if migration is not None and migration.checksum != found.checksum:
            raise StoreMigrationChanged(path, f"{migration.name}.sql")


def check_installed(path: str, installed: Installed | None, bundle: Bundle) -> None:
    """The same for a bundle of the same version. `StoreTooNew` if the installed bundle needs a newer program."""
    if installed is not None and installed.needs_program > bundle.version:
        raise StoreTooNew(path, installed.version, bundle.version, "bundle")
    if installed is not None and installed.version == bundle.version and installed.checksum != bundle.checksum:
        raise StoreMigrationChanged(path, f"bundle version {bundle.version}")


def schema_at(
    version: int, known: Sequence[Migration], *, installed: Installed | None = None, bundle: Bundle | None = None
) -> Schema:
    """What a store of that version lacks. The bundle counts if it is given."""
    names = [migration.name for migration in pending(known, version)]
    if bundle is not None and is_outdated(installed, bundle):
        names.append(bundle.name)
    return Schema(version=version, newest=known[-1].number, pending=tuple(names))
