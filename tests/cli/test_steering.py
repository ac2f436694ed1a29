"""What people ask of tasks they name, from another process than the worker's."""

import json
from datetime import UTC, datetime

import pytest

from taskyard.cli.asking import asker
from taskyard.model.notes import Note, NoteCode
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
    assert record.cancel is not None
    assert (record.cancel.reason, record.error) == ("not needed", None)
    again = shell.here("cancel", one, "--store", shell.url, "--json")
    assert again.code == 1
    (answer,) = again.json
    assert (answer["ok"], answer["ref"], answer["task"]) == (False, one, None)
    error = answer["error"]
    assert (error["code"], error["data"]["uuid"], error["data"]["state"]) == ("is_canceled", one, "canceled")


@pytest.mark.spec("QUE-12")
def test_cancel_stops_what_runs_elsewhere(shell: Shell) -> None:
    """A task that runs in a worker is asked to stop from another process, and ends as canceled."""
    worker = shell.start_worker("--verbose")
    (uuid,) = shell.seed(("hold", {}))
    worker.hear(f"started   hold {uuid}")
    (receipt,) = shell.here("cancel", uuid, "--store", shell.url, "--json").json
    assert (receipt["ok"], receipt["ref"], receipt["error"], receipt["why"]) == (True, uuid, None, None)
    assert (receipt["task"]["uuid"], receipt["task"]["state"]) == (uuid, "running")
    assert receipt["task"]["cancel"]["actor"] == asker()
    watched = shell.here("watch", uuid, "--store", shell.url)
    assert watched.code == 1, "not completed"
    assert "canceled    hold" in watched.out
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
    assert mixed.json[1]["error"]["code"] == "not_failed"
    assert "only a failed task" in mixed.json[1]["error"]["message"]
    places = [shell.record(uuid).position for uuid in (first, waiting, second)]
    assert places == sorted(places)


@pytest.mark.spec("QUE-12")
def test_cancel_by_force_warns_of_damage(shell: Shell) -> None:
    """A run that is canceled by force is killed at once, without its grace, and whoever asks is warned."""
    worker = shell.start_worker("--verbose")
    (uuid,) = shell.seed(("sleeper", {}))
    worker.hear("sleeper has begun")
    asked = shell.here("cancel", uuid, "--force", "--reason", "in the way", "--store", shell.url)
    assert asked.out.endswith("it is canceled when the run has ended. Its output may be damaged\n")
    worker.hear(f"canceled  sleeper {uuid}")
    assert shell.here("watch", "--until-idle", "--store", shell.url).code == 0  # the store hears a moment later
    record = shell.record(uuid)
    assert record.cancel is not None
    assert (record.cancel.is_forced, record.cancel.reason) == (True, "in the way")
    assert record.cancel.actor.startswith("cli:")
    how = "killed, because it was canceled by force"
    assert record.note == Note(NoteCode.STOPPED_BY_CANCEL, reason=how)
    assert record.remarks.endswith(f": in the way; what it was writing may be damaged; {how}")
    shown = shell.here("show", uuid, "--store", shell.url, "--json").json
    assert (shown["cancel"]["reason"], shown["cancel"]["is_forced"]) == ("in the way", True)
    assert (shown["note"]["code"], shown["remarks"]) == ("stopped_by_cancel", record.remarks)


@pytest.mark.spec("QUE-06")
def test_start_goes_to_the_head(shell: Shell) -> None:
    """A task goes before the others of its priority, or with --raise before all; what runs already is refused."""
    first, last = shell.seed(("boom", {}), ("boom", {}))
    (late,) = shell.seed(("boom", {}), delay_s=3600)
    done = shell.here("start", last, "--store", shell.url)
    assert done.out.endswith("boom  ○ queued; place 1 of 2 in queue 'cpu', normal priority\n")
    assert shell.record(last).position < shell.record(first).position
    raised = shell.here("start", late[-12:], "--raise", "--store", shell.url)
    assert raised.out.endswith("○ queued; place 1 of 3 in queue 'cpu', high priority\n")
    assert shell.record(late).priority == 0
    shell.here("cancel", first, "--store", shell.url)
    refused = shell.here("start", first, "--store", shell.url)
    assert (refused.code, refused.out) == (1, f"✘ refused  cannot start task {first}: it is canceled\n")


@pytest.mark.spec("QUE-07")
@pytest.mark.parametrize("side", ["--before", "--after"])
def test_move_keeps_the_order_in_which_they_are_named(shell: Shell, side: str) -> None:
    """Tasks stand right before or after the other one then, in the order they are named; of another row is refused."""
    one, two, three, four = shell.seed(*[("boom", {"why": str(n)}) for n in range(4)])
    done = shell.here("move", four, one, side, three, "--store", shell.url)
    assert done.code == 0
    assert done.out.count(f"○ queued; right {side[2:]} {three}; place ") == 2
    order = [two, four, one, three] if side == "--before" else [two, three, four, one]
    places = [shell.record(uuid).position for uuid in order]
    assert places == sorted(places)
    (elsewhere,) = shell.seed(("add", {"a": 1}))
    refused = shell.here("move", elsewhere, side, three, "--store", shell.url, "--json")
    assert refused.code == 1
    assert "stands in queue 'cpu', normal" in refused.json[0]["error"]["message"]
    assert shell.here("move", one, "--store", shell.url).code == 2
    assert shell.here("move", one, "--before", two, "--after", three, "--store", shell.url).code == 2


