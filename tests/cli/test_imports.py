"""The command line asks only the application: what import-linter enforces is complete."""

import tomllib
from pathlib import Path

import taskyard

ROOT = Path(__file__).parents[2]
ALLOWED = {"application", "cli", "errors", "model"}


def test_every_other_part_is_forbidden_to_the_command_line() -> None:
    """A new module of the package is no way around the application."""
    assert taskyard.__file__ is not None
    parts = {path.stem for path in Path(taskyard.__file__).parent.iterdir() if not path.name.startswith("_")}
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (contract,) = [contract for contract in contracts if contract["id"] == "cli"]
    forbidden = {name.removeprefix("taskyard.") for name in contract["forbidden_modules"]}
    assert forbidden == parts - ALLOWED - {"py"}
