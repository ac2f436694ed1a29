"""The same command for all tasks that match: `--all`, with its question, its dry run and its report."""

import asyncio
import itertools
import json
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from taskyard import rerunning
from taskyard.application.command_requests import Retry
from taskyard.cli.rerunning import run_again
from taskyard.cli.selecting import Selection
from taskyard.cli.session import Target
from taskyard.cli.steering import apply_command
from taskyard.errors import OutcomeUnknown, StoreUnavailable
from taskyard.model.notes import NoteCode
from taskyard.model.state import TaskState
from taskyard.model.task_filter import TaskFilter
from taskyard.queueing import matching
from taskyard.stores.sqlite import SqliteStore
from tests.cli.shell import LONG_S, Shell


def states(shell: Shell) -> dict[str, int]:
    """How many tasks of the store are in each state."""
    found: dict[str, int] = shell.here("ls", "--store", shell.url, "--json").json["counts"]
    return found


def test_retry_all_takes_what_failed_with_this_error(shell: Shell) -> None:
    """`retry --all --error` sends again what failed with this class of error or one derived from it, and nothing else;
    a dry run counts the same tasks and changes none."""
    boom, away, done = shell.seed(("boom", {}), ("flaky", {"host": "a"}), ("add", {"a": 1}), work=True)
    chosen = ("retry", "--all", "--error", "OSError", "--store", shell.url)
    counted = shell.here(*chosen, "--dry-run", "--json").json
    nobody = {"moved": 0, "changed_meanwhile": 0, "unfit": {}, "reasons": {}, "quarantined": 0}
    assert counted == {"matched": 1, **nobody, "dry_run": True, "interrupted": False, "is_uncertain": False}
    assert shell.record(away).state is TaskState.FAILED
    assert shell.here(*chosen).out == "1 task matched   ✔ 1 changed\n"
    found = [shell.record(uuid).state for uuid in (boom, away, done)]
    assert found == [TaskState.FAILED, TaskState.QUEUED, TaskState.COMPLETED]
    note = shell.record(away).note
    assert note is not None
    assert (note.code, note.actor.partition(":")[0]) == (NoteCode.RETRIED, "cli")
    assert shell.here("retry", "--all", "--error", "TimeoutError", "--store", shell.url).out == "no task matches\n"


def test_a_filter_chooses_among_tasks(shell: Shell) -> None:
    """Queue, source, key, state and age each narrow what `--all` means."""
    shell.seed(("add", {"a": 1}), ("add", {"a": 2}))
    (keyed,) = shell.seed(("add", {"a": 3}), key="k")
    (late,) = shell.seed(("add", {"a": 4}), delay_s=3600)
    (boom,) = shell.seed(("boom", {}))

    def matched(*options: str) -> int:
        found: int = shell.here("hold", "--all", "--dry-run", "--json", "--store", shell.url, *options).json["matched"]
        return found

    narrowed = [("--queue", "cpu"), ("--consumer", "add"), ("--key", "k"), ("--state", "scheduled"), ("--older", "1h")]
    assert [matched(*options) for options in narrowed] == [1, 4, 1, 1, 0]
    assert [matched(), matched("--newer", "1h"), matched("--consumer", "add", "--state", "queued")] == [5, 5, 3]
    assert shell.here("hold", "--all", "--queue", "cpu", "--store", shell.url).code == 0
    assert [shell.record(uuid).state for uuid in (boom, keyed, late)] == [
        TaskState.PAUSED, TaskState.QUEUED, TaskState.SCHEDULED,
    ]  # fmt: skip