@pytest.mark.spec("QUE-05")
def test_priority_is_changed_while_it_waits(shell: Shell) -> None:
    """Several tasks get another priority at once; a level that does not exist is refused with 2."""
    one, two = shell.seed(("boom", {}), ("boom", {}))
    done = shell.here("priority", one, two, "high", "--store", shell.url)
    assert "○ queued; place 1 of 2 in queue 'cpu', high priority" in done.out
    assert "○ queued; place 2 of 2 in queue 'cpu', high priority" in done.out
    assert [shell.record(uuid).priority for uuid in (one, two)] == [0, 0]
    wrong = shell.here("priority", one, "urgent", "--store", shell.url)
    assert (wrong.code, wrong.err) == (2, "error: priority 'urgent' is not one of high, normal, low\n")


@pytest.mark.spec("QUE-16", "QUE-17")
def test_hold_release_and_skip(shell: Shell) -> None:
    """A held task waits for a person, goes back to its place when it is released, and can be skipped for good."""
    (uuid,) = shell.seed(("boom", {}))
    place = shell.record(uuid).position
    assert shell.here("hold", uuid, "--store", shell.url).out.endswith("boom  ‖ paused\n")
    held = shell.here("show", uuid, "--store", shell.url, "--json").json
    assert (held["hold"]["actor"].partition(":")[0], held["note"], held["cancel"]) == ("cli", None, None)
    released = shell.here("release", uuid, "--store", shell.url)
    assert released.out.endswith("boom  ○ queued; at its old place on queue 'cpu'\n")
    assert shell.record(uuid).position == place
    assert "cannot release" in shell.here("release", uuid, "--store", shell.url).out
    assert shell.here("skip", uuid, "--reason", "not wanted", "--store", shell.url).out.endswith("» skipped\n")
    note = shell.record(uuid).note
    assert note is not None
    assert (note.code, note.reason) == (NoteCode.SKIPPED, "not wanted")
    refused = shell.here("skip", uuid, "--store", shell.url)
    assert (refused.code, refused.out) == (1, f"✘ refused  cannot skip task {uuid}: it is skipped\n")


def test_reschedule_takes_a_while_or_a_moment(shell: Shell) -> None:
    """A task becomes due in a while or at a moment, and earlier again; what is neither is refused with 2."""
    (uuid,) = shell.seed(("boom", {}))
    later = shell.here("reschedule", uuid, "2h", "--store", shell.url)
    assert "◷ scheduled; due in" in later.out
    assert shell.here("reschedule", uuid, "2040-01-31T09:00+01:00", "--store", shell.url).code == 0
    assert shell.record(uuid).due_at == datetime(2040, 1, 31, 8, tzinfo=UTC)
    assert shell.here("reschedule", uuid, "0", "--store", shell.url).out.endswith("due now\n")
    for wrong in ("tomorrow", "2040-01-31T09:00", "9999999d", "9999-12-31T23:59-12:00", "0001-01-01T00:00Z"):
        assert shell.here("reschedule", uuid, wrong, "--store", shell.url).code == 2
    assert shell.record(uuid).due_at < datetime.now(UTC)


@pytest.mark.spec("QUE-15")
def test_run_again_makes_a_new_task(shell: Shell) -> None:
    """What has ended is run again as a new task that names the old one; what has not is refused with its state."""
    (old,) = shell.seed(("add", {"a": 41}), work=True)
    (pending,) = shell.seed(("add", {"a": 1}))
    done = shell.here("run-again", old[-10:], pending, "--store", shell.url, "--json")
    assert done.code == 1
    made, refused = done.json
    new = made["task"]
    assert (made["ok"], new["origin"], new["state"]) == (True, old, "queued")
    assert shell.record(new["uuid"]).args == '{"a":41}'
    shown = shell.here("show", new["uuid"], "--store", shell.url).out.split("\n")
    assert any(line.startswith("note ") and "run again by cli:" in line for line in shown)
    assert shell.record(new["uuid"]).submitted_by == asker()
    assert (refused["ok"], refused["error"]["data"]["state"]) == (False, "queued")
    assert shell.record(old).state is TaskState.COMPLETED


def test_run_again_with_other_arguments(shell: Shell) -> None:
    """--set changes some arguments, which the consumer of the app checks; without the app it is refused with 2."""
    (old,) = shell.seed(("boom", {"why": "1", "password": "x"}), work=True)
    shown = shell.ok("run-again", old, "--set", "why=7", "--app", "app:yard", "--store", shell.url).out
    record = shell.record(shown.split()[0])
    assert json.loads(record.args) == {"why": "7", "password": "x"}
    assert f"a new task, made of {old}" in shown
    wrong = shell.run("run-again", old, "--set", "whom=me", "--app", "app:yard", "--store", shell.url)
    assert wrong.code == 1
    assert "whom" in wrong.out
    assert shell.here("run-again", old, "--set", "why=7", "--store", shell.url).code == 2


def test_prune_forgets_what_ended_long_ago(shell: Shell) -> None:
    """What ended longer ago than asked is forgotten, after a question if it is much; what has not ended stays."""
    shell.seed(*[("add", {"a": n}) for n in range(6)], work=True)
    (waiting,) = shell.seed(("add", {"a": 1}))
    store = ("--store", shell.url)
    assert shell.here("prune", *store).out == "forgot 0 tasks that ended more than 7 d ago\n"
    counted = shell.here("prune", "--older", "0", "--dry-run", "--json", *store).json
    assert (counted["matched"], counted["pruned"], counted["dry_run"]) == (6, 0, True)
    refused = shell.here("prune", "--older", "0", *store, NO_COLOR="1")
    assert (refused.code, refused.out) == (1, "")
    assert "add --yes to forget 6 tasks for good" in refused.err
    assert shell.here("prune", "--older", "0", "--yes", "--json", *store).json["pruned"] == 6
    assert [task["uuid"] for task in shell.here("ls", "--json", *store).json["tasks"]] == [waiting]
