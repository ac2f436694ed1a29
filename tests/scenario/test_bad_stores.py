"""Stores that cannot be used, as a table: each gets a typed error that says what to do, and nothing is changed."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import apsw
import pytest

from taskyard import Yard
from taskyard.errors import (
    StoreCorrupt,
    StoreFolderMissing,
    StoreForeign,
    StoreOnNetwork,
    StoreReadOnly,
    StoreTooNew,
    StoreUrlInvalid,
)
from taskyard.ports.clock import SystemClock
from taskyard.settings import make_store
from taskyard.stores.postgres import PostgresStore
from taskyard.stores.sqlite import place
from tests.scenario.jobs import build
from tests.scenario.processes import TOP, environment, run_python

# --- where the store is -----------------------------------------------------------------------------------------------

FORMS = r"use memory://, sqlite:///path/to/work\.db or postgresql://user@host/database"

URLS = [
    ("redis://localhost", FORMS),
    ("postgres", FORMS),
    ("work.db", FORMS),
    ("sqlite://work.db", FORMS),
    ("sqlite:///", FORMS),
    ("memory://x", FORMS),
    ("file:work.db", FORMS),
    ("sqlite:///:memory:", "a store in memory is memory://"),
    ("sqlite:///file:work.db", "a store in memory is memory://"),
    ("sqlite:///?mode=ro", "an address takes no options"),
    ("sqlite:///work.db?mode=ro", "an address takes no options"),
    ("postgresql+asyncpg://me@host/db", r"leave out the \+asyncpg"),
    ("postgres+psycopg://me@host/db", r"leave out the \+psycopg"),
    ("host=localhost dbname=db", "write it as postgresql://user:password@host:5432/database"),
    ("postgresql://me:p@ss@host/db", "%40 for an @ in the password"),
    ("postgresql://me:p/ss@host/db", "%2F for a /"),
    ("postgresql://me:p@s/s@host:5432/db", "%40 for an @ in the password, %2F for a /"),
    ("postgresql://me:p@s?s@host/db", r"%3F for a \?"),
    ("postgresql://me:p@s#s@host/db", "%23 for a #"),
    ("postgresql://me:pass@host/\udcff\udcfe", "write it in UTF-8"),
    ("postgresql://m\udcff:pass@host/db", "write it in UTF-8"),
    ("postgresql://me:p\udcff@host/db", "write it in UTF-8"),
    ("postgresql://me:pass@host/db?application_name=\udcff", "write it in UTF-8"),
    ("postgresql://me:pass@host/db\0", "leave out the NUL"),
    ("postgresql://me:pass@host/db%00", "leave out the NUL"),
]

ADDRESSES = [
    "postgresql://me:p%40s%2Fs@host:5432/db",
    "postgresql://me:pass@host/db@2",
    "postgresql://me@host/db?host=/run/a@b/postgresql",
    "postgresql://me:pass@/db?host=/run/a@b/postgresql",
]


@pytest.mark.parametrize("good", ADDRESSES)
def test_an_address_with_odd_characters_is_taken(good):
    """An @ where it belongs, or where it does no harm, is no reason to refuse an address, which stays as it is."""
    store = make_store(good, SystemClock())
    assert isinstance(store, PostgresStore)
    assert store.url == good


@pytest.mark.parametrize(("bad", "advice"), URLS)
def test_an_address_that_is_none_is_refused(bad, advice):
    """An address nobody knows is refused when the yard is made, with what to write instead."""
    with pytest.raises(StoreUrlInvalid, match=advice):
        Yard(bad)
    with pytest.raises(StoreUrlInvalid, match=advice):
        Yard("memory://").use_store(bad)


async def test_no_address_at_all_is_refused(monkeypatch, tmp_path):
    """Without an address the environment is asked, and if it has none, the error names the variable."""
    monkeypatch.delenv("TASKYARD_STORE", raising=False)
    with pytest.raises(StoreUrlInvalid, match="no store was given; set TASKYARD_STORE, or pass one"):
        await Yard().start()
    monkeypatch.setenv("TASKYARD_STORE", f"sqlite:///{tmp_path / 'env.db'}")
    async with Yard():
        assert (tmp_path / "env.db").exists()


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def ours(path: Path) -> None:
    """A store with some finished and some waiting tasks in it, closed."""
    yard = build(f"sqlite:///{path}")
    with yard.blocking() as sync:
        for handle in sync.submit_many("add", [{"a": n} for n in range(200)]):
            sync.result(handle, timeout_s=10)
        sync.submit("echo", {"value": "kept"}, delay_s=3600)


def garbage(path: Path) -> None:
    path.write_bytes(b"this is not a database, it is a letter to the editor\n" * 200)


def short(path: Path) -> None:
    path.write_bytes(b"SQLite format 3\0")


def truncated(path: Path) -> None:
    ours(path)
    os.truncate(path, path.stat().st_size // 2)


def overwritten(path: Path) -> None:
    ours(path)
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xa5" * (path.stat().st_size - 4096))


def foreign(path: Path) -> None:
    connection = apsw.Connection(str(path))
    connection.execute("CREATE TABLE song (title TEXT); INSERT INTO song VALUES ('Yesterday')")
    connection.close()


def foreign_with_log(path: Path) -> None:
    """As a program leaves it that was killed: what is in it is only in its log."""
    other = path.with_name("other.db")
    connection = apsw.Connection(str(other))
    connection.execute("PRAGMA journal_mode = WAL; CREATE TABLE song (title TEXT)").fetchall()
    for end in ("", "-wal"):
        shutil.copy(f"{other}{end}", f"{path}{end}")
    connection.close()
    other.unlink()


def newer(path: Path) -> None:
    ours(path)
    connection = apsw.Connection(str(path))
    connection.execute("PRAGMA user_version = 9999")
    connection.close()


def folder(path: Path) -> None:
    path.mkdir()


def missing(path: Path) -> None:
    path.parent.rmdir()


def pipe(path: Path) -> None:
    os.mkfifo(path)


def below_a_file(path: Path) -> None:
    path.parent.rmdir()
    path.parent.touch()


def beside_a_file(path: Path) -> None:
    sidecar(path).touch()


def dangling(path: Path) -> None:
    path.symlink_to(path.parent / "nowhere" / "work.db")


def in_proc(path: Path) -> None:
    path.symlink_to("/proc/work.db")


FILES = [
    pytest.param(garbage, StoreCorrupt, r"is damaged or is not a Taskyard store .* choose another path", id="garbage"),
    pytest.param(short, StoreCorrupt, "restore a backup", id="a-header-only"),
    pytest.param(truncated, StoreCorrupt, r"stop all processes that use it, keep the file", id="truncated"),
    pytest.param(overwritten, StoreCorrupt, r"try `sqlite3 .* \.recover`", id="overwritten"),
    pytest.param(foreign, StoreForeign, "SQLite database of another program.*choose another path", id="foreign"),
    pytest.param(foreign_with_log, StoreForeign, "SQLite database of another program", id="foreign-with-log"),
    pytest.param(newer, StoreTooNew, r"schema version 9999, .* upgrade Taskyard", id="newer"),
    pytest.param(folder, StoreForeign, r"is a folder.* name a file in it, such as .*work\.db/work\.db", id="a-folder"),
    pytest.param(missing, StoreFolderMissing, r"does not exist; make it with `mkdir -p .*/folder\"`", id="no-folder"),
    pytest.param(pipe, StoreForeign, "work.db is not a regular file", id="a-pipe"),
    pytest.param(below_a_file, StoreForeign, "/folder is a file and no folder", id="below-a-file"),
    pytest.param(beside_a_file, StoreForeign, "work.db-yard is a file where .* move it away", id="beside-a-file"),
    pytest.param(dangling, StoreFolderMissing, "folder .*/nowhere does not exist", id="a-link-to-nowhere"),
    pytest.param(in_proc, StoreReadOnly, "/proc takes no new files", id="in-proc"),
]


@pytest.mark.parametrize(("arrange", "error", "advice"), FILES)
def test_a_file_that_is_no_store_of_ours_is_refused_unchanged(tmp_path, arrange, error, advice):
    """What is damaged, foreign, newer or not there is refused when the yard is opened, and the file is not touched."""
    path = tmp_path / "folder" / "work.db"
    path.parent.mkdir()
    arrange(path)
    before, log = digest(path), digest(path.with_name("work.db-wal"))
    yard = build(f"sqlite:///{path}")
    with pytest.raises(error, match=advice), yard.blocking():
        pass
    assert digest(path) == before
    if error is StoreForeign:
        assert digest(path.with_name("work.db-wal")) == log
        assert not sidecar(path).is_dir()


async def test_two_names_of_one_file_are_one_store(tmp_path):
    """Through a link the same store is opened, with the same folder beside it: who runs there, runs here."""
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "elsewhere" / "link.db"
    link.symlink_to(tmp_path / "work.db")
    async with build(f"sqlite:///{tmp_path}/work.db") as yard, build(f"sqlite:///{link}").client() as client:
        assert await (await client.submit("add", {"a": 1})).result(timeout_s=10) == 2
        assert not sidecar(link).exists()
        assert await yard.store.nodes() == await client.store.nodes()


def test_an_empty_file_is_a_new_store(tmp_path):
    """An empty file, as `touch` makes it, is taken for a store that is still to be filled."""
    path = tmp_path / "work.db"
    path.touch()
    with build(f"sqlite:///{path}").blocking() as sync:
        assert sync.result(sync.submit("add", {"a": 1}), timeout_s=10) == 2


# --- a store that cannot be written -----------------------------------------------------------------------------------

AS_NOBODY = """
import os, sys, tempfile
from taskyard.errors import StoreReadOnly
from tests.scenario.jobs import build

