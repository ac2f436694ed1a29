"""`taskyard schedule`: what recurs."""

import signal
from contextlib import closing
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import apsw
import pytest

from taskyard.cli.asking import asker
from tests.cli.shell import Done, Shell

NIGHTLY = ("schedule", "add", "nightly", "add", "a=1", "--cron", "30 4 * * *", "--zone", "Europe/Berlin")


def on(shell: Shell, *words: str) -> Done:
    done = shell.here("schedule", *words, "--store", shell.url)
    assert done.code == 0, done.err
    return done


@pytest.fixture
def scheduled(shell: Shell) -> Shell:
    """A store with one schedule."""
    done = shell.ok(*NIGHTLY, "--app", "app:yard")
    assert done.out.startswith("nightly  ● active  at 04:30 every day, Europe/Berlin; next ")
    return shell


@pytest.mark.spec("SCH-21")
def test_schedules_are_listed_in_words(scheduled: Shell) -> None:
    """Each is a line with its state, when it fires next, its counters and its rule; also in a narrow window."""
    head, line = on(scheduled, "ls").out.splitlines()
    assert head.split() == ["NAME", "STATE", "NEXT", "FIRED", "MISSED", "SKIPPED", "CONSUMER", "RULE"]
    assert line.split()[:4] == ["nightly", "●", "active", "in"]
    assert line.endswith("at 04:30 every day, Europe/Berlin")
    narrow = scheduled.here("schedule", "ls", "--store", scheduled.url, COLUMNS="80").out
    assert max(map(len, narrow.splitlines())) <= 80
    (found,) = on(scheduled, "ls", "--json").json
    assert (found["name"], found["state"], found["rule_text"]) == (
        "nightly",
        "active",
        "at 04:30 every day, Europe/Berlin",
    )
    assert found["counts"] == {"fired": 0, "missed": 0, "skipped": 0, "failed": 0}
    assert found["rule"] == {"type": "cron", "expression": "30 4 * * *", "zone": "Europe/Berlin"}
    assert (found["args"], found["missed"], found["overlap"], found["by"]) == ({"a": 1}, "once", "skip", asker())
    assert len(found["next"]) == 1


def test_without_schedules_it_says_how_to_add_one(shell: Shell) -> None:
    """An empty list tells what to type next."""
    shell.seed(("add", {"a": 1}))
    assert "taskyard schedule add" in on(shell, "ls").out
    assert on(shell, "ls", "--json").json == []


@pytest.mark.spec("SCH-21")
def test_a_schedule_is_shown_with_its_next_fires(scheduled: Shell) -> None:
    """As the clocks of its zone show them, as many as asked for, one a day."""
    said = on(scheduled, "show", "nightly", "--next", "3").out
    lines = [line.split() for line in said.splitlines() if " 04:30:00 " in line]
    assert len({line[1] for line in lines}) == len(lines) == 3
    assert "at 04:30 every day, Europe/Berlin  (30 4 * * *)" in said
    assert "a: 1" in said
    shown = on(scheduled, "show", "nightly", "--next", "3", "--json").json
    moments = [datetime.fromisoformat(at) for at in shown["next"]]
    assert all(timedelta(hours=23) <= b - a <= timedelta(hours=25) for a, b in pairwise(moments))
    assert shown["fires"] == []


@pytest.mark.spec("SCH-21")
def test_a_schedule_is_paused_with_a_note_and_resumed(scheduled: Shell) -> None:
    """The note is shown wherever the schedule is, until it is resumed."""
    said = on(scheduled, "pause", "nightly", "--note", "backup runs").out
    assert said.startswith("nightly  ‖ paused")
    assert "‖ paused" in (listed := on(scheduled, "ls").out)
    assert "backup runs" in listed
    assert f"by {asker()}: backup runs" in on(scheduled, "show", "nightly").out
    assert on(scheduled, "show", "nightly", "--json").json["next"] == []
    assert on(scheduled, "resume", "nightly").out.startswith("nightly  ● active")
    assert "backup runs" not in on(scheduled, "ls").out


@pytest.mark.spec("SCH-21")
def test_a_schedule_is_run_and_backfilled(scheduled: Shell) -> None:
    """Run makes one task now; a backfill one for each time that has passed, and none the second time."""
    app = ("--app", "app:yard")
    (task,) = on(scheduled, "run", "nightly", *app).out.split()
    assert scheduled.record(task).consumer == "add"
    span = ("--from", "2026-01-01T00:00Z", "--to", "2026-01-08T00:00Z")
    made = on(scheduled, "backfill", "nightly", *span, *app, "--json").json["tasks"]
    assert len(made) == 7
    again = on(scheduled, "backfill", "nightly", *span, *app, "--again")
    assert (again.out, again.err.strip()) == ("", "nothing to backfill: every fire time in this range has a task")
    fires = on(scheduled, "show", "nightly", "--json").json["fires"]
    assert [fire["kind"] for fire in fires] == ["backfill"] * 7 + ["by hand"]
    assert {fire["state"] for fire in fires} == {"queued"}
    assert "backfill" in on(scheduled, "show", "nightly").out


