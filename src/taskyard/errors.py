"""Every error Taskyard raises, in one tree.

An error's fields are attributes, its message says what to do, and its docstring says what the caller should do.
What a consumer raises to steer its own run (`RetryLater`, `Cancel`) is a branch of its own: it is never a failure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

REPEATED_CHARS = 80
"""How much of what a user has given a message repeats: enough to recognize it."""


def shorten(text: str) -> str:
    return text if len(text) <= REPEATED_CHARS else text[: REPEATED_CHARS - 1] + "…"


def quote(value: object) -> str:
    """`value` as a message repeats it."""
    return repr(shorten(value)) if isinstance(value, str) else shorten(repr(value))


def _reduce(error: BaseException) -> tuple[Any, ...]:
    """How an error crosses to another process: with its message and its fields as they are. An exception is otherwise
    made again by calling its class with its message, which is not what those below are made of."""
    return _remake, (type(error), error.args), error.__dict__


def _remake(cls: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    error = cls.__new__(cls)
    error.args = args
    return error


HIDDEN = "***"

_IN_URL = re.compile(r"((?:://|\bpostgres(?:ql)?(?::/*|/+))[^/@:?#\s]*):\S*@", re.IGNORECASE)
_IN_NO_URL = re.compile(r"^([^:@\s]*):(?!//)\S*@")
_IN_OPTIONS = re.compile(r"(password\s*=\s*)(?:'(?:[^'\\]|\\.)*'|[^&#\s]*)", re.IGNORECASE)


def hide_password(text: str) -> str:
    """A text as it may be shown if there are addresses in it; also such as are not quite right, with an @ in a
    password, without the // of `postgresql://`, or written as `host=… password=…`."""
    return _IN_OPTIONS.sub(rf"\1{HIDDEN}", _IN_URL.sub(rf"\1:{HIDDEN}@", text))


class TaskyardError(Exception):
    """The base class of every error below. `code` names the kind of error and never changes: programs compare codes,
    people read messages. `problem` is what is wrong, `hint` what to do about it; the message is both."""

    code: str = "taskyard_error"
    hint: str = ""
    __reduce__ = _reduce

    def __init__(self, problem: str = "", *, hint: str = "") -> None:
        self.problem, self.hint = problem, hint
        super().__init__(f"{problem}; {hint}" if hint else problem)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "code" not in cls.__dict__:
            cls.code = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()


# --- bad input: nothing was written ---------------------------------------------------------------------------------


_NOT_GIVEN: Final = object()


class InvalidInput(TaskyardError):
    """What was asked cannot be done as asked: correct it and ask again. Nothing was stored. `field` is the parameter at
    fault, if it is one, and `given` its value as the message repeats it. If several items were passed at once, `item`
    is the index of the one at fault, where that is known.

    `problem` and `hint` may name more parameters, as in "{delay_s} and {schedule_at} exclude each other", if `fields`
    lists them. So `describe` can tell the same in the words of a command line."""

    item: int | None = None
    field: str | None = None

    def __init__(
        self,
        problem: str = "",
        *,
        field: str | None = None,
        fields: Sequence[str] = (),
        given: object = _NOT_GIVEN,
        hint: str = "",
    ) -> None:
        self.field, self.fields = field, tuple(fields)
        self.given = None if given is _NOT_GIVEN else str(given) if isinstance(given, datetime) else quote(given)
        self._problem, self._hint = problem, hint
        named, hint = self._named(str, self.given)
        super().__init__(named, hint=hint)

    def describe(self, name_of: Callable[[str], str], given: str | None = None) -> str:
        """The message with other names for the parameters, and the value as it was typed."""
        problem, hint = self._named(name_of, given if given is not None and self.given is not None else self.given)
        text = f"{problem}; {hint}" if hint else problem
        return text if self.item is None else f"item {self.item}: {text}"

    def _named(self, name_of: Callable[[str], str], given: str | None) -> tuple[str, str]:
        problem, hint = self._problem, self._hint
        for name in self.fields:
            problem, hint = (text.replace("{" + name + "}", name_of(name)) for text in (problem, hint))
        if self.field is not None:
            problem = f"{name_of(self.field)} {problem}"
        return (problem if given is None else f"{problem}, not {given}"), hint


class UnknownConsumer(InvalidInput):
    """No consumer has this name: register it, or correct the name."""

    def __init__(
        self, name: str, known: Iterable[str] = (), *, hint: str = "register it before you submit to it"
    ) -> None:
        self.name, self.known = name, sorted(known)
        have = ", ".join(self.known) or "none"
        super().__init__(f"no consumer is called {quote(name)} (registered: {have})", hint=hint)


