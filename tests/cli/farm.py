"""Devices at a shell: a folder with an app that has a pool of them, and the commands on its store."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

from taskyard import Task, Yard
from taskyard.devices import GameAccount
from tests.cli.device_app import pool, yard
from tests.cli.shell import Background, Done, Shell

ADD = ("--pool", "phones", "--adapter", "simulated")


class Farm:
    """A shell whose store is there, and a folder with the app."""

    def __init__(self, shell: Shell) -> None:
        self.shell = shell
        shutil.copy(Path(__file__).with_name("device_app.py"), shell.folder / "device_app.py")
        self.write()

    def do(self, *words: str, **variables: str) -> Done:
        return self.shell.here("device", *words, "--store", self.shell.url, **variables)

    def ok(self, *words: str, **variables: str) -> str:
        done = self.do(*words, **variables)
        assert (done.code, done.err) == (0, ""), done
        return done.out

    def json(self, *words: str) -> Any:
        return json.loads(self.ok(*words, "--json"))

    def add(self, *names: str) -> None:
        for name in names:
            self.ok("add", name, *ADD)

    def watch(self, *words: str) -> Background:
        watch = self.shell.start("device", "watch", *words, "--store", self.shell.url)
        watch.hear("watching")
        return watch

    def serve(self) -> tuple[Background, Background]:
        """A worker whose two devices are up, and a watch that has told of it."""
        watch = self.watch()
        worker = self.shell.start("worker", "device_app:yard", "-v")
        for _ in range(2):
            watch.hear("up")
        return worker, watch

    def enqueue(self, source: str, account: int | str, *, requires: dict[str, str] | None = None, **args: Any) -> bool:
        async def enqueue() -> bool:
            yard.use_store(f"sqlite:///{self.shell.path}")
            async with yard.client():
                return await pool.enqueue(Task(source=source, args=args), GameAccount(account), requires=requires)

        return asyncio.run(enqueue())

    def write(self, *verbs: Any) -> None:
        """Carry out verbs of the store."""

        async def write() -> None:
            async with Yard(self.shell.path).client() as opened:
                for verb in verbs:
                    await verb(opened)

        asyncio.run(write())