@pytest.mark.parametrize("words", [("run",), ("backfill", "--from", "2026-01-01T00:00Z", "--to", "2026-01-08T00:00Z")])
def test_what_a_schedule_makes_takes_its_code(scheduled: Shell, words: tuple[str, ...]) -> None:
    """Without the app nobody knows queue and arguments of the tasks: nothing is made up."""
    done = scheduled.here("schedule", *words, "nightly", "--store", scheduled.url)
    assert (done.code, done.out) == (2, "")
    assert "name the app with --app" in done.err
    assert on(scheduled, "show", "nightly", "--json").json["fires"] == []


ITEMS_APP = """
from taskyard import Yard

yard = Yard("sqlite:///work.db")


@yard.consumer(concurrency=9)
async def visit(account: int, level: int = 1) -> int:
    return account


def accounts():
    if open("broken.txt").read():
        raise OSError("no database")
    return [{"account": n} for n in range(500)]


yard.schedules.define("daily", "0 4 * * *", visit, {"level": 2}, each=[{"account": n} for n in range(3)])
yard.schedules.define("called", "0 4 * * *", visit, each=accounts, overlap="allow")
"""


@pytest.fixture
def items(shell: Shell) -> Shell:
    """A store with two schedules that make a task for each of many."""
    (shell.folder / "items.py").write_text(ITEMS_APP, "utf-8")
    (shell.folder / "broken.txt").write_text("", "utf-8")
    worker = shell.start("worker", "items:yard")
    worker.hear("is running")
    worker.signal(signal.SIGTERM)
    worker.end()
    return shell


@pytest.mark.spec("SCH-21")
def test_a_schedule_with_items_is_run_and_shown_with_its_counts(items: Shell) -> None:
    """`run` prints the ids and the counts; `ls` and `show` have the counts of the last fire."""
    done = items.ok("schedule", "run", "daily", "--app", "items:yard")
    assert len(done.out.split()) == 3
    assert "3 tasks of schedule 'daily'" in done.err
    done = items.ok("schedule", "run", "daily", "--app", "items:yard")
    assert done.out == ""
    assert "0 tasks of schedule 'daily', 3 skipped: their work is there already" in done.err
    assert "0 tasks, 3 skipped" in next(line for line in on(items, "ls").out.splitlines() if "daily" in line)
    shown = on(items, "show", "daily").out
    assert "3 items; skipped while pending" in shown
    assert "3 tasks, 0 skipped" in shown
    found = on(items, "show", "daily", "--json").json
    assert found["each"] == {"count": 3, "function": "", "timeout_s": 30.0, "dedupe_scope": "pending"}
    assert (found["last"]["made"], found["last"]["skipped"]) == (0, 3)
    assert [(fire["made"], fire["skipped"]) for fire in found["fires"]] == [(0, 3), (3, 0)]
    made = items.ok("schedule", "run", "called", "--app", "items:yard", "--json").json
    assert (len(made["tasks"]), made["skipped"]) == (500, 0)
    assert "accounts(), within " in on(items, "show", "called").out


@pytest.mark.spec("SCH-21")
def test_a_function_that_fails_says_why(items: Shell) -> None:
    """Run by hand, the reason is the error; nothing is made."""
    (items.folder / "broken.txt").write_text("yes", "utf-8")
    done = items.run("schedule", "run", "called", "--app", "items:yard")
    assert (done.code, done.out) == (1, "")
    assert "accounts() raised OSError: no database" in done.err
    assert on(items, "show", "called", "--json").json["fires"] == []


@pytest.mark.spec("SCH-21")
def test_a_worker_fires_what_was_added(shell: Shell) -> None:
    """What is added while a worker runs fires there; without an app the store knows which consumers there are."""
    worker = shell.start_worker("-v")
    done = shell.here("schedule", "add", "pulse", "add", "a=1", "--every", "1s", "--store", shell.url)
    assert done.code == 0, done.err
    assert "checked only when a worker runs" in done.err
    for _ in range(2):
        worker.hear("completed")
    refused = shell.here("schedule", "add", "x", "nobody", "--every", "1s", "--store", shell.url)
    assert (refused.code, "nobody" in refused.err) == (1, True)
    shown = on(shell, "show", "pulse", "--json").json
    assert shown["counts"]["fired"] >= 2
    assert "● running" not in on(shell, "show", "pulse").out


