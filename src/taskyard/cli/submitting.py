"""`taskyard submit`: one task for a consumer, checked by the app if there is one."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from rich.text import Text

from taskyard.application.interface import Application
from taskyard.application.task_requests import SubmitReceipt, SubmitRequest
from taskyard.cli.console import complain, json_text, make_console, say, say_json
from taskyard.cli.errors import UsageError, typed_on_the_command_line
from taskyard.cli.formatting import state_text
from taskyard.cli.session import Target, opened_application
from taskyard.cli.text import clean, duration, moment
from taskyard.cli.values import parse_arguments, parse_duration, parse_moment, parse_option, parse_pairs
from taskyard.errors import quote, shorten


@dataclass(frozen=True, slots=True)
class Submit:
    """What to submit, and whether to wait for it."""

    request: SubmitRequest
    wait: bool = False
    wait_s: float | None = None


def make_submit(
    name: str,
    pairs: Sequence[str],
    whole: str | None,
    *,
    wait: bool,
    wait_timeout: str | None,
    after: Sequence[str] = (),
    labels: Sequence[str] = (),
    requires: Sequence[str] = (),
    **typed: str | None,
) -> Submit:
    """A submit as it was typed: durations and moments are still texts."""
    options: dict[str, Any] = {option: text for option, text in typed.items() if text is not None}
    if labels:
        options["labels"] = parse_pairs("--label", labels)
    if requires:
        options["requires"] = parse_pairs("--require", requires)
    for short, option, parse in (
        ("delay", "delay_s", parse_duration),
        ("timeout", "timeout_s", parse_duration),
        ("dedupe_window", "dedupe_window_s", parse_duration),
        ("at", "schedule_at", parse_moment),
    ):
        if short in options:
            options[option] = parse_option(option, parse, options.pop(short))
    if "delay_s" in options and "schedule_at" in options:
        raise UsageError("give either --delay or --at, not both")
    if "on_failure" in options and not after:
        raise UsageError("--on-failure is about the tasks that it waits for; name them with --after")
    if "dedupe_window_s" in options and "dedupe" not in options:
        raise UsageError("--dedupe-window has no effect without --dedupe merge, refuse or replace")
    with typed_on_the_command_line():
        SubmitRequest(consumer=name, **options)
    given = parse_arguments(pairs, whole)
    return Submit(
        SubmitRequest(consumer=name, args=given.values, args_text=given.typed, after=tuple(after), **options),
        wait=wait or wait_timeout is not None,
        wait_s=None if wait_timeout is None else parse_option("wait_timeout_s", parse_duration, wait_timeout),
    )


async def submit_task(target: Target, submit: Submit, *, as_json: bool) -> int:
    request, has_app = submit.request, target.app_name is not None
    # A task that waits for others is submitted to the store that has those.
    create = has_app and not request.after
    async with opened_application(target, needs_app=has_app, create=create, check=request) as application:
        receipt = await application.tasks.submit(request)
        if not receipt.is_checked:
            hint = _quoting_hint(request.args_text)
            complain("note", f"no --app given, so the arguments are checked only when a worker runs the task{hint}")
        if receipt.known_queues is not None:
            known = ", ".join(map(clean, receipt.known_queues)) or "none"
            complain("note", f"queue {quote(receipt.queue)} has no rules and no other tasks; known queues: {known}")
        if not as_json:
            _tell(receipt, is_awaited=submit.wait)
            if not receipt.is_served:
                worker = f"taskyard worker {target.app_name or 'module:yard'}"
                complain("note", f"no worker for it runs yet; start one with: {worker}")
        if submit.wait:
            await _wait(application, receipt, submit.wait_s, as_json=as_json)
        elif as_json:
            say_json(receipt)
    return 0


def _quoting_hint(typed: Mapping[str, str]) -> str:
    """How to write a text that looks like JSON: only the consumer knows whether it wants one."""
    name = next(iter(typed), None)
    if name is None:
        return ""
    pair = shlex.quote(f"{name}={json_text(typed[name], pretty=False)}")
    return f"; {shorten(name)} was read as JSON, to pass text write {shorten(pair)}"


def _tell(receipt: SubmitReceipt, *, is_awaited: bool) -> None:
    """Standard output gets the id alone, or only the result if that is waited for: `id=$(taskyard submit …)` works. The
    rest is for people."""
    words = Text.assemble((clean(receipt.consumer), "bold"), "  ", state_text(receipt.state))
    if is_awaited:
        words = Text.assemble(clean(receipt.uuid), "  ", words)
    else:
        say(receipt.uuid)
    words.append(f"  on queue {clean(receipt.queue)!r}", "dim")
    if receipt.priority != "normal":
        words.append(f", {receipt.priority} priority", "dim")
    wait = (receipt.due_at - receipt.created_at).total_seconds()
    if wait > 0:
        words.append(f", due in {duration(wait)}", "dim")
    if not receipt.is_new:
        words.append(", merged into an existing task", "yellow")
        until = receipt.window_ends_at
        words.append("" if until is None else f"; its dedupe window ends at {moment(until)}", "yellow")
    make_console(stderr=True).print(words, soft_wrap=True)


async def _wait(application: Application, receipt: SubmitReceipt, wait_s: float | None, *, as_json: bool) -> None:
    """Print the result; if it ends otherwise, that is an error."""
    result = (await application.tasks.wait(receipt.uuid, timeout_s=wait_s, reveal=True)).result
    if as_json:
        (task,) = await application.tasks.get_many([receipt.uuid])
        say_json(msgspec.structs.replace(receipt, **msgspec.structs.asdict(task) | {"result": result}))
    else:
        say(result if isinstance(result, str) else json_text(result))
