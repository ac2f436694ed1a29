"""Users' functions and classes as consumers the engine can run. pydantic is imported when first needed."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import cache, cached_property, partial
from math import isfinite
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Literal,
    NotRequired,
    Required,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)
from uuid import UUID

import msgspec

from taskyard.errors import (
    InvalidArguments,
    InvalidConsumer,
    InvalidInput,
    NotJson,
    StoredArgumentsInvalid,
    quote,
    shorten,
)
from taskyard.execution.registry import check_factory
from taskyard.model.blocker import SEPARATOR
from taskyard.model.execution import INLINE, ISOLATED, PROCESS, THREAD
from taskyard.model.given import check_count, check_name, check_retry, check_timeout, convert_each
from taskyard.model.redaction import redact_schema
from taskyard.model.retry import RetryPolicy
from taskyard.model.task import DEFAULT_QUEUE, NOT_FINITE, TaskRecord, is_finite, is_large, to_json
from taskyard.ports.consumer import BaseTaskConsumer, Consumer, Schemas
from taskyard.ports.executor import ExecutorFactory
from taskyard.ports.middleware import Middleware, check_middleware
from taskyard.ports.places import Place, Places

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError


PLACES = INLINE, THREAD, PROCESS, ISOLATED
"""The words for `executor`, beside those of executors that a yard is given."""


ARGUMENTS = "arguments"
"""The name of the type of all arguments of a consumer. It is no title for people."""


class Signature:
    """What a function takes, as something arguments can be checked against."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name = name
        self._function = function
        self.parameters = list(inspect.signature(function).parameters.values())
        for parameter in self.parameters:
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
                raise InvalidConsumer(
                    f"consumer {quote(name)} takes {parameter}, but arguments are stored by name; "
                    "use ordinary or keyword-only parameters"
                )

    def bind(self, positional: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
        """Positional arguments under their names."""
        if not positional:
            return named
        names = [p.name for p in self.parameters if p.kind is not p.VAR_KEYWORD]
        if len(positional) > len(names):
            raise InvalidArguments(self.name, [f"takes {len(names)} arguments, got {len(positional)}"])
        bound = dict(zip(names, positional, strict=False))
        twice = bound.keys() & named.keys()
        if twice:
            raise InvalidArguments(self.name, [f"{name}: given twice" for name in sorted(twice)])
        return {**bound, **named}

    @cached_property
    def adapter(self) -> TypeAdapter[dict[str, Any]]:
        from pydantic import ConfigDict, TypeAdapter
        from pydantic.errors import PydanticSchemaGenerationError, PydanticUndefinedAnnotation
        from typing_extensions import TypedDict

        try:
            hints = get_type_hints(self._function, include_extras=True)
        except NameError as exc:
            raise InvalidConsumer(
                f"consumer {self.name!r}: {exc}; import that type where the function is defined"
            ) from None
        fields: dict[str, Any] = {}
        extra: Any = "forbid"
        for parameter in self.parameters:
            hint = hints.get(parameter.name, Any)
            if parameter.kind is parameter.VAR_KEYWORD:
                extra = "allow"
            else:
                fields[parameter.name] = (Required if parameter.default is parameter.empty else NotRequired)[hint]
        make: Any = TypedDict  # called with a dict that mypy cannot see through
        arguments = make(ARGUMENTS, fields)
        arguments.__pydantic_config__ = ConfigDict(extra=extra, allow_inf_nan=False)
        try:
            return TypeAdapter(arguments)
        except (PydanticSchemaGenerationError, PydanticUndefinedAnnotation) as exc:
            raise InvalidConsumer(f"consumer {self.name!r} has a parameter that JSON cannot carry: {exc}") from None

    @cached_property
    def is_plain(self) -> bool:
        """Whether all parameters are of types that come back from JSON as they went in. Models need not be: they may
        hide a field (`SecretStr`), or write one under a name that they do not read."""
        hints = get_type_hints(self._function, include_extras=True)
        return all(_is_plain(hint) for name, hint in hints.items() if name != "return")

    @cached_property
    def is_json(self) -> bool:
        """Whether all parameters are of types that JSON has, so that a checked value is written in one way only."""
        hints = get_type_hints(self._function, include_extras=True)
        return all(p.kind is not p.VAR_KEYWORD and _is_json(hints.get(p.name, Any)) for p in self.parameters)

    @cached_property
    def schemas(self) -> Schemas:
        """The JSON schemas of arguments and result, as far as JSON Schema can say them."""
        args = make_schema(self.adapter, mode="validation")
        properties: dict[str, Any] = {} if args is None else args.get("properties", {})
        for parameter in self.parameters:
            known = properties.get(parameter.name)
            if known is not None and parameter.default is not parameter.empty and _is_json_value(parameter.default):
                known["default"] = parameter.default
        return Schemas(redact_schema(args), self._result_schema())

    def _result_schema(self) -> dict[str, Any] | None:
        from pydantic import TypeAdapter

        hints = get_type_hints(self._function, include_extras=True)
        if "return" not in hints:
            return None
        try:
            return make_schema(TypeAdapter(hints["return"]), mode="serialization")
        except Exception:  # results are not checked by their type: no type may keep a yard from opening
            return None

    # The adapter's own methods cost twice as much as the parts it is made of.

    @cached_property
    def _check(self) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
        check: Callable[[Mapping[str, Any]], dict[str, Any]] = self.adapter.validator.validate_python
        return check

    @cached_property
    def _write(self) -> Callable[[dict[str, Any]], bytes]:
        """Writes what was checked: pydantic, or, where it would write the same, msgspec in a quarter of the time."""
        by_pydantic = partial(self.adapter.serializer.to_json, by_alias=True, round_trip=True)

        def by_msgspec(checked: dict[str, Any]) -> bytes:
            try:
                return msgspec.json.encode(checked)
            except ValueError:
                return by_pydantic(checked)  # a number of thousands of digits, which will be refused as it is read

        return by_msgspec if self.is_json else by_pydantic

    @cached_property
    def _read(self) -> Callable[[str], dict[str, Any]]:
        read: Callable[[str], dict[str, Any]] = self.adapter.validator.validate_json
        return read

    def warm_up(self) -> None:
        """Import pydantic and read the signature now, a third of a second: not while the first task is waited for."""
        _ = self._check, self._write, self._read, self.is_plain

    def encode(self, args: Mapping[str, Any]) -> str:
        return self._text(self._checked(args))

    def encode_many(self, many: Iterable[Mapping[str, Any]]) -> list[str]:
        """The same of several, each read once, when it is its turn. What JSON has is copied as it is checked, so that
        it may be written later, all in one go."""
        if not self.is_json:
            return convert_each(self.encode, many)
        checked = convert_each(self._checked, many)
        try:
            texts = msgspec.json.Encoder().encode_lines(checked).decode().split("\n")[:-1]
        except ValueError:  # of one of them: it is found now
            return convert_each(self._text, checked)
        if any(map(is_large, texts)):
            convert_each(self._read_back, texts)
        return texts

    def _checked(self, args: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return self._check(args)
        except ValueError as exc:
            raise self._refusal(exc) from None

    def _text(self, checked: dict[str, Any]) -> str:
        try:
            text = self._write(checked).decode()
        except ValueError as exc:
            raise self._refusal(exc) from None
        if not self.is_plain:
            self._refuse_changed(checked, self.decode(text))
            return text
        self._read_back(text)
        if "null" in text and not is_finite(self.adapter.serializer.to_python(checked)):
            # What is typed as a float was refused above; inside of `Any` a NaN has become null.
            raise NotJson(f"an argument of {self.name!r}", NOT_FINITE)
        return text

    def _read_back(self, text: str) -> None:
        """What could be written may be nested too deep, or have too many digits, to be read."""
        if is_large(text):
            self.decode(text)

    def _refuse_changed(self, given: dict[str, Any], arrived: dict[str, Any]) -> None:
        """What would reach the function as another value is refused now. No value is named: it may be a secret."""
        if given == arrived:
            return
        # Objects that are only equal to themselves are compared by what they consist of.
        dump = self.adapter.serializer.to_python
        before, after = dump(given, round_trip=True), dump(arrived, round_trip=True)
        changed = [name for name in before if before[name] != after.get(name)]
        if changed:
            why = "it is not the same value after it was written as JSON and read again; pass it in a plain form"
            raise InvalidArguments(self.name, [f"{name}: {why}" for name in changed])

    def decode(self, args: str) -> dict[str, Any]:
        try:
            return self._read(args)
        except ValueError as exc:
            raise self._refusal(exc) from None

    def _refusal(self, exc: ValueError) -> InvalidInput:
        from pydantic import ValidationError

        if isinstance(exc, ValidationError):
            names = [str(error["loc"][0]) for error in exc.errors(include_url=False) if error["loc"]]
            return InvalidArguments(self.name, _problems(exc), names=names)
        return NotJson(f"an argument of {self.name!r}", str(exc))


def make_schema(adapter: TypeAdapter[Any], *, mode: Literal["validation", "serialization"]) -> dict[str, Any] | None:
    """The JSON schema of a type, without the titles that repeat each name and without secret defaults; None if it has
    none."""
    from pydantic.json_schema import GenerateJsonSchema

    class Untitled(GenerateJsonSchema):
        def field_title_should_be_set(self, schema: Any) -> bool:
            return False

        def get_decimal_pattern(self, schema: Any) -> str | None:
            return super().get_decimal_pattern(schema) or DECIMAL

    try:
        schema = adapter.json_schema(mode=mode, schema_generator=Untitled)
        msgspec.json.encode(schema)
    except Exception:  # a type may bring its own code for this, or have a value that JSON cannot carry
        return None
    if schema.get("title") == ARGUMENTS:
        del schema["title"]
    redacted: dict[str, Any] = redact_schema(schema)
    return redacted


def _is_json_value(value: Any) -> bool:
    if isinstance(value, int):
        return abs(value) < 1 << 63
    return value is None or type(value) is str or (isinstance(value, float) and isfinite(value))


DECIMAL = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,4})?$"
"""The texts that stand for a decimal. Pydantic writes no pattern for an unbounded one, so any text would fit."""

