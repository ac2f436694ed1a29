"""The SQL files: migrations never change, and a bundle changes only with its version."""

import importlib.util
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from taskyard.model import state
from taskyard.model.blocker import SEPARATOR as LANE_SEPARATOR
from taskyard.model.order import GAP
from taskyard.model.state import LEGAL, TaskState
from taskyard.stores.migrations import Bundle, folder_of, list_migrations, load_bundle, render
from taskyard.stores.postgres import constants, schema
from taskyard.stores.sqlite import place
from tests.scenario.processes import TOP

BUNDLES = {"sqlite": place.bundle, "postgres": schema.bundle}

BUNDLE_CHANGED = (
    "the rendered bundle of {} changed. Existing databases keep the old one until they see a new version: write the "
    "next number into sql/bundle/VERSION, then run `make seal RELEASED=1`. Before the first release: `make seal`"
)
MIGRATION_CHANGED = (
    "a migration of {} changed. An applied migration never runs again, so the change would reach new databases only: "
    "put it into a new file, then run `make seal RELEASED=1`. Before the first release: `make seal`"
)

databases = pytest.mark.parametrize("database", BUNDLES)


def find_change(database: str, bundle: Bundle) -> str | None:
    """What is to be done about a bundle that is not the committed one."""
    sealed = (folder_of(database) / "bundle" / "SHA256").read_text(encoding="utf-8").split()
    is_same = sealed == [str(bundle.version), str(bundle.needs_program), bundle.checksum]
    return None if is_same else BUNDLE_CHANGED.format(database)


@databases
def test_a_committed_migration_stays_as_it_is(database: str) -> None:
    """Every migration has the checksum that was committed with it."""
    sums = (folder_of(database) / "migrations" / "SHA256SUMS").read_text(encoding="utf-8")
    lines = [f"{one.checksum}  {one.name}.sql" for one in list_migrations(database)]
    assert sums.splitlines() == lines, MIGRATION_CHANGED.format(database)


@databases
def test_a_bundle_changes_with_its_version(database: str) -> None:
    """The rendered bundle has the checksum that was committed for its version."""
    assert find_change(database, BUNDLES[database]()) is None, find_change(database, BUNDLES[database]())


@databases
def test_a_migration_is_literal(database: str) -> None:
    """No migration has a placeholder, or anything that belongs to the bundle. They are numbered without a gap."""
    migrations = list_migrations(database)
    assert [one.number for one in migrations] == list(range(1, len(migrations) + 1))
    for one in migrations:
        assert "{{" not in one.sql
        assert not re.search(
            r"\bCREATE\s+(OR\s+REPLACE\s+)?(FUNCTION|PROCEDURE|TRIGGER|TYPE)\b", one.sql, re.IGNORECASE
        )


