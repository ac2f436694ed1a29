"""The commands and their options, and what becomes of an error. What a command does stands in a module of its own,
which is imported when it is called."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import sys
from collections.abc import Coroutine, Sequence
from typing import Annotated, Any, TextIO

import msgspec
import typer

from taskyard.application.errors import describe_error
from taskyard.cli.audit_commands import audit_command, consumers
from taskyard.cli.console import complain, json_text
from taskyard.cli.device_commands import devices
from taskyard.cli.errors import (
    DONE,
    REFUSED,
    USAGE,
    UsageError,
    error_text,
    exit_code_of,
    typed_on_the_command_line,
)
from taskyard.cli.options import (
    AppArgument,
    AppOption,
    BlockerOption,
    GraceOption,
    IdArgument,
    JsonOption,
    LabelOption,
    StoreOption,
    VerboseOption,
)
from taskyard.cli.queue_commands import groups, queues
from taskyard.cli.schedule_commands import schedules
from taskyard.cli.session import Target
from taskyard.cli.task_commands import COMMANDS
from taskyard.errors import TaskyardError

INTERRUPTED = 130

app = typer.Typer(
    name="taskyard",
    help="Runs tasks: when they are due, in the right order, within limits, and without losing any.",
    epilog="The store is --store URL, else TASKYARD_STORE, else that of the app (--app, or TASKYARD_APP).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


# --- running ----------------------------------------------------------------------------------------------------------


@app.command("run")
def run_command(
    yard: AppArgument, store: StoreOption = None, grace: GraceOption = "30", verbose: VerboseOption = False
) -> int:
    """Run a yard here, with a line of status while you watch."""
    return _serve(Target(store, yard), grace, verbose=verbose, live=True)


@app.command("worker")
def worker_command(
    yard: AppArgument, store: StoreOption = None, grace: GraceOption = "30", verbose: VerboseOption = False
) -> int:
    """Run a yard's tasks, with plain logs, until it is stopped or drained. Start as many as you like on one store."""
    return _serve(Target(store, yard), grace, verbose=verbose, live=False)


def _serve(target: Target, grace: str, *, verbose: bool, live: bool) -> int:
    from taskyard.cli.values import parse_duration, parse_option
    from taskyard.cli.worker import WorkerOptions, run_loop, run_worker

    grace_s = parse_option("grace_s", parse_duration, grace)
    worker = WorkerOptions(grace_s=grace_s, verbose=verbose, live=live)
    return run_loop(lambda: run_worker(target, worker))


@app.command("demo")
def demo_command(
    store: StoreOption = None,
    seconds: Annotated[float, typer.Option(min=0, help="How long new work is handed in.")] = 22.0,
    once: Annotated[bool, typer.Option("--once", help="One small round of work, as fast as it goes.")] = False,
) -> int:
    """See real work go through a yard: a tour of half a minute."""
    from taskyard.cli.demo.tour import tour
    from taskyard.cli.worker import run_loop

    return run_loop(lambda: tour(store, seconds=0.0 if once else seconds, small=once))


# --- submitting -------------------------------------------------------------------------------------------------------


@app.command("submit")
def submit_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The consumer.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Arguments; JSON where it is JSON, else text.")
    ] = None,
    *,
    args: Annotated[
        str | None, typer.Option("--args", metavar="JSON", help="Arguments as an object; - reads it.")
    ] = None,
    priority: Annotated[str | None, typer.Option(metavar="LEVEL", help="high, normal or low.")] = None,
    delay: Annotated[str | None, typer.Option(metavar="TIME", help="Start later: 90, 5m, 2h, 1d.")] = None,
    at: Annotated[str | None, typer.Option(metavar="MOMENT", help="Start then: 2030-01-31T09:00+01:00.")] = None,
    queue: Annotated[str | None, typer.Option(help="Another queue than the consumer's.")] = None,
    key: Annotated[str | None, typer.Option(help="Tasks of one key run in turn.")] = None,
    timeout: Annotated[str | None, typer.Option(metavar="TIME", help="The longest a run may take.")] = None,
    bucket: Annotated[str | None, typer.Option(help="Its line in a queue whose buckets take turns.")] = None,
    after: Annotated[
        list[str] | None, typer.Option(metavar="ID", help="Start when this task has completed. Repeatable.")
    ] = None,
    on_failure: Annotated[
        str | None, typer.Option(metavar="WHAT", help="If one of those does not complete: fail, skip or ignore.")
    ] = None,
    dedupe: Annotated[
        str | None, typer.Option(metavar="HOW", help="If it is there already: allow, merge, refuse or replace.")
    ] = None,
    dedupe_key: Annotated[str | None, typer.Option(help="What counts as the same, instead of arguments.")] = None,
    dedupe_scope: Annotated[
        str | None, typer.Option(metavar="WHILE", help="It is there while: pending, queued, a window; or key_idle.")
    ] = None,
    dedupe_window: Annotated[str | None, typer.Option(metavar="TIME", help="How long that window is.")] = None,
    title: Annotated[str | None, typer.Option(metavar="TEXT", help="One line that lists show.")] = None,
    label: Annotated[
        list[str] | None, typer.Option(metavar="NAME=TEXT", help="A label to filter by. Repeatable.")
    ] = None,
    require: Annotated[
        list[str] | None, typer.Option(metavar="NAME=TEXT", help="A label that its place must have. Repeatable.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for it to end and print its result.")] = False,
    wait_timeout: Annotated[str | None, typer.Option(metavar="TIME", help="Wait no longer than that.")] = None,
    store: StoreOption = None,
    yard: AppOption = None,
    as_json: JsonOption = False,
) -> int:
    """Submit one task: taskyard submit resize path=a.png width=640."""
    from taskyard.cli.submitting import make_submit, submit_task

    submit = make_submit(
        name, arguments or (), args, wait=wait, wait_timeout=wait_timeout, after=after or (), priority=priority,
        delay=delay, at=at, queue=queue, key=key, timeout=timeout, bucket=bucket, on_failure=on_failure, dedupe=dedupe,
        dedupe_key=dedupe_key, dedupe_scope=dedupe_scope, dedupe_window=dedupe_window, title=title, labels=label or (),
        requires=require or (),
    )  # fmt: skip
    return _await(submit_task(Target(store, yard), submit, as_json=as_json))


