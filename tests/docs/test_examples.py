"""The examples run, and show what they say."""

from __future__ import annotations

import asyncio
import importlib
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from tests.docs.blocks import TOP
from tests.scenario.processes import environment

EXAMPLES = TOP / "examples"
PATIENCE_S = 30

SHOWS = {
    "farm.py": ["'account_id': 7, 'task_type': 'daily', 'priority': 'normal'"],
    "files.py": ["LICENSE: 11358 -> "],
    "plain.py": ["7 / 2 = 3.5", "1 / 0 is retrying after: float division by zero", "some things cannot be divided"],
    "killed.py": ["(killed -9)", "interrupted", "12 m, at attempt 2"],
    "patient.py": ["here I am after", "never.txt did not appear"],
    "scheduler_alone.py": ["ding 0.1\nding 0.2\nding 0.3\n"],
}


@pytest.mark.parametrize("name", SHOWS)
def test_an_example_shows_what_it_says(tmp_path, name):
    """An example ends well when it is run from a folder of its own, and prints what it promises."""
    arguments = [str(TOP)] if name == "files.py" else []
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for line in SHOWS[name]:
        assert line in done.stdout


@asynccontextmanager
async def worker(folder: Path, app: str) -> AsyncIterator[None]:
    """`taskyard worker` on this app, until the block ends."""
    process = subprocess.Popen(
        [sys.executable, "-m", "taskyard.cli", "worker", app],
        cwd=folder,
        env=environment(PYTHONPATH=str(EXAMPLES)),
        stderr=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        process.terminate()
        assert await asyncio.to_thread(process.wait, PATIENCE_S) == 0


@pytest.mark.spec("SCH-22")
async def test_the_web_example_answers(tmp_path, monkeypatch):
    """The web example takes a task, merges the same one, and serves the result of the worker."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    web = importlib.import_module("web")
    async with web.app.router.lifespan_context(web.app), worker(tmp_path, "web:yard"):
        transport = httpx.ASGITransport(app=web.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://example") as client:
            posted = await client.post("/digests", params={"text": "hello"})
            assert posted.status_code == 202
            uuid = posted.json()["uuid"]
            answer = (await client.get(f"/digests/{uuid}", params={"wait_s": 20})).json()
            assert len(answer["result"]) == 32
            assert (await client.get("/digests/none")).status_code == 404
            for senseless in (-3, "nan"):
                refused = await client.get(f"/digests/{uuid}", params={"wait_s": senseless})
                assert refused.status_code == 400


def test_every_example_is_tested_and_described():
    """Each example begins with what it shows and how to run it, and stands in these tests."""
    names = {path.name for path in EXAMPLES.glob("*.py")}
    assert names == {*SHOWS, "web.py"}
    for name in names:
        assert f"python examples/{name}" in (EXAMPLES / name).read_text("utf-8")


def test_the_examples_leave_nothing_in_the_tree():
    """The stores that examples make are named so that git ignores them."""
    for path in EXAMPLES.glob("*.py"):
        text = path.read_text("utf-8")
        assert "sqlite:///" not in text or f'"sqlite:///{Path(path.name).stem}.db"' in text
