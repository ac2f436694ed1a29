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


def test_nothing_recorded_is_said(shell: Shell) -> None:
    """A store on which nobody has asked for anything says so."""
    shell.seed(("add", {"a": 1}))
    assert "nothing is recorded" in shell.ok("audit", "--store", shell.url).out
