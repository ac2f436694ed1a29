"""What happens in the tour, step by step, with a sentence about each step for whoever watches."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from taskyard.cli.demo.site import Server, write_text
from taskyard.errors import CommandRefused, TaskEnded
from taskyard.handle import TaskHandle
from taskyard.model.event import EventKind
from taskyard.model.retry import RetryPolicy
from taskyard.model.task import TaskRecord
from taskyard.yard import Yard

CANCEL_REASON = "the tour has changed its mind"


@dataclass(frozen=True, slots=True)
class Scale:
    """How large the work is. `step_s` is the time between steps, so that each can be read."""

    files: int
    file_bytes: int
    big_bytes: int
    entries: int
    later_s: float
    step_s: float
    retry: RetryPolicy | None = None

    def within(self, seconds: float) -> Scale:
        """The same in a shorter time, if that is asked."""
        return replace(self, step_s=min(self.step_s, seconds / 8), later_s=min(self.later_s, seconds / 3))


FULL = Scale(files=8, file_bytes=2_500_000, big_bytes=30_000_000, entries=5, later_s=8.0, step_s=3.0)
SMALL = Scale(
    files=3, file_bytes=400_000, big_bytes=20_000_000, entries=3, later_s=1.0, step_s=0.0,
    retry=RetryPolicy(max_retries=5, first_s=0.2),
)  # fmt: skip


@dataclass(slots=True)
class Script:
    """Submits the tour's tasks. `caption` is what is going on now; `told` is called when it changes."""

    yard: Yard
    folder: Path
    server: Server
    scale: Scale
    told: Callable[[str], None] = lambda text: None
    caption: str = "Getting ready: a few files of text are being written."
    handles: list[TaskHandle] = field(default_factory=list)
    urgent: TaskHandle | None = None
    doomed: TaskHandle | None = None

    async def prepare(self) -> None:
        files = [(self.file(i), self.scale.file_bytes) for i in range(self.scale.files)]
        for path, size in [*files, (self.report, 50_000), (self.folder / "big.txt", self.scale.big_bytes)]:
            await asyncio.to_thread(write_text, path, size)

    @property
    def report(self) -> Path:
        """Stays when the other files are gone, so that the task that fails can be tried again."""
        return self.folder.parent / "report.txt"

    def file(self, number: int) -> Path:
        return self.folder / f"chapter-{number % self.scale.files + 1}.txt"

    async def play(self) -> None:
        """The fixed part of the tour, each step once."""
        for step in (self._files, self._lane, self._downloads, self._urgent, self._failure, self._cancel):
            async with self._step():
                await step()

    @contextlib.asynccontextmanager
    async def _step(self) -> AsyncIterator[None]:
        yield
        await asyncio.sleep(self.scale.step_s)  # time to read, not work

    async def go_on(self, round_: int) -> None:
        """One more helping of work, of every kind."""
        self._say("More of everything, so that you can watch it flow. Ctrl-C ends the tour early.")
        file = self.file(round_)
        await self._submit("hash", {"path": str(file)})
        await self._submit("compress", {"path": str(file), "method": "zlib" if round_ % 3 else "lzma"})
        await self._submit("fetch", {"url": f"{self.server.url}/files/{file.name}"})

    async def finish(self) -> None:
        """Wait until everything that was submitted has ended, one way or the other."""
        self._say("No more work is handed in; what is left runs to its end.")
        for handle in self.handles:
            with contextlib.suppress(TaskEnded):
                await handle.result()

    async def records(self) -> list[TaskRecord]:
        """What the store holds of everything that was submitted."""
        found = [await self.yard.store.find(handle.uuid) for handle in self.handles]
        return [record for record in found if record is not None]

    # --- steps --------------------------------------------------------------------------------------------------------

    async def _files(self) -> None:
        self._say(
            "Files are hashed and compressed in threads, two of each kind at a time. The rest is queued. "
            "Each task is a row in one SQLite file, so nothing is lost if this process dies."
        )
        big = str(self.folder / "big.txt")
        self.doomed = await self._submit("compress", {"path": big, "method": "lzma9"}, priority="high")
        for number in range(self.scale.files):
            await self._submit("hash", {"path": str(self.file(number))})
            await self._submit("compress", {"path": str(self.file(number))}, priority="low")
        later = self.scale.later_s
        await self._submit("inventory", {"folder": str(self.folder)}, delay_s=later)

    async def _lane(self) -> None:
        self._say(
            "The ledger's entries share a key: they run one after the other, in order, whatever else goes on. "
            "The inventory (◷) was scheduled for later; it starts by itself."
        )
        book = str(self.folder / "ledger.txt")
        for number in range(self.scale.entries):
            await self._submit("ledger", {"book": book, "entry": f"entry {number + 1}"}, key="ledger")

    async def _downloads(self) -> None:
        self._say(
            "Downloads from a small web server, as async code on the event loop. For some of them it answers 503 at "
            "first: they wait (↻) and try again by themselves."
        )
        retry = {} if self.scale.retry is None else {"retry": self.scale.retry}
        for number in range(min(4, self.scale.files)):
            place = "busy" if number % 2 else "files"
            await self._submit("fetch", {"url": f"{self.server.url}/{place}/{self.file(number).name}"}, **retry)

    async def _urgent(self) -> None:
        self._say(
            "A task of high priority comes last. It gets the next free slot, before all that were queued earlier."
        )
        file = str(self.file(self.scale.files - 1))
        self.urgent = await self._submit("compress", {"path": file, "method": "zlib"}, priority="high")

    async def _failure(self) -> None:
        self._say("A checksum is verified that cannot be right: this task fails (✘). Trying again would not help.")
        await self._submit("verify", {"path": str(self.report), "sha256": "0123456789abcdef"})

    async def _cancel(self) -> None:
        self._say("The large compression is canceled: it is asked to stop, and does at its next block (⊘).")
        assert self.doomed is not None
        await self._started(self.doomed)
        with contextlib.suppress(CommandRefused):  # a fast machine is done with it already
            await self.doomed.cancel(reason=CANCEL_REASON)

    async def _started(self, handle: TaskHandle) -> None:
        if (await handle.record()).attempt:
            return
        async for event in self.yard.events():
            if event.uuid == handle.uuid and event.kind is EventKind.STARTED:
                return

    async def _submit(self, name: str, arguments: dict[str, Any], **options: Any) -> TaskHandle:
        handle = await self.yard.submit(name, arguments, **options)
        self.handles.append(handle)
        return handle

    def _say(self, text: str) -> None:
        if text != self.caption:
            self.caption = text
            self.told(text)
