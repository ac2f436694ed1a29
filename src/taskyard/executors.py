"""The executors of a yard. Imported when one is opened, not with the package: worker processes bring a lot along."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from taskyard.errors import InvalidInput, quote
from taskyard.execution.inline import InProcessExecutor
from taskyard.execution.isolated import IsolatedProcessPoolExecutor, settings_of
from taskyard.execution.pool_settings import PoolSettings
from taskyard.execution.process import ProcessPoolExecutor
from taskyard.execution.registry import ExecutorRegistry
from taskyard.execution.thread import ThreadExecutor
from taskyard.model.execution import INLINE, ISOLATED, PROCESS, THREAD
from taskyard.ports.consumer import Consumer
from taskyard.ports.executor import ExecutorFactory, ExecutorProtocol

log = logging.getLogger("taskyard")


class PoolRules:
    """What is asked of a yard's process pools: the shared one is under None, the others under their consumers."""

    def __init__(self) -> None:
        self._own: dict[str, PoolSettings] = {}
        self._asked: dict[str | None, dict[str, Any]] = {}

    def ask(self, consumer: str | None, settings: dict[str, Any]) -> None:
        """What a person says; the last word counts."""
        known = PoolSettings.__struct_fields__
        if unknown := sorted(settings.keys() - set(known)):
            raise InvalidInput(f"a pool has no {', '.join(map(quote, unknown))}; known are {', '.join(known)}")
        try:
            PoolSettings(**settings)
        except (TypeError, ValueError) as exc:
            raise InvalidInput(str(exc)) from None
        self._asked[consumer] = settings

    def suggest(self, consumer: str, settings: PoolSettings) -> None:
        """What the hints of an algorithm say."""
        self._own[consumer] = settings

    @property
    def shared(self) -> PoolSettings:
        return PoolSettings(**self._asked.get(None, {}))

    def of(self, consumer: Consumer) -> PoolSettings:
        """Its own pool: as many workers as it may run at once, unless somebody says otherwise."""
        settings = self._own.get(consumer.name) or settings_of(consumer)
        return msgspec.structs.replace(settings, **self._asked.get(consumer.name, {}))

    def check(self, consumers: Mapping[str, Consumer]) -> None:
        """`InvalidInput` for rules of a pool that will never be made."""
        for name in self._asked:
            if name is None:
                continue
            found = consumers.get(name)
            if found is None or found.executor != ISOLATED:
                but = "there is no such consumer" if found is None else f"it has executor={found.executor!r}"
                if found is not None and found.executor == PROCESS:
                    but += "; the shared pool is the one without a name, define_pool(…)"
                raise InvalidInput(f"define_pool({quote(name)}) is for a consumer with executor='isolated', but {but}")


def make_executors(
    rules: PoolRules,
    consumers: Mapping[str, Consumer],
    *,
    threads: int,
    serve: bool,
    others: Mapping[str, ExecutorFactory],
) -> dict[str, ExecutorProtocol]:
    """By the names that consumers use. The shared pool has a worker ready if one of `consumers` is for it. `serve`:
    they will run here, so what is wrong with the rules matters. `others` are those that the yard was given."""
    shared = rules.shared
    if serve:
        rules.check(consumers)
    has_processes = any(consumer.executor == PROCESS for consumer in consumers.values())
    registry = ExecutorRegistry(
        {
            INLINE: InProcessExecutor,
            THREAD: lambda: ThreadExecutor(max_workers=threads),
            PROCESS: lambda: ProcessPoolExecutor(settings=shared, warm=has_processes),
            ISOLATED: lambda: IsolatedProcessPoolExecutor(rules.of),
        }
    )
    for name, factory in others.items():
        registry.register(name, factory)
    executors = registry.make_all()
    if serve:
        _tell_crowded(rules, consumers, executors)
    return executors


_MORE_ROOM = {
    THREAD: "Yard(threads={wanted})",
    PROCESS: "yard.define_pool(max_workers={wanted}), or CPU_EXECUTOR_WORKERS",
    ISOLATED: "yard.define_pool({name!r}, max_workers={wanted})",
}
_OTHER_ROOM = "a setting of that executor"


def _tell_crowded(
    rules: PoolRules, consumers: Mapping[str, Consumer], executors: Mapping[str, ExecutorProtocol]
) -> None:
    """Whoever may run more at once than there is room for hears why it does not."""
    for name, consumer in consumers.items():
        place, wanted = consumer.executor, consumer.slots
        here = rules.of(consumer).max_workers if place == ISOLATED else executors[place].abilities.capacity
        if here is not None and here < wanted:
            advice = _MORE_ROOM.get(place, _OTHER_ROOM).format(name=name, wanted=wanted)
            text = "consumer %s may run %d at once, but executor=%r has room for %d here: more with %s"
            log.warning(text, name, wanted, place, here, advice)
