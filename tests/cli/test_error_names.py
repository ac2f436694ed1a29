"""Errors speak of the options that were typed."""

import json
import re

import pytest

from taskyard.cli.errors import error_text, option_of
from taskyard.errors import InvalidArguments, InvalidInput
from tests.cli.shell import Shell

SUBMIT = ("submit", "add", "a=1")
BACKFILL = ("schedule", "backfill", "n")
HALF = "a\udc80"
EVERY = ("schedule", "add", "n", "add", "a=1", "--every", "10")
SAID = [
    ("queue", "pause", "default", "--reason"),
    ("queue", "stop-after-current", "default", "--reason"),
    ("queue", "set", "default", "--concurrency", "2", "--reason"),
    ("group", "cancel", "0000", "--reason"),
    ("cancel", "0000", "--reason"),
    ("skip", "0000", "--reason"),
    ("hold", "0000", "--reason"),
    ("schedule", "pause", "n", "--note"),
]
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
        (*SUBMIT, "--dedupe-key", "k"),
        "--dedupe-key has no effect without --dedupe='merge', 'refuse' or",
        id="key-alone",
    ),
    pytest.param(
        (*SUBMIT, "--dedupe", "merge", "--dedupe-window", "5"),
        "--dedupe-scope='window' and --dedupe-window, ",
        id="window",
    ),
    pytest.param((*EVERY, "--every", "0"), "--every must be a number from 1 to", id="every"),
    pytest.param((*EVERY, "--jitter", "20"), "--jitter must be shorter than the interval, 10 s, not 20", id="jitter"),
    pytest.param(
        (*EVERY, "--grace", "0", "--missed", "skip"),
        "with --missed='skip' and --grace=0 the schedule would never fire",
        id="grace",
    ),
    pytest.param((*EVERY, "--catch-up", "99999999999"), "--catch-up must be a number of", id="catch-up"),
    pytest.param((*EVERY, "--overlap", "x"), "--overlap 'x' is not one of", id="overlap"),
    pytest.param((*EVERY, "--zone", "UTC"), "--zone goes with a cron expression", id="zone"),
    pytest.param(
        (*EVERY, "--from", "1930-01-01T00:00Z"),
        "--from must be between the years 1970 and 9000, not 1930-01-01T00:00Z",
        id="from",
    ),
    pytest.param(
        (*EVERY, "--from", "2030-01-01T00:00Z", "--to", "2029-01-01T00:00Z"), "--to 2029-01-01 00:00:00+00:00", id="to"
    ),
    pytest.param(("hold", "--all", "--reason", "x" * 501), "--reason must be a text of at most", id="reason"),
    pytest.param(("schedule", "pause", "n", "--note", "x" * 501), "--note must be a text of at most", id="note"),
    pytest.param(("ls", "--queue", HALF), "--queue must be text without lone surrogates", id="queue-of-a-list"),
    pytest.param(("failures", "--error", HALF), "--error must be text without lone surrogates", id="error"),
    pytest.param(("retry", "--all", "--key", HALF), "--key must be text without lone surrogates", id="key-of-all"),
    pytest.param(("show", HALF * 4), "an id must be text without lone surrogates", id="id"),
    pytest.param(("schedule", "run", HALF), "the name of a schedule must be text", id="schedule"),
    pytest.param(
        (*BACKFILL, "--from", "1930-01-01T00:00Z", "--to", "2026-01-01T00:00Z"),
        "--from must be between the years 1970 and 9000",
        id="backfill",
    ),
    pytest.param(
        (*BACKFILL, "--from", "2026-01-01T00:00Z", "--to", "2026-01-01T00:00Z"),
        "--to '2026-01-01T00:00Z' must be later than --from",
        id="backfill-of-nothing",
    ),
    *(
        pytest.param((*line, HALF), f"{line[-1]} must be text without lone surrogates", id="-".join(line))
        for line in SAID
    ),
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
    assert done.code == 2
    message = json.loads(done.err)["message"] if how else done.err.removeprefix("error: ")
    assert said in message
    assert not re.search(r"\b[a-z]+_(s|at|key|scope)\b(?!')", message)


