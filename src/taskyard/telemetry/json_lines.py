"""Log records as JSON, one object a line."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from taskyard.errors import HIDDEN, hide_password
from taskyard.model.redaction import Redactor, is_secret_name

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_LEFT_OUT = frozenset({"task_record", "run_line", "is_task_failure"})

NAMES = {"request_id": "requestId", "trace_id": "traceId"}
"""Fields whose name in JSON is another than that of the attribute."""

MAX_DEPTH = 20
"""Levels: a deeper container, and one that contains itself, is written as its type."""


class JsonFormatter(logging.Formatter):
    """Time, level, logger, message, every other field of the record, and its traceback as `exception`. The secrets
    among the arguments of a task, the passwords of addresses and texts of secret names are hidden, also inside of
    fields. A value that JSON cannot hold is written as its text. A field never replaces one of the fixed names."""

    def format(self, record: logging.LogRecord) -> str:
        task = getattr(record, "task_record", None)
        hide = hide_password if task is None else Redactor(task).text
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": hide(record.getMessage()),
        }
        if record.exc_info:
            line["exception"] = hide(self.formatException(record.exc_info))
        elif record.exc_text:
            line["exception"] = hide(record.exc_text)
        if record.stack_info:
            line["stack"] = hide(self.formatStack(record.stack_info))
        for name, value in vars(record).items():
            if name not in _STANDARD and name not in _LEFT_OUT:
                line.setdefault(NAMES.get(name, name), _field(name, value, hide))
        return json.dumps(line, allow_nan=False)


def _to_json(value: Any, hide: Callable[[str], str], parents: tuple[int, ...] = ()) -> Any:
    """The value as JSON can hold it, its texts without secrets. `parents` are the containers it is in."""
    if isinstance(value, str):
        return hide(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    if not isinstance(value, Mapping | list | tuple):
        return hide(_text(value))
    if id(value) in parents or len(parents) >= MAX_DEPTH:
        return f"<{type(value).__name__}>"  # its text would show secrets inside
    parents = (*parents, id(value))
    if isinstance(value, Mapping):
        return {hide(_text(name)): _field(name, one, hide, parents) for name, one in value.items()}
    return [_to_json(one, hide, parents) for one in value]


def _field(name: Any, value: Any, hide: Callable[[str], str], parents: tuple[int, ...] = ()) -> Any:
    if isinstance(name, str) and isinstance(value, str) and value and is_secret_name(name):
        return HIDDEN
    return _to_json(value, hide, parents)


def _text(value: Any) -> str:
    try:
        return str(value)
    except Exception:  # a bad __str__ must not cost the line
        return f"<{type(value).__name__}>"
