"""Artifacts of an attempt: named results beside its return value, on every executor."""

import asyncio
import hashlib
import os
import socket
import stat
from pathlib import Path
from typing import Any

import pytest

from taskyard import InvalidInput, TaskFailed
from taskyard.execution import artifacts
from taskyard.execution.run_handle import RunHandle, RunHost
from taskyard.model.attempt import ARTIFACT_DATA_BYTES, Artifact, check_artifact_name
from taskyard.model.task import Claim
from taskyard.ports.store import Report
from taskyard.testing.samples import a_record
from tests.execution import writers
from tests.execution.recording import EXECUTORS, INLINE, PATIENCE_S, PROCESS, THREAD, open_site

EVERY = pytest.mark.parametrize("executor", EXECUTORS)
SIZE = 3 << 20


@pytest.fixture
async def site(folder):
    async with open_site(folder) as site:
        yield site


@pytest.fixture
def folder(tmp_path) -> Path:
    return Path(tmp_path / "artifacts")


# --- in a yard --------------------------------------------------------------------------------------------------------


@EVERY
async def test_small_artifacts(site, executor):
    """Bytes, texts and JSON up to 256 kB are reported with their content, and a later one of a name follows."""
    uuid = await site.run(writers.keep_all_kinds, executor=executor)
    kept = [(one.name, one.data, one.media_type) for one in site.store.artifacts(uuid)]
    assert set(kept) - {("table", b'{"rows":[1,2]}', "application/json")} == {
        ("bytes.bin", b"\x00\xff", "application/octet-stream"),
        ("page.html", "<p>é</p>".encode(), "text/html"),
        ("table", b'{"rows":[3]}', "application/json"),
        ("other", b"x", "image/x-own"),
    }
    for one in site.store.artifacts(uuid):
        assert one.size == len(one.data)
        assert one.sha256 == hashlib.sha256(one.data).hexdigest()
        assert (one.host, one.path) == (None, None)
        assert one.created_at.utcoffset() is not None


@EVERY
async def test_a_large_artifact_is_a_file(site, executor, folder):
    """More than 256 kB become a file in the private folder of the node, written by the process that runs the code."""
    uuid = await site.run(writers.keep_bytes, "large file.bin", SIZE, executor=executor)
    [kept] = site.store.artifacts(uuid)
    path = Path(kept.path)
    assert (kept.data, kept.host, kept.size) == (None, socket.gethostname(), SIZE)
    assert (path.parent.name, path.parents[2]) == (uuid, folder)
    [report] = [report for report in site.store.reports if report.artifacts]
    assert path.name.startswith(f"{report.claim.token}-large_file.bin-")
    assert path.read_bytes() == b"\x01" * SIZE
    assert kept.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert [stat.S_IMODE(one.stat().st_mode) for one in (path, *path.parents[:2])] == [0o600, 0o700, 0o700]
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("executor", [INLINE, PROCESS])
async def test_from_a_thread(site, executor):
    """Async code keeps a large artifact without holding up its loop, with `asyncio.to_thread`."""
    uuid = await site.run(writers.keep_bytes_async, "large", SIZE, executor=executor)
    [kept] = site.store.artifacts(uuid)
    assert kept.size == SIZE


@pytest.mark.parametrize("executor", [THREAD, PROCESS])
@pytest.mark.parametrize("size", [0, ARTIFACT_DATA_BYTES, ARTIFACT_DATA_BYTES + 1, SIZE])
async def test_a_copy_of_a_file(site, executor, size, tmp_path):
    """A file is copied, whatever its size, and may be removed afterwards."""
    original = tmp_path / "plot.png"
    original.write_bytes(os.urandom(size))
    uuid = await site.run(writers.keep, "plot.png", None, str(original), executor=executor)
    content = original.read_bytes()
    original.unlink()
    [kept] = site.store.artifacts(uuid)
    assert (kept.data is None) == (size > ARTIFACT_DATA_BYTES)
    assert (Path(kept.path).read_bytes() if kept.data is None else kept.data) == content
    assert (kept.size, kept.media_type) == (size, "image/png")


@EVERY
async def test_too_many(site, executor):
    """The 51st name is refused in the code that asks; a name that is there can still be replaced."""
    handle = await site.submit(writers.keep_too_many, executor=executor)
    refusal = await handle.result(timeout_s=PATIENCE_S)
    assert refusal == "artifact 'one more' is one too many: an attempt can have 50"
    assert len({one.name for one in site.store.artifacts(handle.uuid)}) == 50


@EVERY
async def test_a_bad_name_fails_the_code(site, executor):
    """A bad name raises `InvalidInput` where it is used, and the task fails with it."""
    handle = await site.submit(writers.keep, "../escape", "x", executor=executor)
    with pytest.raises(TaskFailed, match="path separators") as failed:
        await handle.result(timeout_s=PATIENCE_S)
    assert failed.value.error_type == "InvalidInput"


