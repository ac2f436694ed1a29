"""`taskyard migrate`."""

import asyncio
import hashlib
from pathlib import Path

import apsw
import pytest

from taskyard.ports.clock import SystemClock
from taskyard.stores.migrations import Bundle
from taskyard.stores.sqlite import SqliteStore, place
from tests.cli.shell import Shell
from tests.stores.test_migrations import NEXT, make, use_next_version

BEFORE, NEWEST = NEXT.number - 1, NEXT.number


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_an_old_store_is_brought_up_to_date(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """The version before and after is told, with what was applied; the tasks are there; a second time nothing is."""
    make(shell.path)
    use_next_version(monkeypatch)
    done = shell.here("migrate", "--store", shell.url)
    assert done.out.startswith(f"sqlite:///work.db  ✔ schema {BEFORE} → {NEWEST}  ({NEXT.name}")
    assert shell.here("ls", "--store", shell.url, "--json").json["counts"] == {"queued": 1}
    again = shell.here("migrate", "--store", shell.url, "--json").json
    assert again == {"before": NEWEST, "after": NEWEST, "newest": NEWEST, "applied": [], "pending": []}
    assert f"schema {NEWEST}, up to date" in shell.here("migrate", "--store", shell.url).out


def test_check_only_looks(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --check the file stays as it is byte by byte; 1 if something is to be applied, 0 if not."""
    make(shell.path)
    use_next_version(monkeypatch)
    before = digest(shell.path)
    done = shell.here("migrate", "--check", "--store", shell.url)
    assert done.code == 1
    assert f"schema {BEFORE}, behind {NEWEST}; to be applied: {NEXT.name}" in done.out
    document = shell.here("migrate", "--check", "--store", shell.url, "--json").json
    assert (document["before"], document["after"], document["applied"]) == (BEFORE, BEFORE, [])
    assert document["pending"] == [NEXT.name]
    assert digest(shell.path) == before
    assert not (shell.folder / "work.db-yard").exists()
    shell.here("migrate", "--store", shell.url)
    assert shell.here("migrate", "--check", "--store", shell.url).code == 0


def test_an_older_bundle_is_replaced(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bundle that is to be replaced is named by its version, although the schema has the newest version."""
    make(shell.path)
    bundle = place.bundle()
    newer = Bundle(bundle.version + 1, bundle.sql)
    monkeypatch.setattr(place, "bundle", lambda: newer)
    check = shell.here("migrate", "--check", "--store", shell.url)
    assert (check.code, f"schema {BEFORE}; to be applied: {newer.name}" in check.out) == (1, True)
    assert f"✔ schema {BEFORE}, updated  ({newer.name})" in shell.here("migrate", "--store", shell.url).out
    assert shell.here("migrate", "--check", "--store", shell.url).code == 0


def test_a_newer_store_is_left_alone(shell: Shell) -> None:
    """A store of a newer version is refused with 3 and advice, whether it is only looked at or not."""
    shell.seed(("add", {"a": 1}))
    conn = apsw.Connection(str(shell.path))
    conn.execute("PRAGMA user_version = 99")
    conn.close()
    before = digest(shell.path)
    for options in ((), ("--check",)):
        done = shell.here("migrate", *options, "--store", shell.url)
        assert done.code == 3
        assert "has schema version 99" in done.err
        assert "upgrade Taskyard" in done.err
    assert digest(shell.path) == before


def test_what_is_no_store_is_refused(shell: Shell) -> None:
    """A store that is missing is not made, one in memory cannot be meant, another program's database is not touched."""
    missing = shell.here("migrate", "--store", shell.url)
    assert missing.code == 3
    assert not shell.path.exists()
    assert shell.here("migrate", "--store", "memory://").code == 2
    conn = apsw.Connection(str(shell.path))
    conn.execute("CREATE TABLE theirs (x)")
    conn.close()
    before = digest(shell.path)
    for options in ((), ("--check",)):
        assert "another program" in shell.here("migrate", *options, "--store", shell.url).err
    assert digest(shell.path) == before


def test_a_store_in_use_is_migrated_at_once(shell: Shell) -> None:
    """With a worker on the store, migrate and --check answer, and the worker goes on."""
    worker = shell.start_worker("-v")
    assert shell.here("migrate", "--check", "--store", shell.url).code == 0
    assert shell.here("migrate", "--store", shell.url).code == 0
    (uuid,) = shell.seed(("add", {"a": 1}))
    worker.hear(f"completed add {uuid}")


async def test_many_may_migrate_at_a_time(tmp_path, monkeypatch) -> None:
    """Of several that migrate one store at once, one applies what is pending, and the others find it done."""
    make(tmp_path / "work.db")
    use_next_version(monkeypatch)
    stores = [SqliteStore(tmp_path / "work.db", clock=SystemClock()) for _ in range(4)]
    found = await asyncio.gather(*(store.migrate() for store in stores))
    assert sorted(schema.version for schema in found) == [BEFORE, NEWEST, NEWEST, NEWEST]
    assert (await stores[0].schema()).pending == ()


def test_doctor_does_not_stumble_over_an_old_store(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store of an earlier version is examined as far as this version can, and the way to bring it up is named."""
    make(shell.path)
    use_next_version(monkeypatch)
    done = shell.here("doctor", "--store", shell.url)
    assert done.code == 0, done
    assert "`taskyard migrate`" in done.out
    assert "not checked" in done.out
