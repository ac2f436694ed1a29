"""The consumers of a yard, which come and go, and those who are told of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from taskyard.errors import DuplicateConsumer, UnknownConsumer
from taskyard.opened import Opened
from taskyard.ports.consumer import Consumer, ConsumerChange, ConsumerListener, ConsumerListeners


class Registering(Opened):
    """Consumers by name. An engine that runs hears of every change."""

    def __init__(self) -> None:
        super().__init__()
        self._consumers: dict[str, Consumer] = {}
        self._retired: list[Consumer] = []
        self._listeners = ConsumerListeners()

    def _register(self, consumer: Consumer) -> None:
        if consumer.name in self._consumers:
            raise DuplicateConsumer(consumer.name)
        if self._open_engine is not None:
            _warm_up(consumer)
        self._consumers[consumer.name] = consumer
        self._tell_engine()
        self._listeners.tell(consumer.name, ConsumerChange.REGISTERED)

    def unregister(self, name: str) -> None:
        """Take a consumer out, also while the yard is open. Its name may be used again at once. Nothing more of it
        starts here, and it can no longer be submitted to here. A run of it that is going on comes to its end, and is
        settled by the rules it began with; one that was claimed and has not begun goes back. What waits for it stays as
        it is in the store, until this yard or another serves it again; `why` says so."""
        consumer = self._get_consumer(name)
        del self._consumers[name]
        if consumer.close is not None:
            self._retired.append(consumer)  # what its runs have left loaded may be in use until the yard is stopped
        self._tell_engine()
        self._listeners.tell(name, ConsumerChange.UNREGISTERED)

    def subscribe(self, listener: ConsumerListener) -> Callable[[], None]:
        """Call `listener(name, change)` whenever a consumer was registered or unregistered here, on the thread where
        that was done, until the function that is returned is called. Which consumers the processes on a store serve,
        those of others included, `store.nodes()` says."""
        return self._listeners.subscribe(listener)

    def _tell_engine(self) -> None:
        """A consumer has come or gone, be it on another thread than the engine's."""
        engine, loop = self._open_engine, self._loop
        if engine is None or loop is None:
            return
        if asyncio._get_running_loop() is loop:
            engine.consumers_changed()
        else:
            loop.call_soon_threadsafe(engine.consumers_changed)

    @property
    def consumers(self) -> Mapping[str, Consumer]:
        """The consumers of this yard by name."""
        return self._consumers

    def _get_consumer(self, name: str) -> Consumer:
        try:
            return self._consumers[name]
        except (KeyError, TypeError):  # of what is no name at all
            raise UnknownConsumer(name, self._consumers) from None

    def _check_served(self, consumer: Consumer) -> None:
        """`UnknownConsumer` if it was unregistered."""
        if self._consumers.get(consumer.name) is not consumer:
            raise UnknownConsumer(consumer.name, self._consumers)

    async def _close_consumers(self) -> None:
        """Let go of what their runs have left loaded; when nothing of theirs runs any more."""
        for consumer in (*self._retired, *self._consumers.values()):
            if consumer.close is not None:
                await consumer.close()
        self._retired.clear()


def _warm_up(consumer: Consumer) -> None:
    for step in warm_up_steps(consumer, serve=True):
        step()


def warm_up_steps(consumer: Consumer, *, serve: bool) -> list[Callable[[], object]]:
    """What would hold up the first task, or a node that joins with this consumer."""
    return [step for step in (consumer.warm_up, consumer.schemas if serve else None) if step is not None]