class DuplicateConsumer(InvalidInput):
    """Two consumers want one name: rename one of them."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(
            f"a consumer called {quote(name)} is registered already", hint="give one of the two another name"
        )


class InvalidConsumer(InvalidInput):
    """This function or class cannot be a consumer as it is written."""


class InvalidArguments(InvalidInput):
    """The arguments do not fit the consumer's signature: `problems` says what is wrong with each, `names` are those of
    the arguments that are wrong by themselves."""

    def __init__(self, consumer: str, problems: Sequence[str], *, names: Iterable[str] = ()) -> None:
        self.consumer, self.problems, self.names = consumer, list(problems), frozenset(names)
        super().__init__(f"arguments do not fit {quote(consumer)}: " + "; ".join(self.problems))


class InvalidAlgorithm(InvalidInput):
    """This class or function cannot be an algorithm as it is written."""

    def __init__(self, name: str, why: str) -> None:
        self.name = name
        super().__init__(f"algorithm {quote(name)}: {why}")


class UnknownAlgorithm(InvalidInput):
    """No algorithm of this name and version is installed: install it, or correct the name."""

    def __init__(self, name: str, installed: Iterable[str] = ()) -> None:
        self.name, self.installed = name, sorted(installed)
        have = ", ".join(self.installed) or "none"
        super().__init__(
            f"no algorithm is called {quote(name)} (installed: {have})", hint="install it before you call it"
        )


class InvalidOutput(TaskyardError):
    """What the algorithm returned is not what it says it returns: correct the algorithm."""

    def __init__(self, name: str, problems: Sequence[str]) -> None:
        self.name, self.problems = name, list(problems)
        super().__init__(f"what algorithm {quote(name)} returned does not fit its Output: " + "; ".join(self.problems))


class StoredArgumentsInvalid(InvalidArguments):
    """What was stored for a task does not fit its consumer as it is now: submit it again as it should be."""


class InvalidRetry(InvalidInput, ValueError):
    """A retry policy that makes no sense: correct the value."""


class NaiveDatetime(InvalidInput):
    """A datetime without a time zone has no single meaning: add one."""

    def __init__(self, field: str, value: object) -> None:
        self.value = value
        super().__init__(
            f"{value} has no time zone",
            field=field,
            hint="write datetime.now(timezone.utc), or give it one with .replace(tzinfo=ZoneInfo('Europe/Berlin'))",
        )


class NotJson(InvalidInput):
    """Arguments and results are stored as JSON: return or pass plain values."""

    def __init__(self, what: str, why: str) -> None:
        self.what, self.why = what, why
        super().__init__(
            f"{what} cannot be written as JSON ({why})",
            hint="use dicts with string keys, lists, strings, finite numbers, booleans and None",
        )


class PayloadTooLarge(InvalidInput):
    """The store keeps small values: put the bulk into a file and pass its path."""

    def __init__(self, what: str, size: int, limit: int) -> None:
        self.what, self.size, self.limit = what, size, limit
        super().__init__(
            f"{what}: {size:,} bytes of JSON are more than the limit of {limit:,}",
            hint="write it to a file and pass the path, or raise max_payload_bytes",
        )


class ResultsPruned(InvalidInput):
    """Some results of a group are not in the store any more: submit the group again, or keep what ended for longer."""

    def __init__(self, group: str, found: int, expected: int) -> None:
        self.group, self.found, self.expected = group, found, expected
        super().__init__(
            f"of the {expected:,} results of group {group} {found:,} are left in the store, the others were pruned",
            hint="submit the group again",
        )


class BatchTooLarge(InvalidInput):
    """A batch is stored as a whole: split it, and submit the parts one after the other."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        super().__init__(f"one submit_many takes at most {limit:,} tasks", hint="split them into several calls")


