"""One measured value, and the proof that the work behind it was done."""

from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any


class Unit(Enum):
    RATE = "/s"
    SECONDS = "s"
    BYTES = "B"


@dataclass(frozen=True, slots=True)
class Reading:
    """What a side reports: a value, how much it was given and how much its store holds of it afterwards."""

    value: float
    given: int
    held: int
    # Further values of the same run, by name: what a scenario needs beside the one that is compared.
    also: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Reading":
        return cls(**fields)


def percentile(values: list[float], percent: float) -> float:
    """The smallest value that at least `percent` of the values do not exceed."""
    ordered = sorted(values)
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(0, int(rank) - 1)]


def format_value(value: float, unit: Unit) -> str:
    match unit:
        case Unit.RATE:
            return f"{value:,.0f}/s"
        case Unit.SECONDS if abs(value) < 1e-3:
            return f"{value * 1e6:.0f} µs"
        case Unit.SECONDS:
            return f"{value * 1e3:.2f} ms"
        case Unit.BYTES if abs(value) < 1e5:
            return f"{value / 1e3:.1f} kB"
        case Unit.BYTES:
            return f"{value / 1e6:.1f} MB"
