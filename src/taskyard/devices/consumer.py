"""Runs the code of a task on a device: the work, its cleanup, and what it leaves behind. For functions and classes."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from taskyard.devices.definitions import GameAccount
from taskyard.devices.device import Device
from taskyard.devices.recording import KeepArtifact
from taskyard.devices.steps import DeviceStep, check_steps
from taskyard.devices.templates import Template, check_templates
from taskyard.errors import CleanupFailed, DeviceError, DeviceLost, InvalidConsumer, InvalidInput, quote
from taskyard.model.given import check_name, check_timeout

log = logging.getLogger("taskyard.devices")

T = TypeVar("T")

CLEANUP_TIMEOUT_S = 30.0
"""For a cleanup: a device that hangs must not keep its task for long."""

ENSURE_UI_TIMEOUT_S = 120.0
"""To bring the app to a known screen, which may be a cold start of it."""

ABANDON_S = 5.0
"""A cleanup that was cancelled and goes on is left alone after this time. It can no longer use the device."""

NO_TEMPLATES: Mapping[str, Template] = MappingProxyType({})

FINAL_SCREENSHOT_S = 5.0
"""For the screenshot at a failure. A device that needs longer does not answer."""


async def run_on_device(
    device: Device,
    body: Callable[[], Awaitable[T]],
    *,
    cleanup: Callable[[], Awaitable[object]] | None = None,
    cleanup_timeout_s: float = CLEANUP_TIMEOUT_S,
    templates: Mapping[str, Template] = NO_TEMPLATES,
    keep: KeepArtifact | None = None,
) -> T:
    """Run the code of a task on a device; what `body` returns or raises. Call it once for each `Device`.

    `body` is the code, and `cleanup` comes after it whatever happened: after an error, a cancellation, a timeout, the
    loss of the device. It has a time limit of its own, and a cancellation that comes meanwhile waits for its end. What
    it raises never hides what `body` raised; after a `body` that returned it is a `CleanupFailed`.

    If a step of the device failed, and was not optional, this raises although `body` returned: `StepFailed`, or the
    `DeviceLost` itself. The code may call `templates` by their names. At the end the steps are kept as `steps.json`
    with `keep`, for which pass `current_run().artifact`; before the cleanup of a run that failed, its last screenshots
    are."""
    device.recording.keep, device.templates = keep, templates
    try:
        result = await body()
        device.recording.check()
    except GeneratorExit:  # the coroutine is closed, since its loop is gone: nothing can be awaited
        device.close()
        raise
    except BaseException as exc:
        is_lost = isinstance(exc, asyncio.CancelledError) and device.lost_reason
        error = device.lost() if is_lost else exc
        await _run_through(_end(device, error, cleanup, cleanup_timeout_s))
        if error is exc:
            raise
        raise error from exc
    if cleanup is None:
        try:
            await device.recording.keep_steps()
        finally:
            device.close()
        return result
    ended, is_cancelled = await _run_through(_end(device, None, cleanup, cleanup_timeout_s))
    if is_cancelled and device.lost_reason:
        text = "the device was lost during the cleanup: the work was done, and may be done again on another device"
        log.warning(text, extra={"device": device.name})
        raise device.lost()
    if is_cancelled:
        raise asyncio.CancelledError
    if ended is not None:
        raise CleanupFailed(_say(ended)) from ended
    return result


async def _end(
    device: Device,
    error: BaseException | None,
    cleanup: Callable[[], Awaitable[object]] | None,
    cleanup_timeout_s: float,
) -> Exception | None:
    """What comes after the body, which raised `error`; the failure of the cleanup, if it failed. Raises nothing."""
    try:
        if error is not None:
            await _keep_failure(device, error)
        if cleanup is None:
            return None
        failure = await _clean_up(device, cleanup, cleanup_timeout_s)
        if failure is not None:
            trace = None if isinstance(failure, DeviceError) else failure
            log.warning("the cleanup failed: %s", _say(failure), exc_info=trace, extra={"device": device.name})
        return failure
    finally:
        await device.recording.keep_steps()
        device.close()


async def _keep_failure(device: Device, error: BaseException) -> None:
    """The last screenshots, and how the screen looks now if the device answers."""
    before, final = tuple(device.recording.latest), None
    if not isinstance(error, DeviceLost):
        try:
            async with asyncio.timeout(FINAL_SCREENSHOT_S):
                final = await device.look()
        except Exception as exc:
            log.debug("no screenshot at the failure: %s", exc, extra={"device": device.name})
    await device.recording.keep_failure(before, final)


async def _clean_up(device: Device, cleanup: Callable[[], Awaitable[object]], timeout_s: float) -> Exception | None:
    async def run() -> None:
        earlier, device.recording.failed = device.recording.failed, None
        try:
            with device.recording.in_phase("cleanup"):
                await cleanup()
            device.recording.check()
        except (SystemExit, KeyboardInterrupt) as exc:  # from an asyncio task it would end the loop
            raise DeviceError(f"it raised {_say(exc)}") from exc
        finally:
            device.recording.failed = earlier

    task = asyncio.ensure_future(run())
    await asyncio.wait([task], timeout=timeout_s)
    if not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=ABANDON_S)
        task.add_done_callback(_forget)
        return DeviceError(f"it did not end within {timeout_s:g} s")
    if task.cancelled():
        return DeviceError("it was cancelled")
    exc = task.exception()
    assert exc is None or isinstance(exc, Exception)
    return exc


def _forget(task: asyncio.Future[None]) -> None:
    """Nobody waits for what it raises."""
    if not task.cancelled():
        task.exception()


async def _run_through(ending: Coroutine[Any, Any, T]) -> tuple[T, bool]:
    """What it returns, and whether somebody tried to cancel this meanwhile: the ending ends by itself in any case."""
    task = asyncio.ensure_future(ending)
    is_cancelled = False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            is_cancelled = True
    return task.result(), is_cancelled


def _say(exc: BaseException) -> str:
    return f"{type(exc).__name__}: {exc}" if str(exc) else type(exc).__name__


class DeviceConsumer:
    """The class form of a consumer of devices. Subclass it, give it a unique `name`, and write `execute`, or give it
    `steps`.

    A run calls `prepare`, `ensure_ui`, `execute` and `cleanup`, in this order. `cleanup` is called whatever happened to
    the others. The parameters of `execute` after `device` and `account` are the arguments of the task; of these,
    `prepare` and `cleanup` get those that they name."""

    name: str = ""
    timeout_s: float | None = None
    """For the whole run. Its cleanup may go on beyond that."""
    ensure_ui_timeout_s: float = ENSURE_UI_TIMEOUT_S
    cleanup_timeout_s: float = CLEANUP_TIMEOUT_S
    templates: Mapping[str, Template] = NO_TEMPLATES
    """What its code and its steps may call by name: `load_templates("templates")`."""
    steps: Sequence[DeviceStep] = ()
    """The work as a list, such as `[Tap("start"), WaitFor("lobby")]`, for a task without arguments."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for part in ("prepare", "ensure_ui", "execute", "cleanup"):
            if not inspect.iscoroutinefunction(getattr(cls, part)):
                raise InvalidConsumer(f"{cls.__name__}.{part} must be written as `async def`")
        try:
            check_steps(cls.steps, check_templates(cls.templates))
        except InvalidInput as exc:
            raise InvalidConsumer(f"{cls.__name__}: {exc}") from exc
        if cls.steps and cls.execute is not DeviceConsumer.execute:
            raise InvalidConsumer(f"{cls.__name__} has steps and execute; leave one of them out")

    async def prepare(self, device: Device, account: Any, *args: Any, **kwargs: Any) -> None:
        """Before the work, such as installing the app. By default it does nothing."""

    async def ensure_ui(self, device: Device) -> None:
        """Bring the app to a known screen. By default it does nothing."""

    async def execute(self, device: Device, account: Any, *args: Any, **kwargs: Any) -> Any:
        """Do the work. What it returns is the result of the task. By default it does the `steps`."""
        for step in self.steps:
            await step.run(device)

    async def cleanup(self, device: Device, account: Any, *args: Any, **kwargs: Any) -> None:
        """After the work, whatever happened. By default it does nothing."""

    # Of the default, whose steps take no arguments. It has *args so that any other execute may take its place.
    execute.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("self", "device", "account")]
    )

    def check(self) -> None:
        """Raise `InvalidConsumer` if it cannot be one. A pool calls it when the consumer is registered."""
        try:
            check_name("name", self.name)
            check_timeout(self.ensure_ui_timeout_s, field="ensure_ui_timeout_s")
            check_timeout(self.cleanup_timeout_s, field="cleanup_timeout_s")
            if self.timeout_s is not None:
                check_timeout(self.timeout_s)
        except InvalidInput as exc:
            raise InvalidConsumer(f"consumer {type(self).__name__}: {exc}") from None
        if type(self).execute is DeviceConsumer.execute and not self.steps:
            raise InvalidConsumer(f"consumer {quote(self.name)} has neither execute nor steps; write one of them")
        self._check_parts()

    def _check_parts(self) -> None:
        """Each part can be called with what it is given: `prepare` and `cleanup` with arguments of `execute`."""
        if any(one.kind is one.VAR_KEYWORD for one in self.parameters):
            return
        arguments = dict.fromkeys(one.name for one in self.parameters)
        for part in (self.prepare, self.cleanup):
            try:
                inspect.signature(part).bind(None, None, **_pick(part, arguments))
            except TypeError as exc:
                raise InvalidConsumer(
                    f"consumer {quote(self.name)}: {part.__name__} takes the device, the account, and arguments of "
                    f"execute, which has {', '.join(arguments) or 'none'}: {exc}"
                ) from None
        try:
            inspect.signature(self.ensure_ui).bind(None)
        except TypeError as exc:
            raise InvalidConsumer(f"consumer {quote(self.name)}: ensure_ui takes the device alone: {exc}") from None

    @property
    def parameters(self) -> list[inspect.Parameter]:
        """The parameters of `execute` that are arguments of a task."""
        return list(inspect.signature(self.execute).parameters.values())[2:]

    async def run(
        self, device: Device, account: GameAccount | None, args: Mapping[str, Any], *, keep: KeepArtifact | None = None
    ) -> Any:
        """Run a task of this consumer: `run_on_device` with all of its parts."""
        recording = device.recording

        async def body() -> Any:
            with recording.in_phase("prepare"):
                await self.prepare(device, account, **_pick(self.prepare, args))
            with recording.in_phase("ensure_ui"):
                await self._ensure_ui(device)
            with recording.in_phase("execute"):
                return await self.execute(device, account, **args)

        async def cleanup() -> None:
            await self.cleanup(device, account, **_pick(self.cleanup, args))

        return await run_on_device(
            device,
            body,
            cleanup=None if type(self).cleanup is DeviceConsumer.cleanup else cleanup,
            cleanup_timeout_s=self.cleanup_timeout_s,
            templates=self.templates,
            keep=keep,
        )

    async def _ensure_ui(self, device: Device) -> None:
        limit = asyncio.timeout(self.ensure_ui_timeout_s)
        try:
            async with limit:
                await self.ensure_ui(device)
        except TimeoutError:
            if limit.expired():
                raise DeviceError(
                    f"ensure_ui did not bring {device.name} to a known screen within {self.ensure_ui_timeout_s:g} s"
                ) from None
            raise


def _pick(method: Callable[..., Any], args: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the arguments that a method takes."""
    parameters = inspect.signature(method).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return dict(args)
    return {name: value for name, value in args.items() if name in parameters}


BaseExecutor = DeviceConsumer
"""Its name in the source design."""