class DuplicateTask(InvalidInput):
    """The task `existing` stands for the same work: it has not ended, or its window is not over; `state` is where it
    is, "forgotten" if only its window is left, None if that is not known, and `until` when the window ends, if it has
    one. Wait for that one, or cancel it if it is pending. Or the work was twice in one batch, which `existing` being
    empty says: leave one of the two out. Or `existing` runs with the same `key`, and the submit has the scope
    "key_idle": wait until it has ended."""

    def __init__(
        self,
        existing: str,
        slot: str,
        state: str | None = None,
        *,
        until: datetime | None = None,
        key: str | None = None,
    ) -> None:
        self.existing, self.slot, self.until, self.key = existing, slot, until, key
        self.state = state = "running" if key is not None else state
        if key is not None:
            super().__init__(
                f"task {existing} runs with the same key, {quote(key)}, in the same queue. Wait until it has ended "
                "({dedupe}='merge' returns that one), cancel it, or submit with another {dedupe_scope} than 'key_idle'",
                fields=("dedupe", "dedupe_scope"),
            )
            return
        window = "its window is not over" if until is None else _ends(until)
        told = _STANDS.get(state or "", _PENDS).format(
            state=state,
            window=window,
            maybe="it has not ended, or " if until is None else "",
            also="" if until is None else f", and {window}",
            dedupe="{dedupe}",
        )
        super().__init__(
            f"task {existing} stands for the same work: {told}"
            if existing
            else "the same work is in this batch twice, so nothing of it was stored; leave one out, or submit with "
            "{dedupe}='merge'",
            fields=("dedupe",),
        )


def _ends(until: datetime) -> str:
    return f"its window ends at {until:%Y-%m-%d %H:%M:%S %Z}"


_BOTH = "submit with {dedupe}='allow' to have both"
_PENDS = (
    "it is {state}{also}. Wait for it ({dedupe}='merge' returns that one), cancel it, submit with {dedupe}='replace' "
    f"to have the new one instead, or {_BOTH}"
)
_STANDS = {
    "": "{maybe}{window}. Wait for it ({dedupe}='merge' returns that one), cancel it if it is "
    f"pending, or {_BOTH}; {{dedupe}}='replace' replaces only what has not started",
    "running": f"it is running{{also}}. Wait for it ({{dedupe}}='merge' returns that one), cancel it, or {_BOTH}",
    "completed": f"it is completed, and {{window}}. Take its result ({{dedupe}}='merge' returns that one), or {_BOTH}",
    "failed": f"it has failed, and {{window}}. Retry that one, or {_BOTH}",
    "forgotten": f"it has ended and is forgotten, with its result, and {{window}}. Wait until then, or {_BOTH}",
}
"""By the state of who stands for the work; the others have not started."""


class DependencyCycle(InvalidInput):
    """The tasks `uuids` of one batch wait for each other, so that none could ever start: leave one `after` out."""

    def __init__(self, uuids: Sequence[str]) -> None:
        self.uuids = list(uuids)
        shown = " → ".join(map(shorten, [*self.uuids[:5], self.uuids[0]]))
        super().__init__(f"these tasks wait for each other, so that none could ever start: {shown}; nothing was stored")


class UnusableConnection(InvalidInput):
    """The connection given to `submit` cannot carry a task, and the message says why: give another, or leave it out.
    Nothing was stored, and as a rule its transaction is as it was."""


class NotInTransaction(UnusableConnection):
    """There is no transaction on the connection to be part of: begin one, and submit inside of it."""

    def __init__(
        self, why: str = "no transaction is open on this connection", begin: str = "connection.transaction()"
    ) -> None:
        super().__init__(
            why,
            hint=f"submit inside of one that is, as in `async with {begin}:`, or leave `connection` out and the task "
            "is stored at once",
        )


class OtherDatabase(UnusableConnection):
    """The connection leads to another database than the yard's store: give one to the same database."""

    def __init__(self, store: str) -> None:
        self.store = store
        super().__init__(
            f"the connection leads to another database than the yard's store {store}, which the task would never be "
            f"seen in",
            hint="connect to the same one, or leave `connection` out",
        )


class StaleTransaction(UnusableConnection):
    """The same work was submitted by somebody else since the transaction began, and at its isolation level that cannot
    be seen: roll back, and run the transaction again."""

    def __init__(self) -> None:
        super().__init__(
            "the same work was submitted after this transaction began, which it cannot see at its isolation level",
            hint="roll it back and run it again",
        )


class UnknownTask(InvalidInput):
    """No task has this id in this store: it was never here, its transaction has not committed, or it was pruned."""

    def __init__(self, uuid: str) -> None:
        self.uuid = uuid
        super().__init__(
            f"no task {shorten(uuid)} in this store; it was never submitted here, the transaction it was submitted in "
            f"has not committed, or its record was pruned"
        )


class UnknownArtifact(InvalidInput):
    """No attempt of this task, or not the one that was asked for, has an artifact of this name: correct the name."""

    def __init__(self, uuid: str, name: str, known: Iterable[str] = ()) -> None:
        self.uuid, self.name, self.known = uuid, name, list(known)
        have = ", ".join(self.known) or "none"
        super().__init__(f"task {shorten(uuid)} has no artifact {quote(name)}; it has {have}")


