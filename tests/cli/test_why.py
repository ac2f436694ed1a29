"""`taskyard why` and `taskyard failures`, and what `ls` and `show` say of tasks that wait."""

import signal
from datetime import UTC, datetime

import pytest
from rich.console import Console

from taskyard.application.task_documents import FailureDocument, FailurePage
from taskyard.cli.failures import draw
from tests.cli.shell import Shell


def test_why_follows_the_chain(shell: Shell) -> None:
    """Each task in the way is asked about in its turn, down to one that does not wait."""
    worker = shell.start_worker()
    held = shell.ok("submit", "hold", "--key", "k", "--app", "app:yard").out.strip()
    worker.hear("hold has begun")
    waiting = shell.ok("submit", "hold", "--key", "k", "--app", "app:yard").out.strip()
    out = shell.here("why", waiting, "--store", shell.url).out
    assert f"key 'k' is busy: task {held} holds it" in out
    assert "wait until that has ended, or cancel it" in out
    assert "it does not wait: it is running" in out
    chain = shell.here("why", waiting, "--store", shell.url, "--json").json
    assert [link["uuid"] for link in chain] == [waiting, held]
    assert (chain[0]["why"]["reason"], chain[0]["why"]["blocking_task"], chain[1]["why"]) == ("key busy", held, None)
    listed = shell.here("ls", "--store", shell.url).out.splitlines()
    assert f"key 'k' is busy: task {held[-8:]} holds it" in listed[1]


def test_what_a_dead_worker_ran_is_told(shell: Shell) -> None:
    """After the only worker was killed, why, show and ls say of what it ran that there is nobody to take it back, and a
    cancel says when it comes true."""
    worker = shell.start_worker()
    uuid = shell.ok("submit", "hold", "--app", "app:yard").out.strip()
    worker.hear("hold has begun")
    worker.signal(signal.SIGKILL)
    worker.end()
    text = "has died, and there is no other to take the task back"
    for command in ("why", "show"):
        assert text in " ".join(shell.here(command, uuid, "--store", shell.url).out.split())
    assert "has died" in shell.here("ls", "--store", shell.url).out
    assert f"{text}; it is canceled then" in shell.here("cancel", uuid, "--store", shell.url).out


def test_ls_and_show_say_why(shell: Shell) -> None:
    """A list and a sheet say what holds a task, and so do their documents."""
    (uuid,) = shell.seed(("add", {"a": 1}))
    text = "no node that serves 'add' is alive"
    assert text in shell.here("ls", "--store", shell.url).out
    assert text in shell.here("show", uuid, "--store", shell.url).out
    (task,) = shell.here("ls", "--store", shell.url, "--json").json["tasks"]
    assert task["why"]["reason"] == "no node"
    assert shell.here("show", uuid, "--store", shell.url, "--json").json["why"] == task["why"]


def test_what_is_over_has_no_why(shell: Shell) -> None:
    """A task that has ended is said to have; its document has null."""
    (uuid,) = shell.seed(("add", {"a": 1}), work=True)
    assert "it does not wait: it is completed" in shell.here("why", uuid, "--store", shell.url).out
    assert shell.here("show", uuid, "--store", shell.url, "--json").json["why"] is None


def test_failures_are_listed_by_what_they_share(shell: Shell) -> None:
    """Groups by error and consumer, with a count, the newest and its message, in which secrets are hidden."""
    shell.seed(("boom", {"why": "first"}), ("flaky", {"host": "example.org"}), work=True)
    (newest,) = shell.seed(("boom", {"why": "again", "password": "hunter2"}), work=True)
    lines = shell.here("failures", "--store", shell.url).out.splitlines()
    assert lines[1].split()[:3] == ["2", "ValueError", "boom"]
    assert newest[-8:] in lines[1]
    assert lines[1].endswith("again ***")
    assert lines[-1].endswith("taskyard retry --all --error ValueError")
    groups = shell.here("failures", "--store", shell.url, "--json", "--error", "OSError").json
    assert [(group["error"], group["consumer"], group["count"]) for group in groups] == [
        ("ConnectionError", "flaky", 1)
    ]
    assert shell.here("failures", "--store", shell.url, "--json", "--quarantined").json == []