FIRST = [
    pytest.param((*SUBMIT, "--delay", "soon"), "--delay 'soon' is no duration; write", id="delay"),
    pytest.param((*SUBMIT, "--timeout", "1y"), "--timeout '1y' is no duration", id="timeout"),
    pytest.param((*SUBMIT, "--dedupe-window=-5"), "--dedupe-window '-5' is no duration", id="dedupe-window"),
    pytest.param((*SUBMIT, "--wait-timeout", "x"), "--wait-timeout 'x' is no duration", id="wait-timeout"),
    pytest.param((*SUBMIT, "--at", "yesterday"), "--at 'yesterday' is no date and time", id="at"),
    pytest.param((*SUBMIT, "--at", "2030-01-31"), "--at 2030-01-31 has no time zone", id="no-zone"),
    pytest.param((*EVERY, "--every", "often"), "--every 'often' is no duration", id="every"),
    pytest.param((*EVERY, "--catch-up", "x"), "--catch-up 'x' is no duration", id="catch-up"),
    pytest.param((*EVERY, "--to", "x"), "--to 'x' is no date and time", id="to"),
    pytest.param((*BACKFILL, "--from", "x", "--to", "x"), "--from 'x' is no date and time", id="from"),
    pytest.param(("retry", "--all", "--older", "-1"), "--older '-1' is no duration", id="older"),
    pytest.param(("retry", "--all", "--newer", "9" * 15), f"--newer '{'9' * 15}' is too long", id="newer"),
    pytest.param(("prune", "--older", "x"), "--older 'x' is no duration", id="prune"),
    pytest.param(("queue", "set", "one", "--concurrency", "abc"), "--concurrency 'abc' is no limit", id="limit"),
    pytest.param((*SUBMIT, "--timeout", "0"), "--timeout must be more than 0 and less than 1e9, not 0;", id="as-typed"),
    pytest.param(
        (*SUBMIT, "--delay=999999999999d"), "--delay must be between 0 and 1e9 seconds, not 999999999999d", id="unit"
    ),
    pytest.param((*EVERY, "--every", "500ms"), "--every must be a number from 1 to 1e9, not 500ms", id="the-last-one"),
]


@pytest.mark.parametrize(("line", "said"), FIRST)
def test_an_error_of_a_value_begins_with_its_option(line: tuple[str, ...], said: str, shell: Shell) -> None:
    """Of several durations, moments and limits on one line the one that is wrong is named, with the value as typed."""
    done = shell.here(*line, "--store", shell.url)
    assert done.code == 2
    assert done.err.startswith(f"error: {said}")


def test_json_names_the_field_of_a_value_that_cannot_be_read(shell: Shell) -> None:
    """A program gets the parameter by the name that the library and HTTP have for it."""
    error = json.loads(shell.here(*SUBMIT, "--delay", "soon", "--store", shell.url, "--json").err)
    assert (error["code"], error["field"]) == ("usage_error", "delay_s")
    assert error["message"].startswith("--delay 'soon' is no duration")


@pytest.mark.parametrize("command", ["run", "worker"])
def test_a_grace_that_is_none_is_named(command: str, shell: Shell) -> None:
    """A worker does not start with a grace that it does not understand."""
    done = shell.here(command, "tests.cli.sample_app", "--grace", "x")
    assert (done.code, done.err.partition(";")[0]) == (2, "error: --grace 'x' is no duration")


def test_who_is_refused_for_the_same_work_hears_of_options(shell: Shell) -> None:
    """The ways out of a duplicate are told as they are typed."""
    shell.seed(("add", {"a": 1}), dedupe="refuse")
    done = shell.here(*SUBMIT, "--dedupe", "refuse", "--app", "tests.cli.sample_app", "--store", shell.url)
    assert "--dedupe='merge' returns that one" in done.err
    assert "submit with --dedupe='allow' to have both" in done.err
    assert " dedupe=" not in done.err


def test_an_error_tells_the_same_with_other_names():
    """The parameters that an error names, and the value that it repeats, can be told as somebody else knows them."""
    error = InvalidInput(
        "must be shorter than {dedupe_window_s}", field="timeout_s", fields=("dedupe_window_s",), given=60
    )
    assert str(error) == "timeout_s must be shorter than dedupe_window_s, not 60"
    assert error.describe(option_of, "1m") == "--timeout must be shorter than --dedupe-window, not 1m"
    assert (error.field, error.hint) == ("timeout_s", "")


def test_words_of_others_stay_as_they_are():
    """What a consumer says about its arguments, and what is quoted, is left alone."""
    for error in (
        InvalidArguments("add", ["timeout_s: Extra inputs are not permitted"]),
        InvalidInput("produce made a task for 'timeout_s=5'", hint="set source"),
        InvalidInput("must be a number", field="timeout_s", given="timeout_s=1, {timeout_s}"),
    ):
        assert error_text(error, ["submit"]) == str(error).replace("timeout_s must", "--timeout must")
