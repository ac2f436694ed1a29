"""SQLite and PostgreSQL held against memory, and all against the rules, over random histories: the short version of
`python -m tests.torture histories-memory histories-sqlite histories-postgres`."""

import os
from typing import Any

import pytest
from hypothesis import Phase

from taskyard.model.move import Move
from taskyard.model.order import tail_position
from taskyard.model.task import Claim, TaskRecord
from taskyard.stores.memory import MemoryCore, core, tasks
from taskyard.testing.postgres import Databases
from tests.stateful import histories
from tests.stateful.machine import StoreMachine
from tests.stateful.memory import MemoryMachine
from tests.stateful.postgres import postgres_machine

HISTORIES = {"small": 20, "large": 2_000, "torture": 100_000}[os.environ.get("HYPOTHESIS_PROFILE", "small")]


@pytest.mark.slow
@pytest.mark.timeout(300 + 5 * HISTORIES)
@pytest.mark.spec("QUE-01", "QUE-02", "QUE-03", "QUE-05", "QUE-26", "SCH-05", "SCH-08", "SCH-15")
def test_memory_keeps_the_rules():
    """Whatever happens, in whatever order, the store in memory moves legally, keeps order and limits, and answers the
    same to the same."""
    histories.check(HISTORIES, machine=MemoryMachine)


@pytest.mark.slow
@pytest.mark.timeout(300 + 5 * HISTORIES)
@pytest.mark.spec("QUE-01", "QUE-02", "QUE-03", "QUE-05", "QUE-26", "SCH-05", "SCH-08", "SCH-15")
def test_sqlite_and_memory_never_differ():
    """Whatever happens, in whatever order, both stores hold and answer the same, move legally and keep every limit."""
    histories.check(HISTORIES)


@pytest.mark.slow
@pytest.mark.timeout(300 + 5 * HISTORIES)
@pytest.mark.spec("QUE-01", "QUE-02", "QUE-03", "QUE-05", "QUE-26", "SCH-05", "SCH-08", "SCH-15")
def test_postgres_and_memory_never_differ(databases: Databases):
    """Whatever happens, in whatever order, both stores hold and answer the same, move legally and keep every limit."""
    histories.check(HISTORIES, machine=postgres_machine(databases))


def no_fence(core: MemoryCore, claim: Claim) -> TaskRecord | None:
    record = core._by_id.get(claim.record.id)
    return record if record is not None and record.token is not None else None


def no_running(core: MemoryCore, queue: str, key: str) -> None:
    return None


def no_cancel(move: Move) -> Move:
    return move


MISTAKES = [
    pytest.param(tasks, "HOLDS_KEY", frozenset(), id="backoff-frees-the-key"),
    pytest.param(core, "heed_cancel", no_cancel, id="a-late-cancel-is-lost"),
    pytest.param(MemoryCore, "find_running", no_running, id="a-busy-key-takes-work"),
    pytest.param(MemoryCore, "_held", no_fence, id="a-stale-run-settles"),
    pytest.param(tasks, "head_position", tail_position, id="rescued-to-the-tail"),
]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("where", "name", "mistake"), MISTAKES)
def test_a_mistake_is_found(where: Any, name: str, mistake: Any, monkeypatch: pytest.MonkeyPatch):
    """The machine would notice: a store with one mistake in it does not pass."""
    monkeypatch.setattr(where, name, mistake)
    with pytest.raises(AssertionError):
        histories.check_seed(6, 500, machine=StoreMachine, phases=[Phase.generate])
