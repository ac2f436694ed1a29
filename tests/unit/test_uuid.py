"""The ids of tasks: UUIDv7 that sort as they were made."""

import subprocess
import sys
import threading
import time
import uuid

import pytest

from taskyard.model.task import _Uuid7, new_uuid, new_uuids

MANY = 100_000


def test_an_id_is_a_uuid_of_version_7():
    """An id is a canonical UUID with the version and variant bits of RFC 9562 and the present millisecond."""
    before = time.time_ns() // 1_000_000
    text = new_uuid()
    parsed = uuid.UUID(text)
    assert str(parsed) == text
    assert (parsed.version, parsed.variant) == (7, uuid.RFC_4122)
    assert before <= parsed.int >> 80 <= time.time_ns() // 1_000_000 + 1


def test_ids_are_sorted_and_unique():
    """A hundred thousand ids made in a row are all different and in order."""
    ids = [new_uuid() for _ in range(MANY)]
    assert ids == sorted(ids)
    assert len(set(ids)) == MANY
    assert all(uuid.UUID(text).version == 7 and uuid.UUID(text).variant == uuid.RFC_4122 for text in ids[::1000])


def test_several_at_once_are_sorted_and_unique():
    """Ids that are made many at a time stand in one order with those made one by one, and none is made twice."""
    ids: list[str] = []
    for _ in range(300):
        ids += [new_uuid(), *new_uuids(100), new_uuid()]
    assert len(ids) == 300 * 102
    assert ids == sorted(set(ids))
    assert new_uuids(0) == []


def test_threads_never_share_an_id():
    """Eight threads making ids at once make no id twice, and each thread's are in order."""
    made: list[list[str]] = [[] for _ in range(8)]
    start = threading.Barrier(8)

    def make(into: list[str]) -> None:
        start.wait()
        for _ in range(100):
            into.extend([new_uuid(), *new_uuids(49)])

    threads = [threading.Thread(target=make, args=(into,)) for into in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(ids == sorted(ids) for ids in made)
    assert len({text for ids in made for text in ids}) == 8 * 5_000


def test_a_clock_that_steps_back_keeps_the_order(monkeypatch: pytest.MonkeyPatch):
    """When the wall clock is set back an hour, the next ids still sort after those before, and are unique."""
    at = 1_800_000_000_000
    clock = iter([at, at, at + 1, at - 3_600_000, at - 3_600_000, at - 1, at + 2])
    monkeypatch.setattr(time, "time_ns", lambda: next(clock) * 1_000_000)
    make = _Uuid7().one
    ids = [make() for _ in range(7)]
    assert ids == sorted(set(ids))


def test_the_largest_random_start_leaves_room_to_count(monkeypatch: pytest.MonkeyPatch):
    """Counting on from the largest random number stays inside its bits."""
    monkeypatch.setattr("os.urandom", lambda n: b"\xff" * n)
    monkeypatch.setattr(time, "time_ns", lambda: 1_800_000_000_000_000_000)
    make = _Uuid7().one
    ids = [make() for _ in range(1000)]
    assert ids == sorted(set(ids))
    assert {(uuid.UUID(text).version, uuid.UUID(text).variant) for text in ids} == {(7, uuid.RFC_4122)}


def test_a_forked_process_makes_other_ids():
    """A process and its fork never make the same id, even while the clock stands still."""
    script = """
import os, time
time.time_ns = lambda: 1_800_000_000_000_000_000
from taskyard.model.task import new_uuid
new_uuid()
reader, writer = os.pipe()
if os.fork() == 0:
    os.write(writer, new_uuid().encode())
    os._exit(0)
mine, theirs = new_uuid(), os.read(reader, 100).decode()
os.wait()
print(len(theirs) == 36 and mine != theirs)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "True"
