"""`taskyard submit`, and what it refuses."""

import json
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from taskyard.cli.text import moment
from taskyard.model.state import TaskState
from tests.cli.shell import Shell


def test_submit_stores_a_task_and_prints_its_id(shell: Shell) -> None:
    """Standard output gets the id alone; what was asked is in the store, JSON as JSON and the rest as text."""
    done = shell.ok(
        "submit",
        "add",
        "a=2",
        "--args",
        '{"b": 40}',
        "--app",
        "app",
        "--priority",
        "high",
        "--key",
        "disk",
        "--delay",
        "5m",
    )
    record = shell.record(done.out.strip())
    assert json.loads(record.args) == {"a": 2, "b": 40}
    assert (record.consumer, record.priority, record.key, record.state) == ("add", 0, "disk", TaskState.SCHEDULED)
    assert (record.due_at - record.created_at).total_seconds() == 300
    assert "scheduled" in done.err
    assert "due in 5 min" in done.err


def test_submit_can_wait_for_other_tasks(shell: Shell) -> None:
    """--after names tasks by any part of their ids; the new one is blocked by all of them, and --on-failure is kept."""
    others = shell.seed(("add", {"a": 1}), ("add", {"a": 2}))
    named = [word for uuid in others for word in ("--after", uuid[-8:])]
    done = shell.here(
        "submit", "add", "a=3", *named, "--on-failure", "skip", "--bucket", "b", "--app", "tests.cli.sample_app",
        "--store", shell.url,
    )  # fmt: skip
    record = shell.record(done.out.strip())
    assert (record.state, record.open_dependencies, record.on_failure, record.bucket) == (
        TaskState.BLOCKED,
        2,
        "skip",
        "b",
    )
    nobody = shell.here(
        "submit", "add", "a=3", "--after", "ffffffff", "--app", "tests.cli.sample_app", "--store", shell.url
    )
    assert (nobody.code, nobody.out) == (1, "")
    assert "no task ffffffff" in nobody.err


def test_submit_takes_every_way_to_dedupe(shell: Shell) -> None:
    """A window, and a scope, are those of the library."""
    of = ["submit", "add", "a=1", "--app", "tests.cli.sample_app", "--store", shell.url, "--json"]
    window = ["--dedupe", "merge", "--dedupe-scope", "window", "--dedupe-window", "2h"]
    first, again = shell.here(*of, *window).json, shell.here(*of, *window).json
    assert (first["is_new"], again["is_new"], again["uuid"]) == (True, False, first["uuid"])
    ends = datetime.fromisoformat(again["window_ends_at"]) - datetime.fromisoformat(first["created_at"])
    assert (first["window_ends_at"], round(ends / timedelta(hours=1))) == (None, 2)
    until = moment(datetime.fromisoformat(again["window_ends_at"]))
    assert f"merged into an existing task; its dedupe window ends at {until}" in shell.here(*of[:-1], *window).err
    assert shell.record(first["uuid"]).dedupe_scope == "window"
    refused = json.loads(shell.here(*of, *window[2:], "--dedupe", "refuse").err.splitlines()[-1])
    assert refused["code"] == "duplicate_task"
    assert refused["data"]["existing"] == first["uuid"]
    assert refused["data"]["until"] == again["window_ends_at"]
    assert "it is queued, and its window ends at" in refused["message"]
    other = shell.here(*of, "--dedupe", "replace", "--dedupe-scope", "queued", "--dedupe-key", "k").json
    assert shell.record(other["uuid"]).dedupe_scope == "queued"


def test_submit_asks_for_an_idle_key(shell: Shell) -> None:
    """With `key_idle` a task stands for its work, and a key that is missing is named by its option."""
    of = ["submit", "add", "a=1", "--app", "tests.cli.sample_app", "--store", shell.url]
    of += ["--dedupe", "refuse", "--dedupe-scope", "key_idle"]
    without = shell.here(*of)
    assert without.code == 2
    assert "--dedupe-scope 'key_idle' needs a --key" in without.err
    first = shell.here(*of, "--key", "7", "--json").json
    assert shell.record(first["uuid"]).dedupe_scope == "key_idle"
    again = shell.here(*of, "--key", "7")
    assert again.code == 1
    assert f"task {first['uuid']} stands for the same work" in again.err


