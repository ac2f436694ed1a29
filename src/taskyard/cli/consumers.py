"""`taskyard consumer ls`: what the workers have published about their consumers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from taskyard.application.consumer_documents import ConsumerDocument
from taskyard.cli.console import json_text, make_console, say_json, show
from taskyard.cli.session import Target, opened_application
from taskyard.cli.text import clean, counted, cut

LONGEST_NAME = 40


async def list_consumers(target: Target, *, as_json: bool) -> int:
    async with opened_application(target) as application:
        found = await application.consumers.list()
    if as_json:
        say_json(found)
        return 0
    console = make_console()
    if found:
        show(console, _table(found))
    else:
        show(console, Text("no worker has run on this store; start one with: taskyard worker module:yard", "dim"))
    return 0


def _table(consumers: Sequence[ConsumerDocument]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False, expand=True)
    for name in ("CONSUMER", "QUEUE", "EXECUTOR", "VERSION", "NODES"):
        table.add_column(name, no_wrap=True)
    table.add_column("ARGUMENTS", no_wrap=True, overflow="ellipsis", ratio=1)
    for one in consumers:
        table.add_row(
            Text(cut(clean(one.name), LONGEST_NAME), "bold"),
            Text(cut(clean(one.queue), LONGEST_NAME)),
            Text(clean(one.executor), "dim"),
            Text(cut(clean(one.version), 12)),
            _nodes_text(one),
            Text(clean(arguments_text(one)), "dim"),
        )
    return table


def _nodes_text(consumer: ConsumerDocument) -> Text:
    """The name of the one node, or how many there are."""
    if not consumer.served:
        return Text("none", "yellow")
    if len(consumer.nodes) == 1:
        return Text(cut(clean(consumer.nodes[0]), 32))
    return Text(counted(len(consumer.nodes), "node"))


def arguments_text(consumer: ConsumerDocument) -> str:
    """`path: string, width: integer = 100`, from the schema."""
    schema = consumer.args_schema
    if schema is None:
        return "?"
    required = schema.get("required", ())
    words = []
    for name, kind in schema.get("properties", {}).items():
        word = f"{name}: {_kind_text(kind)}"
        if "default" in kind:
            word += f" = {json_text(kind['default'], pretty=False)}"
        elif name not in required:
            word += " = …"
        words.append(word)
    if schema.get("additionalProperties", True) is not False:
        words.append("**")
    return ", ".join(words)


def _kind_text(kind: dict[str, Any]) -> str:
    """`integer | null`, `array[string]`, `Size`: the type of an argument in a word or two."""
    if "$ref" in kind:
        return str(kind["$ref"]).rpartition("/")[2]
    for choices in ("anyOf", "oneOf"):
        if choices in kind:
            return " | ".join(dict.fromkeys(_kind_text(one) for one in kind[choices]))
    if "const" in kind or "enum" in kind:
        return " | ".join(json_text(one, pretty=False) for one in kind.get("enum", [kind.get("const")]))
    if kind.get("type") == "array" and isinstance(kind.get("items"), dict):
        return f"array[{_kind_text(kind['items'])}]"
    named = kind.get("format") or kind.get("type", "any")
    return " | ".join(named) if isinstance(named, list) else str(named)
