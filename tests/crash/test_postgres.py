"""The short versions of `python -m tests.torture pg-…`, and proof that they would notice."""

from pathlib import Path

import pytest

from taskyard.testing.postgres import Databases
from tests.torture.postgres import clients, crashes, deaths, foreign, hints, limits, outages, pauses, verdicts

SEED = 4


@pytest.mark.spec("QUE-23")
@pytest.mark.slow
@pytest.mark.parametrize("mutation", ["", "part-every-turn"], ids=["as-it-is", "ends-apart"])
def test_a_dead_nodes_tasks_run_elsewhere_within_the_lease_and_5_s(
    tmp_path: Path, databases: Databases, mutation: str
) -> None:
    """What a node was running that is killed with SIGKILL is started on others; nothing is lost or committed twice."""
    figures = deaths.run_part(tmp_path, trials=2, seed=SEED, databases=databases, mutation=mutation)
    assert figures.failures == []
    assert max(figures.took) <= deaths.LIMIT_S


@pytest.mark.spec("SCH-17")
@pytest.mark.slow
def test_a_node_that_stood_still_past_its_lease_commits_nothing(tmp_path: Path, databases: Databases) -> None:
    """Of what a stopped node goes on with, no result, note, progress or new task is seen; each refusal is counted."""
    figures = pauses.run_part(tmp_path, trials=2, seed=SEED, databases=databases)
    assert figures.failures == []
    assert figures.counts["refused"] == figures.counts["stale runs"] > 0


def test_a_database_without_the_token_check_is_noticed(tmp_path: Path, databases: Databases) -> None:
    """With a database that lets a stale run settle, the same test turns red."""
    figures = pauses.run_part(tmp_path, trials=1, seed=SEED, databases=databases, mutation="drop-the-token-check")
    assert any("is recorded" in failure or "submitted by the stale" in failure for failure in figures.failures)


@pytest.mark.slow
@pytest.mark.parametrize("way", outages.WAYS)
def test_claims_resume_when_the_database_is_back(way: str, tmp_path: Path) -> None:
    """A database that was away for a while, in whichever way, finds every node at work again within 10 s, is not
    stormed, and has lost nothing."""
    figures = outages.run_part(tmp_path, trials=1, seed=SEED, way=way, away_s=3.0)
    assert figures.failures == []
    assert figures.trials == 1


def test_a_lost_notification_only_adds_latency(tmp_path: Path, databases: Databases) -> None:
    """With its listening connection ended again and again, a node starts tasks within the poll interval."""
    assert hints.run_deaf(tmp_path, trials=5, seed=SEED, databases=databases).failures == []


@pytest.mark.spec("QUE-12")
def test_a_cancel_reaches_another_node_within_a_second(tmp_path: Path, databases: Databases) -> None:
    """A task is canceled from another process than the one that runs it, and ends there within a second."""
    assert hints.run_cancels(tmp_path, trials=10, seed=SEED, databases=databases).failures == []


def test_one_task_comes_of_many_submits(tmp_path: Path, databases: Databases) -> None:
    """32 clients in four processes submit the same work at once, one process is killed over it: there is one task."""
    assert clients.run_dedupe(tmp_path, trials=2, seed=SEED, databases=databases).failures == []


@pytest.mark.spec("QUE-02")
@pytest.mark.slow
def test_a_queues_limit_holds_across_nodes(tmp_path: Path, databases: Databases) -> None:
    """A queue with concurrency 1 never runs two tasks at once on four nodes, one of which is killed."""
    assert limits.run(tmp_path, trials=60, seed=SEED, databases=databases).failures == []


@pytest.mark.parametrize(
    ("mutation", "blame"), [("forget-what-runs", "under the same key"), ("drop-the-queue-lock", "task ")]
)
def test_a_limit_that_does_not_hold_is_noticed(mutation: str, blame: str, tmp_path: Path, databases: Databases) -> None:
    """With nodes that do not count what the others run, or do not wait for each other, the same test turns red."""
    figures = limits.run(tmp_path, trials=6, seed=SEED, databases=databases, mutation=mutation)
    assert any(blame in failure for failure in figures.failures), figures.failures


def test_a_foreign_transaction_holds_up_nothing(tmp_path: Path, databases: Databases) -> None:
    """While somebody else's transaction stays open, at least half as many tasks a second run, and results arrive."""
    assert foreign.run(tmp_path, trials=400, seed=SEED, databases=databases).failures == []


@pytest.mark.spec("SCH-14", "QUE-22")
@pytest.mark.slow
def test_nothing_acknowledged_is_lost_to_kill_9(tmp_path: Path, databases: Databases) -> None:
    """Processes killed at any instant lose nothing acknowledged, run no task twice at once, and every task ends."""
    figures = clients.run_kills(tmp_path, trials=6, seed=SEED, databases=databases)
    assert figures.failures == []


@pytest.mark.slow
def test_what_was_acknowledged_survives_a_crash_of_the_server(tmp_path: Path) -> None:
    """A server whose processes are all killed at once has everything it acknowledged when it is started again."""
    figures = crashes.run_part(tmp_path, trials=2, seed=SEED)
    assert figures.failures == []
    assert figures.counts["tasks"] > 0


def test_an_acknowledgement_before_the_flush_is_noticed(tmp_path: Path) -> None:
    """With clients that are answered before their transactions are on disk, the same test turns red."""
    figures = crashes.run_part(tmp_path, trials=1, seed=SEED, mutation="acknowledge-before-flush")
    assert any("acknowledged, and lost" in failure for failure in figures.failures)


@pytest.mark.spec("SCH-16")
def test_a_node_that_beats_again_keeps_its_tasks(tmp_path: Path, databases: Databases) -> None:
    """A node that was taken for dead, and beats before anything was taken from it, goes on undisturbed."""
    assert verdicts.run(tmp_path, trials=1, seed=SEED, databases=databases).failures == []


def test_a_rescue_that_does_not_look_again_is_noticed(tmp_path: Path, databases: Databases) -> None:
    """With a rescue that does not care whether the node has beaten since, the same test turns red."""
    failures: list[str] = []
    for seed in range(SEED, SEED + 3):  # a busy machine may miss the moment: up to three tries
        if not any("was running" in failure for failure in failures):
            where = tmp_path / str(seed)
            where.mkdir()
            failures += verdicts.run(
                where, trials=1, seed=seed, databases=databases, mutation="rescue-without-looking"
            ).failures
    assert any("was running" in failure for failure in failures), failures
