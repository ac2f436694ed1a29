"""`taskyard device`: lists devices, shows one, and what became of commands on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from taskyard.application.device_documents import (
    DeviceChange,
    DeviceCommand,
    DeviceDetail,
    DeviceDocument,
    DeviceReceipt,
    DeviceRequest,
    DrainDevice,
    GiveBackDevice,
    OrdersDocument,
    QuarantineDevice,
    TakeDevice,
)
from taskyard.application.interface import Application
from taskyard.cli.asking import confirm
from taskyard.cli.console import LINE_WIDTH, json_text, make_console, say_json, show
from taskyard.cli.device_formatting import (
    account_text,
    actor_text,
    device_counts,
    device_state,
    misfit_line,
    percent,
    rate_style,
    remark,
    task_text,
    until_text,
)
from taskyard.cli.device_history import run_table
from taskyard.cli.errors import DONE, REFUSED, UsageError
from taskyard.cli.session import Target, opened_application
from taskyard.cli.text import age, clean, counted, cut, duration, label_text, moment, one_line, seconds_between
from taskyard.errors import DeviceExists, InvalidInput, UnknownDevice
from taskyard.model.device import DeviceState
from taskyard.model.state import TaskState
from taskyard.model.why import Reason

NARROW, ROOMY, WIDE = 60, 96, 130
"""Columns of a window below which there is room for device and state only, from which there is for nodes and labels,
and for long names."""

NO_CHANGE = "nothing to change"

_S = DeviceState


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSelection:
    """The devices that a command is for: those named, those of a pool, or all."""

    names: Sequence[str]
    pool: str | None
    everything: bool
    yes: bool
    dry_run: bool = False

    def __post_init__(self) -> None:
        ways = bool(self.names) + (self.pool is not None) + self.everything
        if ways == 0:
            raise UsageError("name the devices, or pass --pool POOL or --all")
        if ways > 1:
            raise UsageError("names, --pool and --all exclude each other")

    async def find(self, application: Application) -> Sequence[str]:
        if self.names:
            return self.names
        return [device.name for device in await application.devices.list(self.pool)]


# --- looking ----------------------------------------------------------------------------------------------------------


async def list_devices(target: Target, pool: str | None, states: Collection[DeviceState], *, as_json: bool) -> int:
    async with opened_application(target) as application:
        found = await application.devices.list(pool)
        misfits = [] if as_json else await _find_misfits(application, {device.pool for device in found})
    shown = tuple(device for device in found if not states or device.state in states)
    if as_json:
        say_json(shown)
        return DONE
    console = make_console(pipe_width=LINE_WIDTH)
    parts: list[RenderableType] = []
    if shown:
        parts += [device_table(shown, console.width, datetime.now(UTC)), Text()]
    elif found:
        parts.append(Text("no device is in this state; in all there are:", "dim"))
    else:
        hint = "no device is in this store; add one: taskyard device add NAME --pool POOL --adapter ADAPTER"
        parts.append(Text(hint, "dim"))
    if found:
        parts.append(device_counts(Counter(device.state for device in found)))
    show(console, Group(*parts, *misfits))
    return DONE


async def _find_misfits(application: Application, pools: Collection[str]) -> list[Text]:
    """A line for each pool whose first task no device fits."""
    known = {queue.name for queue in await application.queues.list()}
    lines = []
    for pool in sorted(known & set(pools)):
        order = await application.queues.order(pool, limit=1)
        why = order.waiting[0].why if order.waiting else None
        if why is not None and why.reason is Reason.NO_DEVICE:
            lines.append(misfit_line(pool, order.waiting[0].uuid, order.counts[TaskState.QUEUED] - 1))
    return lines


Cell = Callable[[DeviceDocument], Text]


def device_table(devices: Sequence[DeviceDocument], width: int, now: datetime) -> Table:
    """What would be the same in every row is left out, and in a narrow window what matters less."""
    roomy, wide, narrow = width >= ROOMY, width >= WIDE, width < NARROW
    name_chars = 28 if roomy else 12 if narrow else 16
    columns: dict[str, Cell] = {"DEVICE": lambda one: Text(cut(clean(one.name), name_chars), "bold")}
    if roomy:
        columns["NO"] = lambda one: Text(str(one.number), "dim")
    if len({one.pool for one in devices}) > 1 and not narrow:
        columns["POOL"] = lambda one: Text(cut(clean(one.pool), 16 if roomy else 10), "dim")
    columns["STATE"] = device_state
    if not narrow:
        columns["FOR"] = lambda one: Text(age(seconds_between(one.since, now)), "dim")
    if any(one.task for one in devices) and not narrow:
        columns["ACCOUNT"] = lambda one: Text(cut(account_text(one.account), 20 if wide else 12))
        columns["TASK"] = lambda one: Text(_task_cell(one, now, wide=wide))
    if roomy and any(one.node for one in devices) and (wide or len({one.node for one in devices}) > 1):
        columns["NODE"] = lambda one: Text(cut(clean(one.node_name or one.node[:8]), 24 if wide else 12), "dim")
    if roomy and any(one.labels for one in devices):
        columns["LABELS"] = lambda one: Text(cut(clean(label_text(one.labels)), 40 if wide else 18), "dim")
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False, expand=True)
    for name in columns:
        table.add_column(name, no_wrap=True, justify="right" if name in ("NO", "FOR") else "left")
    table.add_column("", no_wrap=True, overflow="ellipsis", ratio=1, min_width=8)
    for one in devices:
        said = f"{account_text(one.account)} {task_text(one)}" if narrow and one.task else remark(one, now)
        why = Text(one_line(said, LINE_WIDTH), "red" if one.state is _S.DOWN else "dim")
        table.add_row(*(cell(one) for cell in columns.values()), why)
    return table


def _task_cell(device: DeviceDocument, now: datetime, *, wide: bool) -> str:
    """The task, and where the state has another beginning how long it has run."""
    text = task_text(device)
    if not wide and device.consumer is not None:
        text = f"{cut(clean(device.consumer), 12)} {text.rpartition(' ')[2]}"
    if text and device.state is not _S.BUSY:
        text += f" ({age(seconds_between(device.busy_since, now))})"
    return text


async def show_device(target: Target, name: str, *, limit: int, reveal: bool, as_json: bool) -> int:
    async with opened_application(target) as application:
        device = await application.devices.get(name, limit=limit, reveal=reveal)
    if as_json:
        say_json(device)
    else:
        show(make_console(), _detail(device, datetime.now(UTC)))
    return DONE


def _detail(device: DeviceDetail, now: datetime) -> RenderableType:
    since = age(seconds_between(device.since, now))
    head = Text.assemble((clean(device.name), "bold"), "  ", device_state(device), (f" for {since}" if since else ""))
    facts = Table.grid(padding=(0, 2, 0, 0))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(overflow="fold")
    for title, value in _facts(device, now):
        if value:
            facts.add_row(Text(title), value if isinstance(value, Text) else Text(value))
    parts: list[RenderableType] = [head, Text(), facts]
    if device.runs:
        parts += [Text("\nlast runs", "dim"), Padding(run_table(device.runs, with_device=False), (0, 0, 0, 2))]
    return Group(*parts)


def _facts(device: DeviceDetail, now: datetime) -> Iterator[tuple[str, str | Text]]:
    yield "pool", clean(f"{device.pool}, number {device.number}")
    yield "adapter", clean(" ".join(filter(None, (device.adapter, device.address))))
    yield "settings", clean(json_text(device.settings, pretty=False)) if device.settings else ""
    yield "labels", clean(label_text(device.labels))
    yield "host", clean(device.host and f"only {device.host}")
    yield "node", clean(f"{device.node_name} ({device.node[:8]})") if device.node else "no node serves it"
    yield "last beat", "" if device.beat_at is None else f"{age(seconds_between(device.beat_at, now))} ago"
    if device.task is not None:
        ran = duration(seconds_between(device.busy_since, now))
        account = f" for account {account_text(device.account)}" if device.account is not None else ""
        yield "task", clean(f"{device.consumer or ''} {device.task}".strip() + account + f", running for {ran}")
    if device.state is _S.DOWN:
        yield "down", " · ".join(filter(None, (clean(device.reason), clean(device.step))))
    for title, stamp in (
        ("quarantined", device.orders.quarantined), ("taken", device.orders.taken), ("drained", device.orders.drained),
    ):  # fmt: skip
        if stamp is not None:
            until = _taken_text(device.orders, now) if title == "taken" else ""
            words = (f"by {actor_text(stamp.actor)}", moment(stamp.at), until, clean(stamp.reason))
            yield title, " · ".join(filter(None, words))
    yield "defined", "by a program, whenever it starts" if device.from_code else ""
    yield "runs", _tally_text(device)


def _taken_text(orders: OrdersDocument, now: datetime) -> str:
    if orders.taken_for_s is not None:
        return f"for {duration(orders.taken_for_s)} from the end of its task"
    return until_text(orders.taken_until, now)


def _tally_text(device: DeviceDetail) -> Text:
    tally = device.tally
    counts = [
        f"{n:,} {word}"
        for n, word in (
            (tally.completed, "completed"), (tally.failed, "failed"), (tally.interrupted, "interrupted"),
            (tally.canceled, "canceled"),
        )
        if n
    ]  # fmt: skip
    if not counts:
        return Text("none yet", "dim")
    rate = Text(percent(tally.success_rate), rate_style(tally.success_rate))
    return rate.append(f" success: {', '.join(counts)}", "default")


# --- definitions ------------------------------------------------------------------------------------------------------


@contextmanager
def _definition_typed() -> Iterator[None]:
    """What makes no sense of a definition is a usage error; what the store refuses is none."""
    try:
        yield
    except (DeviceExists, UnknownDevice, UsageError):
        raise
    except InvalidInput as wrong:
        raise UsageError.of(wrong) from wrong


async def add_device(target: Target, request: DeviceRequest, *, as_json: bool) -> int:
    async with opened_application(target) as application:
        with _definition_typed():
            device = await application.devices.add(request)
    if as_json:
        say_json(device)
    else:
        text = f"; number {device.number} of pool {clean(device.pool)}. It takes tasks once a node has connected to it"
        _print(device, text)
    return DONE


async def edit_device(target: Target, name: str, change: DeviceChange, *, as_json: bool) -> int:
    async with opened_application(target) as application:
        with _definition_typed():
            receipt = await application.devices.edit(name, change)
    return _print_receipts([receipt], lambda receipt: _edit_text(receipt, change), as_json=as_json)


async def label_devices(target: Target, names: Sequence[str], labels: Mapping[str, str], *, as_json: bool) -> int:
    async with opened_application(target) as application:
        receipts = await application.devices.label(names, labels)
    return _print_receipts(receipts, _labels_text, as_json=as_json)


def _edit_text(receipt: DeviceReceipt, change: DeviceChange) -> str:
    """What was to change, as it is now."""
    device = receipt.device
    if device is None or not receipt.changed:
        return NO_CHANGE
    parts = [] if change.address is None else [f"serial {device.address}"]
    for name in change.settings or {}:
        now = json_text(device.settings[name], pretty=False) if name in device.settings else "default"
        parts.append(f"{name} {now}")
    if change.host is not None:
        parts.append(f"only on {device.host}" if device.host else "on any host")
    return clean(" · ".join(parts))


def _labels_text(receipt: DeviceReceipt) -> str:
    if receipt.device is None or not receipt.changed:
        return NO_CHANGE
    return clean(f"labels {label_text(receipt.device.labels)}" if receipt.device.labels else "no labels")


async def remove_devices(target: Target, names: Sequence[str], *, force: bool, as_json: bool) -> int:
    async with opened_application(target) as application:
        receipts = await application.devices.remove(names, force=force)
    return _print_receipts(receipts, lambda receipt: "removed; its runs stay in the history", as_json=as_json)


# --- orders -----------------------------------------------------------------------------------------------------------


async def order_devices(target: Target, chosen: DeviceSelection, command: DeviceCommand, *, as_json: bool) -> int:
    """The question is asked while the store is closed: the answer may take long."""
    async with opened_application(target) as application:
        names = await chosen.find(application)
    verb = _VERBS[type(command)]
    if chosen.dry_run:
        matched = f"{counted(len(names), 'device')} matched"
        text = f"{matched}; dry run, nothing was changed: without --dry-run this would {verb} them"
        make_console().print(Text(text), soft_wrap=True)
        return DONE
    if not chosen.names:
        confirm(f"{verb} {counted(len(names), 'device')}", len(names), yes=chosen.yes)
    async with opened_application(target) as application:
        receipts = await application.devices.apply(names, command)
    now = datetime.now(UTC)
    return _print_receipts(receipts, lambda receipt: _order_text(receipt, command, now), as_json=as_json)


_VERBS: dict[type[DeviceCommand], str] = {
    DrainDevice: "drain",
    TakeDevice: "take",
    QuarantineDevice: "quarantine",
    GiveBackDevice: "give back",
}


def _order_text(receipt: DeviceReceipt, command: DeviceCommand, now: datetime) -> str:
    device = receipt.device
    assert device is not None  # the command was carried out
    if not receipt.changed:
        return f"it was {_ALREADY[type(command)]}; nothing to change"
    task = f"task {task_text(device)} goes on"
    match command:
        case DrainDevice() if device.task:
            return f"{task}, and no new one starts"
        case DrainDevice() | QuarantineDevice():
            return "it takes no tasks until: taskyard device give-back " + clean(device.name)
        case TakeDevice() if device.task:
            for_ = "" if command.for_s is None else f", for {duration(command.for_s)}"
            return f"{task}; it is yours when that has ended{for_}"
        case TakeDevice():
            until = until_text(device.until, now)
            back = f"give it back with: taskyard device give-back {clean(device.name)}"
            return f"it is yours {until}; {back}" if until else f"it is yours; {back}"
        case GiveBackDevice() if device.state is _S.DOWN:
            return f"it takes tasks when it is up: {clean(device.reason)}"
        case GiveBackDevice():
            return "it takes tasks again"


_ALREADY: dict[type[DeviceCommand], str] = {
    DrainDevice: "drained already",
    TakeDevice: "taken already",
    QuarantineDevice: "quarantined already",
    GiveBackDevice: "neither drained, taken nor quarantined",
}


def _print_receipts(
    receipts: Sequence[DeviceReceipt], text_of: Callable[[DeviceReceipt], str], *, as_json: bool
) -> int:
    if as_json:
        say_json(receipts)
    else:
        console = make_console()
        for receipt in receipts:
            if receipt.error is not None:
                line = Text.assemble(("✘ refused  ", "bold red"), clean(receipt.error.message))
            else:
                line = Text.assemble((clean(receipt.name), "bold"), "  ")
                if receipt.device is not None:
                    line.append(device_state(receipt.device)).append("; ", "dim")
                line.append(text_of(receipt), "dim")
            console.print(line, soft_wrap=True)
        if not receipts:
            console.print(Text("no device matches", "dim"))
    return DONE if all(receipt.ok for receipt in receipts) else REFUSED


def _print(device: DeviceDocument, text: str) -> None:
    line = Text.assemble((clean(device.name), "bold"), "  ", device_state(device), (text, "dim"))
    make_console().print(line, soft_wrap=True)
