"""What the README shows is run as it stands there."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import TOP, blocks
from tests.scenario.processes import environment

README = blocks(TOP / "README.md")
PATIENCE_S = 50

ALONE = {
    "nightly.py": "a full report\noften 0 too often\nreport 5 \n",
    "after.py": "3\n6 2\n",
    "mail.py": "True queue paused\nValueError\n[(1, 'ValueError', 'send')]\n1\nsent to bob@example.org\n",
    "traces.py": (
        "printed lines are kept as well\n"
        "Holiday video {'saved_bytes': 1024}\n"
        "['read a.mp4', 'printed lines are kept as well']\n"
        "12 frames were dropped\n"
        "[(1, 'completed')]\n"
    ),
    "elsewhere.py": "a.png at 100\n",
    "listening.py": "completed A\ncompleted B\ncompleted C\n",
    "phones.py": "True\nFalse\naccount 8, level 2\n",
    "steered.py": "paused by ann: backup\n[1, 2, 3] True\n['c', 'd', 'b']\n1 1 canceled\n",
}
APART = {*ALONE, "orders.py"}
"""Programs with tests of their own."""


def run(folder: Path, *command: str, **env: str) -> str:
    done = subprocess.run(
        command, cwd=folder, env=environment(**env), capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, f"{shlex.join(command)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the README's programs in it, as a reader would save them."""
    folder = tmp_path_factory.mktemp("readme")
    for block in README:
        if block.file is not None:
            (folder / block.file).write_text(block.text, "utf-8")
    return folder


@pytest.mark.spec("SCH-22")
def test_the_programs_run(folder):
    """Every program in the README runs as it is printed, and says what it should."""
    programs = [block.file for block in README if block.file is not None]
    names = [
        "app",
        "web",
        "plain",
        "cpu",
        "nightly",
        "after",
        "mail",
        "traces",
        "phones",
        "steered",
        "listening",
        "elsewhere",
        "orders",
        "words",
        "later",
    ]
    assert programs == [f"{name}.py" for name in names]
    said = [run(folder, sys.executable, program) for program in programs if program not in APART]
    assert said[0] == "True\n"
    assert len(said[2].strip()) == 64
    assert len(said[3].strip()) == 128
    assert said[4] == "count=3 longest='quick'\nvalidation InvalidArguments\nruntime ValueError\n"
    assert said[5] == "{'count': 3, 'longest': 'quick'}\n"


@pytest.mark.spec("SCH-21")
@pytest.mark.parametrize("program", ALONE)
def test_a_program_with_a_store_of_its_own_runs(folder, program):
    """The programs that have nothing to do with the others run as they are printed, and say what they should."""
    assert run(folder, sys.executable, program) == ALONE[program]


def test_the_program_with_a_database_runs(folder, databases):
    """The program that needs a database runs as it is printed, on an empty one."""
    url = databases.make()
    assert run(folder, sys.executable, "orders.py", DATABASE_URL=url) == "receipt for order 1\n"


def test_the_example_is_short():
    """The first example is about twenty lines."""
    assert len([line for line in README[1].text.splitlines() if line.strip()]) <= 22


def test_every_python_block_is_run():
    """No block of Python in the README is there for show only."""
    assert all(block.file is not None for block in README if block.language == "python")


def test_the_commands_work(folder):
    """The commands of the README work on the example, in the order they stand there."""
    run(folder, sys.executable, "app.py")
    [console] = [block for block in README if block.mark == "run in a shell"]
    program = [sys.executable, "-m", "taskyard.cli"]
    workers: list[subprocess.Popen[bytes]] = []
    try:
        for line in console.text.splitlines():
            name, *arguments = shlex.split(line.removeprefix("$ "))
            assert name == "taskyard"
            if arguments[0] == "worker":
                workers.append(subprocess.Popen([*program, *arguments], cwd=folder, env=environment()))
            else:
                # To watch has no end; here it ends when there is nothing left to see.
                run(folder, *program, *arguments, *(["--until-idle"] if arguments[0] == "watch" else []))
    finally:
        for worker in workers:
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(PATIENCE_S) == 0
    assert "failed" not in run(folder, *program, "ls", "--store", "sqlite:///work.db")
