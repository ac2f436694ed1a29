"""Requirements and blockers on the command line."""

import asyncio
import signal

import pytest

from taskyard import Yard
from taskyard.cli.asking import asker
from taskyard.model.command import Block
from tests.cli.shell import Shell

FARM = """
from taskyard import Place, Yard, current_run

yard = Yard("sqlite:///work.db")


@yard.consumer(places=[Place("gpu-0", {"model": "a100"})])
def train() -> str:
    return current_run().device
"""


@pytest.fixture
def farm(shell: Shell) -> Shell:
    """A folder with an app whose consumer has a place."""
    (shell.folder / "farm.py").write_text(FARM, "utf-8")
    return shell


@pytest.fixture
def blocked(shell: Shell) -> str:
    """A task that a worker has blocked."""
    (uuid,) = shell.seed(("add", {"a": 1}))

    async def block() -> None:
        async with Yard(f"sqlite:///{shell.path}").client() as yard:
            await yard.store.apply([uuid], Block("disk", "/data"))

    asyncio.run(block())
    return uuid


def test_a_task_runs_at_a_place_with_its_labels(farm: Shell) -> None:
    """`submit --require` says what the place must have; `show` says what was required, and where each attempt ran."""
    submitted = farm.ok("submit", "train", "--require", "model=a100", "--json", "--app", "farm:yard").json
    assert (submitted["state"], submitted["requires"]) == ("queued", {"model": "a100"})
    worker = farm.start("worker", "farm:yard")
    worker.hear("is running")
    shown = farm.ok("submit", "train", "--require", "model=a100", "--wait", "--app", "farm:yard")
    assert shown.out.strip() == "gpu-0"
    worker.signal(signal.SIGTERM)
    assert worker.end() == 0
    task = farm.here("show", submitted["uuid"], "--json", "--store", farm.url).json
    assert (task["state"], task["attempts"][0]["device"]) == ("completed", "gpu-0")
    text = farm.here("show", submitted["uuid"], "--store", farm.url).out
    for words in ("requires", "model=a100", "PLACE", "gpu-0"):
        assert words in text


def test_a_task_says_who_submitted_it(shell: Shell) -> None:
    """A submit from a shell keeps the user, as every command does."""
    shell.here("submit", "add", "a=1", "--app", "app:yard", "--store", shell.url)
    (task,) = shell.here("ls", "--json", "--store", shell.url).json["tasks"]
    assert task["submitted_by"] == asker()
    assert asker() in shell.here("show", task["uuid"], "--store", shell.url).out


def test_a_requirement_without_a_value_is_told(shell: Shell) -> None:
    """What is wrong is said with the option as it was typed."""
    done = shell.here("submit", "add", "--require", "model", "--app", "app:yard", "--store", shell.url)
    assert (done.code, "--require 'model' has no value; write --require name=text" in done.err) == (2, True)


def test_blocked_tasks_are_listed_and_explained(shell: Shell, blocked: str) -> None:
    """`ls --blocker` finds them, by kind or by what it is; `why` and `show` say what they wait for."""
    for blocker in ("disk", "disk:/data"):
        (task,) = shell.here("ls", "--blocker", blocker, "--json", "--store", shell.url).json["tasks"]
        assert (task["uuid"], task["state"]) == (blocked, "blocked")
        assert (task["blocker"]["kind"], task["blocker"]["detail"]) == ("disk", "/data")
        assert task["why"]["reason"] == "blocked"
    assert shell.here("ls", "--blocker", "disk:/", "--json", "--store", shell.url).json["tasks"] == []
    for command in ("why", "show"):
        assert "it waits for disk /data" in shell.here(command, blocked, "--store", shell.url).out


def test_all_that_a_blocker_holds_are_steered_together(shell: Shell, blocked: str) -> None:
    """`--all --blocker` chooses them for a command."""
    shell.seed(("add", {"a": 2}))
    done = shell.here("cancel", "--all", "--blocker", "disk", "--yes", "--json", "--store", shell.url)
    assert done.json["moved"] == 1
    assert shell.here("show", blocked, "--json", "--store", shell.url).json["state"] == "canceled"