def attempt(url):
    with build(url).blocking() as sync:
        return sync.result(sync.submit("add", {"a": 1}), timeout_s=10)

# What is imported when first needed is read now: the next user may not read this interpreter's files.
with tempfile.TemporaryDirectory() as folder:
    attempt(f"sqlite:///{folder}/warm.db")
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
try:
    print(attempt(sys.argv[1]))
except StoreReadOnly as error:
    print(error)
"""


def whole_folder(path: Path) -> None:
    path.parent.chmod(0o555)


def file_alone(path: Path) -> None:
    path.parent.chmod(0o777)
    sidecar(path).chmod(0o777)
    path.chmod(0o444)


def closed_folder(path: Path) -> None:
    path.parent.chmod(0)


def lock_file(path: Path) -> None:
    path.parent.chmod(0o777)
    sidecar(path).chmod(0o777)
    (sidecar(path) / "turn").chmod(0o444)
    path.chmod(0o666)


def all_but_the_folder(path: Path) -> None:
    sidecar(path).chmod(0o777)
    (sidecar(path) / "turn").chmod(0o666)
    path.chmod(0o666)
    path.parent.chmod(0o555)


def sidecar(path: Path) -> Path:
    return path.with_name(path.name + "-yard")


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that any user can reach: those of `tmp_path` are closed to others."""
    folder = Path(tempfile.mkdtemp(prefix="taskyard-"))
    folder.chmod(0o755)
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder)