PLAIN = frozenset(
    {Any, None, NoneType, bool, int, float, str, bytes, list, tuple, set, frozenset, dict, Union, UnionType, Ellipsis}
    | {datetime, date, time, timedelta, Decimal, UUID, Path, Sequence, Mapping, Iterable, Iterator}
)


def _is_plain(hint: Any) -> bool:
    origin = get_origin(hint)
    if origin is Literal:
        return True
    if origin is not None:
        return origin in PLAIN and all(_is_plain(arg) for arg in get_args(hint))
    return hint in PLAIN or (isinstance(hint, type) and issubclass(hint, Enum))


JSON = frozenset({None, NoneType, bool, int, float, str})


def _is_json(hint: Any) -> bool:
    """Whether a value that was checked against this type is one that JSON has, or a list of such, and nothing else:
    not even of a class derived from it."""
    origin = get_origin(hint)
    if origin is not None:
        return origin in (list, Union, UnionType) and all(_is_json(arg) for arg in get_args(hint))
    return hint in JSON


def _problems(exc: ValidationError) -> list[str]:
    errors = exc.errors(include_url=False)
    return [f"{shorten('.'.join(map(str, e['loc']))) or 'arguments'}: {e['msg']}" for e in errors]


def function_consumer(  # noqa: PLR0913 - the settings of a consumer, each with a name and a default
    function: Callable[..., Any],
    executors: Collection[str] = PLACES,
    *,
    name: str | None = None,
    queue: str = DEFAULT_QUEUE,
    concurrency: int = 1,
    timeout_s: float | None = None,
    retry: RetryPolicy | None = None,
    executor: str | None = None,
    places: Places | Iterable[Place | str] | None = None,
    middleware: Iterable[Middleware] = (),
    version: str = "",
) -> tuple[Consumer, Signature]:
    """A consumer of a function. `executor` is where it runs, if not on the loop (async ones) or in a thread. `version`
    is that of its code, for people to see."""
    name = name or getattr(function, "__name__", "")
    if not name or name == "<lambda>":
        raise InvalidConsumer("this callable has no name of its own; give it one with name='…'")
    is_async = inspect.iscoroutinefunction(function)
    _refuse_generator(name, function)
    signature = Signature(name, function)
    decode = signature.decode

    def call(record: TaskRecord) -> Any:
        return function(**fitting(name, decode, record.args))

    place = check_executor(name, executor, is_async, executors)
    consumer = Consumer(
        name=name,
        encode=signature.encode,
        call=call if is_async else _plainly(name, call),
        is_async=is_async,
        executor=place,
        **check_consumer(name, queue=queue, concurrency=concurrency, timeout_s=timeout_s, retry=retry),
        warm_up=signature.warm_up,
        remote=_find_remote(name, function, place),
        takes_results=any(p.name == "results" or p.kind is p.VAR_KEYWORD for p in signature.parameters),
        encode_many=signature.encode_many,
        places=check_places(name, places, concurrency),
        middleware=check_middleware(middleware),
        version=check_version(version) or None,
        schemas=lambda: signature.schemas,
        function=function,
    )
    return consumer, signature


