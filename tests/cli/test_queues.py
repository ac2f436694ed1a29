"""`taskyard queue`: what queues hold, and steering them, from another process than the worker's."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import pytest
from rich.console import Console

from taskyard.application.queue_order_documents import QueueEntry, QueueOrderDocument, WhatIf
from taskyard.cli.queue_order import draw
from taskyard.model.queue import QueueOrder, QueueState
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
    assert (found["state"], found["concurrency"], found["counts"]) == ("running", 2, {"queued": 2, "failed": 1})
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
    assert (lifted["concurrency"], lifted["concurrency_override"]) == (None, None)
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
    assert queue(shell, "cpu")["concurrency_override"] is None


@pytest.mark.spec("QUE-32")
def test_queue_show_lists_in_the_order_of_starts(shell: Shell) -> None:
    """What waits is listed with its place, the first to start first; what is held is apart, with who holds it; and a
    queue that no worker serves says so."""
    first, held = shell.seed(("boom", {}), ("boom", {}))
    (urgent,) = shell.seed(("boom", {}), priority="high", title="for the boss")
    shell.here("hold", held, "--reason", "wrong file", "--store", shell.url, LOGNAME="ana")
    out = say(shell, "show", "cpu").out.splitlines()
    assert out[0] == "cpu  ● running   0 running · 2 waiting · 1 held"
    assert out[2].split() == ["PLACE", "ID", "CONSUMER", "PRIORITY", "STARTS"]
    assert out[3].split()[:4] == ["1", urgent[-8:], "boom", "high"]
    assert "for the boss" in out[3]
    assert out[4].split()[:4] == ["2", first[-8:], "boom", "normal"]
    assert out[5].split()[:2] == ["‖", held[-8:]]
    assert out[5].endswith("it is held by cli:ana: wrong file")
    assert out[-1] == "when it will be finished is not known before three runs of boom have completed"
    no_room = say(shell, "show", "cpu", "--if", "concurrency=2").out.splitlines()[-1]
    assert no_room == "no worker takes these tasks; start one: taskyard worker module:yard"
    found = say(shell, "show", "cpu", "--json", "--limit", "1").json
    assert [(entry["uuid"], entry["place"]) for entry in found["waiting"]] == [(urgent, 1)]
    assert (found["counts"], found["slots"], found["finished_at"]) == ({"queued": 2, "paused": 1}, 0, None)
    assert "1 more" in say(shell, "show", "cpu", "-n", "1").out


@pytest.mark.spec("QUE-32")
@pytest.mark.parametrize("width", [80, 120])
def test_a_queue_is_drawn_with_its_times(width: int) -> None:
    """Expected starts and ends, and under another concurrency, are in words: seconds when they are near, a time of day
    when not. No line is wider than the window."""
    order = an_order(entries=[an_entry(1, 0, 0), an_entry(2, 30, 0), an_entry(3, 3600, 30)], finished_s=3660, if_s=45)
    lines = drawn(order, width)
    assert lines[0] == "cpu  ● running   1 of 1 running · 5 waiting"
    assert lines[2].split() == ["PLACE", "ID", "CONSUMER", "PRIORITY", "STARTS", "WITH", "2"]
    assert lines[3].split()[:2] == ["●", "running0"]
    assert "ends in 10 s" in lines[3]
    clock = f"{(NOON + timedelta(hours=1)).astimezone():%H:%M}"
    assert [line.split()[4:] for line in lines[4:7]] == [
        ["now", "now"],
        ["in", "30", "s", "now"],
        [clock, "in", "30", "s"],
    ]
    assert lines[7].split() == ["…", "2", "more"]
    end = f"{(NOON + timedelta(seconds=3660)).astimezone():%H:%M}"
    assert lines[-1] == f"finished about {end}; with concurrency 2 in about 45 s"
    assert max(map(len, lines)) <= width


@pytest.mark.spec("QUE-32")
def test_an_end_that_is_not_known_says_why() -> None:
    """A paused queue names the command that resumes it; a consumer without runs is named; a lack of room is told."""
    assert drawn(an_order(state=QueueState.PAUSED))[-1] == "it starts nothing: taskyard queue resume cpu"
    unknown = an_order(without_median=("shrink",))
    assert drawn(unknown)[-1] == "when it will be finished is not known before three runs of shrink have completed"
    small = drawn(an_order(slots=1, if_s=45, limit=5))
    assert small[-1] == "the workers have room for 1 of these tasks at once; start another: taskyard worker module:yard"


NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


def after(seconds: float) -> datetime:
    return NOON + timedelta(seconds=seconds)


def an_entry(
    place: int | None, start_s: float | None, if_s: float | None = None, *, is_late: bool = False,
    is_estimated: bool = False,
) -> QueueEntry:  # fmt: skip
    running = place is None
    return QueueEntry(
        uuid=f"task-running{place or 0}", consumer="shrink", title="", priority="normal", key=None, place=place,
        state=TaskState.RUNNING if running else TaskState.QUEUED, created_at=NOON, due_at=NOON, why=None,
        started_at=after(-5) if running else None, progress=None,
        expected_end_at=after(10) if running and not is_late else None, is_late=is_late, is_estimated=is_estimated,
        expected_start_at=None if start_s is None else after(start_s),
        what_if_start_at=None if if_s is None else after(if_s),
    )  # fmt: skip


def an_order(
    *,
    entries: Sequence[QueueEntry] = (),
    state: QueueState = QueueState.RUNNING,
    limit: int = 1,
    slots: int = 2,
    finished_s: float | None = None,
    if_s: float | None = None,
    without_median: tuple[str, ...] = (),
    is_lower_bound: bool = False,
    is_late: bool = False,
) -> QueueOrderDocument:
    what_if = None
    if if_s is not None:
        what_if = WhatIf(concurrency=2, slots=slots, finished_at=after(if_s), is_lower_bound=is_lower_bound)
    return QueueOrderDocument(
        queue="cpu", at=NOON, state=state, order=QueueOrder.PRIORITY, concurrency=limit, slots=min(slots, limit),
        counts={TaskState.RUNNING: 1, TaskState.QUEUED: 5}, running=(an_entry(None, None, is_late=is_late),),
        waiting=tuple(entries), apart=(), finished_at=None if finished_s is None else after(finished_s), is_exact=False,
        is_lower_bound=is_lower_bound, without_median=without_median, what_if=what_if,
    )  # fmt: skip


def drawn(queue: QueueOrderDocument, width: int = 120) -> list[str]:
    console = Console(width=width, markup=False, highlight=False)
    with console.capture() as captured:
        console.print(draw(queue, width))
    return [line.rstrip() for line in captured.get().splitlines()]


def test_what_comes_after_a_late_run_is_told_as_about() -> None:
    """A run past its median is said to take longer than usual; a start after it is called "about", one now is not."""
    entries = [an_entry(1, 0, 0, is_estimated=True), an_entry(2, 20, 10, is_estimated=True), an_entry(3, 40, 20)]
    lines = drawn(an_order(entries=entries, finished_s=60, if_s=30, is_late=True))
    assert "takes longer than usual" in lines[3]
    assert [line.split()[3:] for line in lines[4:7]] == [
        ["normal", "now", "now"],
        ["normal", "in", "about", "20", "s", "in", "about", "10", "s"],
        ["normal", "in", "40", "s", "in", "20", "s"],
    ]
    assert lines[-1] == "finished about 12:01:00; with concurrency 2 in about 30 s"


def test_an_end_that_may_be_later_is_told_as_at_least() -> None:
    """The end of a long queue with keys is a lower bound, and is called one."""
    (*_, line) = drawn(an_order(entries=[an_entry(1, 20)], finished_s=60, if_s=30, is_lower_bound=True))
    assert line == "finished 12:01:00 at the earliest; with concurrency 2 in at least 30 s"


@pytest.mark.parametrize("assumed", ["2", "concurrency", "workers=2"])
def test_an_assumption_that_makes_no_sense_is_refused(shell: Shell, assumed: str) -> None:
    """`--if` takes a concurrency and nothing else; the error shows how to write it."""
    wrong = say(shell, "show", "cpu", "--if", assumed)
    assert wrong.code == 2
    assert wrong.err == f"error: --if '{assumed}' is not an assumption: write --if concurrency=2\n"


@pytest.mark.parametrize("number", ["0", "two", "", "1.5"])
def test_an_assumed_concurrency_is_a_number_from_one(shell: Shell, number: str) -> None:
    """The error of an assumption that has the right name and a wrong number is about the number."""
    wrong = say(shell, "show", "cpu", "--if", f"concurrency={number}")
    assert wrong.code == 2
    assert wrong.err == f"error: --if 'concurrency={number}': the concurrency must be a whole number from 1\n"


def test_an_assumption_about_a_paused_queue_is_told_to_have_no_effect(shell: Shell) -> None:
    """A queue that starts nothing starts nothing under another concurrency either, and `--if` says so."""
    shell.seed(("boom", {}))
    assert "note" not in say(shell, "show", "cpu", "--if", "concurrency=2").err
    shell.ok("queue", "pause", "cpu", "--store", shell.url)
    told = say(shell, "show", "cpu", "--if", "concurrency=2")
    assert "note: queue 'cpu' is paused, so --if has no effect; resume it first" in told.err


def test_a_queue_that_is_not_there_cannot_be_shown(shell: Shell) -> None:
    """An unknown name is refused with the queues that there are, as by `pause`."""
    shell.seed(("boom", {}))
    unknown = say(shell, "show", "cpus")
    assert unknown.code == 1
    assert "cpu" in unknown.err
