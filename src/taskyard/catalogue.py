"""Submitting to consumers whose code is elsewhere: by what the nodes of a store have published about them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from taskyard.errors import InvalidArguments, InvalidInput, StoreError, UnknownConsumer, quote
from taskyard.model.catalogue import CatalogueEntry, fit_arguments, list_entries
from taskyard.model.task import TaskRecord, to_json
from taskyard.ports.consumer import Consumer
from taskyard.ports.store import Store

log = logging.getLogger("taskyard")

NOTICE_S = 5.0
"""After the first submit to a consumer: workers that start at the same time have joined by then."""

CLOSE_S = 1.0
"""Seconds: a script that ends waits no longer than this for a store that is slow."""


class Catalogue(Sequence[CatalogueEntry]):
    """The consumers that the nodes of a store have published, by name. While a new version is rolled out, a consumer
    has several entries: those that a node serves come first, and of these the latest."""

    def __init__(self, entries: Sequence[CatalogueEntry]) -> None:
        self._entries = tuple(entries)

    def __getitem__(self, index: Any) -> Any:
        return self._entries[index]

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, name: str) -> list[CatalogueEntry]:
        """The entries of one consumer; `UnknownConsumer` if it has none."""
        found = [entry for entry in self._entries if entry.spec.name == name]
        if not found:
            raise UnknownConsumer(
                name,
                {entry.spec.name for entry in self._entries},
                hint="correct the name, or start a worker that has this consumer: it publishes what it serves",
            )
        return found

    def is_served(self, name: str) -> bool:
        """Whether a live node takes tasks of this consumer, on whatever queue they are."""
        return any(entry.is_served for entry in self._entries if entry.spec.name == name)

    def check(self, name: str, args: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments as the consumer wants them; `InvalidArguments` if they do not fit. They have to fit one of the
        entries that a node serves, or the latest if none is served."""
        found = self.get(name)
        asked = [entry for entry in found if entry.is_served] or found[:1]
        tried = [fit_arguments(entry.spec, dict(args)) for entry in asked]
        for fitted, problems, _ in tried:
            if not problems:
                return fitted
        _, problems, names = tried[0]
        raise InvalidArguments(name, problems, names=names)

    def stand_in(self, name: str) -> Consumer:
        """A consumer to submit to, without its code: `yard.submit_to(catalogue.stand_in("resize"), args)`."""
        spec = self.get(name)[0].spec
        if spec.has_produce:
            raise InvalidInput(
                f"the tasks of {quote(name)} are made by the method `produce` of its class",
                hint="submit where its code is; on the command line, name the app with --app",
            )

        def encode(args: Mapping[str, Any]) -> str:
            return to_json(f"the arguments of {name!r}", self.check(name, args))

        return Consumer(
            name=name,
            encode=encode,
            call=_never,
            is_async=False,
            executor=spec.executor,
            queue=spec.queue,
            timeout_s=spec.timeout_s,
            version=spec.version,
            account=spec.account,
            bucket_by=spec.bucket_by,
        )


def _never(record: TaskRecord) -> Any:
    raise AssertionError(f"task {record.uuid} was to run in a process that only submits")


async def read_catalogue(store: Store) -> Catalogue:
    """Three short queries."""
    stored, statuses = await store.list_specs(), await store.nodes()
    return Catalogue(list_entries(stored, statuses, dead=await store.dead_nodes()))


class UnservedNotice:
    """Says once per consumer if nothing is there to run what was submitted, in a process that runs nothing itself. A
    submit does not wait for it: it looks some seconds later, for all consumers at once, or when the yard is closed."""

    def __init__(self, read: Callable[[], Awaitable[Catalogue]]) -> None:
        self._read = read
        self._noted: set[str] = set()
        self._pending: list[str] = []
        self._timer: asyncio.TimerHandle | None = None
        self._looking: asyncio.Task[None] | None = None

    def note(self, records: Iterable[TaskRecord]) -> None:
        """These tasks are submitted, on the event loop of the yard."""
        for record in records:
            if record.consumer not in self._noted:
                self._noted.add(record.consumer)
                self._pending.append(record.consumer)
                if self._timer is None:
                    self._set_timer()

    def forget(self, consumer: str) -> None:
        """The caller has said it in another way."""
        if consumer in self._pending:
            self._pending.remove(consumer)

    def _set_timer(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(NOTICE_S, self._start)

    def _start(self) -> None:
        self._timer = None
        if self._looking is not None and not self._looking.done():
            self._set_timer()  # the store is slow
            return
        self._looking = asyncio.get_running_loop().create_task(self._look(), name="taskyard-unserved")

    async def _look(self) -> None:
        pending, self._pending = self._pending, []
        if not pending:
            return
        try:
            catalogue = await self._read()
        except StoreError as error:
            self._pending += pending  # for the next time
            log.debug("cannot tell whether the consumers are served: %s", error)
            return
        except Exception:
            log.exception("cannot tell whether the consumers %s are served", ", ".join(pending))
            return
        for name in pending:
            if not catalogue.is_served(name):
                log.warning("no live node serves the consumer %s: its tasks wait until a worker has it", name)

    async def close(self) -> None:
        """Look for the last time, at most for `CLOSE_S` seconds; the next `note` begins anew."""
        if self._timer is not None:
            self._timer.cancel()
        try:
            async with asyncio.timeout(CLOSE_S):
                if self._looking is not None:
                    await self._looking
                await self._look()
        except TimeoutError:
            log.debug("cannot tell whether the consumers are served: the store is too slow")
        finally:
            self._timer = self._looking = None
            self._noted.clear()
            self._pending.clear()
