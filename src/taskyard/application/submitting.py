"""What a submit and a new schedule need of a consumer, whose code may not be in this process.

Without its code the catalogue in the store says which consumers there are, on which queue their tasks go, and what
their arguments must be.
"""

from __future__ import annotations

from typing import Any, Protocol

from taskyard.application.errors import AppRequired
from taskyard.errors import InvalidArguments, InvalidInput, quote
from taskyard.ports.consumer import Consumer
from taskyard.yard import Yard


class Arguments(Protocol):
    """A request with arguments."""

    @property
    def args(self) -> dict[str, Any]: ...

    @property
    def args_text(self) -> dict[str, str]: ...

    @property
    def consumer(self) -> str: ...


def check_arguments(yard: Yard, request: Arguments) -> None:
    """Raise `UnknownConsumer` or `InvalidArguments` before a store is opened, and perhaps made, for the request."""
    fit_arguments(yard._get_consumer(request.consumer), request)


def fit_arguments(consumer: Consumer, request: Arguments) -> dict[str, Any]:
    """The arguments as the consumer takes them: where it refuses a value, it may take the text that was typed."""
    if consumer.produce is not None:
        return request.args  # `produce` makes the arguments out of these
    try:
        consumer.encode(request.args)
    except InvalidArguments as refused:
        args = request.args | {name: text for name, text in request.args_text.items() if name in refused.names}
        try:
            consumer.encode(args)
        except InvalidInput:
            raise refused from None  # it is about the value that was meant, not about its text
        return args
    return request.args


async def find_other_queues(yard: Yard, queue: str) -> tuple[str, ...] | None:
    """The queues that have rules, tasks or a consumer, if this one is none of them; None if it is."""
    known = set(yard._queues) | {consumer.queue for consumer in yard.consumers.values()}
    if queue in known:
        return None
    known |= {status.name for status in await yard.queues()} | {entry.spec.queue for entry in await yard.catalogue()}
    return None if queue in known else tuple(sorted(known))


async def find_consumer(yard: Yard, name: str) -> tuple[Consumer, bool]:
    """The consumer, and whether its arguments can be checked here: by its own code, or by the schema that nodes have
    published. Raises `UnknownConsumer`, `AppRequired`."""
    consumer = yard.consumers.get(name)
    if consumer is not None:
        return consumer, True
    catalogue = await yard.catalogue()
    if not catalogue:
        raise AppRequired(
            f"cannot tell whether there is a consumer {quote(name)}: no worker has run on this store in the past week",
            fields=("app",),
            hint="name the app with {app} module:yard",
        )
    entries = catalogue.get(name)
    if entries[0].spec.has_produce:
        raise AppRequired(
            f"the tasks of {quote(name)} are made by its own code",
            fields=("app",),
            hint="name the app with {app} module:yard",
        )
    return catalogue.stand_in(name), entries[0].spec.args is not None
