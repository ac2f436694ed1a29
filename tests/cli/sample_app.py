"""The app the tests of the command line run; each test has a copy of it in its own folder, as `app.py`."""

import asyncio
import logging
import threading
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from taskyard import RetryPolicy, Yard, current_run
from taskyard.execution.context import CURRENT
from taskyard.execution.run_handle import RunHandle
from taskyard.model.attempt import dropped_line

yard = Yard("sqlite:///work.db")
yard.define_queue("cpu", concurrency=2)


@yard.consumer(concurrency=4)
async def add(a: int, b: int = 1) -> int:
    return a + b


@yard.consumer(queue="cpu")
def boom(why: str = "no reason", password: str = "") -> None:
    raise ValueError(f"{why} {password}".strip())


@yard.consumer
def outputs(password: str = "") -> None:
    """Leaves lines and artifacts behind."""
    run = current_run()
    run.log("a line with \x1b[31m and %s", password)
    handle = CURRENT.get()
    assert isinstance(handle, RunHandle)
    handle.keep_lines([dropped_line(1234, datetime.now(UTC))])
    run.log("careful", level=logging.WARNING)
    run.artifact("note.txt", "to be read\n")
    run.artifact("raw.bin", bytes(range(256)))
    run.artifact("large.bin", bytes(300 * 1024))


@yard.consumer(retry=RetryPolicy(max_retries=1, first_s=0.05))
async def flaky(host: str) -> None:
    raise ConnectionError(f"{host} is away")


@yard.consumer(concurrency=4)
async def hold(name: str = "") -> None:
    """Runs until it is stopped. What it prints says that the code itself has begun: the store tells of a start a moment
    earlier, when it is claimed."""
    print("hold has begun", flush=True)
    current_run().progress(0.5, f"half way {name}".strip(), 3.25)
    await asyncio.Event().wait()


@yard.consumer
def until(path: str) -> str:
    """Runs until the file is there."""
    print("until has begun", flush=True)
    nothing = threading.Event()
    while not Path(path).exists():
        nothing.wait(0.01)
    return "seen"


@yard.consumer
def stubborn() -> None:
    """A thread that nobody can stop."""
    print("stubborn has begun", flush=True)
    threading.Event().wait()


@yard.consumer
async def deaf() -> None:
    print("deaf has begun", flush=True)
    while True:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(60)


@yard.consumer(executor="process")
def sleeper() -> None:
    """Runs in a process of its own, and does not hear that it is asked to stop."""
    print("sleeper has begun", flush=True)
    threading.Event().wait()
