"""Titles and labels on the command line."""

from typing import Any

import pytest

from tests.cli.shell import Shell

ANN: dict[str, Any] = {"title": "first pass", "labels": {"customer": "42", "kind": "video"}}


@pytest.fixture
def labelled(shell: Shell) -> list[str]:
    """Two tasks of customer 42, and one of another."""
    (first,) = shell.seed(("add", {"a": 1}), **ANN)
    (second,) = shell.seed(("add", {"a": 2}), labels={"customer": "42"})
    shell.seed(("add", {"a": 3}), title="other", labels={"customer": "7"})
    return [first, second]


@pytest.mark.spec("QUE-31")
def test_a_submit_gives_a_title_and_labels(shell: Shell) -> None:
    """Both are stored with the task, and printed by `ls` and `show`."""
    options = ("--title", "first pass", "--label", "customer=42", "--label", "kind=video")
    done = shell.here("submit", "add", "a=1", *options, "--json", "--app", "app:yard", "--store", shell.url)
    assert (done.json["title"], done.json["labels"]) == (ANN["title"], ANN["labels"])
    for shown in (
        shell.here("ls", "--store", shell.url, COLUMNS="160").out,
        shell.here("show", done.json["uuid"], "--store", shell.url).out,
    ):
        assert "first pass" in shown
        assert "customer=42" in shown


@pytest.mark.spec("QUE-31")
def test_labels_filter(shell: Shell, labelled: list[str]) -> None:
    """`ls --label` lists the tasks that have all labels that are named; `--all --label` steers them."""

    def listed(*labels: str) -> list[str]:
        named = [word for label in labels for word in ("--label", label)]
        return [task["uuid"] for task in shell.here("ls", *named, "--json", "--store", shell.url).json["tasks"]]

    first, second = labelled
    assert listed("customer=42") == [second, first]
    assert listed("customer=42", "kind=video") == [first]
    assert listed("customer=4") == []
    done = shell.here("cancel", "--all", "--label", "customer=42", "--yes", "--json", "--store", shell.url)
    assert done.json["moved"] == 2


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--label", "customer"), "--label 'customer' has no value; write --label name=text"),
        (("--label", "a b=c"), "--label must have names of 1 to 40"),
        (("--label", "a=1", "--label", "a=2"), "--label 'a' is given twice"),
        (("--title", "two\nlines"), "--title"),
    ],
)
def test_bad_labels_are_told(shell: Shell, options: tuple[str, ...], text: str) -> None:
    """What is wrong is said, with the option as it was typed, and nothing is stored."""
    done = shell.here("submit", "add", "a=1", *options, "--app", "app:yard", "--store", shell.url)
    assert done.code != 0
    assert text in done.err
    assert not shell.path.exists()