@pytest.mark.parametrize("dry_run", [(), ("--dry-run",)], ids=["now", "dry-run"])
def test_a_queue_that_nobody_knows_is_refused(shell: Shell, dry_run: tuple[str, ...]) -> None:
    """A slip of the finger is no queue without tasks: whatever the command, it ends with 1 and names the one that was
    meant; a queue in which nothing matches is fine."""
    (uuid,) = shell.seed(("boom", {}))
    before = shell.record(uuid)
    said = {"start": (), "cancel": (), "retry": (), "run-again": (), "skip": (), "hold": (), "release": ()}
    for verb, rest in (said | {"priority": ("high",), "reschedule": ("2h",)}).items():
        done = shell.here(verb, *rest, "--all", "--queue", "cpux", *dry_run, "--store", shell.url)
        assert (done.code, done.out) == (1, ""), verb
        assert done.err == "error: there is no queue 'cpux'; did you mean 'cpu'? Known queues: 'cpu', 'default'\n"
    assert shell.record(uuid) == before
    fine = shell.here("retry", "--all", "--queue", "cpu", *dry_run, "--store", shell.url)
    assert (fine.code, fine.out) == (0, "no task matches\n")


@pytest.mark.parametrize("dry_run", [(), ("--dry-run",)], ids=["now", "dry-run"])
def test_a_source_that_nobody_knows_is_refused(shell: Shell, dry_run: tuple[str, ...]) -> None:
    """No task is of it and nobody has it: whatever the command, it ends with 1 and names the one that was meant."""
    shell.seed(("boom", {}), ("add", {"a": 1}))
    for verb in ("cancel", "retry", "run-again", "hold"):
        done = shell.here(verb, "--all", "--consumer", "bom", *dry_run, "--store", shell.url)
        assert (done.code, done.out) == (1, ""), verb
        assert done.err == (
            "error: there is no consumer 'bom', and no stored task has it; did you mean 'boom'? "
            "Known consumers: 'add', 'boom'\n"
        )
    assert states(shell) == {"queued": 2}


def test_a_source_is_known_while_somebody_has_it(shell: Shell) -> None:
    """By a task, also an ended one, by the app that is named, or by a schedule: then nothing matches, which is fine."""
    shell.seed(("boom", {}), work=True)
    app, retry = ("--app", "tests.cli.sample_app"), ("retry", "--all", "--store", shell.url, "--consumer")
    assert shell.here("cancel", "--all", "--store", shell.url, "--consumer", "boom").out == "no task matches\n"
    assert shell.here(*retry, "flaky", *app).out == "no task matches\n"
    assert shell.here(*retry, "bom", "--app", "nowhere").code == 1
    assert shell.here(*retry, "hold").code == 1
    assert shell.here("schedule", "add", "n", "hold", "--every", "1h", *app, "--store", shell.url).code == 0
    assert shell.here(*retry, "hold").out == "no task matches\n"


def test_a_worker_makes_its_consumers_known(shell: Shell) -> None:
    """What a worker serves is a source, before there is any task of it."""
    shell.start_worker()
    done = shell.here("hold", "--all", "--store", shell.url, "--consumer", "deaf")
    assert (done.code, done.out) == (0, "no task matches\n")


@pytest.mark.parametrize("command", ["ls", "failures"])
def test_a_list_of_what_nobody_knows_says_so(shell: Shell, command: str) -> None:
    """Where no task is listed because the source, or the queue, is unknown, that is told; a program gets none."""
    shell.seed(("boom", {}), work=True)
    where = ("--store", shell.url)
    told = shell.here(command, "--consumer", "bom", *where)
    assert told.code == 0
    assert told.out.startswith("there is no consumer 'bom', and no stored task has it; did you mean 'boom'?")
    told = shell.here(command, "--queue", "cpux", *where)
    assert told.out.startswith("there is no queue 'cpux'; did you mean 'cpu'?")
    none = shell.here(command, "--consumer", "bom", *where, "--json").json
    assert (none["tasks"] if command == "ls" else none) == []