class ArtifactElsewhere(InvalidInput):
    """The artifact is a file that cannot be read here: read it on the machine `host`, at `path`."""

    def __init__(self, name: str, host: str, path: str, *, why: str = "") -> None:
        self.name, self.host, self.path = name, host, path
        cannot = f"which cannot be read: {why}" if why else "which is another machine: read it there"
        super().__init__(f"artifact {quote(name)} is the file {path} on {host}, {cannot}")


class UnknownGroup(InvalidInput):
    """No task of this group is in the store: correct the id, or the group is so old that it was pruned."""

    def __init__(self, group: str) -> None:
        self.group = group
        super().__init__(f"no task of a group {shorten(group)} is in this store; its id is wrong, or it was pruned")


class UnknownNode(InvalidInput):
    """No such node is on this store: it has left, or was given up for dead. See who is, and correct the name."""

    def __init__(self, node: str) -> None:
        self.node = node
        super().__init__(f"no node {quote(node)} is on this store; it has left or died, or was never here")


class DeviceError(TaskyardError):
    """A device answered that it cannot do what was asked. The message says what; look at the device."""


class DeviceLost(DeviceError):
    """A device is gone or does not answer. Its task goes to another one; the device is reconnected."""


class StepFailed(DeviceError):
    """A step of a run on a device failed, and the code went on: the run is not completed. If the step may fail, mark it
    as optional."""

    def __init__(self, step: str, why: str) -> None:
        self.step, self.why = step, why
        super().__init__(
            f"the step {step} failed and the code went on ({why})", hint="mark it as optional if it may fail"
        )


class TemplateNotSeen(DeviceError):
    """A template did not appear on the screen of a device in time. Look at the screenshot that the attempt has kept; if
    it is there, take a new template, or lower its threshold. `score` and `at` are those of the best match."""

    def __init__(
        self, template: str, within_s: float, *, threshold: float, score: float | None, at: tuple[int, int] | None
    ) -> None:
        self.template, self.within_s, self.threshold, self.score, self.at = template, within_s, threshold, score, at
        best = "it is larger than the screen, or than its region of it"
        if score is not None:
            best = f"best match {score:.2f} at {at}, threshold {threshold:g}"
        time = f"within {within_s:g} s" if within_s else "on the screen"
        super().__init__(f"did not see {template} {time}; {best}")


class TemplateNotGone(DeviceError):
    """A template was still on the screen of a device when the time was over. Look at the screenshot that the attempt
    has kept."""

    def __init__(self, template: str, within_s: float, *, threshold: float, score: float, at: tuple[int, int]) -> None:
        self.template, self.within_s, self.threshold, self.score, self.at = template, within_s, threshold, score, at
        super().__init__(
            f"{template} did not go within {within_s:g} s; match {score:.2f} at {at}, threshold {threshold:g}"
        )


class InvalidTemplate(InvalidInput):
    """This image cannot be looked for: correct the path, or take another image."""

    def __init__(self, template: str, why: str) -> None:
        self.template, self.why = template, why
        super().__init__(f"the template {quote(template)} cannot be used: {why}")


class CleanupFailed(DeviceError):
    """The work on a device was done, but its cleanup failed: look at what the task has left on the device."""

    def __init__(self, why: str) -> None:
        self.why = why
        super().__init__(f"the work was done, but the cleanup after it failed: {why}")


class UnknownDevice(InvalidInput):
    """No such device is in this store: see which there are, and correct the name."""

    def __init__(self, device: str, *, hint: str = "`taskyard device ls` lists them") -> None:
        self.device = device
        super().__init__(f"no device {quote(device)} is in this store", hint=hint)


class AccountQuarantined(InvalidInput):
    """Tasks of this account and consumer have failed again and again: find out why, then release the account."""

    def __init__(self, account: object, consumer: str, pool: str) -> None:
        self.account, self.consumer, self.pool = account, consumer, pool
        super().__init__(
            f"tasks of {quote(consumer)} are refused for account {account!r}, since the last ones have all failed",
            hint=f"`yard.devices.release({pool!r}, {account!r})` or `taskyard device release` takes them again",
        )


