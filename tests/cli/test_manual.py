"""The manual, the program's own help, and what importing the library costs."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer.main

from taskyard.cli.app import app
from taskyard.version import VERSION
from tests.cli.shell import Shell

MANUAL = Path(__file__).parents[2].joinpath("docs", "CLI.md").read_text(encoding="utf-8")
COMMANDS = [
    *(command.name or "" for command in app.registered_commands),
    *(
        f"{group.name} {command.name}"
        for group in app.registered_groups
        for command in (group.typer_instance.registered_commands if group.typer_instance else ())
    ),
]


@pytest.mark.parametrize("command", COMMANDS)
def test_command_is_in_the_manual(command: str) -> None:
    """Every command is in the manual's list, has a section there, and every option it has is named."""
    assert f"\ntaskyard {command}" in MANUAL
    assert re.search(rf"^## .*\btaskyard {command}\b", MANUAL, re.MULTILINE)
    found: Any = typer.main.get_command(app)
    for word in command.split():
        found = found.commands[word]
    for option in (option for parameter in found.params for option in parameter.opts if option.startswith("--")):
        assert re.search(rf"{option}\b", MANUAL), f"{option} of {command}"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, shell: Shell) -> None:
    """--help tells of each command, without opening anything."""
    done = shell.here(*command.split(), "--help")
    assert done.code == 0
    assert f"taskyard {command}" in done.out


def test_the_program_answers_at_a_shell(shell: Shell) -> None:
    """The installed command and the module are the same program; without a command it shows its help, and 2."""
    installed = Path(sys.executable).with_name("taskyard")
    said = subprocess.run([installed, "--version"], capture_output=True, text=True, check=True).stdout
    assert said == shell.ok("--version").out
    nothing = shell.run()
    assert nothing.code == 2
    assert all(command.split()[0] in nothing.out for command in COMMANDS)


def test_the_library_does_not_load_the_command_line() -> None:
    """`import taskyard` imports neither typer nor rich, nor the command line itself."""
    code = "import sys, taskyard; print([m for m in ('typer', 'rich', 'click', 'taskyard.cli') if m in sys.modules])"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said == "[]\n"


def test_the_version_is_that_of_the_package() -> None:
    """What the program says of itself is what the package is published as."""
    project = tomllib.loads(Path(__file__).parents[2].joinpath("pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["version"] == VERSION
