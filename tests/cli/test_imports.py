"""The command line asks only the application, whatever modules the package gets."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CLI = ROOT / "src" / "taskyard" / "cli"
ALLOWED = {"application", "cli", "errors", "model"}


@pytest.mark.parametrize("path", sorted(CLI.rglob("*.py")), ids=lambda path: str(path.relative_to(CLI)))
def test_a_module_of_the_command_line_imports_only_what_it_may(path: Path) -> None:
    """Nothing comes in through the names of the package itself."""
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            imported.add(node.module)
        elif isinstance(node, ast.Import):
            imported.update(alias.name for alias in node.names)
    own = {name for name in imported if name.partition(".")[0] == "taskyard"}
    assert {name for name in own if name.partition(".")[2].partition(".")[0] not in ALLOWED} == set()