class DeviceExists(InvalidInput):
    """Another device has this name, number or address: choose another, or remove that device. `pool` and `owner_number`
    say where it is, if that is known."""

    def __init__(
        self, device: str, what: str, value: object, *, pool: str | None = None, owner_number: int | None = None
    ) -> None:
        self.device, self.what, self.value = device, what, value
        self.pool, self.owner_number = pool, owner_number
        if what != "name":
            place = "" if pool is None else f" of the pool {quote(pool)}"
            super().__init__(f"the device {quote(device)}{place} already has the {what} {quote(value)}")
            return
        place = "" if pool is None else f", as number {owner_number} of the pool {quote(pool)}"
        super().__init__(f"the device {quote(device)} already exists{place}")


class DeviceBusy(TaskyardError):
    """A task runs on this device: drain it and wait, or remove it by force."""

    def __init__(self, device: str, task: str) -> None:
        self.device, self.task = device, task
        super().__init__(
            f"task {task} runs on the device {quote(device)}; drain the device first, or remove it by force"
        )


class UnknownSchedule(InvalidInput):
    """No such schedule is in this store: see which there are, and correct the name."""

    def __init__(self, schedule: str) -> None:
        self.schedule = schedule
        super().__init__(f"no schedule {quote(schedule)} is in this store", hint="`taskyard schedule ls` lists them")


class ScheduleExists(InvalidInput):
    """There is a schedule of this name, and it was not to be changed: take another name, or remove it first."""

    def __init__(self, schedule: str, hint: str) -> None:
        self.schedule = schedule
        super().__init__(f"there is a schedule {quote(schedule)} already", hint=hint)


class ItemsFailed(InvalidInput):
    """The items of a schedule could not be listed, or not be made into tasks; none of its tasks was made. Correct the
    function that lists them, or the list. At its fire times the schedule tries again by itself."""

    def __init__(self, schedule: str, why: str) -> None:
        self.schedule, self.why = schedule, why
        super().__init__(f"the items of schedule {quote(schedule)} make no tasks: {why}")


REFUSALS = {
    "not_finished": "it has not finished yet",
    "not_failed": "only a failed task can be retried; submit a new one",
    "never_held": "a running task is never held",
    "has_dependencies": "it waits for other tasks, and starts when they have completed",
    "not_in_line": "only a task that stands in line can be moved",
    "same_task": "it cannot be put beside itself",
    "slot_taken": "another task stands for the same work now",
    "dependency_failed": "one of its dependencies failed",
    "dependency_canceled": "one of its dependencies was canceled",
    "dependency_skipped": "one of its dependencies was skipped",
}
"""Why a command is refused, by code. `is_running` and the like say that the command does not fit that state."""


def describe_refusal(code: str) -> str:
    """The sentence of a code, without the name of any task."""
    return REFUSALS.get(code) or code.replace("is_", "it is ", 1).replace("_", " ")


class CommandRefused(TaskyardError):
    """The command no longer fits the task; `state` is what it found. Look again, then decide. `code` is the same for
    all tasks that are refused for one reason; `detail` replaces its sentence where other tasks are to be named."""

    def __init__(self, uuid: str, command: str, state: str, *, code: str = "", detail: str = "") -> None:
        self.uuid, self.command, self.state = uuid, command, state
        self.code = code or f"is_{state}"
        told = f"it is {state}"
        if detail:
            told = detail
        elif self.code in REFUSALS:
            told = f"{told}; {REFUSALS[self.code]}"
        super().__init__(f"cannot {command} task {uuid}: {told}")


class ChangedMeanwhile(CommandRefused):
    """The task is not, or no longer, among those that the command was for. Look again, then decide."""


class SlotTaken(CommandRefused):
    """The task cannot be sent again while another, `holder`, stands for the same work: wait until that has ended, or
    until its window has, which is `until` if it has one; or cancel it if it is pending."""

    def __init__(self, uuid: str, state: str, holder: str, *, until: datetime | None = None) -> None:
        self.holder, self.until = holder, until
        wait = "wait until it has ended" if until is None else f"{_ends(until)}. Wait until then"
        detail = f"task {holder} stands for the same work now; {wait}, or cancel it if it is pending"
        super().__init__(uuid, "retry", state, code="slot_taken", detail=detail)


class DependencyLost(CommandRefused):
    """The task cannot be sent again: `parent`, which it waits for, has ended as `ended`, and would only fail it once
    more. If that failed, send it again first."""

    def __init__(self, uuid: str, state: str, parent: str, ended: str, how: str) -> None:
        self.parent, self.ended = parent, ended
        detail = f"it is {state}; its dependency {parent} {how}" + ("; retry that first" if ended == "failed" else "")
        super().__init__(uuid, "retry", state, code=f"dependency_{ended}", detail=detail)


