"""A view that draws itself again and again, until it is told to end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from datetime import UTC, datetime

from rich.console import Console, RenderableType
from rich.live import Live

from taskyard.cli.board import Board
from taskyard.cli.frame import Frame
from taskyard.cli.text import clock_time
from taskyard.listening import AWAY
from taskyard.yard import Yard

FRAME_S = 0.2
"""Between frames. Clocks and countdowns move with every frame; the store is asked only when it has changed."""

LOOK_S = 1.0
"""The longest between two looks at the store, in case a change was not told."""

Header = Callable[[int], tuple[Iterable[RenderableType], int]]
"""For a width: what to show above the frame, and how many lines that takes."""


def no_header(width: int) -> tuple[Iterable[RenderableType], int]:
    return (), 0


class LiveView:
    """A board on a console. `header` may change what it says from frame to frame. The last frame stays on the screen
    unless `stays` is false."""

    def __init__(
        self,
        yard: Yard,
        board: Board,
        console: Console,
        *,
        title: str,
        header: Header = no_header,
        stays: bool = True,
    ) -> None:
        self._yard, self._board, self._console = yard, board, console
        self._title, self._header, self._stays = title, header, stays
        self._away_since: datetime | None = None

    def draw(self, *, height: int | None = None) -> RenderableType:
        width = self._console.width
        above, lines = self._header(width)
        # One line is left free: a frame as high as the window would scroll it.
        room = height or self._console.height - 1
        title = self._title
        if self._away_since is not None:
            title += f" · away since {clock_time(self._away_since)}"
        frame = Frame(self._board, title=title, width=width, height=room, now=datetime.now(UTC))
        return frame.draw(above=above, lines_above=lines)

    async def run(self, is_over: Callable[[], bool]) -> None:
        """Draw until `is_over` says so after a look."""
        loop = asyncio.get_running_loop()
        with (
            self._yard.engine.changes() as changes,
            Live(
                console=self._console, auto_refresh=False, vertical_overflow="crop", transient=not self._stays
            ) as live,
        ):
            looked_at = -LOOK_S
            while True:
                now = loop.time()
                if changes.is_set() or now - looked_at >= LOOK_S:
                    changes.clear()
                    looked_at = now
                    await self._look()
                live.update(self.draw(), refresh=True)
                if is_over():
                    return
                await asyncio.sleep(FRAME_S)

    async def _look(self) -> None:
        """While the store is away the view shows what was seen last, and since when."""
        try:
            await self._board.look()
        except AWAY:
            self._away_since = self._away_since or datetime.now(UTC)
        else:
            self._away_since = None
