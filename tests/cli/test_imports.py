"""The command line asks only the application: what import-linter enforces is complete."""

import ast
import tomllib
from pathlib import Path

import pytest

import taskyard

ROOT = Path(__file__).parents[2]
CLI = ROOT / "src" / "taskyard" / "cli"
ALLOWED = {"application", "cli", "errors", "model"}


def test_every_other_part_is_forbidden_to_the_command_line() -> None:
    """A new module of the package is no way around the application."""
    assert taskyard.__file__ is not None
    parts = {path.stem for path in Path(taskyard.__file__).parent.iterdir() if not path.name.startswith("_")}
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (contract,) = [contract for contract in contracts if contract["id"] == "cli"]
    forbidden = {name.removeprefix("taskyard.") for name in contract["forbidden_modules"]}
    assert forbidden == parts - ALLOWED - {"py"}


@pytest.mark.parametrize("path", sorted(CLI.rglob("*.py")), ids=lambda path: str(path.relative_to(CLI)))
def test_a_module_of_the_command_line_imports_only_what_it_may(path: Path) -> None:
    """Nothing comes in through the names of the package itself. The demo shows them, as an app of a user would."""
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            imported.add(node.module)
        elif isinstance(node, ast.Import):
            imported.update(alias.name for alias in node.names)
    own = {name for name in imported if name.partition(".")[0] == "taskyard"}
    root = {"taskyard"} if path.parent.name == "demo" else set[str]()
    assert {name for name in own - root if name.partition(".")[2].partition(".")[0] not in ALLOWED} == set()