def test_what_does_not_fit_is_counted_by_why(shell: Shell) -> None:
    """Where the states are named, those that the command does not fit are told, by why, and end with 1; a dry run tells
    the same."""
    shell.seed(("add", {"a": 1}), ("boom", {}), work=True)
    done = shell.here("retry", "--all", "--state", "ended", "--store", shell.url)
    assert done.code == 1
    why = "only a failed task can be retried; submit a new one"
    assert done.out == f"2 tasks matched   ✔ 1 changed   ✘ 1 refused: {why}\n"
    counted = shell.here("retry", "--all", "--state", "completed", "--dry-run", "--json", "--store", shell.url).json
    assert (counted["matched"], counted["unfit"]) == (1, {"not_failed": 1})
    assert counted["reasons"] == {"not_failed": why}


def test_many_are_not_changed_without_a_word(shell: Shell) -> None:
    """More than a handful are changed only with --yes where nobody can be asked; a handful is changed at once."""
    shell.seed(*[("add", {"a": n}) for n in range(6)])
    refused = shell.run("cancel", "--all", "--store", shell.url)
    assert (refused.code, refused.out) == (1, "")
    assert (
        refused.err
        == "error: nothing was changed; add --yes to cancel 6 tasks without a question, or --dry-run to count them\n"
    )
    assert states(shell) == {"queued": 6}
    assert shell.here("cancel", "--all", "--yes", "--store", shell.url).out == "6 tasks matched   ✔ 6 changed\n"
    shell.seed(*[("add", {"a": n}) for n in range(5)])
    assert shell.here("cancel", "--all", "--store", shell.url).out == "5 tasks matched   ✔ 5 changed\n"
    assert states(shell) == {"canceled": 11}


@pytest.mark.parametrize(("answer", "left"), [("y", {"skipped": 6}), ("n", {"queued": 6})])
def test_a_person_is_asked(shell: Shell, answer: str, left: dict[str, int]) -> None:
    """At a terminal the question says what would be done to how many, and the answer decides."""
    shell.seed(*[("add", {"a": n}) for n in range(6)])
    done = shell.on_a_terminal("skip", "--all", "--store", shell.url, typed=f"{answer}\n")
    assert "Skip 6 tasks? [y/N]: " in done.out
    assert done.code == (0 if answer == "y" else 1)
    assert ("nothing was changed" in done.out) == (answer == "n")
    assert states(shell) == left


@pytest.mark.parametrize("way", ["--head", "--tail"])
def test_those_that_are_sent_again_keep_their_order(shell: Shell, way: str) -> None:
    """All that are sent again stand in the order they were submitted in, before the one that waits or behind it."""
    failed = shell.seed(*[("boom", {"why": str(n)}) for n in range(3)], work=True)
    (waiting,) = shell.seed(("boom", {}))
    assert shell.here("retry", "--all", way, "--store", shell.url).code == 0
    order = [*failed, waiting] if way == "--head" else [waiting, *failed]
    places = [shell.record(uuid).position for uuid in order]
    assert places == sorted(places)


def test_start_priority_and_reschedule_take_all_that_match(shell: Shell) -> None:
    """The commands that change a place, a priority or a time take `--all` as well, with their own arguments."""
    first, second = shell.seed(("add", {"a": 1}), ("add", {"a": 2}), priority="low")
    (other,) = shell.seed(("boom", {}))
    chosen = ("--all", "--consumer", "add", "--store", shell.url)
    assert shell.here("reschedule", *chosen, "2h").code == 0
    assert [shell.record(uuid).state for uuid in (first, second)] == [TaskState.SCHEDULED] * 2
    assert shell.here("priority", *chosen, "normal").code == 0
    assert shell.here("start", *chosen, "--raise").code == 0
    found = [shell.record(uuid) for uuid in (first, second)]
    assert [(record.state, record.priority) for record in found] == [(TaskState.QUEUED, 0)] * 2
    assert found[0].position < found[1].position
    assert shell.record(other).priority == 1


WRONG = [
    pytest.param((), "no tasks given", id="nothing"),
    pytest.param(("--queue", "cpu"), "no tasks given", id="a-filter-without-all"),
    pytest.param(("0000", "--all"), "not both", id="ids-and-all"),
    pytest.param(("0000", "--queue", "cpu"), "need --all", id="ids-and-a-filter"),
    pytest.param(("0000", "--dry-run"), "need --all", id="ids-and-a-dry-run"),
    pytest.param(("--all", "--state", "lost"), "there is no state 'lost'", id="no-such-state"),
    pytest.param(("--all", "--older", "9999999d"), "is too long", id="before-all-time"),
]


