"""What attempts leave behind, as a user finds it."""

import os
import socket
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest

from taskyard import InvalidInput, RetryPolicy, TaskFailed, TaskState, Yard
from taskyard.artifact_files import UNFINISHED_S, choose_folder, read_file, sweep
from taskyard.errors import ArtifactElsewhere, UnknownArtifact
from taskyard.model.move import Move
from taskyard.model.task import new_uuid
from taskyard.ports.clock import SystemClock
from taskyard.ports.store import Add
from taskyard.retention import Keep, Retention
from taskyard.stores.memory import MemoryStore
from taskyard.stores.sqlite import SqliteStore
from taskyard.testing.clock import ManualClock
from taskyard.testing.samples import a_record, room
from tests.scenario.crashing import LARGE, die, leave

ONCE = RetryPolicy(max_retries=0)


@pytest.fixture(params=["sqlite", "postgresql"])
def durable_url(request, tmp_path):
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/work.db"
    return request.getfixturevalue("postgres_url")


def make_yard(url: str, **settings) -> Yard:
    yard = Yard(url, **settings)
    yard.consumer(executor="process", retry=ONCE)(die)
    yard.consumer(executor="process", retry=ONCE)(leave)
    return yard


@pytest.fixture
async def yard(tmp_path):
    async with make_yard("memory://", artifacts=tmp_path, keep_s=None) as yard:
        yield yard


async def test_what_a_killed_worker_wrote_is_kept(durable_url, tmp_path):
    """Lines and artifacts of a worker process that is killed by SIGKILL are in the store, with its process id."""
    async with make_yard(durable_url, artifacts=tmp_path / "kept") as yard:
        handle = await yard.submit("die")
        with pytest.raises(TaskFailed):
            await handle.result(timeout_s=60)
    async with make_yard(durable_url, artifacts=tmp_path / "kept").client() as yard:
        attempts = await yard.attempts(handle)
        lines = await yard.log_lines(handle, attempt=1)
        assert [one.line.text for one in lines] == ["before the end", "printed"]
        assert {one.token for one in lines} <= {one.token for one in attempts}
        assert attempts[0].worker_pid not in (None, os.getpid())
        assert [one.artifact.name for one in await yard.artifacts(handle)][:2] == ["large.bin", "small.txt"]
        assert await yard.read_artifact(handle, "small.txt") == b"kept"
        assert await yard.read_artifact(handle, "large.bin", attempt=1) == LARGE


async def test_a_completed_attempt_is_complete(durable_url, tmp_path):
    """A completed attempt names its worker process, and its artifacts can be read."""
    async with make_yard(durable_url, artifacts=tmp_path / "kept") as yard:
        handle = await yard.submit("leave")
        pid = await handle.result(timeout_s=60)
        (attempt,) = await yard.attempts(handle)
        assert (attempt.state, attempt.worker_pid) == (TaskState.COMPLETED, pid)
        (large, small) = [one.artifact for one in await yard.artifacts(handle)]
        path = Path(large.path or "")
        assert (large.host, path.parent.name, path.parents[2]) == (socket.gethostname(), handle.uuid, tmp_path / "kept")
        assert (small.data, small.path, await yard.read_artifact(handle, "small.txt")) == (None, None, b"kept")
        with pytest.raises(UnknownArtifact, match=r"large\.bin, small\.txt"):
            await yard.read_artifact(handle, "other")
        for asked in (yard.read_artifact(handle, "small.txt", attempt=2), yard.log_lines(handle, attempt=2)):
            with pytest.raises(InvalidInput, match="has no attempt 2; it has 1 to 1"):
                await asked


@pytest.fixture
async def large(yard):
    """An artifact that is a file."""
    handle = await yard.submit("leave")
    await handle.result(timeout_s=60)
    return (await yard.artifacts(handle))[0].artifact


async def test_a_file_that_cannot_be_read(large):
    """A changed file and a missing one are each an error that names the file."""
    for changed in (b"changed", LARGE[::-1] + b"x", LARGE[:-1] + b"y"):
        Path(large.path).write_bytes(changed)
        with pytest.raises(InvalidInput, match=f"{large.path} of artifact 'large.bin' was changed"):
            read_file(large)
    Path(large.path).unlink()
    with pytest.raises(ArtifactElsewhere, match="No such file"):
        read_file(large)


async def test_a_file_of_another_host(large):
    """A file that was written under another host name is read if it is here as it was written: a container that is
    created anew has a new name. Otherwise the error names host and path."""
    moved = msgspec.structs.replace(large, host="elsewhere")
    assert read_file(moved) == LARGE
    path = Path(large.path)
    path.write_bytes(LARGE[:-1] + b"y")
    with pytest.raises(ArtifactElsewhere, match=f"{large.path} on elsewhere, which is another machine") as elsewhere:
        read_file(moved)
    assert (elsewhere.value.host, elsewhere.value.path) == ("elsewhere", large.path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ArtifactElsewhere, match="another machine"):
        read_file(moved)
    path.unlink()
    with pytest.raises(ArtifactElsewhere, match="another machine"):
        read_file(moved)


