"""What a process must not do to a store, and is told so: carry it across a fork, or open its file another way."""

from __future__ import annotations

import pytest

from tests.scenario.processes import run_python

FORKED = """
import asyncio, os, sys
from taskyard.errors import ForkedStore
from tests.scenario.jobs import build

yard = build(sys.argv[1])

def refused(call):
    try:
        call()
    except ForkedStore as error:
        print(type(error).__name__, str(error), flush=True)

def in_child(*calls):
    pid = os.fork()
    if pid == 0:
        for call in calls:
            refused(call)
        os._exit(0)
    os.waitpid(pid, 0)

with yard.blocking() as sync:
    handle = sync.submit("add", {"a": 1})
    assert sync.result(handle, timeout_s=10) == 2
    in_child(
        lambda: sync.submit("add", {"a": 5}),
        lambda: asyncio.run(yard.submit("add", {"a": 5})),
        lambda: asyncio.run(handle.result()),
        lambda: asyncio.run(handle.record()),
        lambda: asyncio.run(yard.start()),
    )
    assert sync.result(sync.submit("add", {"a": 2}), timeout_s=10) == 3
    store = yard.store
    in_child(lambda: asyncio.run(store.find(handle.uuid)), lambda: asyncio.run(store.turn("x")))
"""

GUARDED = """
import sqlite3, sys, warnings
from pathlib import Path
from tests.scenario.jobs import build

url, path = sys.argv[1], sys.argv[1].removeprefix("sqlite:///")

def warned(name, **options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sqlite3.connect(name, **options).close()
    return [str(warning.message) for warning in caught if warning.category is RuntimeWarning]

yard = build(url)
with yard.blocking() as sync:
    sync.result(sync.submit("echo"), timeout_s=10)
    for name, options in [(path, {}), (Path(path), {}), (f"file:{path}?mode=ro", {"uri": True})]:
        [message] = warned(name, **options)
        assert "can lose acknowledged commits. Use another process, or apsw" in message, message
    assert warned(":memory:") == []
    assert warned(path + "-other") == []
print("guarded")
"""


def test_a_yard_does_not_work_in_a_forked_child(url):
    """Whatever a forked child asks of the parent's yard, it gets an error that says what to do; the parent goes on."""
    calls = 5 if url == "memory://" else 7  # a store in memory has nothing of its own to protect
    said = "ForkedStore this store was opened before fork(); open a new Yard in the child process"
    assert run_python(FORKED, url).splitlines() == [said] * calls


def test_opening_the_file_with_sqlite3_warns(file_url):
    """Opening a store's file with the standard library's sqlite3 in the same process warns, other files do not."""
    assert run_python(GUARDED, file_url) == "guarded\n"


PACKAGES = ["fastapi", "starlette", "uvicorn", "typer", "rich", "click", "asyncpg", "pydantic", "apsw", "sqlite3"]


@pytest.mark.parametrize("module", [*PACKAGES, "multiprocessing", "zoneinfo", "cronsim", "taskyard.execution.wire"])
def test_importing_taskyard_imports_little(module):
    """`import taskyard` imports no web, CLI or database package and no process pool; those come when they are first
    needed."""
    assert run_python(f"import sys, taskyard; print({module!r} in sys.modules)") == "False\n"
