"""Checks a JSON value against a JSON Schema, and converts text where the schema wants a number or a truth value.

It knows the keywords that pydantic writes for function signatures. A keyword that it does not know is not checked: the
worker checks the arguments again with the types themselves, and its answer is final.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from datetime import date, datetime
from math import isfinite
from typing import Any, NamedTuple
from uuid import UUID

from taskyard.errors import quote

JsonSchema = Mapping[str, Any]

Path = tuple[str | int, ...]
"""Where in a value: names of objects and indexes of arrays."""


class Misfit(NamedTuple):
    """Something in a value that does not fit."""

    path: Path
    problem: str

    def __str__(self) -> str:
        return f"{'.'.join(map(str, self.path)) or 'value'}: {self.problem}"


class Fitted(NamedTuple):
    """A value after conversion, and what does not fit."""

    value: Any
    misfits: list[Misfit]


def fit(schema: JsonSchema | bool, value: Any) -> Fitted:
    """Check `value` against a whole schema, with its `$defs`."""
    return _Check(schema if isinstance(schema, Mapping) else {}).fit(schema, value, ())


NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
INTEGER = re.compile(r"[+-]?\d{1,4000}")
WORDS = {"true": True, "false": False}

NAMES = {
    "string": "a string",
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "null": "null",
    "array": "an array",
    "object": "an object",
}


def _is_integer(value: Any) -> bool:
    return (isinstance(value, int) and not isinstance(value, bool)) or (isinstance(value, float) and value.is_integer())


IS: dict[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "integer": _is_integer,
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "array": lambda value: isinstance(value, list | tuple),
    "object": lambda value: isinstance(value, Mapping),
}

FORMATS: dict[str, tuple[Callable[[str], object], str]] = {
    "date-time": (datetime.fromisoformat, "a date and time such as 2030-01-31T12:00:00Z"),
    "date": (date.fromisoformat, "a date such as 2030-01-31"),
    "uuid": (UUID, "a UUID"),
}

BOUNDS: tuple[tuple[str, Callable[[Any, Any], bool], str], ...] = (
    ("minimum", lambda value, bound: value >= bound, "at least"),
    ("maximum", lambda value, bound: value <= bound, "at most"),
    ("exclusiveMinimum", lambda value, bound: value > bound, "greater than"),
    ("exclusiveMaximum", lambda value, bound: value < bound, "less than"),
)


def _read(text: str, kinds: Iterable[str]) -> Any:
    """The value that a text stands for where one of these types is wanted; else the text."""
    if "integer" in kinds and INTEGER.fullmatch(text):
        return int(text)
    if "number" in kinds and NUMBER.fullmatch(text) and isfinite(float(text)):
        return int(text) if INTEGER.fullmatch(text) else float(text)
    return WORDS.get(text, text) if "boolean" in kinds else text


class _Check:
    def __init__(self, root: JsonSchema) -> None:
        self._root = root

    def fit(self, schema: JsonSchema | bool, value: Any, path: Path) -> Fitted:
        if isinstance(schema, bool):
            return Fitted(value, [] if schema else [Misfit(path, "is not allowed")])
        misfits: list[Misfit] = []
        if "$ref" in schema:
            value, found = self.fit(self._resolve(schema["$ref"]), value, path)
            misfits += found
        for part in schema.get("allOf", ()):
            value, found = self.fit(part, value, path)
            misfits += found
        choices = schema.get("anyOf") or schema.get("oneOf")
        if choices:
            value, found = self._choose(choices, value, path)
            misfits += found
        value, found = self._fit_type(schema, value, path)
        return Fitted(value, misfits + found)

    def _resolve(self, reference: str) -> JsonSchema | bool:
        found: Any = self._root
        for part in reference.removeprefix("#").strip("/").split("/"):
            found = found.get(part.replace("~1", "/").replace("~0", "~"), {}) if isinstance(found, Mapping) else {}
        return found if isinstance(found, Mapping | bool) else {}

    def _choose(self, choices: Iterable[JsonSchema | bool], value: Any, path: Path) -> Fitted:
        """The first choice that fits as it is, else the first that fits after a conversion."""
        tried = [self.fit(choice, value, path) for choice in choices]
        fitting = [one for one in tried if not one.misfits]
        for one in fitting:
            if one.value is value or (type(one.value) is type(value) and one.value == value):
                return one
        if fitting:
            return fitting[0]
        # A choice whose type is right says more about what is wrong than the list of all types.
        deep = [one for one in tried if any(len(misfit.path) > len(path) for misfit in one.misfits)]
        if len(deep) == 1:
            return deep[0]
        problems = dict.fromkeys(misfit.problem for one in tried for misfit in one.misfits if misfit.path == path)
        return Fitted(value, [Misfit(path, ", or ".join(problems) or "fits none of the choices")])

    def _fit_type(self, schema: JsonSchema, value: Any, path: Path) -> Fitted:
        if "const" in schema and not _equals(value, schema["const"]):
            return Fitted(value, [Misfit(path, f"must be {quote(schema['const'])}, not {quote(value)}")])
        if "enum" in schema and not any(_equals(value, one) for one in schema["enum"]):
            known = ", ".join(map(quote, schema["enum"]))
            return Fitted(value, [Misfit(path, f"must be one of {known}, not {quote(value)}")])
        asked = schema.get("type")
        kinds = [asked] if isinstance(asked, str) else list(asked or ())
        if kinds and isinstance(value, str) and "string" not in kinds:
            value = _read(value, kinds)
        if kinds and not any(IS[kind](value) for kind in kinds if kind in IS):
            wanted = " or ".join(NAMES.get(kind, kind) for kind in kinds)
            return Fitted(value, [Misfit(path, f"must be {wanted}, not {quote(value)}")])
        match value:
            case bool() | None:
                return Fitted(value, [])
            case str():
                return Fitted(value, [Misfit(path, problem) for problem in _text_problems(schema, value)])
            case int() | float():
                return Fitted(value, [Misfit(path, problem) for problem in _number_problems(schema, value)])
            case list() | tuple():
                return self._fit_array(schema, value, path)
            case Mapping():
                return self._fit_object(schema, value, path)
        return Fitted(value, [])

    def _fit_array(self, schema: JsonSchema, value: list[Any] | tuple[Any, ...], path: Path) -> Fitted:
        misfits: list[Misfit] = []
        if len(value) < schema.get("minItems", 0):
            misfits.append(Misfit(path, f"must have at least {schema['minItems']} items, not {len(value)}"))
        if "maxItems" in schema and len(value) > schema["maxItems"]:
            misfits.append(Misfit(path, f"must have at most {schema['maxItems']} items, not {len(value)}"))
        first = schema.get("prefixItems", ())
        rest = schema.get("items", True)
        items = []
        for n, item in enumerate(value):
            fitted = self.fit(first[n] if n < len(first) else rest, item, (*path, n))
            items.append(fitted.value)
            misfits += fitted.misfits
        return Fitted(items, misfits)

    def _fit_object(self, schema: JsonSchema, value: Mapping[str, Any], path: Path) -> Fitted:
        properties = schema.get("properties", {})
        misfits = [Misfit((*path, name), "is missing") for name in schema.get("required", ()) if name not in value]
        others, fitted = schema.get("additionalProperties", True), dict[str, Any]()
        for name, item in value.items():
            if name not in properties and others is False:
                known = ", ".join(properties) or "none"
                misfits.append(Misfit((*path, name), f"is unknown; known are: {known}"))
                continue
            one = self.fit(properties.get(name, others), item, (*path, name))
            fitted[name] = one.value
            misfits += one.misfits
        return Fitted(fitted, misfits)


def _equals(value: Any, other: Any) -> bool:
    """As JSON has it: true is not 1."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def _text_problems(schema: JsonSchema, value: str) -> list[str]:
    if len(value) < schema.get("minLength", 0):
        return [f"must have at least {schema['minLength']} characters"]
    if "maxLength" in schema and len(value) > schema["maxLength"]:
        return [f"must have at most {schema['maxLength']} characters, not {len(value)}"]
    if "pattern" in schema and not _matches(schema["pattern"], value):
        return [f"must match {schema['pattern']}"]
    parse, wanted = FORMATS.get(schema.get("format", ""), (None, ""))
    if parse is not None:
        try:
            parse(value)
        except ValueError:
            return [f"must be {wanted}, not {quote(value)}"]
    return []


def _matches(pattern: str, value: str) -> bool:
    try:
        return re.search(pattern, value) is not None
    except re.error:
        return True  # written for another dialect: the worker judges


def _number_problems(schema: JsonSchema, value: float) -> list[str]:
    problems = [
        f"must be {words} {schema[name]}, not {value}"
        for name, is_kept, words in BOUNDS
        if name in schema and not is_kept(value, schema[name])
    ]
    multiple = schema.get("multipleOf")
    if isinstance(multiple, int) and multiple and value % multiple:
        problems.append(f"must be a multiple of {multiple}, not {value}")
    return problems
