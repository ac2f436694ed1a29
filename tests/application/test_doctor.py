"""The doctor's findings as values."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from taskyard import Yard
from taskyard.application.doctor import Finding, Level, diagnose
from taskyard.errors import StoreUrlInvalid


def by_topic(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.topic: finding for finding in findings}


def test_findings_have_a_schema(tmp_path: Path) -> None:
    """A finding survives JSON and has a schema: a page can show what the command line prints."""
    found = diagnose(f"sqlite:///{tmp_path / 'none.db'}")
    assert msgspec.json.decode(msgspec.json.encode(found), type=list[Finding]) == found
    assert msgspec.json.schema(Finding)["$defs"]["Finding"]["required"] == ["topic", "level", "text"]


def test_every_warning_and_problem_says_what_to_do(tmp_path: Path) -> None:
    """A finding that is not ok has a hint."""
    (tmp_path / "notes.db").write_text("not a database, but long enough to be read as one\n" * 100)
    for name in ("none.db", "notes.db", "."):
        found = diagnose(f"sqlite:///{tmp_path / name}")
        assert Level.PROBLEM in {finding.level for finding in found}
        assert all(finding.hint for finding in found if finding.level is not Level.OK)


async def test_a_store_in_use_is_examined(tmp_path: Path) -> None:
    """The running worker, its schema and tasks are found while the store is open, and nothing is changed."""
    yard = Yard(url := f"sqlite:///{tmp_path / 'work.db'}")

    @yard.consumer
    async def double(n: int) -> int:
        return 2 * n

    async with yard:
        await (await yard.submit("double", {"n": 1})).result(timeout_s=20)
        found = by_topic(await asyncio.to_thread(diagnose, url))
    assert found["tasks"].data == {"counts": {"completed": 1}}
    assert "double" in found["worker"].text
    assert found["integrity"].level is found["write lock"].level is Level.OK
    assert found["schema"].data["schema"] == found["schema"].data["newest"]


def test_no_store_is_a_finding_and_a_wrong_address_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an address only the machine is examined; what is not an address is refused."""
    monkeypatch.delenv("TASKYARD_STORE", raising=False)
    assert "none examined" in by_topic(diagnose())["store"].text
    with pytest.raises(StoreUrlInvalid):
        diagnose("work.db")
