"""Errors speak of the options that were typed."""

import json
import re
from typing import Any

import pytest
import typer

from taskyard.cli.app import app
from taskyard.cli.rewording import OPTIONS, reword
from taskyard.errors import InvalidArguments, InvalidInput
from tests.cli.shell import Shell

SUBMIT = ("submit", "add", "a=1")
EVERY = ("schedule", "add", "n", "add", "a=1", "--every", "10")
TYPED = [
    pytest.param((*SUBMIT, "--timeout", "0"), "--timeout must be more than 0 and less than 1e9", id="timeout"),
    pytest.param((*SUBMIT, "--delay", "99999999999"), "--delay must be between 0 and", id="delay"),
    pytest.param((*SUBMIT, "--queue", ""), "--queue must be a string of", id="queue"),
    pytest.param((*SUBMIT, "--key", ""), "--key must be a string of", id="key"),
    pytest.param((*SUBMIT, "--bucket", ""), "--bucket must be a string of", id="bucket"),
    pytest.param((*SUBMIT, "--priority", "timeout_s"), "--priority 'timeout_s' is not one of", id="priority"),
    pytest.param((*SUBMIT, "--dedupe", "key=1"), "--dedupe 'key=1' is not one of", id="dedupe"),
    pytest.param((*SUBMIT, "--after", "0000", "--on-failure", "x"), "--on-failure 'x' is not one of", id="on-failure"),
    pytest.param(
        (*SUBMIT, "--dedupe-key", "k"), "--dedupe-key has no effect without --dedupe merge, refuse or", id="key-alone"
    ),
    pytest.param(
        (*SUBMIT, "--dedupe", "merge", "--dedupe-window", "5"),
        "--dedupe-scope window and --dedupe-window, ",
        id="window",
    ),
    pytest.param((*EVERY, "--every", "0"), "--every must be a number from 1 to", id="every"),
    pytest.param((*EVERY, "--jitter", "20"), "--jitter 20 must be shorter than the interval, 10 s", id="jitter"),
    pytest.param(
        (*EVERY, "--grace", "0", "--missed", "skip"), "with --missed skip and --grace 0 it would never fire", id="grace"
    ),
    pytest.param((*EVERY, "--catch-up", "99999999999"), "--catch-up must be a number of", id="catch-up"),
    pytest.param((*EVERY, "--overlap", "x"), "--overlap 'x' is not one of", id="overlap"),
    pytest.param((*EVERY, "--zone", "UTC"), "--zone goes with a cron expression", id="zone"),
    pytest.param(
        (*EVERY, "--from", "1930-01-01T00:00Z"), "--from must be between the years 1970 and 9000, not 1930", id="from"
    ),
    pytest.param(
        (*EVERY, "--from", "2030-01-01T00:00Z", "--to", "2029-01-01T00:00Z"), "--to 2029-01-01 00:00:00+00:00", id="to"
    ),
    pytest.param(("hold", "--all", "--reason", "x" * 501), "--reason must be a text of at most", id="reason"),
    pytest.param(("schedule", "pause", "n", "--note", "x" * 501), "--note must be a text of at most", id="note"),
]


@pytest.mark.parametrize("how", [(), ("--json",)])
@pytest.mark.parametrize(("line", "said"), TYPED)
def test_an_error_names_the_option_that_was_typed(
    line: tuple[str, ...], said: str, how: tuple[str, ...], shell: Shell
) -> None:
    """Whatever the library calls it, it is told as it stands on the command line, as text and as JSON."""
    where = ("--app", "tests.cli.sample_app", "--store", shell.url)
    shell.here("schedule", "add", "n", "add", "a=1", "--every", "60", *where)
    done = shell.here(*line, *where, *how)
    assert done.code in (1, 2)
    message = json.loads(done.err)["message"] if how else done.err.removeprefix("error: ")
    assert said in message
    assert not re.search(r"\b[a-z]+_(s|at|key|scope)\b(?!')", message)


def test_who_is_refused_for_the_same_work_hears_of_options(shell: Shell) -> None:
    """The ways out of a duplicate are told as they are typed."""
    shell.seed(("add", {"a": 1}), dedupe="refuse")
    done = shell.here(*SUBMIT, "--dedupe", "refuse", "--app", "tests.cli.sample_app", "--store", shell.url)
    assert "--dedupe merge gives you its id" in done.err
    assert "submit with --dedupe allow to have both" in done.err
    assert "dedupe=" not in done.err


OTHERS = [
    pytest.param(InvalidArguments("add", ["timeout_s: Extra inputs are not permitted"]), id="a-consumer's-arguments"),
    pytest.param(InvalidInput("produce made a task for 'timeout_s=5'; set source"), id="quoted"),
    pytest.param(InvalidInput("""produce of "it's key='x'" made none"""), id="quoted-with-an-apostrophe"),
    pytest.param(InvalidInput("the same --dedupe-key for the key and the queue"), id="words-and-options"),
]


@pytest.mark.parametrize("error", OTHERS)
def test_words_of_others_stay_as_they_are(error: InvalidInput) -> None:
    """Arguments of a consumer, what is quoted, and words of English that are names of parameters are left alone."""
    before = str(error)
    reword(error, SUBMIT)
    assert str(error) == before


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_that_is_named_is_there(name: str) -> None:
    """The command takes each option that its errors may name."""
    command: Any = typer.main.get_command(app)
    for word in name.split():
        command = command.commands[word]
    assert set(OPTIONS[name].values()) <= {option for one in command.params for option in one.opts}