@pytest.mark.parametrize("close_off", [whole_folder, closed_folder, file_alone, lock_file, all_but_the_folder])
def test_a_store_that_may_not_be_written_is_refused(open_folder, close_off):
    """A file, a folder or a lock that this user may not write is told as such, and the store stays as it was."""
    path = open_folder / "work.db"
    ours(path)
    before = digest(path)
    close_off(path)
    said = run_python(AS_NOBODY, f"sqlite:///{path}")
    path.parent.chmod(0o755)
    path.chmod(0o644)
    assert "give this user write permission on the file and on its folder, or choose another path" in said
    assert digest(path) == before


def test_a_store_cannot_be_made_where_one_may_not_write(open_folder):
    """In a folder that this user may not write, no store can be made, and none is begun."""
    open_folder.chmod(0o555)
    said = run_python(AS_NOBODY, f"sqlite:///{open_folder}/new.db")
    assert "give this user write permission on the file and on its folder" in said
    assert os.listdir(open_folder) == []


# --- a disk that is full ----------------------------------------------------------------------------------------------

ON_A_SMALL_DISK = """
import asyncio, subprocess, sys
from taskyard import TaskState
from taskyard.errors import StoreFull
from tests.scenario.jobs import build

folder = sys.argv[1]
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=700k", "tmpfs", folder], check=True)
yard = build(f"sqlite:///{folder}/work.db")
big = "x" * 20_000
taken = []

async def fill():
    async with yard.client():
        while True:
            try:
                taken.append((await yard.submit("echo", {"value": big})).uuid)
            except StoreFull as error:
                print(error)
                break
        # Refused again, and what was acknowledged can still be read.
        try:
            await yard.submit("echo", {"value": big})
        except StoreFull:
            print("still full")
        assert await yard.store.count() == {("default", TaskState.QUEUED): len(taken)}

async def work():
    async with yard:
        for uuid in taken:
            assert await yard.handle(uuid).result(timeout_s=10) == big
        assert await (await yard.submit("add", {"a": 1})).result(timeout_s=10) == 2

asyncio.run(fill())
subprocess.run(["mount", "-o", "remount,size=16m", folder], check=True)
asyncio.run(work())
print("taken and done:", len(taken) > 5)
"""