@pytest.mark.parametrize("dedupe", ["merge", "refuse"])
def test_what_is_forgotten_stands_for_its_window(shell: Shell, dedupe: str) -> None:
    """Who submits work that was done and forgotten, while its window is open, hears so and until when."""
    (done,) = shell.seed(("add", {"a": 1}), work=True, dedupe="merge", dedupe_scope="window", dedupe_window_s=3600)
    assert shell.here("prune", "--older", "0", "--yes", "--store", shell.url).code == 0
    again = shell.here(
        "submit", "add", "a=1", "--dedupe", dedupe, "--app", "tests.cli.sample_app", "--store", shell.url
    )
    assert (again.code, again.out) == (1, "")
    assert f"task {done} stands for the same work: it has ended and is forgotten" in again.err


def test_submit_tells_whether_a_worker_runs(shell: Shell) -> None:
    """Who submits what nobody runs is told how to start a worker; with one there, nothing is said."""
    assert "start one with: taskyard worker app:yard" in shell.ok("submit", "add", "a=1", "--app", "app:yard").err
    shell.start_worker()
    assert "note" not in shell.ok("submit", "add", "a=1", "--app", "app:yard").err


def test_who_gave_up_waiting_knows_which_task_goes_on(shell: Shell) -> None:
    """The id stands in a field of its own: nobody has to look for it in a sentence."""
    late = shell.run("submit", "add", "a=1", "--app", "app", "--wait-timeout", "0.1", "--json")
    assert late.code == 1
    (task,) = shell.here("ls", "--store", shell.url, "--json").json["tasks"]
    assert json.loads(late.err.splitlines()[-1])["data"] == {"uuid": task["uuid"]}


def test_submit_can_wait_for_the_result(shell: Shell) -> None:
    """With --wait standard output is the result and nothing else; a task that fails is exit code 1 and says why."""
    shell.start_worker()
    assert shell.ok("submit", "add", "a=2", "b=40", "--app", "app", "--wait").out == "42\n"
    failed = shell.run("submit", "boom", "why=bad luck", "--app", "app", "--wait-timeout", "30", "--json")
    assert (failed.code, failed.out) == (1, "")
    assert json.loads(failed.err)["code"] == "task_failed"
    assert "bad luck" in json.loads(failed.err)["message"]


def test_submit_without_an_app_asks_the_workers(shell: Shell) -> None:
    """With the store alone, a consumer that a running worker has is accepted; any other is refused with their names."""
    nobody = shell.run("submit", "add", "a=1", "--store", shell.url)
    assert nobody.code == 3, "there is not even a store"
    shell.start_worker()
    done = shell.ok("submit", "add", "a=1", "--store", shell.url, "--wait")
    assert done.out == "2\n"
    assert "note" not in done.err
    refused = shell.run("submit", "nope", "--store", shell.url)
    assert refused.code == 1
    assert "add, boom, deaf, flaky, hold, outputs, sleeper, stubborn, until" in refused.err


