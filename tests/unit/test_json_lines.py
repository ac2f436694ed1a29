"""Log records as JSON."""

import json
import logging
import math
import sys
from typing import Any

import pytest

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


class Mute:
    """Has no text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_no_value_costs_the_line():
    """Keys of any kind, numbers that JSON lacks, values without a text and values that contain themselves are written;
    the line is JSON by any parser."""
    circle: list[Any] = [1]
    circle.append(circle)
    line = formatted("done", ctx={(1, 2): 3}, rate=math.nan, most=[-math.inf], mute=Mute(), circle=circle)
    assert (line["ctx"], line["rate"], line["most"], line["mute"]) == ({"(1, 2)": 3}, "nan", ["-inf"], "<Mute>")
    assert line["circle"] == [1, "<list>"]


def test_secrets_inside_of_fields_are_hidden():
    """Passwords of addresses, texts of secret names and secrets of the task are hidden at any depth, also in keys."""
    task = a_record(args='{"password":"hunter22"}')
    ctx = {"url": "postgresql://u:sesame@h/d", "parts": [{"hunter22": ("a hunter22",)}], "api_key": "open"}
    line = formatted("done", task_record=task, ctx=ctx, db_password="sesame")
    assert line["ctx"] == {"url": "postgresql://u:***@h/d", "parts": [{"***": ["a ***"]}], "api_key": "***"}
    assert line["db_password"] == "***"


@pytest.mark.parametrize("name", ["time", "level", "logger"])
def test_a_field_never_replaces_a_fixed_name(name):
    """A field with the name of a fixed one is left out; so is `exception` if the record has a traceback."""
    fixed = formatted("done")
    line = formatted("done", **{name: "mine"})
    assert line[name] == fixed[name] or (name == "time" and line[name].endswith("+00:00"))
    try:
        raise ValueError("from the code")
    except ValueError:
        assert "ValueError: from the code" in formatted("x", exc_info=sys.exc_info(), exception="mine")["exception"]


def test_a_stack_is_written():
    """The stack of `stack_info=True` is a field of the line, without passwords."""
    record = logging.getLogger("app").makeRecord("app", logging.INFO, "f", 1, "x", (), None, sinfo="at ://a:sesame@h")
    assert json.loads(JsonFormatter().format(record))["stack"] == "at ://a:***@h"