async def test_a_yard_in_memory_leaves_no_files():
    """The large artifacts of a yard in memory are temporary: they go when it stops."""
    async with make_yard("memory://") as yard:
        handle = await yard.submit("leave")
        await handle.result(timeout_s=60)
        path = Path((await yard.artifacts(handle))[0].artifact.path or "")
        assert path.is_file()
    assert not path.parent.parent.exists()


def test_every_store_has_a_folder_of_its_own(tmp_path, monkeypatch):
    """By default the folder is beside a SQLite file, or among the data of this user by the address of the database."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    store = SqliteStore(tmp_path / "work.db", clock=SystemClock())
    assert choose_folder(None, store, None).path == tmp_path / "work.db-artifacts"
    memory = MemoryStore(SystemClock())
    urls = ("postgresql://a:x@h/one", "postgres://b:y@h/one?password=z", "postgresql://h/two")
    one, same, two = [choose_folder(None, memory, url).path for url in urls]
    assert one == same != two
    assert one is not None
    assert one.parent == tmp_path / "taskyard" / "artifacts"
    assert choose_folder(None, memory, "memory://").is_temporary


def test_stores_can_share_the_folder_they_are_given(tmp_path):
    """Below a folder that is given, each store has one of its own, and finds it again; that of a store in memory is
    temporary."""
    stores = [SqliteStore(tmp_path / name, clock=SystemClock()) for name in ("one.db", "one.db", "two.db")]
    one, same, two = [choose_folder(tmp_path, store, None) for store in stores]
    memory = MemoryStore(SystemClock())
    server, again = [choose_folder(tmp_path, memory, f"postgresql://{user}@h/one") for user in "ab"]
    first, second = [choose_folder(tmp_path, memory, "memory://") for _ in range(2)]
    assert (one.path, server.path) == (same.path, again.path)
    assert len({folder.path for folder in (one, two, server, first, second)}) == 5
    assert {folder.path.parent for folder in (one, two, server, first) if folder.path} == {tmp_path}
    assert [folder.is_temporary for folder in (one, server, first, second)] == [False, False, True, True]


async def test_a_sweep_spares_the_files_of_other_stores(tmp_path):
    """Of two stores that were given one folder, each sweep removes only what its own store does not know."""
    folder = tmp_path / "shared"
    (folder / new_uuid()).mkdir(parents=True)
    async with make_yard(f"sqlite:///{tmp_path}/one.db", artifacts=folder) as one:
        handle = await one.submit("leave")
        await handle.result(timeout_s=60)
        async with make_yard(f"sqlite:///{tmp_path}/two.db", artifacts=folder) as two:
            await (await two.submit("leave")).result(timeout_s=60)
            assert two._artifact_folder.path is not None
            await sweep(two.store, two._artifact_folder.path)
        assert await one.read_artifact(handle, "large.bin") == LARGE
    assert len(list(folder.iterdir())) == 3


@pytest.fixture
def folder(yard) -> Path:
    """Where the yard has its large artifacts."""
    return Path(yard._artifact_folder.path)


async def test_a_sweep_removes_what_no_task_has(yard, folder):
    """The folders of pruned tasks are removed; those of tasks in the store, and what is no task's, stay."""
    gone, kept = await yard.submit("leave"), await yard.submit("leave")
    for handle in (gone, kept):
        await handle.result(timeout_s=60)
    (folder / "notes").mkdir()
    assert await sweep(yard.store, folder) == 0
    await yard.store.prune(finished_before=yard.now() + timedelta(seconds=1), limit=1)
    assert await sweep(yard.store, folder) == 1
    (left,) = await yard.store.list_tasks()
    assert left.uuid in (gone.uuid, kept.uuid)
    assert {path.name for path in folder.iterdir()} == {"notes", left.uuid}


async def test_a_sweep_removes_old_unfinished_files(yard, folder):
    """A file that was begun more than a day ago and never finished is removed, and no other."""
    handle = await yard.submit("leave")
    await handle.result(timeout_s=60)
    unfinished = folder / handle.uuid / ".unfinished-abc"
    unfinished.write_bytes(b"half")
    written_s = unfinished.stat().st_mtime
    await sweep(yard.store, folder, now_s=written_s + UNFINISHED_S - 1)
    assert unfinished.exists()
    await sweep(yard.store, folder, now_s=written_s + UNFINISHED_S + 1)
    assert not unfinished.exists()
    assert await yard.read_artifact(handle, "large.bin") == LARGE


async def test_files_go_after_pruning(yard, folder):
    """A round of the retention loop removes the files of the tasks that it prunes, and leaves those of running ones."""
    handle = await yard.submit("leave")
    await handle.result(timeout_s=60)
    (held,) = (await yard.store.turn("nobody", adds=[Add([a_record()])], demand=room(1))).claims
    (folder / held.uuid).mkdir()
    clock = ManualClock(yard.now() + timedelta(hours=2))
    await Retention(yard.store, clock, Keep(3600.0), artifacts=folder).step()
    assert [path.name for path in folder.iterdir()] == [held.uuid]
    await yard.store.turn("nobody", settles=[(held, Move.completed(at=yard.now()))])


async def test_a_sweep_without_a_folder(tmp_path):
    """A folder that was never made is not made by a sweep."""
    assert await sweep(MemoryStore(SystemClock()), tmp_path / "never") == 0
    assert not (tmp_path / "never").exists()
