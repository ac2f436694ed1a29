"""Consumers of devices, from functions and from classes: which parameters get the device, which one is the account, and
how a run calls the code."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import replace
from functools import update_wrapper
from types import SimpleNamespace
from typing import Any, get_type_hints

from taskyard.consumers import Signature, class_consumer, function_consumer
from taskyard.devices.consumer import DeviceConsumer, run_on_device
from taskyard.devices.definitions import GameAccount
from taskyard.devices.device import Device, current_device
from taskyard.errors import InvalidConsumer, quote
from taskyard.execution.context import current_run
from taskyard.model.retry import RetryPolicy
from taskyard.ports.consumer import BaseTaskConsumer, Consumer
from taskyard.ports.middleware import Middleware
from taskyard.ports.places import Places

SETTINGS = ("name", "timeout_s", "retry", "middleware", "version")
"""What a consumer of devices may be given; the rest is that of its pool."""


class PoolPart:
    """What the consumers of a pool have in common."""

    def __init__(self, pool: str, executor: str, places: Places, middleware: Middleware) -> None:
        self.pool, self.executor, self.places, self.middleware = pool, executor, places, middleware


def check_device_settings(settings: Collection[str]) -> None:
    """`InvalidConsumer` for settings that a consumer of devices does not have."""
    if unknown := sorted(set(settings) - set(SETTINGS)):
        raise InvalidConsumer(
            f"a consumer of devices has no {', '.join(map(quote, unknown))}; known are {', '.join(SETTINGS)}. "
            "Queue, places and concurrency are those of the pool"
        )


def device_function(
    part: PoolPart,
    function: Callable[..., Any],
    *,
    name: str | None = None,
    timeout_s: float | None = None,
    retry: RetryPolicy | None = None,
    middleware: Iterable[Middleware] = (),
    version: str = "",
) -> tuple[Consumer, Signature]:
    """A consumer of a function. Parameters with the annotation `Device` get the device, the one with `GameAccount` is
    the account; the rest are the other arguments. One that is not asynchronous runs in the thread of its device."""
    name = str(name or getattr(function, "__name__", ""))
    accounts = _annotated(function, GameAccount)
    if len(accounts) > 1:
        raise InvalidConsumer(f"consumer {quote(name)} has {len(accounts)} accounts; a task is done for one")
    devices = _annotated(function, Device)
    is_async = inspect.iscoroutinefunction(function)
    if devices and not is_async:
        raise InvalidConsumer(f"consumer {quote(name)} uses a device, whose calls are awaited: write it as `async def`")
    _check_annotations(name, function, is_plain=not (accounts or devices))

    async def call(arguments: dict[str, Any]) -> Any:
        device = current_device()

        def body() -> Awaitable[Any]:
            return function(**arguments, **dict.fromkeys(devices, device))  # type: ignore[no-any-return]

        return await run_on_device(device, body, keep=current_run().artifact)

    consumer, signature = function_consumer(
        _with_parameters(function, call, without=devices) if is_async else function,
        (part.executor,),
        name=name,
        queue=part.pool,
        executor=part.executor,
        places=part.places,
        timeout_s=timeout_s,
        retry=retry,
        middleware=(part.middleware, *middleware),
        version=version,
    )
    return replace(consumer, function=function, account=accounts[0] if accounts else ""), signature


def _check_annotations(name: str, function: Callable[..., Any], *, is_plain: bool) -> None:
    """`InvalidConsumer` for parameters that are meant for the device or the account, and do not say so: they would be
    arguments that nobody gives. `is_plain`: no parameter is annotated as one of these."""
    bare = [
        one.name
        for one in inspect.signature(function).parameters.values()
        if one.annotation is one.empty
        and one.default is one.empty
        and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
    meant = bare if is_plain else [one for one in bare if one in ("device", "account")]
    if meant:
        raise InvalidConsumer(
            f"consumer {quote(name)}: parameter {', '.join(map(quote, meant))} has no annotation. Write "
            "`device: Device` for the device, `account: GameAccount` for the account, and the types of the arguments"
        )


def device_class(part: PoolPart, instance: DeviceConsumer) -> Consumer:
    """A consumer of the class form with `prepare`, `ensure_ui`, `execute` and `cleanup`."""
    instance.check()
    first = list(inspect.signature(instance.execute).parameters.values())
    if len(first) < 2:
        raise InvalidConsumer(f"consumer {quote(instance.name)}: execute takes the device and the account")
    device, account = first[0].name, first[1].name

    async def call(arguments: dict[str, Any]) -> Any:
        asked = arguments.pop(account)
        return await instance.run(current_device(), asked, arguments, keep=current_run().artifact)

    function = _with_parameters(instance.execute, call, without=(device,), hints={account: GameAccount})
    consumer, _ = function_consumer(
        function,
        (part.executor,),
        name=instance.name,
        queue=part.pool,
        executor=part.executor,
        places=part.places,
        timeout_s=instance.timeout_s,
        retry=getattr(instance, "retry", None),
        middleware=(part.middleware, *getattr(instance, "middleware", ())),
        version=getattr(instance, "version", ""),
    )
    return replace(consumer, function=instance.execute, account=account)


def plain_class(part: PoolPart, instance: BaseTaskConsumer) -> Consumer:
    """A consumer of the class form that every yard takes. An `async def consume` finds its device with
    `current_device()`; another one runs in the thread of the device."""
    consumer = class_consumer(instance, (part.executor, *_words(instance)))

    async def call(record: Any) -> Any:
        return await run_on_device(current_device(), lambda: consumer.call(record), keep=current_run().artifact)

    return replace(
        consumer,
        call=call if consumer.is_async else consumer.call,
        queue=part.pool,
        executor=part.executor,
        concurrency=1,
        places=part.places,
        remote=None,
        middleware=(part.middleware, *consumer.middleware),
    )


def _words(instance: BaseTaskConsumer) -> tuple[str, ...]:
    asked = getattr(instance, "executor", None)
    return () if asked is None else (asked,)


def _annotated(function: Callable[..., Any], kind: type) -> list[str]:
    """The parameters that have this class as annotation, whether written as such or as text."""
    found: list[str] = []
    scope = getattr(inspect.unwrap(function), "__globals__", {})
    for name, parameter in inspect.signature(function).parameters.items():
        try:
            hint = get_type_hints(SimpleNamespace(__annotations__={name: parameter.annotation}), scope)[name]
        except Exception:  # a type that is defined later: it is neither of ours, and is read when it is needed
            continue
        if isinstance(hint, type) and issubclass(hint, kind):
            found.append(name)
    return found


def _with_parameters(
    function: Callable[..., Any],
    call: Callable[[dict[str, Any]], Awaitable[Any]],
    *,
    without: Iterable[str],
    hints: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """A function with the parameters of `function`, `without` these, that does `call` with its arguments."""

    async def outer(**arguments: Any) -> Any:
        return await call(arguments)

    update_wrapper(outer, function)
    taken = set(without)
    signature = inspect.signature(function)
    outer.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[one for name, one in signature.parameters.items() if name not in taken]
    )
    kept = {name: hint for name, hint in function.__annotations__.items() if name not in taken}
    outer.__annotations__ = kept | (hints or {})
    return outer
