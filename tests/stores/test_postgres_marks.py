"""The marks of lanes: claims begin to read there, so nothing that may start can ever stand below one."""

import asyncio
import os

import pytest

from taskyard.stores import migrate
from taskyard.stores.postgres import PostgresStore, schema
from taskyard.testing.clock import ManualClock
from taskyard.testing.postgres import Databases
from tests.stateful.histories import crowded
from tests.stores.walk import Walk

STEPS = 400
SEEDS = {"small": 8, "large": 200, "torture": 5_000}[os.environ.get("HYPOTHESIS_PROFILE", "small")]
SEEDS_TO_FIND = 12


def walk(databases: Databases, kind: str, seed: int) -> None:
    with crowded():
        asyncio.run(_walk(databases.empty(kind), seed))


async def _walk(url: str, seed: int) -> None:
    clock = ManualClock()
    store = PostgresStore(url, clock=clock)
    await store.open()
    try:
        await Walk(store, clock, seed).go(STEPS)
    finally:
        await store.close()


def passes(databases: Databases, kind: str, seed: int) -> bool:
    try:
        walk(databases, kind, seed)
    except AssertionError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.spec("QUE-03", "QUE-05", "QUE-30")
@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_claim_comes_across_all_that_may_start(databases: Databases, seed: int):
    """Whatever is done to tasks and queues, no task that may start is ever lost sight of, and all are worked off."""
    walk(databases, "crowded", seed)


MARKS = [
    pytest.param("PERFORM taskyard.lower_1(v_done.queued);", id="given-back"),
    pytest.param("PERFORM taskyard.lower_1(v_freed);", id="freed-by-a-key"),
    pytest.param(
        "AND (SELECT q.ordering FROM taskyard.queue AS q WHERE q.name = l.queue) IS DISTINCT FROM 'buckets'",
        id="buckets-take-turns",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("line", MARKS)
def test_a_task_below_a_mark_is_found(databases: Databases, line: str, monkeypatch: pytest.MonkeyPatch):
    """The walk would notice: without one line of the SQL that keeps marks below what may start, it does not pass."""

    def mutated(database: str) -> list[tuple[int, str]]:
        return [(number, sql.replace(line, "")) for number, sql in migrate.migrations(database)]

    assert sum(sql.count(line) for _, sql in migrate.migrations("postgres")) == 1
    monkeypatch.setattr(schema, "migrations", mutated)
    assert not all(passes(databases, line, seed) for seed in range(SEEDS_TO_FIND))