class UnguardedScript(TaskyardError):
    """A script was read by a worker process, and began to work again: put its work behind a guard."""

    def __init__(self) -> None:
        super().__init__(
            "this script starts its work when it is merely imported, which worker processes do to find its functions",
            hint='put what it does under `if __name__ == "__main__":`',
        )


class NoScript(TaskyardError):
    """A function that stands in no file was sent to a worker process, which cannot find it there: save it to one."""

    def __init__(self) -> None:
        super().__init__(
            "it was defined in an interactive session, with `python -c` or on standard input, where worker processes "
            "cannot find it",
            hint="save it to a file and import it from there",
        )


class IllegalMove(TaskyardError):
    """A state change outside the one table of legal moves: a bug, never a user's fault."""

    def __init__(self, old: str, new: str) -> None:
        self.old, self.new = old, new
        super().__init__(f"a task that is {old} cannot become {new}")


# --- how a task ended, for who waits on its result ------------------------------------------------------------------


class TaskEnded(TaskyardError):
    """The task ended without a result."""

    def __init__(self, uuid: str, message: str) -> None:
        self.uuid = uuid
        super().__init__(message)


class TaskFailed(TaskEnded):
    """The task failed for good; `kind`, `error_type` and `traceback` say how."""

    def __init__(
        self, uuid: str, *, kind: str, message: str, error_type: str = "", traceback: str | None = None
    ) -> None:
        self.kind, self.error_type, self.traceback = kind, error_type, traceback
        super().__init__(uuid, f"task {uuid} failed ({kind}): {message}")


class TaskCanceled(TaskEnded):
    """Somebody canceled the task."""

    def __init__(self, uuid: str, reason: str = "") -> None:
        self.reason = reason
        super().__init__(uuid, f"task {uuid} was canceled" + (f": {reason}" if reason else ""))


class TaskSkipped(TaskEnded):
    """Somebody skipped the task."""

    def __init__(self, uuid: str) -> None:
        super().__init__(uuid, f"task {uuid} was skipped")


class ResultGone(TaskEnded):
    """The record is not in the store, not yet, or not any more: correct the id, ask after the commit of the transaction
    it was submitted in, or keep results longer."""

    def __init__(self, uuid: str) -> None:
        super().__init__(
            uuid,
            f"no task {shorten(uuid)} in this store: it was never submitted here, the transaction it was submitted in "
            f"has not committed, or it ended so long ago that it is gone; check the id, ask after the commit, or keep "
            f"finished tasks longer with Yard(keep_s=…)",
        )


# --- running ----------------------------------------------------------------------------------------------------------


class ClaimLost(TaskyardError):
    """Another node owns this task now: drop the result, do not write again."""

    def __init__(self, uuid: str, token: int) -> None:
        self.uuid, self.token = uuid, token
        super().__init__(f"the claim on task {uuid} (token {token}) is no longer valid; what it did was not recorded")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClaimLost) and (self.uuid, self.token) == (other.uuid, other.token)

    def __hash__(self) -> int:
        return hash((self.uuid, self.token))


class NotOpen(TaskyardError):
    """The yard, scheduler or store is not open: use `async with`, or call `start`."""


class EventsMissed(TaskyardError):
    """The reader fell so far behind that events after `after` are gone, or the store has been restored, or begun anew,
    and has not come to that number: look at the records, then go on with `yard.events(after=error.now)`, or without a
    number."""

    def __init__(self, after: int, now: int) -> None:
        self.after, self.now = after, now
        why = "are no longer kept" if after < now else "are of another store, or of this one before it was restored"
        super().__init__(
            f"events after number {after} {why}",
            hint=f"look at the tasks themselves, then go on with events(after={now})",
        )


class MiddlewareFault(TaskyardError):
    """A middleware function is not written as it must be: correct it."""

    def __init__(self, name: str, what: str) -> None:
        self.name = name
        super().__init__(f"middleware {name} {what}")


class NoCurrentRun(TaskyardError):
    """`current_run()` was called outside a task."""

    def __init__(self) -> None:
        super().__init__("current_run() works only inside a consumer that Taskyard is running")


class BlockingOnLoop(TaskyardError):
    """A blocking call was made on the event loop's own thread, where it would wait for itself: await instead."""

    def __init__(self, call: str) -> None:
        super().__init__(
            f"{call} blocks, and was called on the event loop's thread", hint="use the awaitable call there"
        )


