"""What a child process of the torture does: one role, in one folder, under one name.

A child ends with its parent, whatever happens to that; it installs the fault points that its environment asks for.
"""

import asyncio
import ctypes
import os
import random
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

from taskyard.testing.faults import Board, Faults
from taskyard.testing.ledger import Ledger
from tests.torture import mutations
from tests.torture.work import ledger_of, make_yard, submit_for_ever

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
        self.ledger: Ledger = ledger_of(folder)
        self.board = Board(board_of(folder, name))
        self.faults = Faults.from_environment(
            last_words=lambda point: self.ledger.kill(os.getpid(), point), board=self.board
        )
        self.faults.install()
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
        await submit_for_ever(yard, stage.ledger, stage.rng, every_s=every_s, until=stage.stopping.is_set)


ROLES: dict[str, Callable[[Stage], Awaitable[None]]] = {"work": work, "submit": submit}


def main(words: list[str]) -> None:
    die_with_parent(ZYGOTE)
    mutations.install(os.environ.get(mutations.VARIABLE, ""))
    asyncio.run(perform(*words))


async def perform(role: str, folder: str, name: str, *options: str) -> None:
    stage = Stage(Path(folder), name, dict(option.split("=", 1) for option in options))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stage.stopping.set)
    await ROLES[role](stage)
