"""Algorithms as users write them, found by workers by their import path."""

import asyncio
import hashlib
import logging
import os
import time
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from taskyard import Algorithm, AlgorithmContext, AlgorithmSpec, ExecutionHints, current_run

DEVICE_AT_IMPORT = os.environ.get("CUDA_VISIBLE_DEVICES")


class Number(BaseModel):
    n: int
    folder: str = ""
    pid: int | None = None


class Served(BaseModel):
    n: int
    pid: int
    opened: int
    before: list[str]


class Ledger(Algorithm):
    """Squares a number, and tells what its instance went through so far. Fails for negative numbers."""

    spec = AlgorithmSpec("ledger", "1.2", execution=ExecutionHints(isolated_pool=True, timeout_s=30))
    Input, Output = Number, Served
    opened = 0

    def initialize(self) -> None:
        type(self).opened += 1
        self.before: list[str] = []
        self.folder = ""

    def run(self, given: Number, context: AlgorithmContext) -> Any:
        self.folder = given.folder
        if given.n < 0:
            raise ValueError(f"{given.n} is negative")
        if given.n == 13:
            return {"n": "unlucky"}
        return Served(n=given.n**2, pid=os.getpid(), opened=self.opened, before=self.before)

    def after_run(self, context: AlgorithmContext, error: BaseException | None) -> None:
        self.before.append(f"{context.request_id}:{type(error).__name__}")

    def shutdown(self) -> None:
        if self.folder:
            Path(self.folder, f"shutdown-{os.getpid()}").touch()


class AsyncLedger(Algorithm):
    """The same on the loop."""

    spec = AlgorithmSpec("async-ledger")
    Input, Output = Number, Served
    shut = 0

    async def initialize(self) -> None:
        self.before: list[str] = []

    async def run(self, given: Number, context: AlgorithmContext) -> Any:
        if given.n < 0:
            raise ValueError(f"{given.n} is negative")
        return {"n": given.n**2, "pid": context.worker_pid, "opened": 1, "before": self.before}

    async def after_run(self, context: AlgorithmContext, error: BaseException | None) -> None:
        self.before.append(f"{context.request_id}:{type(error).__name__}")

    async def shutdown(self) -> None:
        type(self).shut += 1


class SlowToLoad(Algorithm):
    spec = AlgorithmSpec("slow-to-load", execution=ExecutionHints(isolated_pool=True, timeout_s=0.2))

    def initialize(self) -> None:
        time.sleep(0.6)

    def run(self, given: Any, context: AlgorithmContext) -> Any:
        return given


class NeedsFile(Algorithm):
    """Can be loaded as soon as the file named by the environment is there, and takes longer for that than a run may."""

    spec = AlgorithmSpec("needs-file", execution=ExecutionHints(isolated_pool=True, timeout_s=0.2))

    def initialize(self) -> None:
        self.text = Path(os.environ["TASKYARD_TEST_FILE"]).read_text()
        time.sleep(0.6)

    def run(self, given: Any, context: AlgorithmContext) -> Any:
        return self.text


def describe(given: str, context: AlgorithmContext) -> dict[str, Any]:
    context.progress(0.5, "half way")
    context.logger.warning("100%% of %s", given)
    logging.getLogger("somebody.else").warning("without arguments: 5 % more")
    run = current_run()
    return {
        "request_id": context.request_id,
        "trace_id": context.trace_id,
        "tenant": context.tenant,
        "user": context.user,
        "values": context.values,
        "algorithm": (context.algorithm, context.version),
        "pid": context.worker_pid,
        "run": (run.uuid, run.source, run.attempt),
        "cancelled": context.cancelled,
    }


async def describe_async(given: str, context: AlgorithmContext) -> dict[str, Any]:
    return describe(given, context)


def report(given: Number, context: AlgorithmContext) -> dict[str, Any]:
    context.progress(0.5, "half way")
    return {
        "n": given.n,
        "request_id": context.request_id,
        "algorithm": f"{context.algorithm} {context.version}",
        "attempt": context.attempt,
        "is_here": context.worker_pid == given.pid,
    }


async def report_async(given: Number, context: AlgorithmContext) -> dict[str, Any]:
    return report(given, context)


def digest(given: bytes) -> str:
    return hashlib.sha256(given).hexdigest()


def double(given: int) -> int:
    return given * 2


async def double_async(given: int) -> int:
    return given * 2


def see_device(given: None) -> str | None:
    return DEVICE_AT_IMPORT


def allocate(size: int) -> int:
    return len(bytearray(size))


def crash(given: bool) -> str:
    if given:
        os._exit(7)
    return "fine"


def wait(folder: str) -> str:
    """Say that it began and wait to be let go, across processes."""
    Path(folder, "began").write_text("!")
    with open(f"{folder}/gate") as gate:
        return gate.read(1)


def hang(given: Number) -> str:
    """As `wait`, and leaves its process id behind."""
    Path(given.folder, "pid").write_text(str(os.getpid()))
    return wait(given.folder)


def fail_until(path: str, context: AlgorithmContext) -> int:
    """Fails for as long as fewer tries than the file says have been made."""
    if context.attempt < int(Path(path).read_text()):
        raise OSError(f"try {context.attempt}")
    return context.attempt


async def wait_for_ever(given: None, context: AlgorithmContext) -> None:
    context.progress(0.0, "began")
    await asyncio.Event().wait()


def go_on(given: None, context: AlgorithmContext) -> Any:
    """Saves and fails once; the next try finds what was saved."""
    if context.checkpointed is None:
        context.checkpoint({"at": 3})
        raise OSError("once")
    return context.checkpointed


def hurry(given: None, context: AlgorithmContext) -> str:
    """Goes on until it is asked to end."""
    context.progress(0.0, "began")
    while not context.cancelled:
        time.sleep(0.005)
    return "ended by itself"


def say_how_far(n: int) -> int:
    """Twice: the second word is held back, and passed on at the end."""
    current_run().progress(0.5)
    current_run().progress(0.6)
    return n
