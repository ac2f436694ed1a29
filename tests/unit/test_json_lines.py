"""Log records as JSON."""

import json
import logging
import sys
from typing import Any

from taskyard.telemetry import JsonFormatter
from taskyard.testing.samples import a_record


def formatted(text: str, *args: object, exc_info: Any = None, **fields: Any) -> dict[str, Any]:
    record = logging.getLogger("app").makeRecord("app", logging.INFO, "f", 1, text, args, exc_info, extra=fields)
    line = JsonFormatter().format(record)
    assert "\n" not in line
    found: dict[str, Any] = json.loads(line)
    return found


def test_fields_of_any_kind_are_written():
    """A field is written with its value, or as text if JSON cannot hold it; a newline does not end the line."""
    line = formatted("%s done\nnow", 3, request_id="r", trace_id="t", size=3, path={"a": [1]}, odd=object)
    assert (line["level"], line["logger"], line["message"]) == ("info", "app", "3 done\nnow")
    assert (line["requestId"], line["traceId"], line["size"], line["path"]) == ("r", "t", 3, {"a": [1]})
    assert line["odd"] == "<class 'object'>"
    assert line["time"].endswith("+00:00")


def test_secrets_are_hidden_in_every_text():
    """The secrets of a task are hidden in the message, in fields and in the traceback, and the record of the task is
    left out; passwords in addresses are hidden for everybody."""
    task = a_record(args='{"password":"hunter22"}')
    try:
        raise ValueError("not hunter22")
    except ValueError:
        line = formatted("hunter22", exc_info=sys.exc_info(), task_record=task, run_line="hunter22", why="hunter22")
    assert (line["message"], line["why"]) == ("***", "***")
    assert "ValueError: not ***" in line["exception"]
    assert "hunter22" not in json.dumps(line)
    assert not line.keys() & {"task_record", "run_line"}
    assert "sesame" not in formatted("postgresql://app:sesame@host/db")["message"]


def test_half_a_character_is_written():
    """A text with a lone surrogate is one line of JSON all the same."""
    assert formatted("\ud800")["message"] == "\ud800"
