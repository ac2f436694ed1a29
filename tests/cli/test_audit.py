"""`taskyard audit`: who asked for what."""

import getpass

from tests.cli.shell import Shell


def test_what_people_ask_is_listed(shell: Shell) -> None:
    """Commands at a shell are listed newest first with who, what, how many and why; filters narrow it."""
    one, other = shell.seed(("add", {"a": 1}), ("add", {"a": 2}))
    shell.ok("hold", one, "--reason", "not yet", "--store", shell.url)
    shell.ok("queue", "pause", "default", "--reason", "disk is full", "--store", shell.url)
    shell.ok("cancel", "--all", "--consumer", "add", "--yes", "--store", shell.url)
    page = shell.ok("audit", "--store", shell.url, "--json").json
    assert [(one["command"], one["kind"], one["via"], one["matched"], one["changed"]) for one in page["entries"]] == [
        ("cancel", "tasks", "cli", 2, 2),
        ("pause", "queue", "cli", 1, 1),
        ("hold", "task", "cli", 1, 1),
    ]
    assert {one["actor"] for one in page["entries"]} == {getpass.getuser()}
    assert page["next"] is None
    text = shell.ok("audit", "--store", shell.url).out
    assert "disk is full" in text
    assert one[-8:] in text
    (held,) = shell.ok("audit", "--task", one[-8:], "--store", shell.url, "--json").json["entries"]
    assert (held["target"], held["reason"]) == (one, "not yet")
    assert shell.ok("audit", "--task", other, "--store", shell.url, "--json").json["entries"] == []
    (paused,) = shell.ok("audit", "--queue", "default", "--store", shell.url, "--json").json["entries"]
    assert paused["command"] == "pause"
    assert shell.ok("audit", "--by", "nobody", "--store", shell.url, "--json").json["entries"] == []
    assert len(shell.ok("audit", "--command", "cancel", "--store", shell.url, "--json").json["entries"]) == 1


def test_a_long_record_is_read_page_by_page(shell: Shell) -> None:
    """A page says where the next one begins."""
    shell.seed(("add", {"a": 1}))
    for verb in ("pause", "resume", "pause"):
        shell.ok("queue", verb, "default", "--store", shell.url)
    first = shell.ok("audit", "-n", "2", "--store", shell.url, "--json").json
    assert [one["command"] for one in first["entries"]] == ["pause", "resume"]
    assert "--before" in shell.ok("audit", "-n", "2", "--store", shell.url).err
    rest = shell.ok("audit", "--before", str(first["next"]), "--store", shell.url, "--json").json
    assert [one["command"] for one in rest["entries"]] == ["pause"]
    assert rest["next"] is None


def test_a_queue_is_found_that_a_filter_names(shell: Shell) -> None:
    """`--queue` lists the commands on the queue and those whose filter names it."""
    shell.seed(("add", {"a": 1}), work=True)
    shell.seed(("add", {"a": 2}))
    shell.ok("cancel", "--all", "--queue", "default", "--yes", "--store", shell.url)
    shell.ok("run-again", "--all", "--queue", "default", "--yes", "--store", shell.url)
    shell.ok("cancel", "--all", "--consumer", "add", "--yes", "--store", shell.url)
    shell.ok("queue", "pause", "default", "--store", shell.url)
    found = shell.ok("audit", "--queue", "default", "--store", shell.url, "--json").json["entries"]
    assert [one["command"] for one in found] == ["pause", "run_again", "cancel"]
    assert [one["target"] for one in found] == ["default"] * 3
    assert shell.ok("audit", "--queue", "other", "--store", shell.url, "--json").json["entries"] == []


def test_the_words_of_the_shell_are_those_of_the_record(shell: Shell) -> None:
    """`--command` takes a command as it is typed, and the list shows it so, a priority by its name."""
    one, other = shell.seed(("add", {"a": 1}), ("add", {"a": 2}))
    shell.ok("move", one, "--after", other, "--store", shell.url)
    shell.ok("priority", one, "high", "--store", shell.url)
    shell.ok("start", other, "--store", shell.url)
    for word in ("move", "priority", "start"):
        (row,) = shell.ok("audit", "--command", word, "--store", shell.url).out.splitlines()[1:]
        assert f"  {word}  " in row
    assert len(shell.ok("audit", "--command", "set_priority", "--store", shell.url, "--json").json["entries"]) == 1
    assert 'priority="high"' in shell.ok("audit", "--store", shell.url, COLUMNS="200").out


def test_a_filter_without_hits_says_so(shell: Shell) -> None:
    """A filter that nothing matches is not told as an empty record."""
    shell.seed(("add", {"a": 1}))
    shell.ok("queue", "pause", "default", "--store", shell.url)
    assert shell.ok("audit", "--by", "nobody", "--store", shell.url).out == "nothing matches\n"


def test_nothing_recorded_is_said(shell: Shell) -> None:
    """A store on which nobody has asked for anything says so."""
    shell.seed(("add", {"a": 1}))
    assert "nothing is recorded" in shell.ok("audit", "--store", shell.url).out
