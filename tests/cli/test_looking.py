"""`taskyard ls` and `taskyard show`."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cli.shell import Shell

NASTY = "\x1b[31mred\x1b]0;title\x07 \x9b2J [bold]x[/bold] \u202egnp"
ESCAPED = r"\x1b[31mred\x1b]0;title\x07 \x9b2J [bold]x[/bold] \u202egnp"


def test_ls_lists_newest_first_and_counts(shell: Shell) -> None:
    """Every task is a line with its id, state, source and what there is to say of it; the last line counts all."""
    done, failed = shell.seed(("add", {"a": 41}), ("boom", {"why": "bad luck"}), work=True)
    (later,) = shell.seed(("add", {"a": 1}), delay_s=7200, priority="high")
    out = shell.ok("ls", "--store", shell.url).out
    lines = out.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == [later, failed, done]
    assert "scheduled" in lines[1]
    assert "high" in lines[1]
    assert lines[1].endswith(("due in 1 h 59 min", "due in 2 h"))
    assert "ValueError: bad luck" in lines[2]
    assert "→ 42" in lines[3]
    assert lines[-1] == "◷ 1 scheduled   ✔ 1 completed   ✘ 1 failed"


def test_ls_fits_a_narrow_window(shell: Shell) -> None:
    """In 80 columns no line is longer than the window, ids are short, and a short id finds its task."""
    (uuid,) = shell.seed(("boom", {"why": "a long story " * 20}), priority="low", work=True)
    out = shell.here("ls", "--store", shell.url, COLUMNS="80").out
    assert max(map(len, out.splitlines())) <= 80
    short = out.splitlines()[1].split()[0]
    assert short == uuid[-8:]
    assert uuid in shell.here("show", short, "--store", shell.url).out


def test_ls_filters_and_pages(shell: Shell) -> None:
    """States, queue, source and limit narrow the list; --before goes on where a page ended."""
    adds = shell.seed(*[("add", {"a": n}) for n in range(5)])
    (boom,) = shell.seed(("boom", {}))

    def ids(*options: str) -> list[str]:
        return [task["uuid"] for task in shell.here("ls", "--store", shell.url, "--json", *options).json["tasks"]]

    first = shell.here("ls", "--store", shell.url, "--json", "--limit", "4").json
    assert first["counts"] == {"queued": 6}
    assert [task["uuid"] for task in first["tasks"]] == [boom, *adds[:1:-1]]
    assert ids("--before", first["next_before"][-8:]) == [adds[1], adds[0]]
    assert ids("--queue", "cpu") == [boom]
    assert ids("--consumer", "add", "--state", "queued,running", "--limit", "1") == [adds[4]]
    assert ids("--state", "ended") == []


def test_the_next_page_is_asked_for_as_this_one_was(shell: Shell) -> None:
    """What the list says to type for more has the same filter and number."""
    shell.seed(*[("add", {"a": n}) for n in range(5)])
    out = shell.here("ls", "--store", shell.url, "--consumer", "add", "--state", "queued,running", "-n", "2").out
    (hint,) = [line for line in out.splitlines() if line.startswith("next page: taskyard ls")]
    first = shell.here("ls", "--store", shell.url, "--json", "-n", "2").json
    assert hint.endswith(f"ls --state queued,running --consumer add -n 2 --before {first['next_before'][-8:]}")
    assert shell.here(*hint.split()[3:], "--store", shell.url, "--json").json["next_before"] is not None


def test_lines_are_not_cut_in_a_pipe(shell: Shell) -> None:
    """What an error says, or a task waits for, is whole: a program may look for what stands at its end."""
    shell.seed(("boom", {"why": "a long story " * 20 + "and its end"}), work=True)
    assert "and its end" in shell.here("ls", "--store", shell.url).out
    assert "and its end" not in shell.here("ls", "--store", shell.url, COLUMNS="80").out


def test_ls_of_a_queue_without_tasks_says_what_there_is(shell: Shell) -> None:
    """A queue that has none, or is misspelt, is not taken for an empty store."""
    shell.seed(("add", {"a": 1}))
    assert shell.here("ls", "--queue", "defualt", "--store", shell.url).out.splitlines() == [
        "there is no queue 'defualt'; did you mean 'default'? Known queues: 'default'. In the store there are:",
        "○ 1 queued",
    ]
    assert shell.here("ls", "--queue", "default", "--state", "failed", "--store", shell.url).out.splitlines() == [
        "no task matches; in the store there are:",
        "○ 1 queued",
    ]
    assert shell.here("ls", "--queue", "defualt", "--store", shell.url, "--json").json["counts"] == {}


def test_show_tells_everything(shell: Shell) -> None:
    """Arguments, error, traceback and every run of a task are shown."""
    (uuid,) = shell.seed(("flaky", {"host": "example.org"}), work=True)
    out = shell.ok("show", uuid, "--store", shell.url).out
    for text in (uuid, "✘ failed", '"host": "example.org"', "ConnectionError", "Traceback", "is away", "↻ retrying"):
        assert text in out
    told = shell.here("show", uuid[-10:], "--store", shell.url, "--json").json
    assert [run["state"] for run in told["attempts"]] == ["retrying", "failed"]
    assert [run["attempt"] for run in told["attempts"]] == [1, 2]
    assert told["error"]["type"] == "ConnectionError"
    assert told["retries"] == 1


def test_show_names_the_task_that_is_run_again(shell: Shell) -> None:
    """Of a task that was made of another by `run-again`, its bucket and that other one are told."""
    (old,) = shell.seed(("add", {"a": 1}), work=True, bucket="red")
    new = shell.ok("run-again", old, "--store", shell.url).out.split()[0]
    told = shell.here("show", new, "--store", shell.url, "--json").json
    assert (told["origin"], told["bucket"], told["group"]) == (old, "red", None)
    (line,) = [line for line in shell.ok("show", new, "--store", shell.url).out.splitlines() if old in line]
    assert line.split() == ["made", "of", old]


def test_secrets_are_hidden(shell: Shell) -> None:
    """An argument with a secret's name is printed nowhere, not even where an error quotes it, unless asked."""
    (uuid,) = shell.seed(("boom", {"why": "https://me:hunter1@example.org", "password": "hunter22"}), work=True)
    for command in (["ls"], ["show", uuid], ["show", uuid, "--json"], ["ls", "--json"], ["watch", "--once"]):
        out = shell.here(*command, "--store", shell.url).out
        assert "hunter" not in out
        assert "***" in out
    assert "hunter22" in shell.here("show", uuid, "--reveal", "--store", shell.url).out


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_task_data_cannot_steer_the_terminal(as_json: bool, shell: Shell) -> None:
    """Control characters, marks that turn the writing and markup in a task's data are printed as harmless text."""
    (uuid,) = shell.seed(("boom", {"why": NASTY}), work=True)
    for command in (["ls"], ["show", uuid], ["watch", "--once"]):
        out = shell.here(*command, "--store", shell.url, *(["--json"] if as_json else [])).out
        assert not set(out) & set("\x1b\x07\x9b\u202e")
        if as_json:
            assert NASTY in list(texts(json.loads(out)))
        else:
            assert ESCAPED in out


