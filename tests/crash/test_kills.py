"""The short version of `python -m tests.torture kills`, and proof that it would notice."""

import asyncio
from pathlib import Path

import pytest

from taskyard.testing.faults import PHASES, POINTS, Board, Faults, phase_of
from taskyard.testing.ledger import judge
from tests.torture import kills, rescue
from tests.torture.procs import Troop
from tests.torture.verdict import drain_and_judge
from tests.torture.work import ledger_of

SEED = 20


@pytest.mark.spec("SCH-14", "QUE-22", "QUE-23")
@pytest.mark.slow
def test_nothing_acknowledged_is_lost_to_kill_9(tmp_path: Path) -> None:
    """Processes killed at any instant lose nothing acknowledged, run no task twice at once, and every task ends."""
    figures = kills.run(tmp_path, trials=20, seed=SEED)
    assert figures.failures == []
    assert figures.trials >= 20


@pytest.mark.parametrize("phase", PHASES)
def test_a_process_dies_at_the_point_it_was_told(phase: str, tmp_path: Path) -> None:
    """Every named point is really passed, kills its process there, and what was in progress is taken up again."""
    ledger = ledger_of(tmp_path)
    troop = Troop(tmp_path, ledger)
    points = [point for point in POINTS if phase_of(point) == phase]
    with troop.gathered():
        role = "submit" if phase == "submit" else "work"
        if role == "work":
            troop.start("submit", every_s=0.002)
        for point in points:
            victim = troop.start(role, fault=f"{point}:2", every_s=0.001)
            assert victim.has_ended(timeout_s=20), point
            troop.end(victim)
        assert troop.phases == {phase: len(points)}
    ledger.close()
    faults, stored = drain_and_judge(tmp_path)
    assert faults == []
    assert stored


def test_an_acknowledgement_before_the_commit_is_noticed(tmp_path: Path) -> None:
    """With a store that answers before it commits, the same test turns red."""
    ledger = ledger_of(tmp_path)
    troop = Troop(tmp_path, ledger)
    with troop.gathered():
        victim = troop.start("submit", fault="submit.commit:4", mutation="acknowledge-before-commit", every_s=0.001)
        assert victim.has_ended(timeout_s=20)
    ledger.close()
    faults, _ = drain_and_judge(tmp_path)
    assert any("acknowledged, and lost" in fault for fault in faults)


def test_a_false_verdict_of_death_is_noticed(tmp_path: Path) -> None:
    """With a store that takes living nodes for dead, a task runs twice at once, and the checker says so."""
    ledger = ledger_of(tmp_path)
    troop = Troop(tmp_path, ledger)
    with troop.gathered():
        troop.start("work", ready=True)
        asyncio.run(rescue.submit(tmp_path, ledger))
        first, line = rescue.next_start(ledger, 0)
        troop.start("work", ready=True, mutation="take-the-living-for-dead", dying_s=0.01)
        second, _ = rescue.next_start(ledger, line)
    assert first.task == second.task
    faults = judge(ledger.entries(), {})
    ledger.close()
    assert any(f"token {second.token} started while token {first.token} was running" in fault for fault in faults)


def test_an_unknown_point_is_refused() -> None:
    """A fault that could never strike is an error, not a test that passes."""
    with pytest.raises(ValueError, match="no fault point"):
        Faults("settle.nowhere:3")


def test_the_board_outlives_its_process(tmp_path: Path) -> None:
    """What a process was doing can be read from its board: the transaction first, then what it waited for."""
    board = Board(tmp_path / "board")
    assert Board.read(tmp_path / "board") == "idle"
    board.count("run", 1)
    assert Board.read(tmp_path / "board") == "run"
    board.count("settle", 1)
    assert Board.read(tmp_path / "board") == "settle"
    board.step("claim")
    assert Board.read(tmp_path / "board") == "claim"
    assert Board.read(tmp_path / "nobody's") == "idle"