# --- looking ----------------------------------------------------------------------------------------------------------


@app.command("ls")
def ls_command(
    state: Annotated[
        list[str] | None, typer.Option("--state", "-s", help="A state; or waiting, ended. Repeatable.")
    ] = None,
    queue: Annotated[str | None, typer.Option(help="Only of this queue.")] = None,
    consumer: Annotated[str | None, typer.Option(help="Only of this consumer.")] = None,
    label: LabelOption = None,
    blocker: BlockerOption = None,
    *,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=10_000, help="At most so many.")] = 20,
    before: Annotated[str | None, typer.Option(metavar="ID", help="Only older ones than this task.")] = None,
    store: StoreOption = None,
    yard: AppOption = None,
    as_json: JsonOption = False,
) -> int:
    """List tasks, newest first."""
    from taskyard.cli.listing import list_tasks
    from taskyard.cli.values import parse_pairs, parse_states
    from taskyard.model.task_filter import TaskFilter

    with typed_on_the_command_line():
        where = TaskFilter(
            states=parse_states(state or ()), queue=queue, consumer=consumer, blocker=blocker,
            labels=parse_pairs("--label", label or ()),
        )  # fmt: skip
    return _await(list_tasks(Target(store, yard), where, before=before, limit=limit, as_json=as_json))


@app.command("show")
def show_command(
    task: IdArgument,
    reveal: Annotated[bool, typer.Option("--reveal", help="Show secrets among the arguments too.")] = False,
    store: StoreOption = None,
    yard: AppOption = None,
    as_json: JsonOption = False,
) -> int:
    """Show everything about one task: arguments, result, error, every run."""
    from taskyard.cli.showing import show_task

    return _await(show_task(Target(store, yard), task, reveal=reveal, as_json=as_json))


@app.command("log")
def log_command(
    task: IdArgument,
    attempt: Annotated[int | None, typer.Option("--attempt", min=1, help="Only the lines of this attempt.")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=10_000, help="How many lines, the latest.")] = 100,
    reveal: Annotated[bool, typer.Option("--reveal", help="Show secrets among the arguments too.")] = False,
    store: StoreOption = None,
    yard: AppOption = None,
    as_json: JsonOption = False,
) -> int:
    """Print the log lines of a task, also while it runs."""
    from taskyard.cli.outputs import show_log

    target = Target(store, yard)
    return _await(show_log(target, task, attempt=attempt, limit=limit, reveal=reveal, as_json=as_json))


@app.command("artifact")
def artifact_command(
    task: IdArgument,
    name: Annotated[str, typer.Argument(help="The name of the artifact.", metavar="NAME")],
    file: Annotated[str | None, typer.Option("--output", "-o", help="Write it to this file.", metavar="FILE")] = None,
    attempt: Annotated[int | None, typer.Option("--attempt", min=1, help="That of this attempt.")] = None,
    store: StoreOption = None,
    yard: AppOption = None,
) -> int:
    """Write an artifact of a task to a file or to standard output."""
    from taskyard.cli.outputs import write_artifact

    return _await(write_artifact(Target(store, yard), task, name, attempt=attempt, file=file))


