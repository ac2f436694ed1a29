"""Consumers in every place, as a user writes them."""

import asyncio
import logging
import os
import time
from collections.abc import Callable
from typing import Any

from taskyard import BaseTaskConsumer, ConsumerFunction, RetryPolicy, Task, Yard, current_run

yard = Yard("memory://")
NO_RETRY = RetryPolicy(max_retries=0)


def work(path: str, quality: int = 80) -> dict[str, object]:
    if quality < 0:
        raise ValueError(f"quality {quality}")
    run = current_run()
    run.progress(0.5, "half way")
    return {"path": path, "quality": quality, "attempt": run.attempt, "source": run.source}


async def work_async(path: str, quality: int = 80) -> dict[str, object]:
    await asyncio.sleep(0)
    return work(path, quality)


async def rest(seconds: float) -> None:
    """Says that it has begun, and when it is cut short that it has cleaned up."""
    current_run().progress(0.1, "begun")
    try:
        await asyncio.sleep(seconds)
    finally:
        current_run().log("cleaned up", level=logging.WARNING)


def everywhere(function: Callable[..., Any]) -> dict[str, ConsumerFunction[..., Any]]:
    """The same function as a consumer in each place: one word makes the difference."""
    name = function.__name__
    places = ("inline", "thread", "process", "isolated")
    return {word: yard.consumer(name=f"{name}_{word}", executor=word, retry=NO_RETRY)(function) for word in places}


WORK = [*everywhere(work).values(), *everywhere(work_async).values()]
REST = everywhere(rest)


@yard.consumer(executor="process")
def where() -> int:
    return os.getpid()


@yard.consumer(executor="process", timeout_s=0.1, retry=NO_RETRY)
def too_slow() -> None:
    time.sleep(600)


@yard.consumer(executor="process", retry=RetryPolicy(max_retries=20, first_s=0.001))
def deadly() -> None:
    os._exit(1)


@yard.consumer(executor="isolated", retry=NO_RETRY)
def endless() -> None:
    time.sleep(600)


SOON = RetryPolicy(max_retries=2, first_s=0.001)


@yard.consumer(retry=SOON)
async def resume_inline(how: str) -> object:
    return resume(how)


@yard.consumer(executor="thread", retry=SOON)
def resume_in_thread(how: str) -> object:
    return resume(how)


@yard.consumer(executor="process", retry=SOON)
async def resume_async(how: str) -> object:
    return resume(how)


@yard.consumer(executor="process", retry=SOON)
def resume_in_process(how: str) -> object:
    return resume(how)


def resume(how: str) -> object:
    """Saves how far it is and fails; the next run goes on from there."""
    run = current_run()
    logging.getLogger("somebody.else").warning("plainly")
    run.log("found %s, 100%% sure", run.checkpointed, level=logging.WARNING)
    if run.checkpointed is not None:
        return {"attempt": run.attempt, "found": run.checkpointed}
    run.checkpoint({"at": 0})
    run.checkpoint({"at": [7, "é"]})
    assert run.checkpointed == {"at": [7, "é"]}
    run.progress(0.7, "saved")
    if how == "exit":
        os._exit(1)
    if how == "sleep":
        time.sleep(600)
    raise OSError("not yet")


@yard.consumer(executor="process", retry=NO_RETRY)
def save(kind: str) -> None:
    current_run().checkpoint(object() if kind == "object" else "x" * 2_000_000)


class Square(BaseTaskConsumer):
    name = "square"
    executor = "process"

    def __init__(self, offset: int) -> None:
        self.offset = offset

    def consume(self, task: Task) -> int:  # type: ignore[override]
        return int(task.args["n"]) ** 2 + self.offset


class AsyncSquare(BaseTaskConsumer):
    name = "async_square"
    executor = "process"

    async def consume(self, task: Task) -> int:
        await asyncio.sleep(0)
        return int(task.args["n"]) ** 2


yard.register(Square(offset=1))
yard.register(AsyncSquare())
yard.define_pool(max_workers=2, cancel_grace_s=20)
yard.define_pool("rest_isolated", cancel_grace_s=20)
yard.define_pool("endless", cancel_grace_s=0.05, term_grace_s=0.05)
