"""`taskyard watch`, from another process than the worker's."""

import json

import pytest

from taskyard.cli.asking import asker
from tests.cli.shell import Shell

ERASED = "\x1b[1A\x1b[2K"
"""How a frame is wiped from a terminal, line by line."""


@pytest.mark.spec("QUE-25")
def test_progress_is_seen_from_another_process(shell: Shell) -> None:
    """A running task's fraction, message and rate are seen live by a process that does not run it."""
    worker = shell.start_worker("--verbose")
    (uuid,) = shell.seed(("hold", {"name": "there"}))
    worker.hear(f"started   hold {uuid}")
    frame = ""
    while "half way there" not in frame:  # progress is stored soon after the start, in a commit of its own
        frame = shell.here("watch", "--once", "--store", shell.url, COLUMNS="80").out
    assert max(map(len, frame.splitlines())) <= 80
    for text in ("1 worker", "● 1 running", uuid[-8:], "50 %", "half way there 3.2/s"):
        assert text in frame
    (running,) = shell.here("watch", "--once", "--json", "--store", shell.url).json["running"]
    assert running["progress"] == {"fraction": 0.5, "message": "half way there", "rate": 3.25}


@pytest.mark.parametrize("named", [("--queue", "cpu"), ("--consumer", "add"), ("--kind", "failed")])
def test_one_look_takes_no_filter(shell: Shell, named: tuple[str, str]) -> None:
    """`--once` shows the whole store: who wants a part of it is told, instead of being shown everything."""
    shell.seed(("add", {"a": 1}))
    refused = shell.here("watch", "--once", *named, "--store", shell.url)
    assert (refused.code, refused.out, "leave --kind, --queue and --consumer out" in refused.err) == (2, "", True)


@pytest.mark.spec("QUE-29")
def test_events_are_lines_in_a_pipe(shell: Shell) -> None:
    """A pipe gets one line for each event, and the command ends by itself when nothing is left to do."""
    (waiting,) = shell.seed(("add", {"a": 1}))
    plain = shell.start("watch", "--until-idle", "--store", shell.url)
    lines = shell.start("watch", "--until-idle", "--json", "--store", shell.url)
    for watcher in (plain, lines):
        watcher.hear("watching")
    assert json.loads(lines.heard[0]) == {"watching": shell.url}
    (told,) = shell.seed(("flaky", {"host": "example.org"}))
    shell.start_worker()
    assert (plain.end(), lines.end()) == (0, 0)
    for text in (f"submitted   flaky {told}", f"completed   add {waiting}  in ", f"failed      flaky {told}  after "):
        assert text in plain.said
    assert "ConnectionError: example.org is away" in plain.said
    events = [event for line in lines.heard[1:] if (event := json.loads(line))["uuid"] == told]
    assert [event["kind"] for event in events] == ["submitted", "running", "retrying", "queued", "running", "failed"]
    assert events[-1]["error"]["message"] == "example.org is away"


def test_watching_a_task_ends_with_it(shell: Shell) -> None:
    """Named tasks are watched until they have ended, and the exit code says whether all completed."""
    good, bad = shell.seed(("add", {"a": 1}), ("boom", {}), work=True)
    done = shell.here("watch", good[-8:], "--store", shell.url)
    assert done.code == 0
    assert f"completed   add {good}" in done.out
    assert shell.here("watch", good, bad, "--store", shell.url).code == 1


def test_the_live_view_draws_on_a_terminal(shell: Shell) -> None:
    """On a terminal the view is drawn live, and its last frame stays on the screen when nothing is left to do."""
    shell.seed(("add", {"a": 41}), ("boom", {"why": "bad luck"}), work=True)
    done = shell.on_a_terminal("watch", "--until-idle", "--store", shell.url)
    assert done.code == 0
    for expected in ("JUST FINISHED", "→ 42", "ValueError: bad luck", "\x1b["):
        assert expected in done.out
    assert ERASED not in done.out.rpartition("JUST FINISHED")[2]


@pytest.mark.spec("QUE-29")
def test_what_is_said_of_a_queue_is_a_line(shell: Shell) -> None:
    """Whoever watches sees that a queue is paused, limited and resumed, and which one."""
    (uuid,) = shell.seed(("boom", {}))
    watcher = shell.start("watch", uuid, "--store", shell.url)
    everything = shell.start("watch", "--store", shell.url)
    everything.hear("watching: ")
    for words in (("pause", "cpu"), ("set", "cpu", "--concurrency", "1"), ("resume", "cpu")):
        shell.here("queue", *words, "--store", shell.url)
    everything.hear("resumed     queue cpu")
    assert [line.split(maxsplit=1)[1].strip() for line in everything.heard[-3:]] == [
        f"{verb}queue cpu  by {asker()}" for verb in ("paused      ", "changed     ", "resumed     ")
    ]
    shell.here("cancel", uuid, "--store", shell.url)
    assert watcher.end() == 1
    assert "queue cpu" not in watcher.said


@pytest.mark.spec("QUE-29")
def test_some_events_only_are_lines(shell: Shell) -> None:
    """By kind, consumer and queue, on whatever it is printed; a kind that does not exist is refused with those that
    do."""
    shell.seed(("boom", {}))
    watcher = shell.start(
        "watch", "--until-idle", "--kind", "completed", "--kind", "failed", "--consumer", "add", "--store", shell.url
    )
    elsewhere = shell.start("watch", "--until-idle", "--json", "--queue", "nowhere", "--store", shell.url)
    for one in (watcher, elsewhere):
        one.hear("watching")
    (good,) = shell.seed(("add", {"a": 1}))
    shell.start_worker()
    assert (watcher.end(), elsewhere.end()) == (0, 0)
    (line,) = [line for line in watcher.said.splitlines() if not line.startswith("watching")]
    assert f"completed   add {good}" in line
    assert len(elsewhere.heard) == 1
    refused = shell.here("watch", "--kind", "finished", "--store", shell.url)
    assert refused.code == 2
    assert "'finished' is no kind of event; known are submitted" in refused.err


@pytest.mark.spec("QUE-32")
def test_watch_shows_what_starts_next(shell: Shell) -> None:
    """The live view lists the first tasks of a queue with their places; a task that is watched has its place too."""
    first, second = shell.seed(("boom", {}), ("boom", {}))
    lines = shell.here("watch", "--once", "--store", shell.url).out.splitlines()
    at = lines.index("NEXT")
    assert [line.split()[:3] for line in lines[at + 1 : at + 3]] == [
        ["○", "boom", first[-8:]],
        ["○", "boom", second[-8:]],
    ]
    assert lines[at + 2].endswith("2 of 2 in cpu")
    watched = shell.here("watch", second, "--once", "--store", shell.url).out
    assert "2 of 2" in watched
    assert "NEXT" not in watched
