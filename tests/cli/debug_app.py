"""The app of the tests of `taskyard debug`; each test has a copy of it in its own folder."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

from taskyard import (
    Algorithm,
    AlgorithmSpec,
    BaseTaskConsumer,
    Cancel,
    RetryLater,
    RetryPolicy,
    Task,
    Yard,
    current_run,
)
from taskyard.middleware import Submission, SubmitNext

yard = Yard("sqlite:///work.db")
NEVER = RetryPolicy(max_retries=0)


@yard.around_submit
async def add_tenant(submission: Submission, call_next: SubmitNext) -> None:
    for task in submission.tasks:
        task.values["tenant"] = "acme"
    await call_next()


def work(kind: str) -> dict[str, Any]:
    """Report in every way, then fail the first time."""
    run = current_run()
    before = run.checkpointed
    print(f"{kind} goes on from {before}")
    run.log("a line of %s", kind, level=logging.DEBUG)
    logging.getLogger("theirs").info("logged by %s", kind)
    run.progress(0.5, "half way", 2.5, saved=3)
    run.note("a remark")
    run.artifact("note.txt", "to be read\n")
    run.artifact("large.bin", bytes(300 * 1024))
    run.checkpoint({"of": kind, "step": 1 if before is None else before["step"] + 1})
    if before is None:
        raise ValueError(f"{kind} fails the first time")
    is_main = threading.current_thread() is threading.main_thread()
    return {"attempt": run.attempt, "task": run.task.uuid, "tenant": run.values["tenant"], "is_main": is_main}


@yard.consumer(retry=NEVER)
def plain(kind: str) -> dict[str, Any]:
    return work(kind)


@yard.consumer(retry=NEVER)
async def later(kind: str) -> dict[str, Any]:
    await asyncio.sleep(0)
    return work(kind)


@yard.consumer(retry=NEVER, executor="process")
def remote(kind: str) -> dict[str, Any]:
    return work(kind)


@yard.consumer(retry=NEVER)
def breaks(divisor: int) -> float:
    number_of_parts = 7
    return number_of_parts / divisor


@yard.consumer(retry=NEVER)
def starts_a_loop() -> str:
    """Plain code may run a loop of its own: none runs in its thread."""

    async def inside() -> str:
        return "inside"

    return asyncio.run(inside())


@yard.consumer(retry=NEVER)
def steers(how: str) -> None:
    raise RetryLater(5, "no disk") if how == "later" else Cancel("no need")


class Own(BaseTaskConsumer):
    name, retry = "own", NEVER

    async def consume(self, task: Task) -> Any:
        return work(**task.args)


class Alg(Algorithm):
    spec = AlgorithmSpec("alg")

    def run(self, data: dict[str, str], context: Any, /) -> dict[str, Any]:
        return work(data["kind"])


yard.register(Own())
yard.install(Alg, retry=NEVER)
