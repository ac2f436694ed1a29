"""What a run on a device leaves behind: its steps, and screenshots. Bounded in number and size.

Nothing here fails a run: an artifact that cannot be kept is a warning in its log.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from time import perf_counter
from typing import Literal, Protocol

import msgspec

from taskyard.errors import DeviceError, DeviceLost, StepFailed
from taskyard.model.attempt import ARTIFACT_DATA_BYTES

log = logging.getLogger("taskyard.devices")

STEPS_ARTIFACT = "steps.json"

STEPS_KEPT = 300
"""Of one run: the latest ones. The first one that failed is remembered beside them."""

ERROR_CHARS = 500
"""Of the message that a step keeps."""

SCREENSHOTS_KEPT = 20
"""Of one run, beside those that are written when it fails: an attempt can have 50 artifacts, some are for its code."""

SCREENSHOT_BYTES = 8 << 20
"""Of one screenshot that is kept: a PNG of a phone has 0.1 to 3 MB."""

LATEST_SCREENSHOTS = 3
"""Kept in memory while a run goes on, in case it fails."""

LATEST_BYTES = 12 << 20
"""Of all of them. The newest is kept whatever its size."""

IS_OPTIONAL: ContextVar[bool] = ContextVar("taskyard_device_optional", default=False)
"""Whether steps may fail now."""

_UNSAFE = re.compile(r"[^A-Za-z0-9]+")


class KeepArtifact(Protocol):
    """Keeps an artifact of the attempt: `current_run().artifact`. Called from any thread."""

    def __call__(self, name: str, data: bytes, *, media_type: str) -> object: ...


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A step as it went. `at_s` is counted from the start of the run. A step that the code itself ended early, such as
    the loser of two waits, is canceled and no failure. `screenshot` is the artifact that a failed wait left."""

    name: str
    phase: str
    at_s: float
    duration_s: float
    outcome: Literal["ok", "failed", "canceled"]
    error: str = ""
    optional: bool = False
    screenshot: str = ""


class StepDocument(msgspec.Struct, frozen=True, kw_only=True):
    """The artifact `steps.json`. `phases` says how long each took; `dropped` counts steps before the first one here."""

    device: str
    started_at: datetime
    phases: dict[str, float]
    steps: list[StepRecord]
    dropped: int = 0


class OpenStep:
    """A step that is going on."""

    __slots__ = ("number", "screenshot")

    def __init__(self, number: int) -> None:
        self.number = number
        self.screenshot = ""


