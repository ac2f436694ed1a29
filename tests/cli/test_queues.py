"""`taskyard queue`: what queues hold, and steering them, from another process than the worker's."""

import pytest

from taskyard.model.state import TaskState
from tests.cli.shell import Done, Shell


def queue(shell: Shell, name: str) -> dict[str, object]:
    (found,) = [one for one in shell.here("queue", "ls", "--store", shell.url, "--json").json if one["name"] == name]
    return dict(found)


def say(shell: Shell, *words: str, **variables: str) -> Done:
    return shell.here("queue", *words, "--store", shell.url, **variables)


def test_queue_ls_shows_what_each_holds(shell: Shell) -> None:
    """Each queue is a line: its state, what runs of how many, what waits and since when, what failed, how fast."""
    shell.seed(("add", {"a": 1}), ("boom", {}), work=True)
    shell.seed(("boom", {}), ("boom", {}))
    shell.seed(("add", {"a": 1}), delay_s=3600)
    lines = shell.ok("queue", "ls", "--store", shell.url).out.splitlines()
    assert lines[0].split() == ["QUEUE", "STATE", "RUNNING", "QUEUED", "OLDEST", "LATER", "FAILED", "RATE"]
    cpu, default = (line.split() for line in lines[1:])
    assert (cpu[:5], cpu[6:8]) == (["cpu", "●", "running", "0/2", "2"], ["0", "1"])
    assert cpu[5].endswith("s")
    assert default[:7] == ["default", "●", "running", "0", "0", "1", "0"]
    found = queue(shell, "cpu")
    assert (found["state"], found["limit"], found["counts"]) == ("running", 2, {"queued": 2, "failed": 1})
    assert found["oldest_due_at"] is not None
    rate = found["rate"]
    assert isinstance(rate, float)
    assert 0 < rate <= 1


def test_queue_ls_fits_a_narrow_window(shell: Shell) -> None:
    """In 80 columns no line is longer than the window, and nothing that people said is lost."""
    shell.seed(*[("add", {"a": n}) for n in range(3)], queue="a-queue-with-a-long-name")
    why = "the disk is being replaced, and will be for some time to come"
    assert say(shell, "pause", "a-queue-with-a-long-name", "--reason", why).code == 0
    out = say(shell, "ls", COLUMNS="80").out
    assert max(map(len, out.splitlines())) <= 80
    assert why in " ".join(out.split())


def test_a_store_without_queues_says_so(shell: Shell) -> None:
    """Where nothing was ever submitted, no empty table is shown."""
    shell.seed()
    assert say(shell, "ls").out.startswith("no queue has anything yet")


@pytest.mark.spec("QUE-09")
def test_a_paused_queue_starts_nothing_until_it_is_resumed(shell: Shell) -> None:
    """A pause holds across the processes that come and go, is shown with who and why, and resume starts the head."""
    shell.seed(("boom", {}), work=True)
    paused = say(shell, "pause", "cpu", "--reason", "backup", LOGNAME="ana")
    assert paused.out == "cpu  ‖ paused; nothing more starts until it is resumed, then at most 2 at once\n"
    held, other = (shell.seed((name, {}))[0] for name in ("boom", "hold"))
    worker = shell.start_worker("--verbose")
    worker.hear(f"started   hold {other}")
    assert shell.record(held).state is TaskState.QUEUED
    assert "cpu was paused" in (out := say(shell, "ls").out)
    assert "by cli:ana: backup" in out
    resumed = say(shell, "resume", "cpu")
    assert resumed.out.startswith("cpu  ● running; it starts tasks, at most 2 at once")
    worker.hear(f"failed    boom {held}")
    stamp = queue(shell, "cpu")["state_set"]
    assert isinstance(stamp, dict)
    assert stamp["actor"].startswith("cli:")


@pytest.mark.spec("QUE-10")
def test_a_queue_stops_after_what_runs(shell: Shell) -> None:
    """A queue is stopping while something of it runs, paused from its end on, and can be taken back before."""
    worker = shell.start_worker("--verbose")
    gate = shell.folder / "gate"
    (uuid,) = shell.seed(("until", {"path": str(gate)}))
    worker.hear(f"started   until {uuid}")
    asked = say(shell, "stop-after-current", "default", "--reason", "upgrade")
    assert asked.out == (
        "default  ◐ stopping; nothing more starts, and it is paused when what runs has ended: 1 task\n"
    )
    assert say(shell, "resume", "default", "--json").json["state"] == "running"
    assert say(shell, "stop-after-current", "default", "--json").json["state"] == "stopping"
    gate.touch()
    worker.hear(f"completed until {uuid}")
    assert shell.here("watch", "--until-idle", "--store", shell.url).code == 0  # the store hears a moment later
    assert queue(shell, "default")["state"] == "paused"


def test_the_concurrency_is_set_while_it_runs(shell: Shell) -> None:
    """A person's limit goes before the app's, takes effect in a worker that runs, and is lifted with none."""
    shell.seed(("boom", {}), work=True)
    worker = shell.start_worker("--verbose")
    limited = say(shell, "set", "default", "--concurrency", "1", "--reason", "slow network")
    assert "at most 1 at once" in limited.out
    first, second = shell.seed(("hold", {}), ("hold", {}))
    worker.hear(f"started   hold {first}")
    assert shell.record(second).state is TaskState.QUEUED
    assert "1/1*" in (out := say(shell, "ls").out)
    assert "default was limited to 1 (*)" in out
    assert "slow network; its own limit is none" in out
    lifted = say(shell, "set", "default", "--concurrency", "none", "--json").json
    assert (lifted["limit"], lifted["override"]) == (None, None)
    worker.hear(f"started   hold {second}")


def test_a_queue_that_is_not_there_is_refused(shell: Shell) -> None:
    """A name that no task, rule or node has is refused with 1 and the known names, and no queue is made of it."""
    shell.seed(("boom", {}))
    for verb in ("pause", "resume", "stop-after-current"):
        done = say(shell, verb, "cpux")
        assert (done.code, done.out) == (1, "")
        assert done.err == "error: there is no queue 'cpux'; did you mean 'cpu'? Known queues: 'cpu', 'default'\n"
    assert [one["name"] for one in say(shell, "ls", "--json").json] == ["cpu"]


@pytest.mark.parametrize("given", ["0", "-1", "many", "1.5", "", "9" * 30])
def test_a_limit_that_is_none_is_refused(shell: Shell, given: str) -> None:
    """Only a whole number of at least 1, or the word none, is a limit; all else ends with 2 and changes nothing."""
    shell.seed(("boom", {}))
    done = say(shell, "set", "cpu", f"--concurrency={given}")
    assert done.code == 2
    assert "is no limit" in done.err
    assert queue(shell, "cpu")["override"] is None