@app.command("debug")
def debug_command(
    task: IdArgument,
    post_mortem: Annotated[
        bool, typer.Option("--pdb", help="Open the debugger where the code has raised an exception.")
    ] = False,
    break_at_start: Annotated[
        bool, typer.Option("--break", help="Open the debugger in the first line of the code.")
    ] = False,
    store: StoreOption = None,
    yard: AppOption = None,
) -> int:
    """Run the code of a task once more, here, with its arguments and checkpoint. Nothing is stored."""
    from taskyard.cli.debugging import debug

    return debug(Target(store, yard), task, break_at_start=break_at_start, post_mortem=post_mortem)


@app.command("why")
def why_command(
    task: Annotated[
        str | None, typer.Argument(metavar="ID", help="A task's id, or the end or beginning of one.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All tasks that wait, added up.")] = False,
    queue: Annotated[str | None, typer.Option(help="All that wait in this queue.")] = None,
    consumer: Annotated[str | None, typer.Option(help="All that wait of this consumer.")] = None,
    key: Annotated[str | None, typer.Option(help="All that wait with this key.")] = None,
    label: LabelOption = None,
    blocker: BlockerOption = None,
    state: Annotated[list[str] | None, typer.Option("--state", "-s", help="All in this state. Repeatable.")] = None,
    *,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=1000, help="At most so many groups.")] = 20,
    store: StoreOption = None,
    yard: AppOption = None,
    as_json: JsonOption = False,
) -> int:
    """Say why a task waits, or why many do: since when, what would free them, and what is in the way."""
    from taskyard.cli.values import parse_pairs, parse_states
    from taskyard.cli.why import check_choice, explain, explain_many
    from taskyard.model.task_filter import TaskFilter

    with typed_on_the_command_line():
        where = TaskFilter(
            states=parse_states(state or ()), queue=queue, consumer=consumer, key=key, blocker=blocker,
            labels=parse_pairs("--label", label or ()),
        )  # fmt: skip
    if check_choice(task, where, everything=everything):
        return _await(explain_many(Target(store, yard), where, limit=limit, as_json=as_json))
    return _await(explain(Target(store, yard), task or "", as_json=as_json))


