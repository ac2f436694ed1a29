"""`taskyard device`: the commands and their options. What they do stands in `devices` and the modules beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from taskyard.cli.errors import UsageError, typed_on_the_command_line
from taskyard.cli.options import AppOption, JsonOption, StoreOption, reason_option
from taskyard.cli.session import Target
from taskyard.errors import quote

if TYPE_CHECKING:
    from taskyard.application.device_documents import DeviceCommand
    from taskyard.model.device import DeviceState

devices = typer.Typer(help="The devices that tasks run on: what they do, and steering them.", no_args_is_help=True)


def _check_name(value: str) -> str:
    from taskyard.model.given import check_name

    with typed_on_the_command_line():
        return check_name("the name of a device", value)


def _check_names(values: list[str] | None) -> list[str]:
    return [_check_name(value) for value in values or ()]


NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The device.", callback=_check_name)]
NamesArgument = Annotated[list[str], typer.Argument(metavar="NAME...", help="The devices.", callback=_check_names)]
AnyNamesArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[NAME]...", help="The devices.", callback=_check_names)
]
PoolOption = Annotated[str | None, typer.Option("--pool", metavar="POOL", help="Only of this pool.")]
WholePoolOption = Annotated[str | None, typer.Option("--pool", metavar="POOL", help="All of this pool.")]
AllOption = Annotated[bool, typer.Option("--all", help="All devices of the store.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask, however many they are.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Only count them.")]
ReasonOption = Annotated[str, reason_option("device")]
SettingOption = Annotated[
    list[str] | None,
    typer.Option("--setting", metavar="KEY=VALUE", help="A setting of the adapter; JSON or text. Repeatable."),
]
HostOption = Annotated[str | None, typer.Option("--host", help="The name of the only host that serves it.")]
SerialOption = Annotated[str | None, typer.Option("--serial", metavar="SERIAL", help="Where it is: emulator-5554.")]


# --- looking ----------------------------------------------------------------------------------------------------------


@devices.command("ls")
def ls_command(
    pool: PoolOption = None,
    state: Annotated[
        list[str] | None, typer.Option("--state", "-s", help="Only in this state: idle, busy, down, … Repeatable.")
    ] = None,
    store: StoreOption = None,
    yard: AppOption = None,
    as_json: JsonOption = False,
) -> int:
    """List the devices: state and since when, account and task, node, labels, why it is down or who has it."""
    from taskyard.cli.devices import list_devices

    return asyncio.run(list_devices(Target(store, yard), pool, _parse_states(state or ()), as_json=as_json))


@devices.command("show")
def show_command(
    name: NameArgument,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=10_000, help="So many of its last runs.")] = 10,
    reveal: Annotated[bool, typer.Option("--reveal", help="Show secrets among the settings too.")] = False,
    store: StoreOption = None,
    yard: AppOption = None,
    as_json: JsonOption = False,
) -> int:
    """Show everything about one device, with its last runs."""
    from taskyard.cli.devices import show_device

    return asyncio.run(show_device(Target(store, yard), name, limit=limit, reveal=reveal, as_json=as_json))


@devices.command("history")
def history_command(
    names: AnyNamesArgument = None,
    *,
    account: Annotated[str | None, typer.Option("--account", help="Only of this account.")] = None,
    consumer: Annotated[str | None, typer.Option("--consumer", help="Only of this consumer.")] = None,
    pool: PoolOption = None,
    since: Annotated[
        str | None, typer.Option("--since", metavar="WHEN", help="Only started since: 24h ago, or a moment.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=10_000, help="At most so many of each.")] = 20,
    before: Annotated[str | None, typer.Option("--before", metavar="PLACE", help="Only older runs.")] = None,
    store: StoreOption = None,
    yard: AppOption = None,
    as_json: JsonOption = False,
) -> int:
    """List runs on devices, newest first, with success rates per device and per account, the lowest first."""
    from taskyard.application.device_documents import RunQuery
    from taskyard.cli.device_history import show_history

    where = RunQuery(
        pool=pool,
        devices=tuple(names or ()),
        account=None if account is None else _parse_account(account),
        consumer=consumer,
        since=None if since is None else _parse_since(since),
    )
    return asyncio.run(show_history(Target(store, yard), where, before=before, limit=limit, as_json=as_json))


@devices.command("watch")
def watch_command(
    pool: PoolOption = None,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
    store: StoreOption = None,
    yard: AppOption = None,
    as_json: JsonOption = False,
) -> int:
    """Watch the devices live: states, tasks, pools, rates, what happened last. In a pipe one line for each change."""
    from taskyard.cli.device_watch import watch_devices

    return asyncio.run(watch_devices(Target(store, yard), pool, once=once, as_json=as_json))


# --- definitions ------------------------------------------------------------------------------------------------------


@devices.command("add")
def add_command(
    name: NameArgument,
    pool: Annotated[str, typer.Option("--pool", metavar="POOL", help="The pool that it is for.")],
    adapter: Annotated[str, typer.Option("--adapter", metavar="KIND", help="How it is reached: adb, simulated, …")],
    *,
    number: Annotated[
        int | None, typer.Option("--number", min=0, help="Its number in the pool; else the next one.")
    ] = None,
    serial: SerialOption = None,
    setting: SettingOption = None,
    label: Annotated[
        list[str] | None, typer.Option("--label", metavar="NAME=TEXT", help="A label that tasks may require.")
    ] = None,
    host: HostOption = None,
    store: StoreOption = None,
    yard: AppOption = None,
    as_json: JsonOption = False,
) -> int:
    """Add a device to a pool while it runs: taskyard device add emu-7 --pool phones --adapter adb --serial …"""
    from taskyard.application.device_documents import DeviceRequest
    from taskyard.cli.devices import add_device
    from taskyard.cli.values import parse_pairs

    settings, texts = _parse_settings(setting or ())
    request = DeviceRequest(
        name=name,
        pool=pool,
        adapter=adapter,
        number=number,
        address=serial or "",
        settings={key: value for key, value in settings.items() if value is not None},
        settings_text=texts,
        labels=parse_pairs("--label", label or ()),
        host=host or "",
    )
    return asyncio.run(add_device(Target(store, yard), request, as_json=as_json))


@devices.command("edit")
def edit_command(
    name: NameArgument,
    serial: SerialOption = None,
    setting: SettingOption = None,
    host: HostOption = None,
    *,
    reason: ReasonOption = "",
    store: StoreOption = None,
    yard: AppOption = None,
    as_json: JsonOption = False,
) -> int:
    """Change how a device is reached. A setting with an empty value is removed; --host '' lets any host serve it."""
    from taskyard.application.device_documents import DeviceChange
    from taskyard.cli.devices import edit_device

    if serial is None and setting is None and host is None:
        raise UsageError("there is nothing to change; pass --serial, --setting or --host")
    settings, texts = _parse_settings(setting or ())
    change = DeviceChange(address=serial, settings=settings or None, settings_text=texts, host=host, reason=reason)
    return asyncio.run(edit_device(Target(store, yard), name, change, as_json=as_json))


@devices.command("label")
def label_command(
    words: Annotated[
        list[str], typer.Argument(metavar="NAME... LABEL=TEXT...", help="Devices, then labels; an empty text removes.")
    ],
    store: StoreOption = None,
    yard: AppOption = None,
    as_json: JsonOption = False,
) -> int:
    """Set labels of devices: taskyard device label emu-1 emu-2 role=eu region= (an empty text removes a label)."""
    from taskyard.cli.devices import label_devices

    names = _check_names([word for word in words if "=" not in word])
    pairs = [word for word in words if "=" in word]
    if not names or not pairs:
        raise UsageError("name one or more devices and one or more labels, as in: emu-1 role=eu region=")
    return asyncio.run(label_devices(Target(store, yard), names, _parse_labels(pairs), as_json=as_json))


@devices.command("rm")
def rm_command(
    names: NamesArgument,
    force: Annotated[bool, typer.Option("--force", help="Also if a task runs on it: that run is interrupted.")] = False,
    store: StoreOption = None,
    yard: AppOption = None,
    as_json: JsonOption = False,
) -> int:
    """Remove devices; their runs stay in the history."""
    from taskyard.cli.devices import remove_devices

    return asyncio.run(remove_devices(Target(store, yard), names, force=force, as_json=as_json))


# --- orders -----------------------------------------------------------------------------------------------------------


def _add_order(verb: str, class_name: str, help_text: str) -> None:
    """A command that gives one order to devices by name, to a pool or to all of them."""

    @devices.command(verb, help=help_text)
    def order_command(
        names: AnyNamesArgument = None,
        *,
        pool: WholePoolOption = None,
        everything: AllOption = False,
        reason: ReasonOption = "",
        yes: YesOption = False,
        dry_run: DryRunOption = False,
        store: StoreOption = None,
        yard: AppOption = None,
        as_json: JsonOption = False,
    ) -> int:
        from taskyard.application import device_documents

        command: DeviceCommand = getattr(device_documents, class_name)(reason=reason)
        chosen = {"names": names or (), "pool": pool, "everything": everything, "yes": yes, "dry_run": dry_run}
        return _order(Target(store, yard), command, chosen, as_json=as_json)


_add_order("drain", "DrainDevice", "Give devices no new tasks; what runs on them goes on.")


@devices.command("take")
def take_command(
    names: NamesArgument,
    for_: Annotated[
        str | None, typer.Option("--for", metavar="TIME", help="For so long, 30m; else until you give it back.")
    ] = None,
    reason: ReasonOption = "",
    *,
    store: StoreOption = None,
    yard: AppOption = None,
    as_json: JsonOption = False,
) -> int:
    """Take devices to use them by hand; a task that runs on one ends first."""
    from taskyard.application.device_documents import TakeDevice
    from taskyard.cli.values import parse_duration, parse_option

    with typed_on_the_command_line():
        for_s = None if for_ is None else parse_option("for_s", parse_duration, for_)
        command = TakeDevice(for_s=for_s, reason=reason)
    return _order(Target(store, yard), command, {"names": names}, as_json=as_json)


_add_order(
    "give-back",
    "GiveBackDevice",
    "Give devices back to their pool: they are no longer drained, taken or quarantined.",
)


@devices.command("quarantine")
def quarantine_command(
    names: NamesArgument,
    reason: ReasonOption = "",
    store: StoreOption = None,
    yard: AppOption = None,
    as_json: JsonOption = False,
) -> int:
    """Set devices aside until they are given back."""
    from taskyard.application.device_documents import QuarantineDevice

    return _order(Target(store, yard), QuarantineDevice(reason=reason), {"names": names}, as_json=as_json)


def _order(target: Target, command: DeviceCommand, chosen: dict[str, Any], *, as_json: bool) -> int:
    from taskyard.cli.devices import DeviceSelection, order_devices

    selection = DeviceSelection(**{"pool": None, "everything": False, "yes": False} | chosen)
    return asyncio.run(order_devices(target, selection, command, as_json=as_json))


# --- accounts ---------------------------------------------------------------------------------------------------------


@devices.command("accounts")
def accounts_command(
    pool: PoolOption = None, store: StoreOption = None, yard: AppOption = None, as_json: JsonOption = False
) -> int:
    """List the quarantined accounts: no more tasks of these accounts and consumers are taken."""
    from taskyard.cli.device_history import list_accounts

    return asyncio.run(list_accounts(Target(store, yard), pool, as_json=as_json))


@devices.command("release")
def release_command(
    account: Annotated[str, typer.Argument(metavar="ACCOUNT", help="The account.")],
    consumer: Annotated[str | None, typer.Option("--consumer", help="Only for tasks of this consumer.")] = None,
    pool: PoolOption = None,
    store: StoreOption = None,
    yard: AppOption = None,
    as_json: JsonOption = False,
) -> int:
    """Take tasks of a quarantined account again."""
    from taskyard.cli.device_history import release_account

    found = _parse_account(account)
    return asyncio.run(release_account(Target(store, yard), found, consumer, pool, as_json=as_json))


# --- what is typed ----------------------------------------------------------------------------------------------------


def _parse_account(text: str) -> int | str:
    """`7` is the number 7, `"7"` the text."""
    from taskyard.model.device import read_account
    from taskyard.model.given import check_name

    with typed_on_the_command_line():
        return read_account(check_name("account", text))


def _parse_since(text: str) -> datetime:
    """A moment, or how long ago."""
    from taskyard.cli.values import parse_duration, parse_moment

    try:
        return datetime.now(UTC) - timedelta(seconds=parse_duration(text.strip().removesuffix(" ago")))
    except OverflowError:
        raise UsageError(f"{quote(text)} is too long ago", field="since") from None
    except UsageError:
        try:
            return parse_moment(text)
        except UsageError as wrong:
            raise UsageError(f"{wrong}; or how long ago, as in 90m, 24h, 7d", field="since") from None


def _parse_settings(pairs: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Settings as they are typed: JSON where it is JSON, else text; None for an empty value, which removes one. Then
    the texts of all of them: an adapter may want a text where `true` was typed."""
    from taskyard.cli.values import parse_value

    settings: dict[str, Any] = {}
    texts: dict[str, str] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise UsageError(f"--setting {quote(pair)} has no value; write --setting key=value")
        settings[name] = parse_value(text) if text else None
        texts[name] = text
    return settings, texts


def _parse_labels(pairs: Sequence[str]) -> dict[str, str]:
    """Labels to set; an empty text removes one."""
    from taskyard.cli.values import parse_pairs

    parse_pairs("a label", [pair if not pair.endswith("=") else f"{pair}-" for pair in pairs])
    return {name: text for name, _, text in (pair.partition("=") for pair in pairs)}


def _parse_states(names: Sequence[str]) -> frozenset[DeviceState]:
    from taskyard.model.device import DeviceState

    words = [word.strip().lower() for word in ",".join(names).split(",") if word.strip()]
    unknown = [word for word in words if word not in list(DeviceState)]
    if unknown:
        known = ", ".join(DeviceState)
        raise UsageError(f"there is no state {quote(unknown[0])} of a device; states are {known}")
    return frozenset(map(DeviceState, words))