@pytest.mark.spec("SCH-21")
def test_a_schedule_is_changed_only_if_that_is_asked_for(scheduled: Shell) -> None:
    """A name that is taken is refused; with --replace the definition is another."""
    refused = scheduled.here(*NIGHTLY, "--app", "app:yard", "--store", scheduled.url)
    assert refused.code == 1
    assert "there is a schedule 'nightly' already" in refused.err
    assert "replace it (--replace)" in refused.err
    said = scheduled.here(
        "schedule", "add", "nightly", "add", "a=2", "--every", "6h", "--replace", "--app", "app:yard", "--store",
        scheduled.url, "--missed", "all", "--catch-up", "2d", "--grace", "30", "--overlap", "buffer", "--jitter", "5m",
        "--key", "k", "--priority", "low", "--queue", "cpu", "--timeout", "9", "--from", "2026-01-01T00:00Z", "--to",
        "2099-01-01T00:00Z", "--json",
    )  # fmt: skip
    assert said.code == 0, said.err
    found = said.json
    assert (found["rule_text"], found["args"], found["missed"], found["overlap"]) == (
        "every 6 hours",
        {"a": 2},
        "all",
        "buffer",
    )
    assert (found["catch_up_s"], found["grace_s"], found["jitter_s"], found["timeout_s"]) == (172_800, 30, 300, 9)
    assert (found["key"], found["priority"], found["queue"]) == ("k", "low", "cpu")
    assert found["start_at"] == datetime(2026, 1, 1, tzinfo=UTC).isoformat().replace("+00:00", "Z")


@pytest.mark.spec("SCH-21")
def test_a_schedule_is_removed(scheduled: Shell) -> None:
    """It is gone from the list, and a second time it is not known."""
    assert "removed" in on(scheduled, "rm", "nightly").out
    assert on(scheduled, "ls", "--json").json == []
    for verb in ("rm", "show", "pause", "resume"):
        gone = scheduled.here("schedule", verb, "nightly", "--store", scheduled.url)
        assert gone.code == 1
        assert "no schedule 'nightly'" in gone.err


def test_one_that_cannot_be_read_is_listed_beside_the_others(scheduled: Shell) -> None:
    """The list and the doctor say of it what is wrong; the others are as they were, and it can be removed."""
    with closing(apsw.Connection(str(scheduled.path))) as conn:
        conn.execute("INSERT INTO schedule SELECT 'odd', definition, '{', version, actor, from_code FROM schedule")
    nightly, odd = on(scheduled, "ls", "--json").json
    assert (nightly["state"], odd["state"]) == ("active", "unreadable")
    assert "unreadable" in on(scheduled, "ls").out
    assert odd["problem"] in on(scheduled, "show", "odd").out
    ill = scheduled.here("doctor", "--store", scheduled.url, "--json")
    (finding,) = [finding for finding in ill.json["findings"] if finding["topic"] == "schedule"]
    assert (ill.code, finding["level"], finding["data"]["name"]) == (1, "problem", "odd")
    assert odd["problem"] in finding["text"]
    on(scheduled, "rm", "odd")
    assert [found["name"] for found in on(scheduled, "ls", "--json").json] == ["nightly"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        pytest.param(("--cron", "* * *"), "has 3 fields, not 5", id="expression"),
        pytest.param(("--cron", "@daily", "--zone", "Europe/Berlim"), "did you mean 'Europe/Berlin'?", id="zone"),
        pytest.param(("--every", "0.5"), "from 1 to 1e9", id="interval"),
        pytest.param(("--every", "1m", "--overlap", "maybe"), "is not one of skip, buffer, allow, cancel", id="policy"),
        pytest.param(("--every", "1m", "--zone", "UTC"), "zone goes with a cron expression", id="zone of an interval"),
        pytest.param((), "either --cron or --every", id="no rule"),
        pytest.param(("--cron", "@every 5m"), "on the command line --every TIME", id="interval as expression"),
        pytest.param(("--every", "1m", "--from", "0001-01-01T00:00Z"), "between the years 1970 and 9000", id="year 1"),
        pytest.param(("--every", "1m", "--to", "9999-12-31T23:59-01:00"), "the years 1 to 9999", id="year 10,000"),
        pytest.param(("--every", "1m", "--cron", "@daily"), "either --cron or --every", id="two rules"),
    ],
)
def test_what_makes_no_sense_is_told(shell: Shell, words: tuple[str, ...], said: str) -> None:
    """What is wrong with a schedule is said before anything is stored."""
    done = shell.here("schedule", "add", "x", "add", "a=1", *words, "--app", "app:yard")
    assert done.code == 2
    assert said in done.err
