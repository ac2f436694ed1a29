"""The setting with which a peer is fastest here: tried, not assumed."""

import sys
from collections.abc import Callable, Sequence

from benchmarks.sides import Side

Arguments = dict[str, object]


def fastest(make: Callable[[Arguments], Side], settings: Sequence[Arguments]) -> Arguments:
    """Each is read once; the one with the highest rate."""
    sides = [make(setting) for setting in settings]
    rates = [side.read().value for side in sides]
    rate, name, setting = max(
        ((rate, side.name, setting) for rate, side, setting in zip(rates, sides, settings, strict=True)),
        key=lambda tried: tried[0],
    )
    print(f"    {name} is fastest with {setting}: {rate:,.0f}/s", file=sys.stderr, flush=True)
    return setting
