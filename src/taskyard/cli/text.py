"""Words for people: task data made safe for a terminal, secrets hidden, times and sizes in few characters.

Whatever a task carries was written by somebody else. It reaches the terminal only through `clean`, as plain text: no
control character, no markup, no text that runs backwards.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import msgspec

from taskyard.application.formatting import counted as counted  # noqa: PLC0414
from taskyard.application.formatting import cut as cut  # noqa: PLC0414
from taskyard.application.formatting import duration as duration  # noqa: PLC0414
from taskyard.application.formatting import seconds_between as seconds_between  # noqa: PLC0414
from taskyard.application.formatting import size as size  # noqa: PLC0414

# C0 and C1 controls (0x9B alone starts an escape sequence on some terminals), line and paragraph separators, marks that
# turn the direction of writing, invisible tags, lone surrogates.
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff\U000e0000-\U000e007f]"
)
_UNSAFE_IN_LINES = re.compile(_UNSAFE.pattern.replace("\x00-\x1f", "\x00-\x08\x0b-\x1f"))

# --- safe -------------------------------------------------------------------------------------------------------------


def clean(text: str, *, lines: bool = False) -> str:
    """`text` with everything that could steer a terminal written out, as in `\\x1b`. With `lines`, newlines and tabs
    stay."""
    pattern = _UNSAFE_IN_LINES if lines else _UNSAFE
    return pattern.sub(_written_out, text)


def _written_out(found: re.Match[str]) -> str:
    code = ord(found[0])
    short = {9: "\\t", 10: "\\n", 13: "\\r"}.get(code)
    if short is not None:
        return short
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def clean_json(text: str) -> str:
    """JSON whose strings carry no such character raw. JSON itself only asks for the first 32 of them to be escaped."""
    return _UNSAFE_IN_LINES.sub(_json_escape, text)


def _json_escape(found: re.Match[str]) -> str:
    raw = found[0].encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{raw[i : i + 4]}" for i in range(0, len(raw), 4))


def label_text(labels: Mapping[str, str]) -> str:
    """`customer=42 region=eu`."""
    return " ".join(f"{name}={value}" for name, value in sorted(labels.items()))


def one_line(text: str, width: int) -> str:
    """The first line of `text`, safe, and at most `width` characters long."""
    first, _, rest = text.strip().partition("\n")
    return cut(clean(first.rstrip()) + (" …" if rest.strip() else ""), width)


def cut_start(text: str, width: int) -> str:
    """The end of a path says more than its beginning."""
    return text if len(text) <= width else "…" + text[len(text) - max(0, width - 1) :]


# --- short ------------------------------------------------------------------------------------------------------------


def short_id(uuid: str) -> str:
    """The end of an id. Ids that were made together begin alike; their ends differ."""
    return clean(uuid[-8:])


def age(seconds: float | None) -> str:
    """The same in one unit, for a narrow column: `8s`, `4m`, `2h`, `3d`."""
    if seconds is None:
        return ""
    for name, unit in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= unit:
            return f"{seconds / unit:.0f}{name}"
    return f"{seconds:.0f}s"


def clock_time(at: datetime) -> str:
    """The local time of day, to the millisecond."""
    return at.astimezone().strftime("%H:%M:%S.%f")[:-3]


def time_text(at: datetime | None, now: datetime) -> str:
    """When something will be, in few characters: `now`, `in 12 s`, `18:02:05`, `18:02`, `Nov 20 09:15`."""
    if at is None:
        return ""
    left_s = (at - now).total_seconds()
    if left_s < 0.5:
        return "now"
    if left_s < 60:
        return f"in {left_s:.0f} s"
    local, today = at.astimezone(), now.astimezone()
    if local.date() != today.date() and left_s > 43_200:
        return f"{local:%b %d %H:%M}"
    return f"{local:%H:%M:%S}" if left_s < 600 else f"{local:%H:%M}"


def moment(at: datetime | None) -> str:
    """Local date and time with its zone."""
    return "" if at is None else at.astimezone().strftime("%Y-%m-%d %H:%M:%S %z")


def as_short_json(value: Any) -> str:
    """A value in one line: a text without its quotes, a flat object as `name: value, …`, all else as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict) and value and not any(isinstance(one, dict | list) for one in value.values()):
        return ", ".join(f"{name}: {as_short_json(one)}" for name, one in value.items())
    return msgspec.json.encode(value).decode()