@databases
def test_no_constant_reaches_a_migration(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another constant, or another table of legal moves, changes no byte of any migration. It changes the bundle, and
    the suite then demands a new version."""
    migrations, bundle = list_migrations(database), BUNDLES[database]()
    with monkeypatch.context() as patch:
        patch.setitem(state.LEGAL, TaskState.SCHEDULED, LEGAL[TaskState.SCHEDULED] | {TaskState.FAILED})
        assert list_migrations(database) == migrations
        changed = BUNDLES[database]()
        assert "scheduled>failed" in changed.sql
        assert "VERSION" in (find_change(database, changed) or "")
    with monkeypatch.context() as patch:
        patch.setattr(constants, "READ_AHEAD", 17)
        assert list_migrations(database) == migrations
        changed = BUNDLES[database]()
        assert (find_change(database, changed) is None) == (
            database == "sqlite"
        )  # which has no constants but the moves
    assert BUNDLES[database]() == bundle


@databases
def test_every_constant_may_change_without_a_migration(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a placeholder stands for, no migration has it."""
    migrations = list_migrations(database)
    monkeypatch.setattr(schema, "bundle_values", lambda: dict.fromkeys(constants.bundle_values(), "0"))
    assert list_migrations(database) == migrations
    assert "{{" not in schema.bundle().sql


def test_an_unknown_placeholder_is_an_error() -> None:
    """A placeholder that nothing stands for is not left in the text."""
    with pytest.raises(ValueError, match=r"guards\.sql has placeholders without a value: legal_movs"):
        render("WHEN {{legal_movs}} AND {{gap}}", {"gap": "1"}, "guards.sql")
    with pytest.raises(ValueError, match="illegal_move"):
        load_bundle("sqlite", {})


def test_every_constant_is_used() -> None:
    """A value that no file asks for is left over from one that did."""
    files = [file for file in (folder_of("postgres") / "bundle").iterdir() if file.name.endswith(".sql")]
    asked = set(re.findall(r"\{\{(\w+)\}\}", "".join(file.read_text(encoding="utf-8") for file in files)))
    unused = constants.bundle_values().keys() - asked
    assert unused <= {"lock_migrating"}  # Python alone takes it


def test_the_structural_constants() -> None:
    """They describe stored data, or what nodes of two versions agree on: they never change for an existing store."""
    assert GAP == 1 << 20
    assert constants.EVENTS_AT_MOST == 1 << 17
    assert (constants.SEPARATOR, constants.CHANNEL) == ("\x1e", "taskyard")
    assert LANE_SEPARATOR == "\x1f"
    assert f"consumer || char({ord(LANE_SEPARATOR)}) || requires" in list_migrations("sqlite")[0].sql
    assert {lock.name: lock.value - 1953721200 for lock in constants.Lock} == {
        "QUEUE": 1, "NODE": 2, "EVENTS": 3, "OPEN_SLOT": 4, "SLOT": 5, "COMPACTION": 6, "MIGRATING": 7, "HINT": 8,
        "COMPLETIONS": 9, "NUMBER_SKIP": 10, "BULK_SLOTS": 11, "ROLLOUT": 12,
        "CATALOGUE": 13, "DEVICES": 14,
    }  # fmt: skip


@pytest.fixture
def sealing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script that writes the checksums, with copies of the committed ones."""
    spec = importlib.util.spec_from_file_location("seal_sql", TOP / "scripts/seal_sql.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    for database in BUNDLES:
        for file in script.sealed_files(database):
            copy = tmp_path / file.relative_to(script.STORES)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, copy)
    monkeypatch.setattr(script, "STORES", tmp_path)
    return script


def read_seals(sealing: Any) -> dict[Path, str]:
    return {file: file.read_text() for database in BUNDLES for file in sealing.sealed_files(database)}


@pytest.mark.parametrize(
    ("more", "is_sealed"), [pytest.param(-1, False, id="lower"), pytest.param(0, False, id="same"), (1, True)]
)
def test_a_released_bundle_changes_with_a_higher_version(
    sealing: Any, monkeypatch: pytest.MonkeyPatch, more: int, is_sealed: bool
) -> None:
    """A changed bundle is sealed if its number is higher than the released one. If one database is refused, nothing is
    written for the other one either."""
    before = read_seals(sealing)
    sealing.main(["--released"])
    assert read_seals(sealing) == before
    ours, theirs = place.bundle(), schema.bundle()
    newer = Bundle(ours.version + 1, "-- newer")
    changed = Bundle(theirs.version + more, "-- changed")
    monkeypatch.setattr(sealing, "BUNDLES", {"sqlite": lambda: newer, "postgres": lambda: changed})
    if is_sealed:
        sealing.main(["--released"])
        after = [sealing.sealed_files(database)[1].read_text() for database in BUNDLES]
        assert after == [sealing.sum_of(newer), sealing.sum_of(changed)]
    else:
        with pytest.raises(
            SystemExit, match=rf"^postgres: the bundle changed; give it a number above {theirs.version} "
        ):
            sealing.main(["--released"])
        assert read_seals(sealing) == before


def test_a_released_migration_is_not_sealed_again(sealing: Any) -> None:
    """A migration with another text than the released one is refused."""
    sums, _ = sealing.sealed_files("sqlite")
    sums.write_text("0" + sums.read_text())
    with pytest.raises(SystemExit, match=r"^sqlite: a migration that was released changed"):
        sealing.main(["--released"])


def test_migrations_need_no_driver() -> None:
    """Files and checksums are read without apsw and asyncpg: the doctor reads them where one of them is missing."""
    code = "import sys, taskyard.stores.migrations; sys.exit('apsw' in sys.modules or 'asyncpg' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=TOP, check=False).returncode == 0


def test_the_files_are_in_the_wheel(tmp_path: Path) -> None:
    """What is installed has every SQL file, and the version of each bundle."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=TOP, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    shipped = {name for name in zipfile.ZipFile(wheel).namelist() if "/sql/" in name}
    folder = Path(str(folder_of("sqlite"))).parents[2]
    ours = {path for kind in ("*.sql", "VERSION", "NEEDS_PROGRAM") for path in folder.glob(f"stores/*/sql/*/{kind}")}
    assert shipped >= {f"taskyard/{path.relative_to(folder)}" for path in ours}
    assert len(ours) > 4