@pytest.mark.parametrize(("options", "said"), WRONG)
def test_what_makes_no_sense_is_refused(shell: Shell, options: tuple[str, ...], said: str) -> None:
    """A command line that does not say clearly which tasks it means changes nothing, and ends with 2."""
    shell.seed(("add", {"a": 1}))
    done = shell.here("cancel", *options, "--store", shell.url)
    assert (done.code, done.out) == (2, "")
    assert said in done.err
    assert states(shell) == {"queued": 1}


def test_who_asked_is_kept(shell: Shell) -> None:
    """What is changed at a shell names the user of that shell."""
    (uuid,) = shell.seed(("add", {"a": 1}))
    assert shell.here("hold", uuid, "--store", shell.url, "--reason", "later", LOGNAME="ana").code == 0
    hold = shell.record(uuid).hold
    assert hold is not None
    assert (hold.actor, hold.reason) == ("cli:ana", "later")


def test_a_user_without_a_name_is_a_number(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container whose user has no name, the number stands for it."""
    import pwd

    def nobody(uid: int) -> None:
        raise KeyError(uid)

    (uuid,) = shell.seed(("add", {"a": 1}))
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    nameless = dict.fromkeys(("LOGNAME", "USER", "LNAME", "USERNAME"), "")
    assert shell.here("hold", uuid, "--store", shell.url, **nameless).code == 0
    hold = shell.record(uuid).hold
    assert hold is not None
    assert (hold.actor, hold.reason) == (f"cli:{os.getuid()}", "")


def test_what_was_run_again_before_an_interrupt_is_told(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the store fails while many are run again, it is told how many new tasks there are."""
    shell.seed(*[("add", {"a": n}) for n in range(5)], work=True)
    monkeypatch.setattr(rerunning, "BATCH", 2)
    make_many, rounds = rerunning._make_many, iter(range(9))

    async def interrupted(*args: Any) -> Any:
        if next(rounds) == 2:
            raise StoreUnavailable("the disk is gone")
        return await make_many(*args)

    monkeypatch.setattr(rerunning, "_make_many", interrupted)
    done = shell.here("run-again", "--all", "--yes", "--store", shell.url)
    assert (done.code, "the disk is gone" in done.err) == (3, True)
    assert done.out == "interrupted: 5 tasks matched so far   ✔ 4 changed; all others are unchanged\n"


def confirm_not(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store changes the nth batch of two like the others, and its answer is lost."""
    monkeypatch.setattr(rerunning, "BATCH", 2)
    monkeypatch.setattr(matching, "CHUNK", 2)
    rounds = itertools.count(1)

    def unheard(change: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def change_unheard_once(*args: Any, **named: Any) -> Any:
            answer = await change(*args, **named)
            if next(rounds) == n:
                raise OutcomeUnknown("cut off")
            return answer

        return change_unheard_once

    monkeypatch.setattr(rerunning, "_submit", unheard(rerunning._submit))
    monkeypatch.setattr(SqliteStore, "apply", unheard(SqliteStore.apply))


CHANGED = [
    pytest.param("cancel", 4, {"canceled": 4, "queued": 1}, id="cancel"),
    pytest.param("retry", 4, {"queued": 4, "failed": 1}, id="retry"),
    pytest.param("run-again", 5, {"queued": 4, "failed": 5}, id="run-again"),
]


@pytest.mark.parametrize(("verb", "found", "left"), CHANGED)
def test_what_is_not_known_is_told(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, verb: str, found: int, left: dict[str, int]
) -> None:
    """When the store does not confirm one batch of many, those before are told as changed, and that more may be."""
    shell.seed(*[("boom", {}) for _ in range(5)], work=verb != "cancel")
    confirm_not(2, monkeypatch)
    done = shell.here(verb, "--all", "--yes", "--store", shell.url)
    assert (done.code, "(cut off), so it is not known whether it took effect" in done.err) == (3, True)
    ends = "✔ 2 changed; the last request got no answer, so more may have changed"
    assert done.out == f"interrupted: {found} tasks matched so far   {ends}\n"
    assert states(shell) == left


def test_where_nothing_is_known_only_that_is_told(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the store does not confirm the first batch, there is no number to tell, and none is."""
    shell.seed(*[("boom", {}) for _ in range(5)])
    confirm_not(1, monkeypatch)
    done = shell.here("cancel", "--all", "--yes", "--store", shell.url)
    assert (done.code, done.out) == (3, "")
    assert "(cut off), so it is not known whether it took effect; look before you ask for it again" in done.err


@pytest.fixture
def ctrl_c(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ctrl-C is pressed when the second batch of two is to be changed."""
    monkeypatch.setattr(rerunning, "BATCH", 2)
    monkeypatch.setattr(matching, "CHUNK", 2)
    rounds = iter(range(9))

    def pressed(change: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def change_but_once(*args: Any) -> Any:
            if next(rounds) == 1:
                signal.raise_signal(signal.SIGINT)
                await asyncio.sleep(LONG_S)
            return await change(*args)

        return change_but_once

    monkeypatch.setattr(rerunning, "_make_many", pressed(rerunning._make_many))
    monkeypatch.setattr(matching.Matching, "_change", pressed(matching.Matching._change))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background has none
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_who_is_interrupted_is_told_so(
    shell: Shell, capsys: pytest.CaptureFixture[str], again: bool, as_json: bool
) -> None:
    """After Ctrl-C a command says that it was interrupted, and how far it came, as text and as JSON."""
    shell.seed(*[("boom", {}) for _ in range(5)], work=True)
    chosen = Selection(Target(f"sqlite:///{shell.path}", None), as_json, where=TaskFilter(), yes=True)
    with pytest.raises(KeyboardInterrupt):
        run_again(chosen, ()) if again else apply_command(chosen, Retry())
    out, found = capsys.readouterr().out, 5 if again else 4
    if as_json:
        said = json.loads(out)
        assert (said["matched"], said["moved"], said["interrupted"]) == (found, 2, True)
    else:
        ends = "✔ 2 changed; all others are unchanged"
        assert out == f"interrupted: {found} tasks matched so far   {ends}\n"


def test_all_that_match_are_run_again_with_an_argument_changed(shell: Shell) -> None:
    """`run-again --all --set` makes a new task of each that ended and matches, once it is known how many they are."""
    old = shell.seed(("add", {"a": 1}), ("add", {"a": 2}), ("boom", {}), work=True)
    chosen = ("run-again", "--all", "--consumer", "add", "--set", "a=5", "--app", "app:yard", "--store", shell.url)
    counted = shell.ok(*chosen, "--dry-run").out
    assert counted == "2 tasks matched; dry run, nothing was changed: without --dry-run this would run them again\n"
    assert shell.ok(*chosen).out == "2 tasks matched   ✔ 2 changed\n"
    new = [shell.record(row["uuid"]) for row in shell.here("ls", "--store", shell.url, "--json").json["tasks"]]
    made = [(record.origin, record.args) for record in new if record.origin is not None]
    assert sorted(made) == sorted((uuid, '{"a":5}') for uuid in old[:2])
    left = "2 skipped: already run again; --repeat runs them once more"
    once_more = ("run-again", "--all", "--consumer", "add", "--store", shell.url)
    assert shell.here(*once_more).out == f"no task matches   {left}\n"
    said = shell.here(*once_more, "--repeat", "--json").json
    assert (said["moved"], said["run_again"]) == (2, 0)
    assert sorted(shell.record(uuid).origin or "" for uuid in said["made"]) == sorted(old[:2])
    assert shell.here("run-again", old[0], "--repeat", "--store", shell.url).code == 2