class WrongLoop(TaskyardError):
    """The yard is open on another event loop than the one that awaits it: go through `yard.blocking()` there."""

    def __init__(self) -> None:
        super().__init__(
            "this yard is open on another event loop",
            hint="from here use yard.blocking() in a thread, or a Yard of this loop's own on the same store",
        )


# --- the store --------------------------------------------------------------------------------------------------------


class StoreError(TaskyardError):
    """The store could not do it. Unless it is `OutcomeUnknown`, nothing of the call was written."""


class StoreUrlInvalid(StoreError, InvalidInput):
    """The store's address is not one we know, or there is none."""

    def __init__(
        self, url: str | None, hint: str = "use memory://, sqlite:///path/to/work.db or postgresql://user@host/database"
    ) -> None:
        # Whatever this was to be, it may begin with a user and his password.
        self.url = None if url is None else _IN_NO_URL.sub(rf"\1:{HIDDEN}@", hide_password(url))
        what = "no store was given" if url is None else f"{quote(self.url)} is not a store"
        super().__init__(what, hint=hint)


class StoreReadOnly(StoreError):
    """The file or its folder cannot be written: change its permissions or choose another place."""

    def __init__(self, path: str, why: str = "") -> None:
        self.path = path
        super().__init__(
            f"the store {path} cannot be written{f' ({why})' if why else ''}",
            hint="give this user write permission on the file and on its folder, or choose another path",
        )


class StoreCorrupt(StoreError):
    """The file is damaged, or is no Taskyard store: restore a copy, or choose another path."""

    def __init__(self, path: str, why: str) -> None:
        self.path, self.why = path, why
        super().__init__(
            f"the store {path} is damaged or is not a Taskyard store ({why}); nothing was changed. "
            f"If it is not ours, choose another path; if it is, stop all processes that use it, keep the file, and "
            f"restore a backup or try `sqlite3 {path} .recover`"
        )


class StoreFolderMissing(StoreError):
    """The folder of the file does not exist: make it, or correct the path. A store makes only its file."""

    def __init__(self, path: str, folder: str) -> None:
        self.path, self.folder = path, folder
        super().__init__(
            f"the store {path} cannot be made, because the folder {folder} does not exist",
            hint=f'make it with `mkdir -p "{folder}"`, or correct the path',
        )


class StoreForeign(StoreError):
    """What is at this path, or in the schema `taskyard` of this database, is not ours, and is left as it is: choose
    another path, or database."""

    def __init__(self, path: str, what: str, hint: str = "choose another path for the store") -> None:
        self.path, self.what = path, what
        super().__init__(f"{path} is {what}, and nothing was changed in it", hint=hint)


class StoreIncomplete(StoreError):
    """A part of the store is missing, as after a restore of only some tables: restore the rest, and drop nothing."""

    def __init__(self, path: str, missing: str) -> None:
        self.path, self.missing = path, missing
        super().__init__(
            f"{path} looks like a store of Taskyard's, but {missing}, as after a restore of only some tables; nothing "
            f"was changed in it. It may hold tasks, so do not drop it: restore what is missing from the backup"
        )


class StoreReplaced(StoreError):
    """The file was removed or replaced while it was open: restart everything that uses the store."""

    def __init__(self, path: str, lost: str) -> None:
        self.path, self.lost = path, lost
        super().__init__(
            f"{lost} was removed or replaced while the store is in use; what is written from here, nobody else would "
            f"ever see, so nothing more is stored. Put the file back if you can, and restart everything that uses the "
            f"store"
        )


class StoreTooNew(StoreError):
    """A newer Taskyard wrote this store: upgrade this one."""

    def __init__(self, path: str, found: int, supported: int, what: str = "schema") -> None:
        self.path, self.found, self.supported, self.what = path, found, supported, what
        super().__init__(
            f"the store {path} has {what} version {found}, this Taskyard knows up to {supported}",
            hint="upgrade Taskyard. Nothing was changed",
        )


class StoreMigrationChanged(StoreError):
    """The store was made with other SQL than this Taskyard has, under the same number: install the Taskyard that made
    the store. A developer who changed the SQL on purpose adds a migration, or a new version of the bundle."""

    def __init__(self, path: str, changed: str) -> None:
        self.path, self.changed = path, changed
        super().__init__(
            f"the store {path} was made with another text of {changed} than this Taskyard has",
            hint="install the version of Taskyard that made it, or one that was released later. Nothing was changed",
        )