def texts(value: Any) -> Iterator[str]:
    """Every text inside of JSON data."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from texts(one)


def test_part_of_an_id_must_mean_one_task(shell: Shell) -> None:
    """A part that fits several tasks is refused with their ids; one that fits none, or says too little, as well."""
    one, other = shell.seed(("add", {"a": 1}), ("add", {"a": 2}))
    ambiguous = shell.here("show", one[:6], "--store", shell.url)
    assert ambiguous.code == 1
    assert one in ambiguous.err
    assert other in ambiguous.err
    assert shell.here("show", "ffffffff", "--store", shell.url).code == 1
    assert shell.here("show", one[-2:], "--store", shell.url).code == 2


STORES = [
    pytest.param(["--store", "sqlite:///missing.db"], 3, "there is no store at", id="missing"),
    pytest.param(["--store", "sqlite:///no/folder/work.db"], 3, "there is no store at", id="missing-folder"),
    pytest.param(["--store", "mysql://work"], 2, "is not a store", id="unknown-kind"),
    pytest.param(["--store", "memory://"], 2, "exists only inside its own process", id="memory"),
    pytest.param([], 2, "no store given", id="none"),
]


@pytest.mark.parametrize(("options", "code", "said"), STORES)
def test_a_store_that_is_not_there_is_told(options: list[str], code: int, said: str, shell: Shell) -> None:
    """Looking at no store is exit code 2 or 3 and one line, in JSON if that was asked; no file is made."""
    before = sorted(shell.folder.iterdir())
    plain, told = shell.here("ls", *options), shell.here("ls", *options, "--json")
    assert (plain.code, told.code) == (code, code)
    assert said in plain.err
    assert said in json.loads(told.err)["message"]
    assert sorted(shell.folder.iterdir()) == before


def test_the_store_may_come_from_the_environment(shell: Shell) -> None:
    """--store wins over TASKYARD_STORE, which wins over the app's own store, and that is said."""
    shell.seed(("add", {"a": 1}))
    assert "1 queued" in shell.here("ls", TASKYARD_STORE=shell.url).out
    assert "1 queued" in shell.ok("ls", TASKYARD_APP="app").out
    other = shell.ok("submit", "add", "a=1", TASKYARD_APP="app", TASKYARD_STORE="sqlite:///other.db")
    assert "not the app's own store" in other.err
    assert "1 queued" in shell.here("ls", "--store", "sqlite:///other.db", TASKYARD_STORE=shell.url).out


@pytest.mark.parametrize("line", ["ls", "doctor", "submit add a=1 --app app:yard", "demo --once"])
def test_an_empty_store_is_not_looked_for_elsewhere(shell: Shell, line: str) -> None:
    """A --store that is empty, as a variable that was never set leaves it, is refused; TASKYARD_STORE is not taken for
    it."""
    done = shell.here(*line.split(), "--store", "", TASKYARD_STORE=shell.url)
    assert (done.code, done.out) == (2, "")
    assert "--store is empty; give an address" in done.err
    assert not shell.path.exists()


@pytest.mark.parametrize("line", ["submit add a=1 --app", "worker", "run"])
def test_an_empty_app_is_not_looked_for_elsewhere(shell: Shell, line: str) -> None:
    """The same of an app that is empty: TASKYARD_APP is not taken for it."""
    done = shell.here(*line.split(), "", TASKYARD_APP="app:yard")
    assert (done.code, done.out) == (2, "")
    assert "is empty; name" in done.err
    assert not shell.path.exists()
