"""`taskyard submit`: one task for a consumer, checked by the app where there is one.

Without an app only the store can say which consumers there are: those that running workers serve. Then the arguments
are stored as they are, the queue is that of the newest task of this consumer, and the answer says so.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from rich.text import Text

from taskyard.cli.asking import asker
from taskyard.cli.console import complain, json_text, make_console, say, say_json
from taskyard.cli.documents import Revealed, priority_label, task_document
from taskyard.cli.errors import UsageError, option_of, typed_on_the_command_line
from taskyard.cli.looks import state_text
from taskyard.cli.target import Target, opened, resolve_all
from taskyard.cli.text import clean, duration, moment
from taskyard.cli.values import Arguments, parse_arguments, parse_duration, parse_moment, parse_option, parse_pairs
from taskyard.errors import DuplicateTask, InvalidArguments, TaskEnded, UnknownConsumer, UnknownTask, quote, shorten
from taskyard.handle import TaskHandle
from taskyard.model.order import Priority
from taskyard.model.task import DEFAULT_QUEUE, TaskRecord, to_json
from taskyard.model.task_filter import TaskFilter
from taskyard.options import TaskOptions
from taskyard.ports.consumer import Consumer
from taskyard.yard import Yard


@dataclass(frozen=True, slots=True)
class Order:
    """What to submit, and whether to wait for it. `after` are the tasks it waits for, as they were typed."""

    name: str
    arguments: Arguments
    options: dict[str, Any] = field(default_factory=dict)
    after: Sequence[str] = ()
    wait: bool = False
    wait_s: float | None = None


def make_order(
    name: str,
    pairs: Sequence[str],
    whole: str | None,
    *,
    wait: bool,
    wait_timeout: str | None,
    after: Sequence[str] = (),
    labels: Sequence[str] = (),
    requires: Sequence[str] = (),
    **typed: str | None,
) -> Order:
    """An order as it was typed: durations and moments are still texts."""
    options: dict[str, Any] = {option: text for option, text in typed.items() if text is not None}
    if labels:
        options["labels"] = parse_pairs("--label", labels)
    if requires:
        options["requires"] = parse_pairs("--require", requires)
    for short, option, parse in (
        ("delay", "delay_s", parse_duration),
        ("timeout", "timeout_s", parse_duration),
        ("dedupe_window", "dedupe_window_s", parse_duration),
        ("at", "schedule_at", parse_moment),
    ):
        if short in options:
            options[option] = parse_option(option_of(option), parse, options.pop(short))
    if "delay_s" in options and "schedule_at" in options:
        raise UsageError("give either --delay or --at, not both")
    if "on_failure" in options and not after:
        raise UsageError("--on-failure is about the tasks that it waits for; name them with --after")
    if "dedupe_window_s" in options and "dedupe" not in options:
        raise UsageError("--dedupe-window has no effect without --dedupe merge, refuse or replace")
    options["submitted_by"] = asker()
    with typed_on_the_command_line():
        TaskOptions.of(**options)
    return Order(
        name=name,
        arguments=parse_arguments(pairs, whole),
        options=options,
        after=after,
        wait=wait or wait_timeout is not None,
        wait_s=None if wait_timeout is None else parse_option("--wait-timeout", parse_duration, wait_timeout),
    )


async def submit_task(target: Target, order: Order, *, as_json: bool) -> int:
    options = TaskOptions.of(**order.options)
    arguments = order.arguments.values
    if target.app_name is not None:
        yard = target.load()
        known = yard.get_consumer(order.name)
        if known.produce is None:
            arguments = fitting(known, order.arguments)  # what is wrong is told before the store is perhaps made
    else:
        yard = target.bare()
    # Who waits for others waits for those of a store that is there.
    async with opened(yard, makes=target.app_name is not None and not order.after):
        consumer = yard.consumers.get(order.name) or await _unchecked(yard, order)
        options = msgspec.structs.replace(options, after=tuple(await resolve_all(yard, order.after)))
        handle = await yard.submit_to(consumer, arguments, options)
        record = await _find(handle)
        if not as_json:
            _tell(record, handle, order)
            await _tell_if_unserved(yard, order, target.app_name)
        if order.wait:
            await _wait(handle, record, order, as_json=as_json)
        elif as_json:
            say_json({**task_document(record), **_merged(handle)})
    return 0


async def _find(handle: TaskHandle) -> TaskRecord:
    try:
        return await handle.record()
    except UnknownTask:
        if handle.until is None:
            raise
        raise DuplicateTask(handle.uuid, "", "forgotten", until=handle.until) from None


def fitting(consumer: Consumer, arguments: Arguments) -> dict[str, Any]:
    """The arguments as the consumer takes them: what it refuses as JSON, it may take as the text that was typed."""
    try:
        consumer.encode(arguments.values)
    except InvalidArguments as refused:
        values = arguments.as_text(refused.names)
        consumer.encode(values)
        return values
    return arguments.values


async def _unchecked(yard: Yard, order: Order) -> Consumer:
    consumer = await stand_in(yard, order.name)
    hint = _how_to_quote(order.arguments.typed)
    complain("note", f"no --app given: the arguments are not checked before a worker takes the task{hint}")
    return consumer


async def stand_in(yard: Yard, name: str) -> Consumer:
    """A stand-in for a consumer whose code is not here. It is only used to make the record."""
    served = sorted({source for status in await yard.store.nodes() for source in status.node.consumers})
    if not served:
        raise UsageError(
            f"cannot tell whether there is a consumer {quote(name)}: no worker runs on this store; "
            f"name the app with --app module:yard"
        )
    if name not in served:
        raise UnknownConsumer(name, served)
    newest = await yard.store.list_tasks(TaskFilter(consumer=name), limit=1)

    def encode(args: Mapping[str, Any]) -> str:
        return to_json(f"the arguments of {name!r}", args)

    return Consumer(
        name=name,
        encode=encode,
        call=_never,
        is_async=False,
        executor="thread",
        queue=newest[0].queue if newest else DEFAULT_QUEUE,
    )


def _how_to_quote(typed: Mapping[str, str]) -> str:
    """How to write a text that looks like JSON: nobody here knows whether the consumer wants one."""
    name = next(iter(typed), None)
    if name is None:
        return ""
    pair = shlex.quote(f"{name}={json_text(typed[name], pretty=False)}")
    return f"; {shorten(name)} is taken as JSON, for a text write {shorten(pair)}"


def _never(record: TaskRecord) -> Any:
    raise AssertionError(f"task {record.uuid} was to run in a process that only submits")


def _merged(handle: TaskHandle) -> dict[str, Any]:
    return {"is_new": handle.is_new, "until": handle.until}


def _tell(record: TaskRecord, handle: TaskHandle, order: Order) -> None:
    """Standard output gets the id alone, or only the result if that is waited for: `id=$(taskyard submit …)` works. The
    rest is for people."""
    words = Text.assemble((clean(record.consumer), "bold"), "  ", state_text(record.state))
    if order.wait:
        words = Text.assemble(clean(record.uuid), "  ", words)
    else:
        say(record.uuid)
    words.append(f"  on queue {clean(record.queue)!r}", "dim")
    if record.priority != Priority.NORMAL:
        words.append(f", {priority_label(record.priority)} priority", "dim")
    wait = (record.due_at - record.created_at).total_seconds()
    if wait > 0:
        words.append(f", due in {duration(wait)}", "dim")
    if not handle.is_new:
        words.append(", merged into the one that was there", "yellow")
        words.append("" if handle.until is None else f", whose window ends at {moment(handle.until)}", "yellow")
    make_console(stderr=True).print(words, soft_wrap=True)


async def _tell_if_unserved(yard: Yard, order: Order, app: str | None) -> None:
    """Whoever has just submitted would wait in vain, and wonder."""
    if not any(order.name in status.node.consumers for status in await yard.store.nodes()):
        complain("note", f"no worker for it runs yet; start one with: taskyard worker {app or 'module:yard'}")


async def _wait(handle: TaskHandle, record: TaskRecord, order: Order, *, as_json: bool) -> None:
    """Print the result; how it ended otherwise is an error."""
    try:
        result = await handle.result(timeout_s=order.wait_s)
    except TaskEnded as ended:
        raise Revealed(record).error(ended) from None
    except TimeoutError as late:
        vars(late)["uuid"] = record.uuid  # for programs: the task was taken, and goes on
        raise
    if as_json:
        say_json({**task_document(await handle.record()), "result": result, **_merged(handle)})
    else:
        say(result if isinstance(result, str) else json_text(result))