class StoreFull(StoreError):
    """No room on the disk: free some; what was acknowledged is safe, what was refused was not stored."""

    def __init__(self, path: str) -> None:
        self.path = path
        super().__init__(
            f"no room left for the store {path}",
            hint="free some disk space and try again. Nothing acknowledged is lost",
        )


class StoreOnNetwork(StoreError):
    """SQLite's locks do not hold on network file systems: use a local disk."""

    def __init__(self, path: str, fstype: str) -> None:
        self.path, self.fstype = path, fstype
        super().__init__(
            f"the store {path} is on a network file system ({fstype}), where SQLite's locks do not protect it",
            hint="put it on a local disk",
        )


class StoreBusy(StoreError):
    """Another program holds the database's lock: find it (`taskyard doctor` names our own) and try again."""

    def __init__(self, path: str, by: str = "by another program; close it, or see `taskyard doctor`") -> None:
        self.path = path
        super().__init__(f"the store {path} is locked {by}, and try again")


class StoreUnavailable(StoreError):
    """The store failed in a way we have no better name for; nothing of the call was written."""


class SubmitPending(StoreError):
    """Somebody submits the same work in a transaction that has not ended: whether it will exist is not known yet. A
    submit has then waited for that transaction for 5 s."""

    def __init__(self) -> None:
        super().__init__(
            "the same work is being submitted in a transaction that somebody keeps open; it was waited for in vain, so "
            "submit again when it has ended"
        )


class StoreUnreachable(StoreUnavailable):
    """No connection to the database came about; nothing was written. It is tried again until one does."""

    def __init__(
        self, url: str, why: str, hint: str = "check that the server runs and that host and port are right"
    ) -> None:
        self.url, self.why = url, why
        super().__init__(f"the database {url} cannot be reached ({why})", hint=hint)


class StoreDenied(StoreError):
    """The database is there, and does not let us do it: see the hint."""

    def __init__(self, url: str, why: str, hint: str) -> None:
        self.url, self.why = url, why
        super().__init__(f"the database {url} refuses: {why}", hint=hint)


class StoreTooOld(StoreError):
    """The server is older than what Taskyard needs: upgrade the server."""

    def __init__(self, url: str, found: int, needed: int) -> None:
        self.url, self.found, self.needed = url, found, needed
        super().__init__(
            f"the server of {url} is PostgreSQL {found}, Taskyard needs {needed} or newer",
            hint="upgrade the server, or use another. Nothing was changed",
        )


class StoreNotUtf8(StoreError):
    """The database has an encoding that lacks most of the world's letters: use one in UTF8."""

    def __init__(self, url: str, found: str) -> None:
        self.url, self.found = url, found
        super().__init__(
            f"the database {url} has the encoding {found}, in which not every text can be stored; use one that was "
            f"made with CREATE DATABASE … ENCODING 'UTF8' TEMPLATE template0 (and LOCALE 'C', where that is refused). "
            f"Nothing was changed"
        )


class OutcomeUnknown(StoreError):
    """The store did not confirm what was asked: it may or may not have happened. Look before you ask for it again."""

    def __init__(self, why: str) -> None:
        super().__init__(
            f"the store did not confirm it ({why}), so it is not known whether it took effect; look before you ask for "
            f"it again"
        )


class ForkedStore(StoreError):
    """A store was carried across fork(): open a new one in the child."""

    def __init__(self) -> None:
        super().__init__("this store was opened before fork()", hint="open a new Yard in the child process")


# --- steering: raised by consumers, never a failure -------------------------------------------------------------------


class Steer(Exception):
    """What a consumer raises to say what should become of its task."""

    __reduce__ = _reduce


class RetryLater(Steer):
    """Run me again in `delay_s` seconds, or after a timedelta; no retry is used up."""

    def __init__(self, delay_s: float | timedelta, reason: str = "") -> None:
        seconds: object = delay_s.total_seconds() if isinstance(delay_s, timedelta) else delay_s
        if isinstance(seconds, bool) or not isinstance(seconds, int | float):
            raise TypeError(f"RetryLater takes a number of seconds or a timedelta, not {quote(delay_s)}")
        if not 0 <= seconds < math.inf:
            raise ValueError(f"RetryLater takes a finite number of seconds, 0 or more, not {delay_s}")
        self.delay_s, self.reason = float(seconds), reason
        super().__init__(reason or f"again in {self.delay_s:g} s")


class Cancel(Steer):
    """End me as canceled."""

    def __init__(self, reason: str = "") -> None:
        self.reason = reason
        super().__init__(reason or "canceled by its own consumer")
