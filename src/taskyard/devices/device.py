"""The device as the code of a consumer sees it, for one run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TypeVar, overload

from taskyard.devices.device_settings import check_seconds
from taskyard.devices.image_matching import run_matching
from taskyard.devices.recording import IS_OPTIONAL, Recording, StepRecord, is_expected
from taskyard.devices.templates import Match, Template, find_template, search_screen
from taskyard.errors import (
    DeviceError,
    DeviceLost,
    InvalidInput,
    NoCurrentRun,
    TemplateNotGone,
    TemplateNotSeen,
    quote,
    shorten,
)
from taskyard.model.attempt import check_artifact_name
from taskyard.model.device import DeviceSpec
from taskyard.ports.device import DeviceAdapter

T = TypeVar("T")

CURRENT_DEVICE: ContextVar[Device] = ContextVar("taskyard_device")
"""The device of this run. The actor sets it in the context in which it runs the code."""

WAIT_TIMEOUT_S = 10.0
"""For a template to appear or to go."""

POLL_S = 0.5
"""Between two looks at the screen."""

QUICK_LIMIT_S = 20.0
"""For a tap or a screenshot, which take milliseconds: a device that needs longer does not answer."""

COPY_LIMIT_S = 600.0
"""For a file to or from the device."""

RESTART_LIMIT_S = 180.0
"""For the restart of the app, or longer if the actor gives it more."""

SHELL_MARGIN_S = 10.0
"""Beyond the timeout of a command, by which the adapter has given it up."""


class Device:
    """The device that a task runs on. Parameters with this annotation get it; they are no arguments of the task.

    One object serves one run. Each call is a step, and is recorded. A run with a failed step is never completed, even
    if the code handles the error, unless the step was optional. Code of the run may use the device in several asyncio
    tasks: the device does one thing at a time. After the run every call is a `DeviceError`."""

    def __init__(
        self, spec: DeviceSpec, adapter: DeviceAdapter, *, restart_app_limit_s: float = RESTART_LIMIT_S
    ) -> None:
        self.spec, self.adapter = spec, adapter
        self._restart_app_limit_s = restart_app_limit_s
        self.recording = Recording(spec.name)
        self.templates: Mapping[str, Template] = {}
        """Those of the consumer, by the names that its steps use."""
        self._seen: tuple[bytes, list[Template], Sequence[Match | None]] = b"", [], ()
        """The last screen that was searched, for what, and what was found."""
        self._turn = asyncio.Lock()
        self._users: set[asyncio.Task[object]] = set()
        self._limit: asyncio.Timeout | None = None
        """Of the call under way."""
        self.lost_reason = ""
        """Why the run has lost the device, as its actor says."""
        self._is_closed = False

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def number(self) -> int:
        """Its `emulator_id`."""
        return self.spec.number

    @property
    def labels(self) -> dict[str, str]:
        return dict(self.spec.labels)

    @property
    def steps(self) -> tuple[StepRecord, ...]:
        """The steps of this run that have ended, the latest 300."""
        return tuple(self.recording.steps)

    # --- steps --------------------------------------------------------------------------------------------------------

    async def shell(self, command: str, *, timeout_s: float = 30.0) -> str:
        """Run a command on the device; its output. An exit status other than 0 is a `DeviceError`."""
        with self.recording.step(f"shell {quote(command)}"):
            return await self._call(
                lambda: self.adapter.shell(command, timeout_s=timeout_s), limit_s=timeout_s + SHELL_MARGIN_S
            )

    async def screenshot(self, *, name: str | None = None) -> bytes:
        """The screen as a PNG. With a name it is kept as the artifact `<name>.png`."""
        if name is not None:
            check_artifact_name(f"{name}.png")
        with self.recording.step("screenshot" if name is None else f"screenshot {quote(name)}"):
            png = await self.look()
        if name is not None:
            await self.recording.keep_screenshot(name, png)
        return png

    @overload
    async def tap(self, target: int, y: int, /) -> None: ...

    @overload
    async def tap(self, target: Template | str | Match, /) -> None: ...

    async def tap(self, target: Template | str | Match | int, y: int | None = None, /) -> None:
        """Touch the screen: at `x, y` in pixels of a screenshot, in the middle of a match, or of a template that is on
        the screen now; `TemplateNotSeen` if it is not."""
        if isinstance(target, Template | str):
            await self.tap_when(target, timeout_s=0)
        elif isinstance(target, Match):
            await self._tap(*target.center, f"tap {quote(target.template)}")
        elif y is not None:
            await self._tap(target, y, f"tap {target}, {y}")
        else:
            raise InvalidInput("tap needs x and y, a template or a match", given=target)

    async def push(self, source: Path | bytes, target: str) -> None:
        """Copy a file, or these bytes, to the device."""
        with self.recording.step(f"push {quote(target)}"):
            await self._call(lambda: self.adapter.push(source, target), limit_s=COPY_LIMIT_S)

    async def pull(self, source: str) -> bytes:
        """The content of a file of the device."""
        with self.recording.step(f"pull {quote(source)}"):
            return await self._call(lambda: self.adapter.pull(source), limit_s=COPY_LIMIT_S)

    async def restart_app(self) -> None:
        """End the app of the device, and start it again."""
        with self.recording.step("restart_app"):
            await self._call(self.adapter.restart_app, limit_s=self._restart_app_limit_s)

    # --- templates ----------------------------------------------------------------------------------------------------

    async def find(self, template: Template | str) -> Match | None:
        """Where a template is on the screen now; None if it is not, which is no failure."""
        wanted = find_template(template, self.templates)
        with self.recording.step(f"find {quote(wanted.name)}"):
            (match,) = await self._search([wanted])
        return match if wanted.accepts(match) else None

    async def wait_for(
        self, *templates: Template | str, timeout_s: float = WAIT_TIMEOUT_S, poll_s: float = POLL_S
    ) -> Match:
        """Wait until one of these is on the screen; the match, whose `template` says which. `TemplateNotSeen` if none
        is in time: then the screen is kept as an artifact."""
        wanted = [find_template(template, self.templates) for template in templates]
        if not wanted:
            raise InvalidInput("wait_for needs a template")

        def find_hit(seen: Sequence[Match | None]) -> Match | None:
            pairs = zip(wanted, seen, strict=True)
            hits = [match for template, match in pairs if match is not None and template.accepts(match)]
            return max(hits, key=_score, default=None)

        name = f"wait_for {_names(wanted)}"
        with self.recording.step(name) as step:
            hit, seen = await self._watch(wanted, find_hit, timeout_s, poll_s)
            if hit is None:
                await self.recording.keep_step_screenshot(step, name)
                raise _not_seen(wanted, seen, timeout_s)
            return hit

    async def wait_gone(
        self, template: Template | str, *, timeout_s: float = WAIT_TIMEOUT_S, poll_s: float = POLL_S
    ) -> None:
        """Wait until it is not on the screen. `TemplateNotGone` if it still is: then the screen is kept as an
        artifact."""
        wanted = find_template(template, self.templates)
        name = f"wait_gone {quote(wanted.name)}"
        with self.recording.step(name) as step:
            is_gone, (match,) = await self._watch(
                [wanted], lambda seen: True if not wanted.accepts(seen[0]) else None, timeout_s, poll_s
            )
            if not is_gone and match is not None:
                await self.recording.keep_step_screenshot(step, name)
                raise TemplateNotGone(
                    quote(wanted.name), timeout_s, threshold=wanted.threshold, score=match.score, at=match.center
                )

    async def tap_when(
        self, *templates: Template | str, timeout_s: float = WAIT_TIMEOUT_S, poll_s: float = POLL_S
    ) -> Match:
        """Wait until one of these is on the screen, and touch its middle."""
        match = await self.wait_for(*templates, timeout_s=timeout_s, poll_s=poll_s)
        await self.tap(match)
        return match

    async def _watch(
        self,
        wanted: Sequence[Template],
        judge: Callable[[Sequence[Match | None]], T | None],
        timeout_s: float,
        poll_s: float,
    ) -> tuple[T | None, Sequence[Match | None]]:
        """Look until `judge` answers something of the best matches, or the time is over; its answer, and the matches of
        the last look. A device that cannot show its screen is asked again until then, save one that is lost."""
        clock = asyncio.get_running_loop().time
        until = clock() + check_seconds("timeout_s", timeout_s)
        check_seconds("poll_s", poll_s)
        while True:
            try:
                seen = await self._search(wanted)
            except DeviceError as exc:
                if isinstance(exc, DeviceLost) or clock() >= until:
                    raise
            else:
                answer = judge(seen)
                if answer is not None or clock() >= until:
                    return answer, seen
            await asyncio.sleep(max(0.0, min(poll_s, until - clock())))

    async def _search(self, wanted: Sequence[Template]) -> Sequence[Match | None]:
        """The best match of each on the screen now. OpenCV takes long, so it runs in threads of its own, and only if
        the screen is another one than at the last look."""
        png = await self.look()
        seen_png, seen_templates, matches = self._seen
        if png != seen_png or list(wanted) != seen_templates:
            matches = await run_matching(search_screen, png, wanted)
            self._seen = png, list(wanted), matches
        return matches

    @contextmanager
    def optional(self) -> Iterator[None]:
        """Steps in this block may fail. A `DeviceError` ends the block, and the code goes on after it; save a
        `DeviceLost`, since nothing can go on without the device."""
        token = IS_OPTIONAL.set(True)
        try:
            yield
        except DeviceError as exc:
            if not is_expected(exc):
                raise
        finally:
            IS_OPTIONAL.reset(token)

    # --- the connection -----------------------------------------------------------------------------------------------

    async def _tap(self, x: int, y: int, name: str) -> None:
        with self.recording.step(name):
            await self._call(lambda: self.adapter.tap(x, y), limit_s=QUICK_LIMIT_S)

    async def look(self) -> bytes:
        """A screenshot that is no step."""
        png: object = await self._call(self.adapter.screenshot, limit_s=QUICK_LIMIT_S)
        if not isinstance(png, bytes):
            raise DeviceError(f"the adapter of {quote(self.name)} answered with no screenshot: {quote(png)}")
        self.recording.saw(png)
        return png

    async def _call(self, call: Callable[[], Awaitable[T]], *, limit_s: float) -> T:
        """One call of the adapter. One that takes too long is a `DeviceLost`: the device does not answer."""
        user = asyncio.current_task()
        assert user is not None
        async with self._turn:
            if self._is_closed and self.lost_reason:
                raise self.lost()
            if self._is_closed:
                raise DeviceError(f"the run on {quote(self.name)} has ended: its code can no longer use the device")
            limit = asyncio.timeout(limit_s)
            self._users.add(user)
            self._limit = limit
            try:
                async with limit:
                    return await call()
            except TimeoutError:
                if limit.expired() and self._is_closed:
                    raise self.lost() from None
                if limit.expired():
                    raise DeviceLost(f"{shorten(self.name)} did not answer within {limit_s:g} s") from None
                raise
            finally:
                self._users.discard(user)
                self._limit = None

    def lose(self, reason: str) -> None:
        """The run has lost the device. Its cleanup may still try to use it."""
        self.lost_reason = self.lost_reason or reason

    def lost(self) -> DeviceLost:
        """The error of a run that has lost the device."""
        return DeviceLost(f"{shorten(self.name)} is lost: {self.lost_reason}")

    def cut_off(self) -> None:
        """From now on each call is a `DeviceLost`, the one under way included."""
        self.lose("another node may use it")
        self._is_closed = True
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time())

    def close(self) -> None:
        """The run has ended. What it has left behind, such as an asyncio task, can no longer use the device."""
        self._is_closed = True
        for user in self._users:
            user.cancel()


def _names(templates: Sequence[Template]) -> str:
    return " or ".join(quote(template.name) for template in templates)


def _score(match: Match) -> float:
    return match.score


def _not_seen(wanted: Sequence[Template], seen: Sequence[Match | None], within_s: float) -> TemplateNotSeen:
    """The error with the match that came nearest to its threshold."""
    template, match = max(
        zip(wanted, seen, strict=True), key=lambda pair: -2 if pair[1] is None else pair[1].score - pair[0].threshold
    )
    score, at = (None, None) if match is None else (match.score, match.center)
    return TemplateNotSeen(_names(wanted), within_s, threshold=template.threshold, score=score, at=at)


def current_device() -> Device:
    """The device of this run; `NoCurrentRun` outside of a run on a device."""
    device = CURRENT_DEVICE.get(None)
    if device is None:
        raise NoCurrentRun
    return device
