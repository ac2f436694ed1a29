"""Consumers in every place, as a user writes them."""

import logging
import os
import time

from taskyard import BaseTaskConsumer, RetryPolicy, Task, Yard, current_run

yard = Yard("memory://")
NO_RETRY = RetryPolicy(max_retries=0)


@yard.consumer(executor="thread", retry=NO_RETRY)
def in_thread(path: str, quality: int = 80) -> dict[str, object]:
    return work(path, quality)


@yard.consumer(executor="process", retry=NO_RETRY)
def in_process(path: str, quality: int = 80) -> dict[str, object]:
    return work(path, quality)


@yard.consumer(executor="isolated", concurrent_count=2, retry=NO_RETRY)
def in_isolation(path: str, quality: int = 80) -> dict[str, object]:
    return work(path, quality)


def work(path: str, quality: int) -> dict[str, object]:
    if quality < 0:
        raise ValueError(f"quality {quality}")
    run = current_run()
    run.progress(0.5, "half way")
    return {"path": path, "quality": quality, "attempt": run.attempt, "source": run.source}


@yard.consumer(executor="process")
def where() -> int:
    return os.getpid()


@yard.consumer(executor="process", timeout_s=0.1, retry=NO_RETRY)
def too_slow() -> None:
    time.sleep(600)


@yard.consumer(executor="process", retry=RetryPolicy(max_retries=20, first_s=0.001))
def deadly() -> None:
    os._exit(1)


@yard.consumer(executor="process", retry=NO_RETRY)
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


yard.register(Square(offset=1))
yard.define_pool(max_workers=2, cancel_grace_s=0.05, term_grace_s=0.05)
