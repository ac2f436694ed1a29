"""`taskyard migrate`."""

import asyncio
import hashlib
from pathlib import Path

import apsw

from taskyard.ports.clock import SystemClock
from taskyard.stores.migrate import migrations
from taskyard.stores.sqlite import SqliteStore
from tests.cli.shell import Shell
from tests.stores.test_migrations import make

STEPS = migrations("sqlite")
NEWEST = STEPS[-1][0]
LAST = f"{NEWEST:04}_"


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_an_old_store_is_brought_up_to_date(shell: Shell) -> None:
    """The version before and after is told, with what was applied; the tasks are there; a second time nothing is."""
    make(shell.path, NEWEST - 1)
    done = shell.ok("migrate", "--store", shell.url)
    assert done.out.startswith(f"sqlite:///work.db  ✔ schema {NEWEST - 1} → {NEWEST}  ({LAST}")
    assert shell.here("ls", "--store", shell.url, "--json").json["counts"] == {"queued": 1}
    again = shell.here("migrate", "--store", shell.url, "--json").json
    assert again == {"before": NEWEST, "after": NEWEST, "newest": NEWEST, "applied": [], "pending": []}
    assert f"schema {NEWEST}, up to date" in shell.here("migrate", "--store", shell.url).out


def test_check_only_looks(shell: Shell) -> None:
    """With --check the file stays as it is byte by byte; 1 if something is to be applied, 0 if not."""
    make(shell.path, 2)
    before = digest(shell.path)
    done = shell.here("migrate", "--check", "--store", shell.url)
    assert done.code == 1
    assert f"schema 2, behind {NEWEST}; to be applied: 0003_cancel_reason, 0004_" in done.out
    document = shell.here("migrate", "--check", "--store", shell.url, "--json").json
    assert (document["before"], document["after"], document["applied"]) == (2, 2, [])
    assert [name[:4] for name in document["pending"]] == [f"{n:04}" for n, _ in STEPS if n > 2]
    assert digest(shell.path) == before
    assert not (shell.folder / "work.db-yard").exists()
    shell.here("migrate", "--store", shell.url)
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


async def test_many_may_migrate_at_a_time(tmp_path) -> None:
    """Of several that migrate one store at once, one applies what is pending, and the others find it done."""
    make(tmp_path / "work.db", 1)
    stores = [SqliteStore(tmp_path / "work.db", clock=SystemClock()) for _ in range(4)]
    found = await asyncio.gather(*(store.migrate() for store in stores))
    assert sorted(schema.version for schema in found) == [1, NEWEST, NEWEST, NEWEST]
    assert (await stores[0].schema()).pending == ()


def test_doctor_does_not_stumble_over_an_old_store(shell: Shell) -> None:
    """A store of an earlier version is examined as far as this version can, and the way to bring it up is named."""
    make(shell.path, NEWEST - 1)
    done = shell.here("doctor", "--store", shell.url)
    assert done.code == 0, done
    assert "`taskyard migrate`" in done.out
    assert "not looked at" in done.out
