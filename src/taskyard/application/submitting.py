"""What a submit and a new schedule need of a consumer, whose code may not be in this process.

Without its code only the store can say which consumers there are: those of the nodes that run. Then the arguments are
stored as they are, and the queue is that of the newest task of the consumer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from taskyard.application.errors import AppRequired
from taskyard.errors import InvalidArguments, UnknownConsumer, quote
from taskyard.model.task import DEFAULT_QUEUE, TaskRecord, to_json
from taskyard.model.task_filter import TaskFilter
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
        consumer.encode(args)
        return args
    return request.args


async def find_consumer(yard: Yard, name: str) -> tuple[Consumer, bool]:
    """The consumer, and whether its own code is here to check arguments."""
    consumer = yard.consumers.get(name)
    return (consumer, True) if consumer is not None else (await _unchecked_consumer(yard, name), False)


async def _unchecked_consumer(yard: Yard, name: str) -> Consumer:
    """Stands in for a consumer whose code is not here. It can make a record, and runs nothing."""
    served = sorted({consumer for status in await yard.store.nodes() for consumer in status.node.consumers})
    if not served:
        raise AppRequired(
            f"cannot tell whether there is a consumer {quote(name)}: no worker runs on this store",
            fields=("app",),
            hint="name the app with {app} module:yard",
        )
    if name not in served:
        raise UnknownConsumer(name, served)
    newest = await yard.store.list_tasks(TaskFilter(consumer=name), limit=1)

    def encode(args: Mapping[str, Any]) -> str:
        return to_json(f"the arguments of {name!r}", args)

    return Consumer(
        name=name,
        encode=encode,
        call=_refuse_run,
        is_async=False,
        executor="thread",
        queue=newest[0].queue if newest else DEFAULT_QUEUE,
    )


def _refuse_run(record: TaskRecord) -> Any:
    raise AssertionError(f"task {record.uuid} was to run in a process that only submits")
