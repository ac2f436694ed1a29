"""The short version of `python -m tests.torture full`."""

import random
from pathlib import Path

import pytest

from tests.torture import full
from tests.torture.disks import PretendedDisk, fill_up
from tests.torture.work import ledger_of


@pytest.mark.slow
def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    """On a full disk submits are refused as such, nothing acknowledged is lost, and with room the work resumes."""
    figures = full.run(tmp_path, trials=1, seed=12)
    assert figures.failures == []
    assert figures.trials == 1


@pytest.mark.slow
async def test_a_pretended_full_disk_loses_nothing(tmp_path: Path) -> None:
    """The same where no file system can be mounted, with an SQLite that cannot make its files longer."""
    said: list[str] = []
    ledger = ledger_of(tmp_path)
    disk = PretendedDisk(tmp_path)
    assert await fill_up(disk, ledger, tmp_path, random.Random(12), said.append) == []
    assert [line.split()[0] for line in said] == ["refused"]
    ledger.close()
