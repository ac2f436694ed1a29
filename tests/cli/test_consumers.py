"""`taskyard consumer ls`, and submits that are checked by what workers have published."""

import json
import signal

from taskyard.application.consumer_documents import ConsumerDocument
from taskyard.cli.consumers import arguments_text
from tests.cli.shell import Shell


def test_consumers_are_listed_with_their_arguments(shell: Shell) -> None:
    """Each consumer of a worker is a line with queue, executor, node and arguments; --json has the schemas."""
    shell.start_worker()
    done = shell.ok("consumer", "ls", "--store", shell.url)
    (line,) = [line for line in done.out.splitlines() if line.startswith("add ")]
    assert "default" in line
    assert "inline" in line
    found = {one["name"]: one for one in shell.ok("consumer", "ls", "--store", shell.url, "--json").json}
    assert list(found) == sorted(found)
    add = found["add"]
    assert (add["served"], len(add["nodes"]), add["queue"], add["result_schema"]) == (
        True,
        1,
        "default",
        {"type": "integer"},
    )
    assert add["args_schema"]["properties"]["b"] == {"type": "integer", "default": 1}
    assert found["boom"]["queue"] == "cpu"


REFUSED = {
    "add": "a: is missing",
    "add a=1 c=2": "c: is unknown; known are: a, b",
    "add a=x": "a: must be an integer, not 'x'",
    "add a=1.5": "a: must be an integer, not 1.5",
}


def test_a_submit_is_checked_without_the_app(shell: Shell) -> None:
    """With the store alone, arguments that do not fit are refused by name, nothing is stored, and text is converted
    where the consumer wants text or a number."""
    worker = shell.start_worker()
    for arguments, problem in REFUSED.items():
        refused = shell.run("submit", *arguments.split(), "--store", shell.url)
        assert (refused.code, refused.out) == (1, "")
        assert problem in refused.err
    text = shell.ok("submit", "boom", "why=[1]", "--store", shell.url)
    assert json.loads(shell.record(text.out.strip()).args) == {"why": "[1]"}
    done = shell.ok("submit", "add", "--args", '{"a": "41"}', "--store", shell.url, "--wait")
    assert done.out == "42\n"
    assert "note" not in done.err
    worker.signal(signal.SIGTERM)
    assert worker.end() == 0
    late = shell.run("submit", "add", "a=x", "--store", shell.url)
    assert "a: must be an integer" in late.err
    unserved = shell.ok("submit", "add", "a=1", "--store", shell.url)
    assert "no worker for it runs yet" in unserved.err
    assert shell.ok("submit", "add", "a=1", "--store", shell.url, "--json").json["is_served"] is False
    assert "none" in shell.ok("consumer", "ls", "--store", shell.url).out


def test_a_store_without_workers_has_no_consumers(shell: Shell) -> None:
    """Where no worker has run, the list says how to start one."""
    shell.seed(("add", {"a": 1}))
    assert "taskyard worker" in shell.ok("consumer", "ls", "--store", shell.url).out
    assert shell.ok("consumer", "ls", "--store", shell.url, "--json").json == []


def test_arguments_are_words() -> None:
    """The list shows types and defaults in a few words."""
    schema = {
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "at": {"anyOf": [{"type": "string", "format": "date-time"}, {"type": "null"}], "default": None},
            "sizes": {"type": "array", "items": {"type": "integer"}},
            "mode": {"enum": ["fast", "slow"], "default": "fast"},
            "crop": {"$ref": "#/$defs/Crop"},
            "extra": {},
        },
        "required": ["path", "sizes", "crop"],
        "additionalProperties": True,
    }
    document = ConsumerDocument(
        name="x", queue="q", executor="inline", version="", timeout_s=None, has_produce=False, served=False, nodes=(),
        seen_at=None, args_schema=schema, result_schema=None,
    )  # fmt: skip
    assert arguments_text(document) == (
        'path: string, at: date-time | null = null, sizes: array[integer], mode: "fast" | "slow" = "fast", crop: Crop, '
        "extra: any = …, **"
    )