def test_what_failed_is_named_where_nothing_matches(shell: Shell) -> None:
    """Where no failure matches it is said which errors there are, with how many, and where there is none, that."""
    shell.seed(("add", {"a": 1}), work=True)
    assert shell.here("failures", "--store", shell.url, "--error", "nope").out == "no task has failed\n"
    shell.seed(("boom", {}), ("boom", {}), ("flaky", {"host": "example.org"}), work=True)
    for options in (["--error", "nope"], ["--consumer", "add"], ["--quarantined"]):
        out = shell.here("failures", "--store", shell.url, *options).out
        assert out == "no failed task matches; what failed ended with ValueError (2), ConnectionError (1)\n"


@pytest.mark.parametrize(
    ("quarantined", "options"), [(False, "--all --error system"), (True, "--all --error system --quarantined")]
)
def test_what_is_suggested_chooses_what_is_shown(quarantined: bool, options: str) -> None:
    """The command that is proposed for the largest group is one that means it, also when it is in quarantine."""
    at = datetime(2026, 1, 1, tzinfo=UTC)
    group = FailureDocument(
        error="system", consumer="resize", quarantined=quarantined, count=1, newest_at=at, uuid="u", message="gone"
    )
    console = Console(width=200)
    with console.capture() as said:
        console.print(draw(FailurePage(groups=(group,)), now=at))
    assert said.get().rstrip().endswith(f"taskyard retry {options}")


def test_the_reasons_of_many_are_added_up(shell: Shell) -> None:
    """`why --queue` counts what its tasks wait for, each with the command that frees them."""
    shell.seed(*[("boom", {}) for _ in range(3)])
    (held,) = shell.seed(("boom", {}))
    shell.here("hold", held, "--store", shell.url, LOGNAME="ana")
    shell.seed(("add", {"a": 1}))
    out = shell.here("why", "--queue", "cpu", "--store", shell.url).out.splitlines()
    assert out[0] == "4 wait: 3 for a worker of 'boom', 1 held by cli:ana"
    assert [line.split() for line in out[2:4]] == [
        ["3", "for", "a", "worker", "of", "'boom'"],
        ["no", "node", "that", "serves", "'boom'", "is", "alive"],
    ]
    assert out[4].endswith("taskyard worker module:yard")
    assert out[-1].endswith(f"taskyard release {held[-8:]}")
    summary = shell.here("why", "--all", "--store", shell.url, "--json").json
    assert (summary["total"], summary["explained"], summary["is_sampled"]) == (5, 5, False)
    found = [(group["count"], group["reason"], group["subject"], group["command"]) for group in summary["groups"]]
    assert found == [
        (3, "no node", "boom", "taskyard worker module:yard"),
        (1, "held", "cli:ana", f"taskyard release {held}"),
        (1, "no node", "add", "taskyard worker module:yard"),
    ]
    only = shell.here("why", "--state", "paused", "--store", shell.url, "--json").json
    assert [group["reason"] for group in only["groups"]] == ["held"]


def test_a_command_frees_all_of_a_group(shell: Shell) -> None:
    """A paused queue is resumed by one command; that is what is printed, and it works."""
    shell.seed(("boom", {}), ("boom", {}))
    shell.here("queue", "pause", "cpu", "--store", shell.url)
    (group,) = shell.here("why", "--queue", "cpu", "--store", shell.url, "--json").json["groups"]
    assert (group["count"], group["reason"], group["command"]) == (2, "queue paused", "taskyard queue resume cpu")
    assert shell.here(*group["command"].split()[1:], "--store", shell.url).code == 0
    (group,) = shell.here("why", "--queue", "cpu", "--store", shell.url, "--json").json["groups"]
    assert group["reason"] == "no node"


def test_why_wants_one_task_or_many(shell: Shell) -> None:
    """A task and a filter at once make no sense, and neither does nothing; an empty answer says why it is empty."""
    (uuid,) = shell.seed(("boom", {}))
    neither = shell.here("why", "--store", shell.url)
    assert (neither.code, "which task?" in neither.err) == (2, True)
    both = shell.here("why", uuid, "--all", "--store", shell.url)
    assert (both.code, "not both" in both.err) == (2, True)
    assert "no task that matches waits" in shell.here("why", "--state", "failed", "--store", shell.url).out
    assert "'nowhere'" in shell.here("why", "--queue", "nowhere", "--store", shell.url).out
