"""The short version of `python -m tests.torture images control`, and the rules by which images are made."""

import random
from pathlib import Path

import pytest

from taskyard.testing.crashvfs import SECTOR, Delete, Mark, Op, Sync, Truncate, Write, crash_image
from tests.torture import images

SEED = 40
TRIES = 200


@pytest.mark.spec("QUE-22")
@pytest.mark.slow
def test_nothing_acknowledged_is_lost_to_a_power_cut(tmp_path: Path) -> None:
    """Whatever a cut leaves of the unsynced writes, the store is sound, holds all it acknowledged, and works on."""
    figures = images.run(tmp_path, trials=40, seed=SEED)
    assert figures.failures == []
    assert figures.trials == 40


@pytest.mark.slow
def test_the_same_at_normal_loses_acknowledged_tasks(tmp_path: Path) -> None:
    """Without a sync at each commit the same images do lose tasks: the test above can fail."""
    figures = images.run_control(tmp_path, trials=20, seed=SEED)
    assert figures.failures == []


def all_images(log: list[Op], cut: int | None = None) -> list[dict[str, bytes]]:
    return [crash_image(log, len(log) if cut is None else cut, random.Random(seed)) for seed in range(TRIES)]


def test_what_was_synced_stays() -> None:
    """A synced write is in every image, whatever else is."""
    log: list[Op] = [Write("db", 0, b"a" * 1000), Sync("db"), Write("db", 1000, b"b" * 1000)]
    assert all(image["db"].startswith(b"a" * 1000) for image in all_images(log))


def test_what_was_not_synced_may_be_there_or_not_or_in_part() -> None:
    """An unsynced write is whole in some images, absent in others, and torn between sectors in others still."""
    log: list[Op] = [Write("db", 0, b"a" * 2048), Sync("db"), Write("db", 0, b"b" * 2048)]
    seen = {image["db"] for image in all_images(log)}
    assert {b"a" * 2048, b"b" * 2048} < seen
    for content in seen:
        sectors = [content[at : at + SECTOR] for at in range(0, len(content), SECTOR)]
        assert all(len(set(sector)) == 1 for sector in sectors)


def test_unsynced_writes_may_arrive_in_any_order() -> None:
    """Of two unsynced writes to one place either may be the one that lasts."""
    log: list[Op] = [Write("db", 0, b"first"), Write("db", 0, b"later")]
    assert {image.get("db") for image in all_images(log)} == {None, b"first", b"later"}


def test_a_cut_is_before_what_comes_after_it() -> None:
    """Nothing that was written after the cut is in an image, synced or not."""
    log: list[Op] = [Write("db", 0, b"a"), Mark("acknowledged", 1), Sync("db"), Write("db", 0, b"b"), Sync("db")]
    assert {image.get("db") for image in all_images(log, cut=2)} == {None, b"a"}
    assert {image.get("db") for image in all_images(log, cut=3)} == {b"a"}


def test_what_was_removed_may_be_back_until_the_folder_is_synced() -> None:
    """A removed file may reappear, until SQLite syncs the folder along with a new log."""
    gone: list[Op] = [Write("db-journal", 0, b"old"), Sync("db-journal"), Delete("db-journal", is_synced=False)]
    assert {image.get("db-journal") for image in all_images(gone)} == {None, b"old"}
    settled = [*gone, Write("db-wal", 0, b"new"), Sync("db-wal")]
    assert {image.get("db-journal") for image in all_images(settled)} == {None}


def test_a_file_is_cut_short_or_not() -> None:
    """An unsynced truncation may or may not have happened; a synced one has."""
    log: list[Op] = [Write("db", 0, b"abcd"), Sync("db"), Truncate("db", 2)]
    assert {image["db"] for image in all_images(log)} == {b"ab", b"abcd"}
    assert {image["db"] for image in all_images([*log, Sync("db")])} == {b"ab"}
