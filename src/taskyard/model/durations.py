"""Durations as people read them."""

from __future__ import annotations


def duration(seconds: float | None) -> str:
    """`85 ms`, `3.2 s`, `4 min 10 s`, `2 h 5 min`, `3 d 4 h`."""
    if seconds is None:
        return ""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    return _two_units(round(seconds), (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)))


def _two_units(left: int, units: tuple[tuple[str, int], ...]) -> str:
    parts: list[str] = []
    for name, size in units:
        if left >= size or parts:
            parts.append(f"{left // size} {name}" if left // size else "")
            left %= size
        if len(parts) == 2:
            break
    return " ".join(filter(None, parts))
