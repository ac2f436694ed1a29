"""Which store and which app a command is about, and opening the application on them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from taskyard.cli.asking import asker
from taskyard.cli.console import complain

if TYPE_CHECKING:
    from taskyard.application.interface import Application
    from taskyard.application.opening import FoundYard
    from taskyard.application.submitting import Arguments

T = TypeVar("T")

APP_VARIABLE = "TASKYARD_APP"

SLOW_OPEN_S = 5.0
"""Seconds that opening a store may take before a note says what it waits for."""


@dataclass(frozen=True, slots=True)
class Target:
    """The store and the app that the options name."""

    store: str | None = None
    app: str | None = None

    @property
    def app_name(self) -> str | None:
        return self.app or os.environ.get(APP_VARIABLE) or None

    def find_yard(self, *, needs_app: bool = False) -> FoundYard:
        """The yard that is meant. With `needs_app` it is the app's, and its store need not exist yet."""
        from taskyard.application.opening import find_app, find_yard

        found = find_app(self.store, self.app_name) if needs_app else find_yard(self.store, self.app_name)
        if found.note:
            complain("note", found.note)
        return found


@asynccontextmanager
async def opened_application(
    target: Target, *, needs_app: bool = False, create: bool = False, check: Arguments | None = None
) -> AsyncIterator[Application]:
    """The application that the options name, for as long as the block lasts. With `needs_app` it has the app's code,
    and the arguments to `check` are refused before the store is opened, and perhaps made."""
    from taskyard.application.opening import open_application
    from taskyard.application.submitting import check_arguments

    found = target.find_yard(needs_app=needs_app)
    if check is not None and needs_app:
        check_arguments(found.yard, check)
    opening = open_application(found.yard, actor=asker(), app=target.app_name, create=create)
    application = await note_if_slow(found, opening.__aenter__())
    try:
        yield application
    finally:
        await opening.__aexit__(None, None, None)


async def note_if_slow(found: FoundYard, opening: Awaitable[T]) -> T:
    """Await `opening`; if that takes long, print what it waits for."""
    timer = asyncio.get_running_loop().call_later(SLOW_OPEN_S, _print_wait, found)
    try:
        return await opening
    finally:
        timer.cancel()


def _print_wait(found: FoundYard) -> None:
    from taskyard.application.opening import describe_wait

    complain("note", f"still waiting for the store: {describe_wait(found.yard)}")
