"""A shell in a folder of its own for each test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.farm import Farm
from tests.cli.shell import Shell


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    yield shell
    shell.close()


@pytest.fixture
def farm(shell: Shell) -> Farm:
    """The same with an app that has devices, and a store."""
    return Farm(shell)
