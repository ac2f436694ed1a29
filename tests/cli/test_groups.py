"""`taskyard group`: tasks that were submitted together."""

import asyncio

import pytest

from taskyard.errors import TaskEnded
from taskyard.model.state import TaskState
from tests.cli.sample_app import yard
from tests.cli.shell import LONG_S, Shell


def seed_group(shell: Shell, *, work: bool = False, summary: bool = True) -> tuple[str, list[str]]:
    """A group of two that complete and one that fails; its id and those of its tasks."""

    async def submit() -> tuple[str, list[str]]:
        yard.use_store(f"sqlite:///{shell.path}")
        async with yard if work else yard.client():
            tasks = [yard.bind("add", {"a": 1}), yard.bind("boom", {"why": "bad luck"}), yard.bind("add", {"a": 2})]
            group = await yard.submit_group(tasks, summary=yard.bind("add", {"a": 9}) if summary else None)
            for handle in (*group.tasks, *([group.summary] if summary else ())) if work else ():
                try:
                    await handle.result(timeout_s=LONG_S)
                except TaskEnded:
                    continue
            return group.id, [handle.uuid for handle in group.tasks]

    return asyncio.run(submit())


@pytest.mark.spec("QUE-27")
def test_group_show_tells_how_far_it_is(shell: Shell) -> None:
    """How many have ended, what did not complete first, and the summary with why it did not run."""
    group, (first, failed, last) = seed_group(shell, work=True)
    lines = shell.ok("group", "show", group, "--store", shell.url).out.splitlines()
    assert lines[:2] == [f"group  {group}  3 of 3 ended", "✔ 2 completed   ✘ 1 failed"]
    assert [line.split()[0] for line in lines[4:]] == [failed, first, last, group]
    assert "ValueError: bad luck" in lines[4]
    assert f"summary  its dependency {failed} failed" in lines[7]
    told = shell.here("group", "show", group, "--store", shell.url, "--json").json
    assert (told["total"], told["finished"], told["completed"]) == (3, 3, 2)
    assert (told["summary"]["uuid"], told["summary"]["state"]) == (group, "failed")


def test_a_group_is_found_by_any_of_its_tasks(shell: Shell) -> None:
    """The end of the id of any task in it names a group, also one without a summary; a lone task names none."""
    group, (first, *_) = seed_group(shell, summary=False)
    for given in (first, first[-8:], group):
        told = shell.here("group", "show", given, "--store", shell.url, "--json", "--limit", "2").json
        assert (told["group"], told["summary"], len(told["tasks"])) == (group, None, 2)
    (alone,) = shell.seed(("add", {"a": 1}))
    refused = shell.here("group", "show", alone, "--store", shell.url)
    assert (refused.code, refused.err) == (1, f"error: task {alone} belongs to no group\n")
    unknown = shell.here("group", "cancel", "ffffffff", "--store", shell.url)
    assert (unknown.code, unknown.out) == (1, "")
    assert "no task of a group ffffffff" in unknown.err


def test_group_show_fits_a_narrow_window(shell: Shell) -> None:
    """In 80 columns no line is longer than the window, and what is left out is counted."""
    group, _ = seed_group(shell, work=True)
    out = shell.here("group", "show", group, "--store", shell.url, "--limit", "1", COLUMNS="80").out
    assert max(map(len, out.splitlines())) <= 80
    assert "… and 2 tasks more" in out


def test_group_cancel_ends_all_that_has_not_ended(shell: Shell) -> None:
    """Every task of the group and its summary are canceled with who and why; a second time there is nothing left."""
    group, tasks = seed_group(shell)
    done = shell.here("group", "cancel", tasks[0], "--reason", "not needed", "--store", shell.url)
    assert (done.code, done.out) == (0, "4 tasks were canceled, or asked to stop\n⊘ 3 canceled\n")
    records = [shell.record(uuid) for uuid in (*tasks, group)]
    assert {record.state for record in records} == {TaskState.CANCELED}
    asked = [record.cancel for record in records if record.cancel is not None]
    assert [cancel.reason for cancel in asked] == ["not needed"] * len(records)
    assert all(cancel.actor.startswith("cli:") for cancel in asked)
    again = shell.here("group", "cancel", group, "--store", shell.url)
    assert (again.code, again.out) == (1, "nothing to change\n⊘ 3 canceled\n")


def test_group_retry_sends_what_failed_again(shell: Shell) -> None:
    """What failed and the summary that failed with it are sent again; what completed stays as it is."""
    group, (first, failed, _) = seed_group(shell, work=True)
    told = shell.here("group", "retry", group, "--store", shell.url, "--json").json
    assert told == {"group": group, "changed": 2, "states": {"completed": 2, "queued": 1}}
    states = [shell.record(uuid).state for uuid in (first, failed, group)]
    assert states == [TaskState.COMPLETED, TaskState.QUEUED, TaskState.BLOCKED]
