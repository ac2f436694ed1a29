"""One frame of the live view of devices, for any width and height, and for four devices or five hundred.

The devices get the richest form that fits: a line each, a cell each with task and time, with the account alone, the
name alone, or only a symbol. If they are not shown as lines, those that need a person are listed below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from taskyard.application.device_documents import DeviceDocument, DeviceOverview, PoolDocument
from taskyard.application.event_documents import EventDocument
from taskyard.cli.device_formatting import (
    DEVICE_STYLES,
    account_text,
    device_counts,
    device_symbol,
    misfit_line,
    percent,
    pool_rate,
    rate_style,
    remark,
)
from taskyard.cli.devices import device_table
from taskyard.cli.story import event_line
from taskyard.cli.text import age, clean, clock_time, counted, cut, cut_start, seconds_between
from taskyard.model.device import DeviceState

EVENT_ROWS, MIN_EVENT_ROWS = 8, 3
"""Lines of events at most, and as many as are kept free for them while there are many devices."""

ATTENTION_ROWS = 6
"""Lines about devices that need a person."""

_ATTENTION = (DeviceState.QUARANTINED, DeviceState.DOWN, DeviceState.TAKEN, DeviceState.DRAINING)

Cell = Callable[[DeviceDocument], Text]


class DeviceFrame:
    """`title` is what the view is of."""

    def __init__(self, seen: DeviceOverview, *, title: str, width: int, height: int, now: datetime) -> None:
        self._seen, self._title, self._now = seen, title, now
        self._width, self._left = width, height

    def draw(self) -> RenderableType:
        parts: list[RenderableType] = []
        for section in (self._head, self._pools, self._devices, self._events):
            parts += section()
        return Group(*parts)

    # --- the head -----------------------------------------------------------------------------------------------------

    def _head(self) -> Iterator[RenderableType]:
        seen = self._seen
        right = f"{counted(len(seen.devices), 'device')} · {clock_time(self._now)[:8]}"
        if seen.away_since is not None:
            right = f"the store is away since {clock_time(seen.away_since)[:8]}"
        title = cut_start(clean(self._title), max(0, self._width - len(right) - len("Taskyard") - 4))
        left = Text.assemble(("Taskyard", "bold"), "  ", (title, "dim"))
        grid = Table.grid(expand=True)
        grid.add_column(no_wrap=True)
        grid.add_column(justify="right", no_wrap=True)
        grid.add_row(left, Text(right, "dim" if seen.away_since is None else "yellow"))
        self._left -= 1
        yield grid

    def _pools(self) -> Iterator[RenderableType]:
        """One or two lines for each pool, as the width allows; of many pools those that need most room are left out."""
        room = max(1, self._left // 3)
        for pool in self._seen.pools[:room]:
            name, states, work = self._pool_parts(pool)
            line = Text("   ").join([name, states, work])
            lines = [line] if line.cell_len <= self._width else [Text("   ").join([name, states]), work]
            for one in lines:
                one.no_wrap, one.overflow = True, "ellipsis"
                self._left -= 1
                yield one
            if pool.misfit is not None:
                self._left -= 1
                line = misfit_line(pool.name, pool.misfit, pool.queued - 1)
                line.no_wrap, line.overflow = True, "ellipsis"
                yield line
        more = len(self._seen.pools) - room
        if more > 0:
            self._left -= 1
            yield Text(f"… and {more:,} more pools: --pool", "dim")

    def _pool_parts(self, pool: PoolDocument) -> tuple[Text, Text, Text]:
        waiting = f" + {pool.waiting:,} later" if pool.waiting else ""
        work = Text.assemble(
            (f"{pool.queued:,} queued{waiting} · {pool_rate(pool.rate)} · ", "dim"),
            (percent(pool.success_rate), rate_style(pool.success_rate)),
            (" success in 1 h", "dim"),
        )
        return Text(cut(clean(pool.name), 20), "bold"), device_counts(pool.states), work

    # --- devices ------------------------------------------------------------------------------------------------------

    def _devices(self) -> Iterator[RenderableType]:
        devices = self._seen.devices
        if not devices:
            self._left -= 2
            yield Text("\nno devices; add one: taskyard device add NAME --pool POOL --adapter ADAPTER", "dim")
            return
        yield Text()
        self._left -= 1
        events = 2 + min(MIN_EVENT_ROWS, len(self._seen.events)) if self._seen.events else 0
        room = self._left - events
        if len(devices) + 1 <= room:
            self._left -= len(devices) + 1
            yield device_table(devices, self._width, self._now)
            return
        attention = self._attention()
        room -= min(ATTENTION_ROWS, len(attention)) + (2 if attention else 0)
        yield self._grid(devices, max(1, room))
        yield from self._draw_attention(attention)

    def _grid(self, devices: Sequence[DeviceDocument], room: int) -> RenderableType:
        """All devices as cells, in the richest form of which all have room; of the barest as many as have room."""
        name = min(24, max(len(one.name) for one in devices))
        account = min(12, max(len(account_text(one.account)) for one in devices))
        consumer = min(12, max(len(one.consumer or "") for one in devices))
        forms: list[tuple[int, Cell]] = [
            (name + account + consumer + 9, lambda one: self._cell(one, name, account, consumer)),
            (name + account + 8, lambda one: self._cell(one, name, account, 0)),
            (name + 7, lambda one: self._cell(one, name, 0, 0)),
            (name + 2, lambda one: device_symbol(one).append(f" {cut(clean(one.name), name)}", "default")),
        ]
        if len({one.pool for one in devices}) == 1:
            digits = len(str(max(one.number for one in devices)))
            forms.append((digits + 1, lambda one: device_symbol(one).append(str(one.number), "default")))
        fits = [(width, cell) for width, cell in forms if self._rows(devices, width) <= room]
        if not fits:
            return self._symbols(devices, room, name)
        width, cell = fits[0]
        columns, rows = self._columns(width), self._rows(devices, width)
        self._left -= rows
        return Group(*(_line(devices[row * columns : (row + 1) * columns], cell, width) for row in range(rows)))

    def _symbols(self, devices: Sequence[DeviceDocument], room: int, name: int) -> RenderableType:
        """Lines of symbols, each with the name of its first device; as many as there is room for."""
        columns = max(10, (self._width - name - 2) // 10 * 10)
        rows = min(room, -(-len(devices) // columns))
        self._left -= rows
        lines = []
        for row in range(rows):
            shown = devices[row * columns : (row + 1) * columns]
            label = Text(f"{cut(clean(shown[0].name), name):<{name}}  ", "dim")
            lines.append(Text("", no_wrap=True, overflow="crop").append_text(label).append_text(_symbols(shown)))
        return Group(*lines)

    def _columns(self, width: int) -> int:
        """How many cells of this width fit into a line."""
        return max(1, (self._width + _gap(width)) // (width + _gap(width)))

    def _rows(self, devices: Sequence[DeviceDocument], width: int) -> int:
        return -(-len(devices) // self._columns(width))

    def _cell(self, device: DeviceDocument, name: int, account: int, consumer: int) -> Text:
        """`● emu-12  7  daily  12s`: account and consumer have as many characters as are given."""
        text = device_symbol(device).append(f" {cut(clean(device.name), name):<{name}} ", "default")
        if account:
            text.append(f"{cut(account_text(device.account), account):<{account}} ", "default")
        if consumer:
            text.append(f"{cut(clean(device.consumer or ''), consumer):<{consumer}} ", "dim")
        return text.append(f"{age(seconds_between(device.since, self._now)):>4}", "dim")

    def _attention(self) -> list[DeviceDocument]:
        """The devices that a person may have to look at, the gravest first."""
        found = [one for one in self._seen.devices if one.state in _ATTENTION]
        return sorted(found, key=lambda one: (_ATTENTION.index(one.state), one.pool, one.number))

    def _draw_attention(self, devices: Sequence[DeviceDocument]) -> Iterator[RenderableType]:
        rows = min(ATTENTION_ROWS, self._left - 2, len(devices))
        if rows < 1:
            return
        shown = devices if len(devices) <= rows else devices[: rows - 1]
        yield Text("\nNOT IN SERVICE", "dim")
        table = Table.grid(padding=(0, 2, 0, 0), expand=True)
        for ratio in (None, None, 1):
            table.add_column(no_wrap=True, overflow="ellipsis", ratio=ratio)
        for one in shown:
            since = age(seconds_between(one.since, self._now))
            word = Text(f"{DEVICE_STYLES[one.state][0]} {one.state} {since}", DEVICE_STYLES[one.state][1])
            table.add_row(Text(cut(clean(one.name), 24), "bold"), word, Text(remark(one, self._now), "dim"))
        yield table
        if len(shown) < len(devices):
            yield Text(f"… and {len(devices) - len(shown):,} more", "dim")
        self._left -= 2 + rows

    # --- events -------------------------------------------------------------------------------------------------------

    def _events(self) -> Iterator[RenderableType]:
        """The last events, the newest at the end, as in a log."""
        shown: Sequence[EventDocument] = self._seen.events[: min(EVENT_ROWS, self._left - 2)]
        if self._left < 3 or not shown:
            return
        yield Text("\nLAST EVENTS", "dim")
        for event in reversed(shown):
            line = event_line(event, whole_ids=False)
            line.no_wrap, line.overflow = True, "ellipsis"
            yield line


def _gap(width: int) -> int:
    """Columns between two cells; numbers need less."""
    return 2 if width > 5 else 1


def _symbols(devices: Sequence[DeviceDocument]) -> Text:
    return Text("").join(map(device_symbol, devices))


def _line(devices: Sequence[DeviceDocument], cell: Cell, width: int) -> Text:
    line = Text(no_wrap=True, overflow="crop")
    for device in devices:
        text = cell(device)
        text.truncate(width)
        line.append_text(text).append(" " * (width - text.cell_len + _gap(width)))
    line.rstrip()
    return line
