"""`taskyard cancel` and `taskyard retry`, from another process than the worker's."""

import json

import pytest

from taskyard.model.state import TaskState
from tests.cli.shell import Shell


@pytest.mark.spec("QUE-11")
def test_cancel_ends_what_waits_at_once(shell: Shell) -> None:
    """A queued task is canceled with the reason given; what cannot be canceled is refused without stopping the rest."""
    one, other = shell.seed(("add", {"a": 1}), ("add", {"a": 2}))
    done = shell.run("cancel", one[-8:], "ffffffff", other, "--reason", "not needed", "--store", shell.url)
    assert done.code == 1
    assert "no task ffffffff" in done.out
    assert done.out.count("⊘ canceled") == 2
    record = shell.record(one)
    assert record.state is TaskState.CANCELED
    assert record.error is not None
    assert record.error.message == "not needed"
    again = shell.here("cancel", one, "--store", shell.url, "--json")
    assert again.code == 1
    (answer,) = again.json
    assert (answer["ok"], answer["code"], answer["uuid"]) == (False, "CommandRefused", one)
    assert answer["state"] == "canceled"


@pytest.mark.spec("QUE-12")
def test_cancel_stops_what_runs_elsewhere(shell: Shell) -> None:
    """A task that runs in a worker is asked to stop from another process, and ends as canceled."""
    worker = shell.start_worker("--verbose")
    (uuid,) = shell.seed(("hold", {}))
    worker.hear(f"started   hold {uuid}")
    asked = shell.here("cancel", uuid, "--store", shell.url, "--json").json
    assert asked == [{"ok": True, "asked": uuid, "uuid": uuid, "state": "running", "stopping": True}]
    watched = shell.here("watch", uuid, "--store", shell.url)
    assert watched.code == 1, "not completed"
    assert "canceled   hold" in watched.out
    assert shell.record(uuid).state is TaskState.CANCELED


def test_retry_sends_failed_tasks_again(shell: Shell) -> None:
    """A failed task goes before the others that wait, or behind them; one that did not fail is refused."""
    first, second, done = shell.seed(("boom", {}), ("boom", {}), ("add", {"a": 1}), work=True)
    (waiting,) = shell.seed(("boom", {}))
    assert shell.here("retry", first, "--store", shell.url).out.endswith(
        "boom  ○ queued; at the head of normal priority on queue 'cpu'\n"
    )
    mixed = shell.here("retry", second, done, "--tail", "--store", shell.url, "--json")
    assert mixed.code == 1
    assert [answer["ok"] for answer in mixed.json] == [True, False]
    assert json.dumps(mixed.json).count("only a failed task") == 1
    places = [shell.record(uuid).position for uuid in (first, waiting, second)]
    assert places == sorted(places)
