"""Log records as JSON, one object a line."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any

from taskyard.errors import hide_password
from taskyard.model.redaction import Redactor

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_LEFT_OUT = frozenset({"task_record", "run_line", "is_task_failure"})

NAMES = {"request_id": "requestId", "trace_id": "traceId"}
"""Fields whose name in JSON is another than that of the attribute."""


class JsonFormatter(logging.Formatter):
    """Time, level, logger, message, every other field of the record, and its traceback as `exception`. The secrets
    among the arguments of a task are hidden in texts. A value that JSON cannot hold is written as its text."""

    def format(self, record: logging.LogRecord) -> str:
        task = getattr(record, "task_record", None)
        hide = hide_password if task is None else Redactor(task).text
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": hide(record.getMessage()),
        }
        for name, value in vars(record).items():
            if name not in _STANDARD and name not in _LEFT_OUT:
                line[NAMES.get(name, name)] = hide(value) if isinstance(value, str) else value
        if record.exc_info:
            line["exception"] = hide(self.formatException(record.exc_info))
        return json.dumps(line, default=str)
