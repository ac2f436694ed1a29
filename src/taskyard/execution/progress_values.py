"""Brings progress, notes and facts into the form in which they are kept. Never raises: no report fails a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from taskyard.model.execution import Fact
from taskyard.ports.explain import clean

PROGRESS_INTERVAL_S = 0.25
"""Progress is written to the store: a run that reports more often than this is thinned out, its last report kept."""

TEXT_CHARS = 500
"""Characters kept of a progress message or a note."""

FACTS_KEPT = 16
"""Facts that one progress may carry."""

FACT_NAME_CHARS = 40
"""Characters in the name of a fact."""

FACT_CHARS = 200
"""Characters kept of a fact that is a text."""

LARGEST_FACT = 2**63 - 1
"""The largest integer that every store can hold."""


def clip_text(text: object) -> str:
    """The text of any object, cut to `TEXT_CHARS`."""
    try:
        clipped = str(text)
    except Exception as broken:
        clipped = f"{type(text).__name__}, whose text could not be read: {type(broken).__name__}"
    return clean(clipped[:TEXT_CHARS])[:TEXT_CHARS]


def merge_text(text: object, args: tuple[object, ...]) -> str:
    """A message and its arguments in one, as `logging` does it; side by side if they do not fit."""
    try:
        return str(text) % args if args else str(text)
    except Exception:
        return " ".join([clip_text(text), *map(safe_repr, args)])


def safe_repr(value: object) -> str:
    """The repr of any object, or the name of its class."""
    try:
        return repr(value)
    except Exception:
        return type(value).__name__


def keep_facts(given: Mapping[str, Any]) -> dict[str, Fact]:
    """The facts that can be kept: at most `FACTS_KEPT`, each a number or a text under a short name."""
    kept: dict[str, Fact] = {}
    for name, value in given.items():
        fact = _fact_of(value)
        if fact is not None and len(name) <= FACT_NAME_CHARS and name.isidentifier() and len(kept) < FACTS_KEPT:
            kept[name] = fact
    return kept


def _fact_of(value: Any) -> Fact | None:
    """The value as one of the plain types: a number of NumPy's, or a member of an enum, may be a subclass of them."""
    try:
        if isinstance(value, bool):
            return value
        if isinstance(value, int):
            return int(value) if -LARGEST_FACT <= value <= LARGEST_FACT else None
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else None
        return clean(str(value)[:FACT_CHARS])[:FACT_CHARS] if isinstance(value, str) else None
    except Exception:
        return None


def clamp_fraction(value: object) -> float | None:
    number = to_float(value)
    if number is None:
        return None
    # `not (x > 0)` is true of NaN as well.
    return 0.0 if not number > 0 else min(number, 1.0)


def finite_number(value: object) -> float | None:
    """A number that JSON has, or None."""
    number = to_float(value)
    return number if number is not None and math.isfinite(number) else None


def to_float(value: Any) -> float | None:
    try:
        return None if value is None else float(value)
    except Exception:
        return None
