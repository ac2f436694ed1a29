"""What a child process of the torture does: one role, in one folder, under one name.

A child ends with its parent, whatever happens to that; it installs the fault points that its environment asks for.
"""

import asyncio
import ctypes
import os
import random
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from taskyard import StoreError, TaskHandle, Yard
from taskyard.errors import DuplicateTask
from taskyard.testing.faults import Board, Faults
from taskyard.testing.ledger import DYING_S, Ledger
from tests.torture import mutations
from tests.torture.disks import fill_up, make_disk
from tests.torture.postgres.links import Connects
from tests.torture.postgres.wires import enter
from tests.torture.work import address_of, ledger_of, make_yard, submit_for_ever

FOLDER = "TORTURE_FOLDER"
"""Tells `tests.torture.app` where it is."""

ZYGOTE = os.getpid()
"""The process that imported this module, and is the parent of every victim it forks."""


def die_with_parent(parent: int) -> None:
    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    # Race: the parent may have died before the call; then nobody will ever send that signal.
    if os.getppid() != parent:
        os._exit(1)


class Stage:
    """What every role gets: where it is, what it is called, its ledger and its faults."""

    def __init__(self, folder: Path, name: str, options: dict[str, str]) -> None:
        self.folder, self.name, self.options = folder, name, options
        self.ledger: Ledger = ledger_of(folder, dying_s=float(options.get("dying_s", DYING_S)))
        self.board = Board(board_of(folder, name))
        self.faults = Faults.from_environment(
            last_words=lambda point: self.ledger.kill(os.getpid(), point), board=self.board
        )
        self.faults.install()
        if address_of(folder).exists():
            Connects(folder, name).install()
        self.rng = random.Random(options.get("seed", ""))
        self.stopping = asyncio.Event()

    def say(self, text: str) -> None:
        """To the parent."""
        print(text, flush=True)


def board_of(folder: Path, name: str) -> Path:
    return folder / f"board-{name}"


async def work(stage: Stage) -> None:
    """A node, until SIGTERM asks it to stop within its grace."""
    yard = make_yard(stage.folder, stage.ledger, stage.faults)
    await yard.start()
    stage.say("ready")
    await stage.stopping.wait()
    await yard.stop(grace_s=float(stage.options.get("grace_s", "5")))


async def submit(stage: Stage) -> None:
    """Submits at random, until SIGTERM."""
    yard = make_yard(stage.folder, stage.ledger, stage.faults)
    every_s = float(stage.options.get("every_s", "0.02"))
    async with yard.client():
        stage.say("ready")
        await submit_for_ever(
            yard,
            stage.ledger,
            stage.rng,
            every_s=every_s,
            until=stage.stopping.is_set,
            patient="patient" in stage.options,
        )


async def sequence(stage: Stage) -> None:
    """A node that submits a few tasks to itself, one after the other, when told to go. What the store refuses is said
    and asked again. The log is folded back into the database all the time, so that this happens within a few tasks."""
    yard = make_yard(stage.folder, stage.ledger, stage.faults)
    await yard.start()
    store: Any = yard.store
    store._conn.execute("PRAGMA wal_autocheckpoint = 3")
    stage.say(f"ready {thread_id('taskyard-writer')}")
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    for _ in range(int(stage.options.get("tasks", "2"))):
        handle = await submit_until_taken(stage, yard)
        stage.ledger.acknowledged(handle.uuid)
        await handle.result(timeout_s=20)
    await yard.stop(grace_s=5)
    stage.say("done")


async def submit_until_taken(stage: Stage, yard: Yard) -> TaskHandle:
    while True:
        try:
            return await yard.submit("breathe", {"ms": 1.0})
        except StoreError as error:
            stage.say(f"refused {type(error).__name__}")
            await asyncio.sleep(0.05)


async def dedupe(stage: Stage) -> None:
    """Several clients on yards of their own, which all submit the same work, key after key as they are told."""
    yards = [make_yard(stage.folder, stage.ledger, stage.faults) for _ in range(2)]
    clients = int(stage.options["clients"])
    async with yards[0].client(), yards[1].client():
        stage.say("ready")
        while key := (await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)).strip():
            asked = (submit_same(yards[number % 2], key, number) for number in range(clients))
            for uuid in await asyncio.gather(*asked):
                stage.ledger.acknowledged(uuid)
                stage.say(f"{key} {uuid}")


async def submit_same(yard: Yard, key: str, number: int) -> str:
    """The task that stands for the work; some clients merge into it, some want to be refused."""
    how = "refuse" if number % 4 == 3 else "merge"
    try:
        handle = await yard.submit("breathe", {"ms": float(number)}, dedupe=how, dedupe_key=key, delay_s=3600)
    except DuplicateTask as duplicate:
        return duplicate.existing
    return handle.uuid


async def fill(stage: Stage) -> None:
    """A node on a small disk, which runs full and gets room again."""
    disk = make_disk(stage.folder / "disk")
    stage.say(f"ready {type(disk).__name__}")
    for fault in await fill_up(disk, stage.ledger, stage.folder, stage.rng, stage.say):
        stage.say(f"fault {fault}")
    stage.say("done")


async def open_store(stage: Stage) -> None:
    """Only opens the store, makes it if need be, and closes it again, when told to go."""
    stage.say(f"ready {os.getpid()}")
    sys.stdin.readline()
    yard = make_yard(stage.folder, stage.ledger)
    async with yard.client():
        pass
    stage.say("done")


def thread_id(name: str) -> int:
    return next(thread.native_id or 0 for thread in threading.enumerate() if thread.name == name)


ROLES: dict[str, Callable[[Stage], Awaitable[None]]] = {
    "work": work,
    "submit": submit,
    "sequence": sequence,
    "open": open_store,
    "dedupe": dedupe,
    "fill": fill,
}


def main(words: list[str]) -> int:
    """The exit code of the whole process."""
    die_with_parent(ZYGOTE)
    mutations.install(os.environ.get(mutations.VARIABLE, ""))
    if words[0] == "cli":
        return command(*words[1:])
    asyncio.run(perform(*words))
    return 0


def command(folder: str, name: str, *options: str) -> int:
    """The same node as `work`, as a user starts it."""
    from taskyard.cli.app import run

    os.environ[FOLDER] = folder
    grace_s = dict(option.split("=", 1) for option in options).get("grace_s", "5")
    return run(["worker", "tests.torture.app:yard", "--grace", grace_s])


async def perform(role: str, folder: str, name: str, *options: str) -> None:
    stage = Stage(Path(folder), name, dict(option.split("=", 1) for option in options))
    enter(stage.options.get("network", ""))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stage.stopping.set)
    await ROLES[role](stage)