def check_version(version: object) -> str:
    """A version as people write it; none is an empty text."""
    return "" if version == "" else check_name("version", version)


def check_places(name: str, given: Any, concurrency: int) -> Places | None:
    if given is None:
        return None
    if concurrency != 1:
        raise InvalidConsumer(f"consumer {quote(name)} has places: leave concurrency out, each runs one task")
    if isinstance(given, Places):
        return given
    if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
        raise InvalidConsumer(f"consumer {quote(name)}: places must be a list of places or names, not {quote(given)}")
    try:
        return Places(given)
    except InvalidInput as exc:
        raise InvalidConsumer(f"consumer {quote(name)}: {exc}") from None


def fitting(name: str, decode: Callable[[str], dict[str, Any]], args: str) -> dict[str, Any]:
    """The stored arguments; what is wrong with them is told from what the function itself may raise."""
    try:
        return decode(args)
    except InvalidArguments as exc:
        raise StoredArgumentsInvalid(name, exc.problems, names=exc.names) from None
    except NotJson as exc:
        raise StoredArgumentsInvalid(name, [str(exc)]) from None


def check_settings(settings: dict[str, Any]) -> None:
    """Refuse what `function_consumer` does not take. `concurrent_count` is another name for `concurrency`."""
    if "concurrent_count" in settings:
        if "concurrency" in settings:
            raise InvalidConsumer("concurrent_count is another name for concurrency: leave one of them out")
        settings["concurrency"] = settings.pop("concurrent_count")
    known = function_consumer.__kwdefaults__ or {}
    unknown = sorted(settings.keys() - known.keys())
    if unknown:
        from taskyard.execution.pool_settings import PoolSettings

        advice = f"known are {', '.join(known)}"
        if set(unknown) <= set(PoolSettings.__struct_fields__):
            advice = "that is a matter of its pool: yard.define_pool(…)"
        raise InvalidConsumer(f"a consumer has no {', '.join(map(quote, unknown))}; {advice}")