class Recording:
    """The steps and screenshots of one run. `keep` is None for a run without an attempt, whose artifacts are lost."""

    def __init__(self, device: str, keep: KeepArtifact | None = None) -> None:
        self.device, self.keep = device, keep
        self.started_at = datetime.now(UTC)
        self.phase = "execute"
        self.phases: dict[str, float] = {}
        self.steps: deque[StepRecord] = deque(maxlen=STEPS_KEPT)
        self.failed: tuple[StepRecord, Exception] | None = None
        """The first step that failed and was not optional. One that shows that the device is lost goes before it."""
        self._began = perf_counter()
        self._count = 0
        self.latest: deque[bytes] = deque()
        self._kept: set[str] = set()
        self._written: bytes | None = None

    # --- steps --------------------------------------------------------------------------------------------------------

    @contextmanager
    def in_phase(self, name: str) -> Iterator[None]:
        earlier, self.phase, began = self.phase, name, perf_counter()
        try:
            yield
        finally:
            self.phase = earlier
            self.phases[name] = round(perf_counter() - began, 6)

    @contextmanager
    def step(self, name: str) -> Iterator[OpenStep]:
        """Record the block as a step."""
        self._count += 1
        step, began = OpenStep(self._count), perf_counter()
        try:
            yield step
        except Exception as exc:
            self._add(step, name, began, exc)
            raise
        except BaseException:
            self._add(step, name, began, None, is_canceled=True)
            raise
        self._add(step, name, began, None)

    def _add(
        self, step: OpenStep, name: str, began: float, exc: Exception | None, *, is_canceled: bool = False
    ) -> None:
        is_optional = IS_OPTIONAL.get() and not isinstance(exc, DeviceLost)
        record = StepRecord(
            name=name,
            phase=self.phase,
            at_s=round(began - self._began, 6),
            duration_s=round(perf_counter() - began, 6),
            outcome="failed" if exc is not None else "canceled" if is_canceled else "ok",
            error="" if exc is None else f"{type(exc).__name__}: {exc}"[:ERROR_CHARS],
            optional=is_optional,
            screenshot=step.screenshot,
        )
        self.steps.append(record)
        extra = {"device": self.device, "step": name, "duration_s": record.duration_s}
        if exc is None:
            log.debug("step %s: %s", name, record.outcome, extra=extra)
        elif is_optional:
            log.info("optional step %s failed: %s", name, record.error, extra=extra)
        else:
            log.warning("step %s failed: %s", name, record.error, extra=extra)
            if self.failed is None or (isinstance(exc, DeviceLost) and not isinstance(self.failed[1], DeviceLost)):
                self.failed = record, exc

    def check(self) -> None:
        """Raise if a step has failed although the code went on."""
        if self.failed is None:
            return
        record, exc = self.failed
        if isinstance(exc, DeviceLost):
            raise exc
        raise StepFailed(record.name, record.error) from exc

    # --- screenshots --------------------------------------------------------------------------------------------------

    def saw(self, png: bytes) -> None:
        """Remember a screenshot in case the run fails. One like the last is no news."""
        latest = self.latest
        if latest and latest[-1] == png:
            return
        latest.append(png)
        while len(latest) > 1 and (len(latest) > LATEST_SCREENSHOTS or sum(map(len, latest)) > LATEST_BYTES):
            latest.popleft()

    async def keep_screenshot(self, name: str, png: bytes) -> str:
        """Keep one as an artifact; its name, or nothing if it was not kept."""
        artifact = f"{name}.png"
        if artifact not in self._kept and len(self._kept) >= SCREENSHOTS_KEPT:
            log.warning("screenshot %s is not kept: a run keeps %d", name, SCREENSHOTS_KEPT)
            return ""
        return await self._keep_png(artifact, png)

    async def keep_step_screenshot(self, step: OpenStep, name: str) -> None:
        """Keep the latest screenshot for a step that fails, unless it may fail."""
        if self.latest and not IS_OPTIONAL.get():
            self._written = self.latest[-1]
            words = _UNSAFE.sub("-", name).strip("-")[:60]
            step.screenshot = await self.keep_screenshot(f"step-{step.number:03}-{words}", self._written)

    async def keep_failure(self, before: Sequence[bytes], final: bytes | None) -> None:
        """Keep the screenshots before the failure of a run, and the final one if there is one."""
        news = [png for png in before if png is not self._written and png != final]
        for number, png in enumerate(news, start=1):
            await self._keep_png(f"before-failure-{number}.png", png)
        if final is not None:
            await self._keep_png("failure.png", final)

    async def _keep_png(self, artifact: str, png: bytes) -> str:
        if len(png) > SCREENSHOT_BYTES:
            log.warning("screenshot %s is not kept: it has %d bytes", artifact, len(png))
            return ""
        return artifact if await self._keep(artifact, png, "image/png") else ""

    # --- artifacts ----------------------------------------------------------------------------------------------------

    async def keep_steps(self) -> None:
        """Keep the steps as they are now. A run without any leaves nothing."""
        if not self._count or self.keep is None:
            return
        document = StepDocument(
            device=self.device,
            started_at=self.started_at,
            phases=self.phases,
            steps=list(self.steps),
            dropped=self._count - len(self.steps),
        )
        await self._keep(STEPS_ARTIFACT, msgspec.json.encode(document), "application/json")

    async def _keep(self, name: str, data: bytes, media_type: str) -> bool:
        if self.keep is None:
            return False
        try:
            if len(data) <= ARTIFACT_DATA_BYTES:
                self.keep(name, data, media_type=media_type)
            else:  # it becomes a file
                await asyncio.to_thread(self.keep, name, data, media_type=media_type)
        except Exception as exc:  # too many artifacts, a full disk
            log.warning("artifact %s is not kept: %s", name, exc)
            return False
        if media_type == "image/png":
            self._kept.add(name)
        return True


def is_expected(exc: BaseException) -> bool:
    """Whether `Device.optional()` lets a block end with it."""
    return isinstance(exc, DeviceError) and not isinstance(exc, DeviceLost)