REFUSED = [
    pytest.param(["nope"], 1, "add, boom, deaf, flaky, hold, outputs, sleeper, stubborn, until", id="unknown-consumer"),
    pytest.param(["add", "a=x"], 1, "a: Input should be a valid integer", id="wrong-type"),
    pytest.param(["add", "b=1"], 1, "a: Field required", id="missing-argument"),
    pytest.param(["add", "a=1", "c=1"], 1, "c: Extra inputs", id="unknown-argument"),
    pytest.param(["add", "a=1", "--priority", "urgent"], 2, "not one of high, normal, low", id="priority"),
    pytest.param(["add", "a=1", "--dedupe", "perhaps"], 2, "perhaps", id="dedupe"),
    pytest.param(["add", "a=1", "--dedupe-scope", "queued"], 2, "has no effect without --dedupe", id="scope-alone"),
    pytest.param(
        ["add", "a=1", "--dedupe-window", "5"], 2, "--dedupe-window has no effect", id="window-without-dedupe"
    ),
    pytest.param(["add", "a=1", "--dedupe", "merge", "--dedupe-window", "5"], 2, "go together", id="window-alone"),
    pytest.param(["add", "a=1", "--dedupe-window", "soon"], 2, "is no duration", id="window"),
    pytest.param(["add", "a=1", "--on-failure", "skip"], 2, "name them with --after", id="on-failure-alone"),
    pytest.param(["add", "a"], 2, "write key=value", id="no-equals"),
    pytest.param(["add", "a=1", "a=2"], 2, "given twice", id="twice"),
    pytest.param(["add", "--args", "[1]"], 2, "must be a JSON object", id="args-not-an-object"),
    pytest.param(["add", "--args", "{"], 2, "is not JSON", id="args-not-json"),
    pytest.param(["add", "--args", r'{"a": "\ud800"}'], 2, "--args holds a lone surrogate", id="args-half-escaped"),
    pytest.param(["add", "--args", '{"a": "\udc80"}'], 2, "--args holds a lone surrogate", id="args-half"),
    pytest.param(["add", "--args", r'{"a": "\\ud800'], 2, "is not JSON (Input data was truncated)", id="args-cut"),
    pytest.param(["add", "a=1", "--delay", "soon"], 2, "is no duration", id="delay"),
    pytest.param(["add", "a=1", "--at", "2030-01-31T09:00"], 2, "has no time zone", id="naive-datetime"),
    pytest.param(["add", "a=1", "--at", "2030-01-31"], 2, "write 2030-01-31T00:00:00Z for UTC", id="day-alone"),
    pytest.param(["add", "a=1", "--at", "tomorrow"], 2, "is no date and time", id="no-datetime"),
    pytest.param(["add", "a=1", "--at", "2030-01-31T09:00Z", "--delay", "1"], 2, "not both", id="at-and-delay"),
    pytest.param(["add", "a=1", "--nonsense"], 2, "No such option", id="unknown-option"),
    pytest.param([], 2, "Missing argument", id="no-name"),
]


@pytest.mark.parametrize(("arguments", "code", "said"), REFUSED)
def test_bad_input_is_told_and_nothing_is_stored(arguments: list[str], code: int, said: str, shell: Shell) -> None:
    """A wrong submit says in one line what is wrong, with the right exit code, and the store is not even made."""
    done = shell.here("submit", *arguments, "--app", "tests.cli.sample_app", "--store", shell.url)
    assert (done.code, done.out) == (code, "")
    assert done.err.startswith("error: ")
    assert said in done.err
    assert done.err.count("\n") == 1
    assert "Traceback" not in done.err
    assert not shell.path.exists()


TEXTS = [
    pytest.param("why=404", "404", id="number"),
    pytest.param("why=true", "true", id="bool"),
    pytest.param("why=[1, 2]", "[1, 2]", id="list"),
    pytest.param('why="404"', "404", id="quoted"),
    pytest.param("why=bad luck", "bad luck", id="text"),
]


@pytest.mark.parametrize(("typed", "kept"), TEXTS)
def test_a_text_may_look_like_json(typed: str, kept: str, shell: Shell) -> None:
    """Where the consumer wants a text, it gets what was typed, whatever else that could be."""
    done = shell.here("submit", "boom", typed, "--app", "tests.cli.sample_app", "--store", shell.url, "--json")
    assert done.code == 0, done
    assert done.json["args"]["why"] == kept


def test_a_queue_that_nobody_knows_is_told(shell: Shell) -> None:
    """A queue without rules, tasks or a consumer is told with the known ones, until it has a task."""
    of = ("submit", "add", "a=1", "--app", "tests.cli.sample_app", "--store", shell.url)
    told = "note: queue 'nosuch' has no rules and no other tasks; known queues: cpu, default"
    for queue, is_told in (("cpu", False), ("default", False), ("nosuch", True), ("nosuch", False)):
        assert (told in shell.here(*of, "--queue", queue).err) is is_told
    receipt = shell.here(*of, "--queue", "other", "--json").json
    assert receipt["known_queues"] == ["cpu", "default", "nosuch"]
    assert shell.here(*of, "--json").json["known_queues"] is None


STRICT = ("--app", "tests.cli.strict_app")


