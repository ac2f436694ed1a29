"""What the page on executors shows is run as it stands there."""

from __future__ import annotations

import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

import taskyard.futures
from taskyard import Algorithm, RunContext
from taskyard.consumers import PLACES
from taskyard.futures import PoolSettings
from tests.docs.blocks import TOP, blocks
from tests.scenario.processes import environment

PAGE = TOP / "docs" / "EXECUTORS.md"

SHOWS = {
    "places.py": "attempt 2 went on from page 2\nTrue\n",
    "doubler.py": "[0, 2, 4]\nExecutorStats(max_workers=1, active=0, queued=0, done=3)\n",
    "careful.py": (
        "first half way\n"
        "exactly 7\n"
        "crash half way\n"
        "crash\n"
        "crash half way\n"
        "crash\n"
        "circuit_opened\n"
        "about 7 | answered by 'rough': algorithm 'exact' has crashed 2 times in a row and is given a rest\n"
        "preset 1\n"
    ),
    "pool.py": (
        "[32, 243, 1024]\n"
        "_exit was not finished: its worker process exited with code 3\n"
        "sleep was ended: it ran longer than its timeout of 1 s\n"
        "1\n"
    ),
    "manager.py": "[499999500000, 249999500000] True 2\nin a thread, because a lambda cannot be pickled\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the page's programs in it, as a reader would save them."""
    for block in blocks(PAGE):
        if block.file is not None:
            (tmp_path / block.file).write_text(block.text, "utf-8")
    return tmp_path


@pytest.mark.parametrize("name", SHOWS)
@pytest.mark.spec("MGR-04")
def test_the_programs_run(folder, name):
    """Each program runs as it is printed, and says what it should."""
    done = subprocess.run(
        [sys.executable, name], cwd=folder, env=environment(), capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == SHOWS[name]


@pytest.mark.spec("MGR-14")
async def test_the_application_answers(folder):
    """The web application opens the manager with itself, uses it, and shuts it down."""
    spec = importlib.util.spec_from_file_location("documented_web", folder / "web.py")
    assert spec is not None
    assert spec.loader is not None
    web = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(web)
    async with web.app.router.lifespan_context(web.app):
        transport = httpx.ASGITransport(app=web.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://example") as client:
            assert (await client.get("/power/10")).json() == 1024
    with pytest.raises(RuntimeError):
        await web.app.state.executor_manager.run_cpu_intensive(pow, 2, 2)


def test_every_program_is_run():
    """No program of the page is there for show only."""
    python = [block.file for block in blocks(PAGE) if block.language == "python"]
    assert python == [*SHOWS, "web.py"]


def test_every_error_is_in_the_table():
    """All that a future of ours can raise is on the page."""
    errors = [name for name in taskyard.futures.__all__ if isinstance(getattr(taskyard.futures, name), type)]
    text = PAGE.read_text("utf-8")
    raised = [name for name in errors if issubclass(getattr(taskyard.futures, name), Exception)]
    assert [name for name in raised if f"| `{name}` |" not in text] == ["RemoteTraceback"]


def test_every_setting_is_on_the_page():
    """Each rule of a pool, each hint, each hook and each word is named there, in code."""
    text = PAGE.read_text("utf-8")
    hooks = [name for name, member in vars(Algorithm).items() if inspect.isfunction(member)]
    inside = [name for name in vars(RunContext) if f"`{name}`" in str(RunContext.__doc__) and not name.startswith("_")]
    wanted = [*PoolSettings.__struct_fields__, *hooks, *PLACES, *inside]
    left_out = {"setup", "uuid", "source", "token", "note"}  # `setup` is for pools that others make
    missing = [name for name in wanted if name not in left_out and not re.search(rf"\b{name}\b", text)]
    assert missing == []
