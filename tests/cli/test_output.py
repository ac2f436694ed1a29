"""Output that goes nowhere, that cannot be written, or that there is none of."""

import subprocess
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder

import msgspec
import pytest

from taskyard.cli import main
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


@pytest.mark.parametrize("line", [("queue", "pause"), ("node", "drain"), ("start",)])
def test_half_a_character_is_written_out_in_json(shell: Shell, line: tuple[str, ...]) -> None:
    """What was typed and is no text is repeated in JSON all the same, written out."""
    shell.seed(("add", {"a": 1}))
    done = shell.here(*line, "work\udc80", "--store", shell.url, "--json")
    assert done.code == 1
    told = msgspec.json.decode(done.err or done.out.strip()[1:-1])
    assert r"work\udc80" in {**told, **told.get("data", {})}.values()


class Interrupt(MetaPathFinder):
    """Ctrl-C while a module is looked for."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> None:
        raise KeyboardInterrupt


def test_ctrl_c_before_a_command_runs(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Who gives up while the program is still being loaded gets 130, and no traceback."""
    monkeypatch.delitem(sys.modules, "taskyard.cli.app")
    monkeypatch.setattr(sys, "meta_path", [Interrupt(), *sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code, capfd.readouterr()) == (130, ("", ""))