@app.command("failures")
def failures_command(
    error: Annotated[str | None, typer.Option(metavar="CLASS", help="Only of this class, or one below it.")] = None,
    queue: Annotated[str | None, typer.Option(help="Only of this queue.")] = None,
    consumer: Annotated[str | None, typer.Option(help="Only of this consumer.")] = None,
    quarantined: Annotated[
        bool | None, typer.Option("--quarantined/--not-quarantined", help="Only what took its workers down, or else.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=1000, help="At most so many groups.")] = 20,
    store: StoreOption = None,
    yard: AppOption = None,
    as_json: JsonOption = False,
) -> int:
    """List what has failed, by class of error and consumer, the largest groups first."""
    from taskyard.cli.failures import list_failures
    from taskyard.model.task_filter import TaskFilter

    with typed_on_the_command_line():
        where = TaskFilter(error=error, queue=queue, consumer=consumer, quarantined=quarantined)
    return _await(list_failures(Target(store, yard), where, limit=limit, as_json=as_json))


@app.command("watch")
def watch_command(  # noqa: PLR0917 - a command takes all of its options so
    tasks: Annotated[
        list[str] | None, typer.Argument(metavar="[ID]...", help="Only these, until they have ended.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
    until_idle: Annotated[bool, typer.Option("--until-idle", help="End when nothing is left to do.")] = False,
    kind: Annotated[list[str] | None, typer.Option("--kind", help="Only such events: completed, failed, …")] = None,
    queue: Annotated[str | None, typer.Option("--queue", help="Only events of this queue.")] = None,
    consumer: Annotated[str | None, typer.Option("--consumer", help="Only events of this consumer.")] = None,
    store: StoreOption = None,
    yard: AppOption = None,
    as_json: JsonOption = False,
) -> int:
    """Watch tasks live: progress, queues, what just finished. In a pipe, or of some events only, one line for each."""
    from taskyard.cli.live import watch
    from taskyard.model.event import EventFilter, check_kinds

    with typed_on_the_command_line():
        where = EventFilter(kinds=check_kinds(kind) if kind else None, queue=queue, consumer=consumer)
    return _await(watch(Target(store, yard), tasks or (), where, once=once, until_idle=until_idle, as_json=as_json))


@app.command("doctor")
def doctor_command(store: StoreOption = None, yard: AppOption = None, as_json: JsonOption = False) -> int:
    """Examine a store and this machine, and say what to do about what is wrong."""
    from taskyard.cli.doctor import print_findings

    return print_findings(Target(store, yard), as_json=as_json)


# --- steering ---------------------------------------------------------------------------------------------------------


for name, command in COMMANDS.items():
    app.command(name)(command)

app.add_typer(queues, name="queue")
app.add_typer(groups, name="group")


# --- nodes and the store ----------------------------------------------------------------------------------------------

nodes = typer.Typer(help="The processes that run tasks on a store.", no_args_is_help=True)
app.add_typer(nodes, name="node")


@nodes.command("ls")
def node_ls_command(store: StoreOption = None, yard: AppOption = None, as_json: JsonOption = False) -> int:
    """List the nodes: who they are, what they run, whether they live."""
    from taskyard.cli.nodes import list_nodes

    return _await(list_nodes(Target(store, yard), as_json=as_json))


@nodes.command("drain")
def node_drain_command(
    node: Annotated[str, typer.Argument(metavar="NODE", help="A name, an incarnation, or the beginning of one.")],
    undo: Annotated[bool, typer.Option("--undo", help="Let it take tasks again.")] = False,
    store: StoreOption = None,
    yard: AppOption = None,
    as_json: JsonOption = False,
) -> int:
    """Let a node finish what it runs and take nothing new; `taskyard worker` then ends."""
    from taskyard.cli.nodes import drain_node

    return _await(drain_node(Target(store, yard), node, on=not undo, as_json=as_json))


app.add_typer(devices, name="device")
app.add_typer(consumers, name="consumer")
app.command("audit")(audit_command)
app.add_typer(schedules, name="schedule")


@app.command("migrate")
def migrate_command(
    check: Annotated[bool, typer.Option("--check", help="Only look; 1 if something is to be done.")] = False,
    store: StoreOption = None,
    yard: AppOption = None,
    as_json: JsonOption = False,
) -> int:
    """Bring the tables of a store to the version of this program."""
    from taskyard.cli.migrating import migrate_store

    return _await(migrate_store(Target(store, yard), check=check, as_json=as_json))


# --- the program ------------------------------------------------------------------------------------------------------


def _await(work: Coroutine[Any, Any, int]) -> int:
    return asyncio.run(work)


def _print_version(asked: bool) -> None:
    if asked:
        from taskyard.application import VERSION

        print(f"taskyard {VERSION}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and end.")
    ] = False,
) -> None:
    """What comes before the command."""


def run(arguments: Sequence[str]) -> int:
    """Run one command line; the exit code."""
    closed = _fill_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    wants_json = "--json" in arguments
    try:
        answer = app(args=list(arguments), prog_name="taskyard", standalone_mode=False)
        code = answer if isinstance(answer, int) else 0
        sys.stdout.flush()
    except (TaskyardError, TimeoutError) as exc:
        code = _report(exc, exit_code_of(exc), wants_json, arguments)
    except typer.Abort:
        code = INTERRUPTED
    except BrokenPipeError:
        _drop(sys.stdout)
        code = REFUSED
    except Exception as exc:
        code = _report_unexpected(exc, wants_json)
    try:
        sys.stderr.flush()
    except OSError:
        _drop(sys.stderr)  # nobody reads what it says beside its work, which is no reason to fail
    if code == INTERRUPTED:
        # A thread that waits for a lock on the store cannot be interrupted, and would hold up any other end.
        sys.stdout.flush()
        os._exit(code)
    return REFUSED if code == DONE and "stdout" in closed else code


def _fill_closed_streams() -> list[str]:
    """Let what is closed lead nowhere, or the next file would be opened in its place; the names of what was."""
    closed = [name for name in ("stdin", "stdout", "stderr") if getattr(sys, name) is None]
    for name in closed:
        setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115 - until the process ends
    return closed


def _drop(stream: TextIO) -> None:
    """What could not be written is given up, or the end of the process would fail on it once more."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def _report(error: TaskyardError | TimeoutError, code: int, wants_json: bool, arguments: Sequence[str] = ()) -> int:
    text = error_text(error, arguments)
    if wants_json:
        document = msgspec.structs.replace(describe_error(error), message=text)
        print(json_text(document, pretty=False), file=sys.stderr)
    else:
        complain("error", text)
    return code


def _report_unexpected(error: Exception, wants_json: bool) -> int:
    """What typer says of a command line it does not understand, and a disk that has no room for what we print; anything
    else is a bug of ours."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT) and error.filename is None:
        _drop(sys.stdout)
        return _report(TaskyardError(f"the output could not be written: {error.strerror}"), REFUSED, wants_json)
    message = getattr(error, "format_message", None)
    if message is not None:
        if not message():
            return USAGE  # no command was given, and the help has been shown
        where = getattr(getattr(error, "ctx", None), "command_path", "taskyard")
        text = message().rstrip(".")
        joint = " See" if text.endswith("?") else "; see"
        return _report(UsageError(f"{text}{joint} `{where} --help`"), USAGE, wants_json)
    if os.environ.get("TASKYARD_DEBUG"):
        raise error
    text = f"unexpected {type(error).__name__}: {error}; this is a bug in Taskyard (TASKYARD_DEBUG=1 shows where)"
    return _report(TaskyardError(text), REFUSED, wants_json)