def _find_remote(name: str, function: Callable[..., Any], place: str) -> RemoteFunction | None:
    """The function for other processes. Only the process pools need one; an executor of somebody else's may."""
    if place in (INLINE, THREAD):
        return None
    try:
        return RemoteFunction.of(name, function)
    except InvalidConsumer:
        if place in PLACES:
            raise
        return None


def class_consumer(instance: BaseTaskConsumer, executors: Collection[str] = PLACES) -> Consumer:
    """A consumer of an instance of the class form. `concurrent_count` is the name that the class form has for the
    concurrency; a missing or invalid one is 1."""
    count = getattr(instance, "concurrency", getattr(instance, "concurrent_count", 1))
    is_async = inspect.iscoroutinefunction(instance.consume)
    place = check_executor(instance.name, getattr(instance, "executor", None), is_async, executors)
    _refuse_generator(instance.name, instance.consume)

    def call(record: TaskRecord) -> Any:
        return instance.consume(record.task)

    def encode(args: Mapping[str, Any]) -> str:
        return to_json(f"the arguments of {instance.name!r}", args)

    return Consumer(
        name=instance.name,
        encode=encode,
        produce=instance.produce,
        call=call if is_async else _plainly(instance.name, call),
        is_async=is_async,
        executor=place,
        remote=None if place in (INLINE, THREAD) else RemoteInstance(instance),
        takes_results=True,
        **check_consumer(
            instance.name,
            queue=getattr(instance, "queue", DEFAULT_QUEUE),
            concurrency=count if isinstance(count, int) and not isinstance(count, bool) and count > 0 else 1,
            timeout_s=getattr(instance, "timeout_s", None),
            retry=getattr(instance, "retry", None),
        ),
        places=check_places(instance.name, getattr(instance, "places", None), count),
        middleware=check_middleware(getattr(instance, "middleware", ())),
        version=check_version(getattr(instance, "version", "")) or None,
        function=instance.consume,
    )


