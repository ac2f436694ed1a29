"""The marks of lanes: claims begin to read there, so nothing that may start can ever stand below one. The short version
of `python -m tests.torture pg-walks`."""

import pytest

from taskyard.stores.migrations import Bundle
from taskyard.stores.postgres import schema
from taskyard.testing.postgres import Databases
from tests.stores.walk import walk

SEEDS = 8
SEEDS_TO_FIND = 80


def passes(databases: Databases, kind: str, seed: int) -> bool:
    try:
        walk(databases, seed, kind)
    except AssertionError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.spec("QUE-03", "QUE-05", "QUE-30")
@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_claim_comes_across_all_that_may_start(databases: Databases, seed: int):
    """Whatever is done to tasks and queues, no task that may start is ever lost sight of, and all are worked off."""
    walk(databases, seed)


MARKS = [
    pytest.param("PERFORM taskyard.lower_watermarks(v_done.queued);", id="given-back"),
    pytest.param("PERFORM taskyard.lower_watermarks(v_freed);", id="freed-by-a-key"),
    pytest.param("q.ordering = 'buckets' OR ", id="buckets-take-turns"),
    pytest.param(" OR q.rollout_task_id IS NOT NULL OR q.target_ordering <> q.ordering", id="put-into-lines"),
    pytest.param(
        "PERFORM taskyard.lower_watermarks(ARRAY(SELECT id FROM taskyard.task WHERE uuid = ANY (a.uuid)));",
        id="new-lanes",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("line", MARKS)
def test_a_task_below_a_mark_is_found(databases: Databases, line: str, monkeypatch: pytest.MonkeyPatch):
    """The walk would notice: without one line of the SQL that keeps marks below what may start, it does not pass."""

    whole = schema.bundle
    assert whole().sql.count(line) == 1
    monkeypatch.setattr(schema, "bundle", lambda: Bundle(whole().version, whole().sql.replace(line, "")))
    assert not all(passes(databases, line, seed) for seed in range(SEEDS_TO_FIND))
