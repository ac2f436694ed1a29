"""How devices look in tables and live views: a symbol and a colour for each state, and shared phrases."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from rich.text import Text

from taskyard.application.device_documents import DeviceDocument
from taskyard.cli.formatting import progress_text, rate_text
from taskyard.cli.text import clean, counted, short_id
from taskyard.model.audit import split_actor
from taskyard.model.device import DeviceState, account_key

_S = DeviceState

DEVICE_STYLES: dict[DeviceState, tuple[str, str]] = {
    _S.BUSY: ("●", "bold bright_blue"),
    _S.IDLE: ("○", "green"),
    _S.DRAINING: ("‖", "magenta"),
    _S.TAKEN: ("◆", "yellow"),
    _S.DOWN: ("✘", "bold red"),
    _S.QUARANTINED: ("■", "bold red"),
}
"""The symbol and the colour of each state, in the order in which counts are shown."""


def state_word(device: DeviceDocument) -> str:
    """A device that drains and runs nothing is drained."""
    return "drained" if device.state is _S.DRAINING and device.task is None else str(device.state)


def device_symbol(device: DeviceDocument) -> Text:
    return Text(*DEVICE_STYLES[device.state])


def device_state(device: DeviceDocument) -> Text:
    symbol, style = DEVICE_STYLES[device.state]
    return Text(f"{symbol} {state_word(device)}", style)


def device_counts(states: Mapping[DeviceState, int]) -> Text:
    """`● 3 busy   ○ 1 idle   ✘ 2 down`."""
    parts = [
        Text.assemble((f"{symbol} {states[state]:,}", style), f" {state}")
        for state, (symbol, style) in DEVICE_STYLES.items()
        if states.get(state)
    ]
    return Text("   ").join(parts) if parts else Text("no devices", "dim")


def account_text(account: int | str | None) -> str:
    """As it is typed: the text `7` is `"7"`, since 7 is a number."""
    return "" if account is None else clean(account_key(account))


def task_text(device: DeviceDocument) -> str:
    """`daily 3f259cf1`: what runs on it."""
    if device.task is None:
        return ""
    return f"{clean(device.consumer or '')} {short_id(device.task)}".strip()


def remark(device: DeviceDocument, now: datetime) -> str:
    """Why it is in its state, who asked for that, until when; or how far its task is."""
    parts: list[str] = []
    orders = device.orders
    if device.state is _S.BUSY:
        parts.append(progress_text(device.progress, 80))
    if device.by:
        # A device that is taken while its task goes on is drained for that person.
        word = "for" if device.state is _S.DRAINING and orders.drained is None else "by"
        parts.append(" ".join(filter(None, (f"{word} {actor_text(device.by)}", until_text(device.until, now)))))
    parts += [clean(device.reason), clean(device.step)]
    if device.state is _S.DOWN and orders.drained is not None:
        parts.append(f"drained by {actor_text(orders.drained.actor)}")
    return " · ".join(filter(None, parts))


def actor_text(by: str) -> str:
    """`ana`, without the way in which she asked."""
    return clean(split_actor(by)[1])


def until_text(at: datetime | None, now: datetime) -> str:
    """`until 18:02`, with the date if that is another day."""
    if at is None:
        return ""
    local = at.astimezone()
    return f"until {local:%H:%M}" if local.date() == now.astimezone().date() else f"until {local:%b %d %H:%M}"


def misfit_line(pool: str, uuid: str, behind: int) -> Text:
    """Why the line of a pool does not move. A narrow window cuts the end."""
    text = f"{clean(pool)} is stuck: taskyard why {short_id(uuid)}: no device fits the first task"
    return Text(f"{text}; {counted(behind, 'task')} behind it" if behind > 0 else text, "yellow")


def pool_rate(rate: float) -> str:
    """`3.2/s`, or of a slow pool `14/min`."""
    return rate_text(rate) if rate >= 1 else f"{rate * 60:.0f}/min"


def rate_style(rate: float | None) -> str:
    """The colour of a success rate."""
    return "dim" if rate is None else "green" if rate >= 0.98 else "yellow" if rate >= 0.8 else "bold red"


def percent(rate: float | None) -> str:
    """`98 %`; never 100 % where anything has failed, nor 0 % where anything has completed."""
    if rate is None:
        return "–"
    shown = f"{rate:.0%}" if rate in (0.0, 1.0) or 0.005 <= rate < 0.995 else f"{min(max(rate, 0.001), 0.999):.1%}"
    return shown.replace("%", " %")