def _refuse_generator(name: str, function: Callable[..., Any]) -> None:
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise InvalidConsumer(
            f"consumer {quote(name)} is a generator, whose code would never run; return a value instead of yielding, "
            "and report what happens meanwhile with current_run().progress()"
        )


def _plainly(name: str, call: Callable[[TaskRecord], Any]) -> Callable[[TaskRecord], Any]:
    """`call`, refusing what only looks like a plain function: a coroutine that nobody awaits has done nothing."""

    def checked(record: TaskRecord) -> Any:
        result = call(record)
        if inspect.iscoroutine(result):
            result.close()
            raise TypeError(
                f"consumer {quote(name)} returned a coroutine; write it, and what decorates it, as `async def`"
            )
        return result

    return checked


def check_consumer(
    name: str, *, queue: object, concurrency: object, timeout_s: object, retry: object
) -> dict[str, Any]:
    """The settings that every form of consumer has, checked."""
    try:
        if SEPARATOR in check_name("name", name):
            raise InvalidInput("name must not have the control character U+001F in it")
        return {
            "queue": check_name("queue", queue),
            "concurrency": check_count("concurrency", concurrency, least=1),
            "timeout_s": None if timeout_s is None else check_timeout(timeout_s),
            "retry": None if retry is None else check_retry(retry),
        }
    except InvalidInput as exc:
        raise InvalidConsumer(f"consumer {quote(name)}: {exc}") from None


def check_executor(name: str, asked: object, is_async: bool, known: Collection[str] = PLACES) -> str:
    """Where it runs. Both kinds of functions run everywhere; a plain one blocks the event loop only if it is asked."""
    if asked is None:
        return INLINE if is_async else THREAD
    if not isinstance(asked, str) or asked not in known:
        words = ", ".join(map(repr, known))
        raise InvalidConsumer(f"consumer {quote(name)}: there is no executor={quote(asked)}; the words are {words}")
    return asked


def check_executors(given: Mapping[str, ExecutorFactory] | None) -> dict[str, ExecutorFactory]:
    """The executors that a yard is given beside its own, by name."""
    checked = dict(given or {})
    for name, factory in checked.items():
        check_factory(name, factory, taken=PLACES)
    return checked


@dataclass(frozen=True)
class RemoteFunction:
    """A function consumer on its way to a worker process, by name. There it becomes what the import finds: the consumer
    that a decorator made of it, or one made anew, with its signature read. All of that is loading, like the import
    itself, and is not held against the timeout of the first run."""

    crosses_by_name: ClassVar = True

    name: str
    module: str
    path: str

    @staticmethod
    def of(name: str, function: Callable[..., Any]) -> RemoteFunction:
        module, path = getattr(function, "__module__", None), getattr(function, "__qualname__", "<")
        if module is None or "<" in path:
            raise InvalidConsumer(
                f"consumer {quote(name)} cannot be found by a worker process; define it at the top level of a module"
            )
        return RemoteFunction(name, module, path)

    @property
    def wire_key(self) -> tuple[str, str]:
        """What a worker has to load for it."""
        return self.module, f"{self.path} as {self.name}"

    def __reduce__(self) -> tuple[Any, ...]:
        return load_consumer, (self.name, self.module, self.path)

    def __call__(self, record: TaskRecord) -> Any:
        raise NotImplementedError("it runs in a worker process only")


@cache
def load_consumer(name: str, module: str, path: str) -> Callable[[TaskRecord], Any]:
    """In a worker process: what runs the tasks of a function consumer, with nothing left to load."""
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    consumer = getattr(found, "consumer", None)
    if not isinstance(consumer, Consumer):
        consumer, _ = function_consumer(found, name=name)
    if consumer.warm_up is not None:
        consumer.warm_up()
    return consumer.call


@dataclass
class RemoteInstance:
    """A consumer of the class form as a worker process gets it: a copy of the instance."""

    instance: BaseTaskConsumer

    @property
    def wire_key(self) -> tuple[str, str]:
        """What a worker has to import for it."""
        return type(self.instance).__module__, type(self.instance).__qualname__

    def __call__(self, record: TaskRecord) -> Any:
        consume = self.instance.consume
        if inspect.iscoroutinefunction(consume):
            return consume(record.task)  # a coroutine, which the worker runs
        return _plainly(self.instance.name, lambda record: consume(record.task))(record)