@pytest.mark.parametrize("executor", [THREAD, PROCESS])
async def test_a_file_that_is_replaced_is_removed(site, executor):
    """If a small artifact replaces a large one of its name, the file goes."""
    handle = await site.submit(writers.keep_then_small, executor=executor)
    path = await handle.result(timeout_s=PATIENCE_S)
    assert not os.path.exists(path)
    assert [one.size for one in site.store.artifacts(handle.uuid)][-1] == 3


async def test_artifacts_come_before_the_settle(site):
    """An artifact reaches the store before the settle of its attempt."""
    uuid = await site.run(writers.keep, "a", "x", executor=PROCESS)
    kinds = [kind for kind, what in site.store.told if uuid in (what, getattr(what, "claim", None) and what.claim.uuid)]
    assert kinds == ["report", "settle"]


# --- alone ------------------------------------------------------------------------------------------------------------


@pytest.fixture
async def run(tmp_path):
    reports: list[Report] = []
    host = RunHost(asyncio.get_running_loop(), reports.append, artifact_folder=tmp_path / "kept")
    record = a_record()
    record.uuid = "../odd uuid"
    run = RunHandle(Claim(record, 1, 7), host)
    run.reports = reports  # type: ignore[attr-defined]
    return run


async def test_the_folder_is_a_setting(run, tmp_path):
    """Files go to the folder that the runner was given, and never out of it, whatever the task is called."""
    kept = run.context.artifact("../x".replace("/", "·"), b"x" * SIZE)
    folder = Path(kept.path).parent
    assert folder.parent == tmp_path / "kept"
    assert run.reports == [Report(run.claim, artifacts=(kept,))]


@pytest.mark.parametrize("name", ["", "x" * 201, "a/b", "a\\b", "a\nb", "a\0", ".", "..", "\ud800", 7, None])
async def test_bad_names(run, name):
    """A name is 1 to 200 characters without path separators and control characters."""
    with pytest.raises(InvalidInput, match="the name of an artifact"):
        run.context.artifact(name, "x")
    assert run.reports == []


@pytest.mark.parametrize("name", ["a", "x" * 200, "with spaces.tar.gz", "图.png", ".hidden", "a..b"])
def test_good_names(name):
    """Other names are taken as they are, and become names of files of their own."""
    assert check_artifact_name(name) == name
    safe = artifacts.safe_name(name)
    assert len(safe) <= 200
    assert safe.isascii()
    assert not safe.startswith(".")
    assert artifacts.safe_name(name + "?") != safe


async def test_bad_content(run, tmp_path):
    """What is neither data nor a readable file raises `InvalidInput`, and leaves nothing behind."""
    os.mkfifo(tmp_path / "pipe")
    bad: list[dict[str, Any]] = [
        {},
        {"data": "x", "path": "y"},
        {"data": object()},
        {"data": float("nan")},
        {"path": tmp_path / "missing"},
        {"path": tmp_path},
        {"path": tmp_path / "pipe"},
        {"path": "a\0b"},
        {"path": 1.5},
        {"data": "x", "media_type": ""},
        {"data": "x", "media_type": "a\nb"},
        {"data": "x", "media_type": 7},
    ]
    for given in bad:
        with pytest.raises(InvalidInput):
            run.context.artifact("a", **given)
    assert run.reports == []
    assert not (tmp_path / "kept").exists()


async def test_after_the_end(run):
    """A thread that has outlived its attempt can keep nothing more."""
    run.end()
    with pytest.raises(InvalidInput, match="the attempt has ended"):
        run.context.artifact("late", "x")


async def test_a_write_that_fails(run, tmp_path, monkeypatch):
    """If a file cannot be written, nothing is left of it, and the code gets the error."""

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space"):
        run.context.artifact("a", b"x" * SIZE)
    assert [path for path in (tmp_path / "kept").rglob("*") if path.is_file()] == []


def test_the_default_folder(tmp_path, monkeypatch):
    """Without a setting files go among the user's data, or to a private folder among the temporary files."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert artifacts.default_folder() == tmp_path / "data" / "taskyard" / "artifacts"
    (tmp_path / "file").touch()
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    private = artifacts.default_folder()
    assert private.parent == tmp_path / "tmp"
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    private.chmod(0o755)
    with pytest.raises(PermissionError, match="not a private folder"):
        artifacts.default_folder()


def test_reports_join_artifacts():
    """Of two artifacts with one name in two reports the later stays."""
    claim = Claim(a_record(), 1, 1)
    first, other, second = (_artifact(name, data) for name, data in (("a", b"1"), ("b", b"2"), ("a", b"3")))
    joined = Report(claim, artifacts=(second,)).after(Report(claim, artifacts=(first, other)))
    assert {one.name: one.data for one in joined.artifacts} == {"a": b"3", "b": b"2"}


def _artifact(name: str, data: bytes) -> Artifact:
    target = artifacts.ArtifactTarget(None, "u", 1)
    return artifacts.make_artifact(name, data, None, None, target=target, now=a_record().created_at)