def test_what_is_wrong_inside_a_value_is_told(shell: Shell) -> None:
    """Where neither the value nor its text fits, the message is about the value that was typed."""
    how = (*STRICT, "--store", shell.url)
    done = shell.here("submit", "shrink", 'where={"x":"q"}', *how)
    assert done.code == 1
    assert "where.x: Input should be a valid integer" in done.err
    told = json.loads(shell.here("submit", "shrink", 'where={"x":"q"}', *how, "--json").err.splitlines()[-1])
    assert (told["code"], told["field"], told["data"]["names"]) == ("invalid_arguments", "where", ["where"])
    uuid = shell.here("submit", "shrink", 'where={"x":1}', *how).out.strip()
    assert shell.here("cancel", uuid, *how).code == 0
    again = shell.here("run-again", uuid, "--set", 'where={"x":"q"}', *how)
    assert again.code == 1
    assert "where.x: Input should be a valid integer" in again.out


@pytest.mark.parametrize(("typed", "why"), [("x=5", "KeyError: 'n'"), ("n=many", "ValueError: invalid literal")])
def test_a_fault_in_produce_is_told_as_one(typed: str, why: str, shell: Shell) -> None:
    """An exception of the consumer's own `produce` is a refusal that names it, and nothing is stored."""
    done = shell.here("submit", "bell", typed, *STRICT, "--store", shell.url)
    assert done.code == 1
    assert f"produce of 'bell' failed: {why}" in done.err
    assert "bug in Taskyard" not in done.err


def test_without_an_app_text_is_text_where_the_consumer_wants_it(shell: Shell) -> None:
    """The published schema says that the consumer wants a text, so what looks like JSON is taken as it was typed."""
    shell.start_worker()
    done = shell.here("submit", "boom", "why=404", "--store", shell.url, "--json")
    assert done.json["args"]["why"] == "404"
    assert done.json["is_checked"] is True
    assert "note" not in done.err


def test_the_same_work_is_refused_when_it_is_pending(shell: Shell) -> None:
    """--dedupe refuse names the task that is pending, and --dedupe merge answers with its id."""
    (pending,) = shell.seed(("add", {"a": 1}), dedupe="refuse")
    refused = shell.run("submit", "add", "a=1", "--app", "app", "--dedupe", "refuse")
    assert refused.code == 1
    assert pending in refused.err
    assert shell.ok("submit", "add", "a=1", "--app", "app", "--dedupe", "merge").out.strip() == pending


@pytest.mark.parametrize("how", [(), ("--json",)])
def test_waiting_and_the_log_tell_no_secret(how: tuple[str, ...], shell: Shell) -> None:
    """Where an error quotes a secret, neither who waits for the task nor the log of the worker prints it."""
    worker = shell.start_worker()
    done = shell.run("submit", "boom", "why=refused", "password=hunter22", "--wait", "--app", "app", *how)
    assert done.code == 1
    assert "refused ***" in done.err
    assert "refused ***" in worker.hear("failed ")
    assert "hunter" not in done.out + done.err + worker.said


def test_a_slip_in_a_command_is_told(shell: Shell) -> None:
    """A command that is nearly one is answered with the one that was meant."""
    done = shell.here("sumbit", "add")
    assert done.code == 2
    assert done.err == "error: No such command 'sumbit'. Did you mean 'submit'? See `taskyard --help`\n"


APPS = [
    pytest.param("nowhere:yard", "there is no module 'nowhere'", id="no-module"),
    pytest.param("tests.cli.sample_app:nothing", "has no 'nothing'", id="no-attribute"),
    pytest.param("tests.cli.sample_app:add", "not a Yard", id="no-yard"),
    pytest.param(":yard", "names no module", id="no-name"),
    pytest.param("app.py:yard", "is a file; name its module and the yard in it, as in app:yard", id="a-file"),
    pytest.param("./app.py", "as in app:yard", id="a-file-here"),
    pytest.param("pkg/app.py", "as in pkg.app:yard", id="a-file-below"),
    pytest.param("../app.py:yard", "as in app:yard, from the folder it is in", id="a-file-elsewhere"),
    pytest.param("../app:yard", "names no module", id="a-path"),
    pytest.param("broken:yard", "failed with ZeroDivisionError: division by zero", id="raises"),
]


@pytest.mark.parametrize(("name", "said"), APPS)
def test_an_app_that_cannot_be_loaded_is_told(name: str, said: str, shell: Shell, tmp_path: Path) -> None:
    """A wrong module:yard is exit code 2 and one line that says what is wrong with it."""
    (tmp_path / "broken.py").write_text("print(1 / 0)\n")
    done = shell.here("worker", name)
    assert done.code == 2
    assert said in done.err
    assert done.err.count("\n") == 1
