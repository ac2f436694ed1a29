"""The steps of the tour: what is submitted, with a sentence about each step for the person who watches."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from taskyard.application.command_requests import Cancel
from taskyard.application.interface import Application
from taskyard.application.task_requests import SubmitRequest
from taskyard.model.event import EventFilter, EventKind
from taskyard.model.retry import RetryPolicy
from taskyard.model.state import ENDED

CANCEL_REASON = "the tour has changed its mind"

BLOCK = 64 * 1024
"""Bytes of a file that are written at once."""

CHECK_S = 0.2
"""Seconds between two looks at the submitted tasks at the end."""


def write_text(path: Path, size: int) -> None:
    """A file of about `size` bytes of words, the same every time. It compresses as well as prose does."""
    drawn = random.Random(path.name)
    words = ["".join(drawn.choices("etaoinshrdlu", k=drawn.randint(2, 9))) for _ in range(4000)]
    with path.open("w") as out:
        for written in range(0, size, BLOCK):
            out.write(" ".join(drawn.choices(words, k=BLOCK // 4))[: min(BLOCK, size - written)])


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

    def fit_to(self, seconds: float) -> Scale:
        """The same work in a shorter time, if the tour is short."""
        return replace(self, step_s=min(self.step_s, seconds / 8), later_s=min(self.later_s, seconds / 3))


FULL = Scale(files=8, file_bytes=2_500_000, big_bytes=30_000_000, entries=5, later_s=8.0, step_s=3.0)
SMALL = Scale(
    files=3, file_bytes=400_000, big_bytes=20_000_000, entries=3, later_s=1.0, step_s=0.0,
    retry=RetryPolicy(max_retries=5, first_s=0.2),
)  # fmt: skip


@dataclass(slots=True)
class Script:
    """Submits the tour's tasks. `caption` says what is going on now; `on_caption` is called when it changes."""

    application: Application
    folder: Path
    server_url: str
    scale: Scale
    on_caption: Callable[[str], None] = lambda text: None
    caption: str = "Getting ready: a few files of text are being written."
    tasks: list[str] = field(default_factory=list)
    urgent: str | None = None
    to_cancel: str | None = None

    async def prepare(self) -> None:
        files = [(self.file(i), self.scale.file_bytes) for i in range(self.scale.files)]
        for path, size in [*files, (self.report, 50_000), (self.folder / "big.txt", self.scale.big_bytes)]:
            await asyncio.to_thread(write_text, path, size)

    @property
    def report(self) -> Path:
        """A file that stays when the others are gone, so that the task that fails can be tried again."""
        return self.folder.parent / "report.txt"

    def file(self, number: int) -> Path:
        return self.folder / f"chapter-{number % self.scale.files + 1}.txt"

    async def play(self) -> None:
        """The fixed part of the tour, each step once."""
        for step in (self._files, self._keyed_tasks, self._downloads, self._urgent, self._failure, self._cancel):
            async with self._step():
                await step()

    @contextlib.asynccontextmanager
    async def _step(self) -> AsyncIterator[None]:
        yield
        await asyncio.sleep(self.scale.step_s)  # time to read, not work

    async def submit_more(self, round_: int) -> None:
        """One more task of every kind."""
        self._say("More of everything, so that you can watch it flow. Ctrl-C ends the tour early.")
        file = self.file(round_)
        await self._submit("hash", {"path": str(file)})
        await self._submit("compress", {"path": str(file), "method": "zlib" if round_ % 3 else "lzma"})
        await self._submit("fetch", {"url": f"{self.server_url}/files/{file.name}"})

    async def finish(self) -> None:
        """Wait until every submitted task has finished."""
        self._say("No more work is handed in; what is left runs to its end.")
        async for seen in self.application.overview.watch(self.tasks, min_interval_s=CHECK_S):
            if all(state in ENDED for state in seen.counts):
                return

    # --- steps --------------------------------------------------------------------------------------------------------

    async def _files(self) -> None:
        self._say(
            "Files are hashed and compressed in threads, two of each kind at a time. The rest is queued. "
            "Each task is a row in one SQLite file, so nothing is lost if this process dies."
        )
        big = str(self.folder / "big.txt")
        self.to_cancel = await self._submit("compress", {"path": big, "method": "lzma9"}, priority="high")
        for number in range(self.scale.files):
            await self._submit("hash", {"path": str(self.file(number))})
            await self._submit("compress", {"path": str(self.file(number))}, priority="low")
        later = self.scale.later_s
        await self._submit("inventory", {"folder": str(self.folder)}, delay_s=later)

    async def _keyed_tasks(self) -> None:
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
            await self._submit("fetch", {"url": f"{self.server_url}/{place}/{self.file(number).name}"}, **retry)

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
        assert self.to_cancel is not None
        await self._wait_started(self.to_cancel)
        # On a fast machine it has completed by now, and the command is refused.
        await self.application.tasks.apply([self.to_cancel], Cancel(reason=CANCEL_REASON))

    async def _wait_started(self, task: str) -> None:
        events = self.application.events
        now = (await events.read()).last  # before the task is read: a start in between is in the events
        if (await self.application.tasks.get(task)).attempt:
            return
        where = EventFilter(kinds=frozenset({EventKind.STARTED}), uuids=frozenset({task}))
        await anext(events.subscribe(where, after=now))

    async def _submit(self, consumer: str, args: dict[str, Any], **options: Any) -> str:
        receipt = await self.application.tasks.submit(SubmitRequest(consumer=consumer, args=args, **options))
        self.tasks.append(receipt.uuid)
        return receipt.uuid

    def _say(self, text: str) -> None:
        if text != self.caption:
            self.caption = text
            self.on_caption(text)