def test_a_full_disk_refuses_and_loses_nothing(tmp_path):
    """On a full disk a submit is refused and says so; with room again, everything that was acknowledged is there."""
    own_mounts = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
    done = subprocess.run(
        [*own_mounts, sys.executable, "-c", ON_A_SMALL_DISK, str(tmp_path)],
        env=environment(),
        cwd=TOP,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told, still, taken = done.stdout.splitlines()
    assert "free some disk space and try again. Nothing acknowledged is lost" in told
    assert (still, taken) == ("still full", "taken and done: True")


# --- network file systems ---------------------------------------------------------------------------------------------

MOUNTINFO = r"""22 1 254:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw,errors=remount-ro
25 22 0:5 / /dev rw,nosuid,relatime shared:2 - devtmpfs udev rw,size=4028500k
30 22 0:24 / /run rw,nosuid,nodev shared:5 - tmpfs tmpfs rw,size=808744k,mode=755
88 22 0:45 / /srv rw,relatime shared:40 - nfs4 files.example:/export rw,vers=4.2,addr=192.0.2.7
89 88 0:46 / /srv/local rw,relatime shared:41 - xfs /dev/vdb1 rw,attr2
90 22 0:47 / /mnt/two\040words rw,relatime shared:42 - cifs //files.example/share rw,vers=3.1.1
91 22 0:48 / /mnt/été rw,relatime shared:43 - fuse.sshfs me@files.example:/ rw,user_id=0
92 22 0:49 / /data rw,relatime shared:44 - ext4 /dev/vdc1 rw
93 92 0:50 / /data rw,relatime shared:45 - nfs files.example:/data rw,vers=3
94 22 0:51 / /mnt/old rw - ext2 /dev/vdd rw
a line that is no mount
"""

MOUNTS = [
    ("/var/lib/work.db", "ext4"),
    ("/run/work.db", "tmpfs"),
    ("/srv/work.db", "nfs4"),
    ("/srv/deep/er/work.db", "nfs4"),
    ("/srv/local/work.db", "xfs"),
    ("/srv/localities/work.db", "nfs4"),
    ("/mnt/two words/work.db", "cifs"),
    ("/mnt/été/work.db", "fuse.sshfs"),
    ("/data/work.db", "nfs"),
    ("/mnt/old/work.db", "ext2"),
]


@pytest.mark.parametrize(("path", "fstype"), MOUNTS)
def test_the_file_system_of_a_path_is_read_off_the_mounts(path, fstype):
    """The deepest mount decides, of two on one place the later, and names with spaces and accents are understood."""
    assert place.filesystem_of(Path(path), MOUNTINFO) == fstype


@pytest.mark.parametrize("fstype", ["nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "ceph"])
async def test_a_network_file_system_is_refused(tmp_path, monkeypatch, fstype):
    """On a network file system the yard is not opened, and nothing is put there."""
    there = tmp_path / "share"
    there.mkdir()
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"{MOUNTINFO}99 22 0:60 / {there} rw - {fstype} files.example:/x rw\n", "utf-8")
    monkeypatch.setattr(place.refuse_network, "__defaults__", (mounts,))
    with pytest.raises(StoreOnNetwork, match=rf"\({fstype}\).*put it on a local disk"):
        await build(f"sqlite:///{there}/work.db").start()
    assert os.listdir(there) == []
    async with build(f"sqlite:///{tmp_path}/work.db") as yard:
        assert await (await yard.submit("add", {"a": 1})).result(timeout_s=10) == 2
