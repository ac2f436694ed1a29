"""What the public verbs take: whatever is handed in is of a kind that the signature names, or is told to be none.

The annotations are the one place where kinds are written down. What a value of the right kind may be, how long or how
late, the checks of `model.given` say.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from enum import Enum
from functools import cached_property, wraps
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin

from taskyard.errors import InvalidInput

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)

_WORDS: dict[type, str] = {
    str: "a string",
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    datetime: "a datetime with a time zone",
    NoneType: "None",
    Mapping: "a dict",
    Sequence: "a list",
    Iterable: "a list",
}


def checked_verbs(cls: C) -> C:
    """A class whose public methods are all `checked`."""
    for name, method in list(vars(cls).items()):
        if inspect.isfunction(method) and not name.startswith("_"):
            setattr(cls, name, checked(method))
    return cls


def checked(verb: F) -> F:
    """A function or method that raises `InvalidInput` for an argument that is of none of the kinds its annotation
    names. One that yields has checks of its own: it is called before it is begun."""
    taken = _Taken(verb)
    if inspect.isasyncgenfunction(verb):
        return verb
    if inspect.iscoroutinefunction(verb):

        @wraps(verb)
        async def ask(*args: Any, **kwargs: Any) -> Any:
            taken.check(args, kwargs)
            return await verb(*args, **kwargs)

        return cast("F", ask)

    @wraps(verb)
    def call(*args: Any, **kwargs: Any) -> Any:
        taken.check(args, kwargs)
        return verb(*args, **kwargs)

    return cast("F", call)


class _Taken:
    """What one function takes. It is looked at when it is first called: a class may be named before it is defined."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    @cached_property
    def _signature(self) -> inspect.Signature:
        return inspect.signature(self._function, eval_str=True)

    @cached_property
    def _kinds(self) -> dict[str, tuple[type, ...]]:
        found = {
            name: tuple(_kinds_of(one.annotation))
            for name, one in self._signature.parameters.items()
            if one.kind is not one.VAR_KEYWORD and one.annotation is not one.empty
        }
        return {name: kinds for name, kinds in found.items() if not any(map(_says_nothing, kinds))}

    def check(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        for name, value in self._signature.bind(*args, **kwargs).arguments.items():
            kinds, parameter = self._kinds.get(name), self._signature.parameters[name]
            for one in value if parameter.kind is parameter.VAR_POSITIONAL else (value,):
                if kinds is not None and not _is_one(one, kinds):
                    raise InvalidInput(_kinds_text(kinds), field=name, given=one, hint=_hint(one, kinds))


def _kinds_text(kinds: Sequence[type]) -> str:
    return "must be " + " or ".join(_WORDS.get(kind) or f"a {kind.__name__}" for kind in kinds)


def _hint(value: Any, kinds: Sequence[type]) -> str:
    return "give its uuid" if str in kinds and hasattr(value, "uuid") else ""


def _kinds_of(annotation: Any) -> Iterator[type]:
    """The classes that it names; `object` where it names something else."""
    origin = get_origin(annotation)
    if origin in {Union, UnionType}:
        for part in get_args(annotation):
            yield from _kinds_of(part)
        return
    kind = origin or annotation
    yield NoneType if kind is None else kind if isinstance(kind, type) else object


def _says_nothing(kind: type) -> bool:
    """Whether there is nothing to ask of such a kind here: anything fits, or, of an enum, its names do as well."""
    return kind is object or issubclass(kind, Enum) or getattr(kind, "_is_protocol", False)


def _is_one(value: Any, kinds: tuple[type, ...]) -> bool:
    if isinstance(value, bool):  # which is no number, whatever Python says
        return bool in kinds
    if isinstance(value, str | bytes):  # and a text is no list of texts
        return type(value) in kinds or (isinstance(value, str) and str in kinds)
    return isinstance(value, kinds) or (float in kinds and isinstance(value, int))
