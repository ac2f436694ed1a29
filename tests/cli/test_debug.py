"""`taskyard debug`: the code of a stored task runs here once more, and nothing is stored."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import apsw
import pytest

from taskyard.errors import TaskEnded
from tests.cli.debug_app import yard
from tests.cli.shell import LONG_S, Done, Shell

APP = ("--app", "debug_app:yard")
KINDS = ["plain", "later", "remote", "own", "alg"]


@pytest.fixture(autouse=True)
def _app(shell: Shell) -> None:
    shutil.copy(Path(__file__).with_name("debug_app.py"), shell.folder / "debug_app.py")


def ran(shell: Shell, name: str, args: dict[str, Any]) -> str:
    """A task that a node has run; its id."""

    async def run() -> str:
        yard.use_store(f"sqlite:///{shell.path}")
        async with yard:
            handle = await yard.submit(name, args)
            with contextlib.suppress(TaskEnded):
                await handle.result(timeout_s=LONG_S)
        return handle.uuid

    return asyncio.run(run())


def contents(shell: Shell) -> dict[str, list[Any]]:
    """All rows of all tables of the store."""
    with contextlib.closing(apsw.Connection(str(shell.path), flags=apsw.SQLITE_OPEN_READONLY)) as base:
        tables = [str(name) for (name,) in base.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        rows = {name: sorted(map(repr, base.execute(f"SELECT * FROM {name}"))) for name in tables}
    assert sum(map(len, rows.values())) > 3
    return rows


def files(shell: Shell) -> set[str]:
    return {str(path.relative_to(shell.folder)) for path in shell.folder.rglob("*") if "__pycache__" not in str(path)}


@pytest.mark.parametrize("kind", KINDS)
def test_it_runs_with_arguments_and_checkpoint(shell: Shell, kind: str) -> None:
    """Every form of consumer goes on from its checkpoint, on the main thread; what it reports is printed, and the store
    and its artifacts are as before."""
    uuid = ran(shell, kind, {"kind": kind})
    record, before, kept = shell.record(uuid), contents(shell), files(shell)
    assert (record.state, record.error.message if record.error else "") == ("failed", f"{kind} fails the first time")
    done = shell.ok("debug", uuid[-8:], *APP)
    assert contents(shell) == before
    assert files(shell) == kept
    lines = done.out.splitlines()
    checkpoint = json.dumps({"of": kind, "step": 2}, separators=(",", ":"))
    for said in (
        f"{kind} goes on from {{'of': '{kind}', 'step': 1}}",
        f"log debug: a line of {kind}",
        "progress 50% (2.5/s) half way saved=3",
        "note a remark",
        "artifact note.txt: 11 bytes of text/plain, not kept",
        "artifact large.bin: 307,200 bytes of application/octet-stream, not kept",
        f"checkpoint {checkpoint}",
    ):
        assert said in lines
    assert f"logged by {kind}" in done.err
    assert "nothing is written to the store" in done.err
    result = json.loads(lines[-1].split(": ", 1)[1])
    assert lines[-1].startswith("completed in ")
    assert result == {"attempt": 1, "task": uuid, "tenant": "acme", "is_main": True}


def test_a_failure_is_shown(shell: Shell) -> None:
    """Code that fails here is shown with its traceback, and the command ends with 1."""
    uuid = ran(shell, "breaks", {"divisor": 0})
    done = shell.run("debug", uuid, *APP)
    assert done.code == 1
    assert "return number_of_parts / divisor" in done.out
    assert done.out.splitlines()[-1] == "failed as runtime: division by zero"


def on_a_terminal(shell: Shell, *arguments: str, typed: str) -> Done:
    return shell.on_a_terminal(*arguments, typed=typed, TERM="dumb", NO_COLOR="1")


def test_the_debugger_opens_where_it_was_raised(shell: Shell) -> None:
    """With --pdb the debugger stands in the line that raised, and knows its variables."""
    uuid = ran(shell, "breaks", {"divisor": 0})
    done = on_a_terminal(shell, "debug", uuid, *APP, "--pdb", typed="p 'parts', number_of_parts\nq\n")
    assert "-> return number_of_parts / divisor" in done.out
    assert "('parts', 7)" in done.out
    assert done.code == 1


@pytest.mark.parametrize(
    ("kind", "line"),
    [("plain", "@yard.consumer(retry=NEVER)"), ("later", "@yard.consumer(retry=NEVER)"), ("alg", "def run")],
)
def test_the_debugger_opens_in_the_first_line(shell: Shell, kind: str, line: str) -> None:
    """With --break the debugger stands at the code of the task, plain, async or an algorithm's, and goes on to its
    end."""
    uuid = ran(shell, kind, {"kind": kind})
    before = contents(shell)
    done = on_a_terminal(shell, "debug", uuid, *APP, "--break", typed="c\n")
    assert done.code == 0, done.out
    first = done.out[done.out.index("-> ") :].splitlines()[0]
    assert first.startswith(f"-> {line}")
    assert "completed in" in done.out
    assert contents(shell) == before


@pytest.mark.parametrize("kind", ["plain", "later"])
def test_the_debugger_passes_what_reads_the_arguments(shell: Shell, kind: str) -> None:
    """With --break and a store of another yard, where nothing has read the signature before, the debugger does not stop
    in the library that reads it."""
    uuid = ran(shell, kind, {"kind": kind})
    done = on_a_terminal(shell, "debug", uuid, *APP, "--store", shell.url, "--break", typed="c\n")
    assert done.code == 0, done.out
    assert done.out[done.out.index("-> ") :].startswith("-> @yard.consumer(retry=NEVER)")


@pytest.mark.parametrize(
    ("how", "told"),
    [("later", "would be tried again in 5 s: no disk"), ("never", "would be canceled: no need")],
)
def test_what_a_run_asks_for_is_no_failure(shell: Shell, how: str, told: str) -> None:
    """`RetryLater` and `Cancel` are told as what a worker would do, and the command ends with 0."""
    done = shell.run("debug", shell.ok("submit", "steers", f"how={how}", *APP).out.strip(), *APP)
    assert (done.code, done.out.splitlines()[-1]) == (0, told)


def test_leaving_the_debugger_ends_the_run(shell: Shell) -> None:
    """`q` at the first line ends the code, and the store does not know of it."""
    uuid = ran(shell, "breaks", {"divisor": 1})
    before = contents(shell)
    done = on_a_terminal(shell, "debug", uuid, *APP, "--break", typed="q\n")
    assert done.code == 1
    assert contents(shell) == before


def test_plain_code_may_run_a_loop(shell: Shell) -> None:
    """No event loop runs in the thread of plain code, as in a node."""
    uuid = ran(shell, "starts_a_loop", {})
    done = shell.ok("debug", uuid, *APP)
    assert done.out.splitlines()[-1].endswith(': "inside"')


def test_what_cannot_be_debugged(shell: Shell) -> None:
    """Without an app, with one that has no such consumer, and for an id that is none, it says what is wrong."""
    uuid = ran(shell, "breaks", {"divisor": 1})
    assert "no app given" in shell.here("debug", uuid, "--store", shell.url).err
    done = shell.run("debug", uuid, "--app", "app:yard")
    assert done.code != 0
    assert "no consumer is called 'breaks'" in done.err
    done = shell.run("debug", "nothing-like-it", *APP)
    assert done.code != 0
    assert "nothing-like-it" in done.err
    assert os.path.exists(shell.path)
