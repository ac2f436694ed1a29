"""Output that goes nowhere: closed, full, or given up by its reader."""

import subprocess
import sys

import pytest

from tests.cli.shell import Shell

WAYS = [
    pytest.param(">&-", 1, "", id="closed"),
    pytest.param(">/dev/full", 1, "error: the output could not be written: No space left on device\n", id="full"),
    pytest.param("2>&-", 0, "", id="errors-closed"),
    pytest.param("<&-", 0, "", id="input-closed"),
]


@pytest.mark.parametrize("command", ["ls", "doctor", "show", "--help"])
@pytest.mark.parametrize(("way", "code", "said"), WAYS)
def test_output_that_goes_nowhere(shell: Shell, way: str, code: int, said: str, command: str) -> None:
    """Where the output is closed or full, a command fails without calling that a bug; other streams may be closed."""
    (uuid,) = shell.seed(("add", {"a": 1}))
    arguments = (
        "--help" if command == "--help" else f"{command} {uuid if command == 'show' else ''} --store {shell.url}"
    )
    line = f"{sys.executable} -m taskyard.cli {arguments} {way}"
    done = subprocess.run(line, shell=True, cwd=shell.folder, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, said)
