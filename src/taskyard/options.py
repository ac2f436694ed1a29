"""How a task is to be run, as the submitter says it: checked once, then carried over into the record."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta
from enum import StrEnum
from functools import partial
from typing import Any, Self
from uuid import UUID

import msgspec

from taskyard.errors import InvalidArguments, InvalidInput, PayloadTooLarge, quote, shorten
from taskyard.model.blocker import encode_requirements
from taskyard.model.dedupe import make_slot
from taskyard.model.device import set_account
from taskyard.model.given import (
    check_delay,
    check_labels,
    check_name,
    check_priority,
    check_retry,
    check_timeout,
    check_title,
    check_uuid,
    check_window,
    convert_each,
)
from taskyard.model.order import Priority
from taskyard.model.retry import RetryPolicy
from taskyard.model.task import (
    NO_EXTRA,
    Dedupe,
    DedupeScope,
    OnFailure,
    TaskExtra,
    TaskRecord,
    moment,
    new_uuid,
    new_uuids,
)
from taskyard.ports.consumer import Consumer

TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
"""A trace or span id of zeros is invalid."""


class TaskOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Everything but the arguments. None means: as the consumer has it.

    `timeout_s` may only be shorter than the consumer's own: a longer one is refused.
    `key`: of the tasks with one key in a queue, only so many run at once as the queue's `per_key` says, in order.
    `bucket`: in a queue that is ordered by buckets, the one it stands in; in another it has no effect.
    `dedupe` with `dedupe_key` (or without: then source and arguments are the key): what to do if the same work is there
    already: "merge" into it, "refuse" the new task, or "replace" what has not started. It is there, by `dedupe_scope`,
    while it is "pending" (queued or running), while it is "queued", or for a "window" of `dedupe_window_s` seconds.
    "key_idle" is "pending", and a task that runs with the same `key` in the same queue counts as the same work.
    `after`: handles or ids of tasks that must complete first. If one of them does not, `on_failure` says what becomes
    of this one: "fail", "skip", or "ignore" that. A list without any is a list, and may have an `on_failure` as well.
    `title`: one line that people read instead of the id. `labels`: names and texts that tasks can be filtered by, such
    as `{"customer": "42"}`.
    `requires`: labels that the place where it runs must have, such as `{"model": "a100"}`. It waits until one is free.
    `trace`: the trace context that the task belongs to, as a W3C traceparent: `00-<trace id>-<span id>-<flags>`.
    `submitted_by`: the person or program that submits.
    `connection`: yours to the database the store is in, with a transaction open. The task is part of that transaction:
    it exists when, and only when, you commit."""

    priority: Priority = Priority.NORMAL
    delay_s: float | None = None
    schedule_at: datetime | None = None
    queue: str | None = None
    key: str | None = None
    timeout_s: float | None = None
    retry: RetryPolicy | None = None
    dedupe: Dedupe = Dedupe.ALLOW
    dedupe_key: str | None = None
    dedupe_scope: DedupeScope = DedupeScope.PENDING
    dedupe_window_s: float | None = None
    after: tuple[str, ...] | None = None
    on_failure: OnFailure = OnFailure.FAIL
    bucket: str | None = None
    title: str = ""
    labels: dict[str, str] = {}
    requires: dict[str, str] = {}
    trace: str = ""
    submitted_by: str = ""
    connection: Any = None

    @classmethod
    def of(cls, **given: Any) -> Self:
        """Options as users write them: `priority="high"`, `dedupe="merge"`."""
        unknown = given.keys() - set(cls.__struct_fields__)
        if unknown:
            raise InvalidInput(
                f"unknown option {', '.join(map(shorten, sorted(unknown)))}; "
                f"known are {', '.join(cls.__struct_fields__)}. "
                "Arguments of the task itself go into the dict of arguments"
            )
        for name, value in given.items():
            if name in CHECKS and (value is not None or name in WITH_DEFAULT):
                given[name] = CHECKS[name](value)
        options = cls(**given)
        options._check_times()
        options._check_dedupe()
        if options.connection is not None:
            options._check_transaction()
        return options

    def _check_dedupe(self) -> None:
        window_s, is_window = self.dedupe_window_s, self.dedupe_scope is DedupeScope.WINDOW
        if self.dedupe is Dedupe.ALLOW:
            if self.dedupe_key is not None or window_s is not None or self.dedupe_scope is not DedupeScope.PENDING:
                name = "dedupe_key" if self.dedupe_key is not None else "dedupe_scope"
                raise InvalidInput(
                    "has no effect without {dedupe}='merge', 'refuse' or 'replace'", field=name, fields=("dedupe",)
                )
        elif self.dedupe_scope is DedupeScope.KEY_IDLE and self.key is None:
            raise InvalidInput(
                "'key_idle' needs a {key}: while a task with that key runs, the new one is a duplicate",
                field="dedupe_scope",
                fields=("key",),
            )
        elif is_window != (window_s is not None):
            raise InvalidInput(
                "{dedupe_scope}='window' and {dedupe_window_s}, how long it lasts, go together",
                fields=("dedupe_scope", "dedupe_window_s"),
            )
        elif window_s is not None:
            check_window(window_s)

    def _check_transaction(self) -> None:
        """What is decided about other tasks is decided in transactions of ours, which end at once."""
        if self.after or self.dedupe is Dedupe.REPLACE or self.dedupe_scope is not DedupeScope.PENDING:
            raise InvalidInput(
                "{after}, {dedupe}='replace' and a {dedupe_scope} other than 'pending' do not go into a transaction of "
                "your own",
                fields=("after", "dedupe", "dedupe_scope", "connection"),
                hint="leave {connection} out, or submit when you have committed",
            )

    def _check_times(self) -> None:
        delay_s, at = self.delay_s, self.schedule_at
        if delay_s is not None:
            check_delay(delay_s)
        if at is None:
            return
        if not isinstance(at, datetime):
            raise InvalidInput("must be a datetime with a time zone", field="schedule_at", given=at)
        moment("schedule_at", at)
        if delay_s is not None:
            raise InvalidInput("give either {delay_s} or {schedule_at}, not both", fields=("delay_s", "schedule_at"))

    def due_at(self, now: datetime) -> datetime:
        if self.schedule_at is not None:
            return moment("schedule_at", self.schedule_at)
        return now if self.delay_s is None else now + timedelta(seconds=self.delay_s)


def _word(name: str, kind: type[StrEnum], value: Any) -> StrEnum:
    try:
        return kind(value)
    except ValueError:
        raise InvalidInput(f"{quote(value)} is not one of {', '.join(kind)}", field=name) from None


def _check_trace(given: Any) -> str:
    if not isinstance(given, str) or (given and not TRACEPARENT.fullmatch(given)):
        raise InvalidInput(
            "must be a W3C traceparent in lower case, such as "
            "'00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01'",
            field="trace",
            given=given,
        )
    return given


def _uuids(given: Any) -> tuple[str, ...] | None:
    """The ids of the tasks that are named, by themselves or by what stands for a task."""
    if given is None:
        return None
    if isinstance(given, str | UUID) or not isinstance(given, Iterable):
        raise InvalidInput("must be a list of handles or ids of tasks", field="after", given=given)
    return tuple(dict.fromkeys(check_uuid(getattr(task, "uuid", task)) for task in given))


CHECKS: dict[str, Callable[[Any], Any]] = {
    "priority": check_priority,
    "queue": partial(check_name, "queue"),
    "key": partial(check_name, "key"),
    "timeout_s": check_timeout,
    "retry": check_retry,
    "dedupe": partial(_word, "dedupe", Dedupe),
    "dedupe_key": partial(check_name, "dedupe_key"),
    "dedupe_scope": partial(_word, "dedupe_scope", DedupeScope),
    "after": _uuids,
    "on_failure": partial(_word, "on_failure", OnFailure),
    "bucket": partial(check_name, "bucket"),
    "title": check_title,
    "labels": check_labels,
    "requires": partial(check_labels, field="requires"),
    "trace": _check_trace,
    "submitted_by": lambda given: given and check_name("submitted_by", given),
}
"""What an option must be, by name: a function that returns its value or raises `InvalidInput`."""

WITH_DEFAULT = frozenset({"priority", "dedupe", "dedupe_scope", "on_failure"})
"""Options that may not be None. None means that another option is not given."""

DEFAULTS = TaskOptions()

MAX_BATCH = 100_000
"""Tasks of one submit: it is one transaction, and all of it is in memory."""


def make_record(
    consumer: Consumer, args: dict[str, Any], options: TaskOptions, *, now: datetime, max_bytes: int
) -> TaskRecord:
    """The record of one task that is asked for now. Bad arguments raise `InvalidInput`, and nothing is stored."""
    due_at, uuid = now if options is DEFAULTS else options.due_at(now), None
    task = consumer.make_task(args)
    if task is not None:
        args, uuid = task.args, check_name("a task's uuid", task.uuid)
        if options is DEFAULTS or (options.schedule_at is None and options.delay_s is None):
            due_at = moment("schedule_at", task.schedule_at)
    text = consumer.encode(args)
    check_size(consumer.name, text, max_bytes)
    record = TaskRecord(uuid or new_uuid(), consumer.name, due_at, now, now, 0, options.queue or consumer.queue, text)
    if options is not DEFAULTS:
        _carry_over(options, record, consumer)
    if consumer.account or consumer.bucket_by:
        _set_pool_fields(options, record, consumer)
    return record


def make_records(
    consumer: Consumer, arguments: Iterable[Mapping[str, Any]], options: TaskOptions, *, now: datetime, max_bytes: int
) -> list[TaskRecord]:
    """The same for several, in order, where what they have in common is found out once."""
    source = consumer.name
    if consumer.produce is not None:
        own = (named(source, args) for args in arguments)
        return convert_each(partial(make_record, consumer, options=options, now=now, max_bytes=max_bytes), own)
    queue, due_at = options.queue or consumer.queue, options.due_at(now)
    given = (args if type(args) is dict else named(source, args) for args in arguments)
    encode_many = consumer.encode_many
    texts = convert_each(consumer.encode, given) if encode_many is None else encode_many(given)
    if max(map(len, texts), default=0) * 4 > max_bytes:
        convert_each(partial(check_size, source, max_bytes=max_bytes), texts)
    records = [
        TaskRecord(uuid, source, due_at, now, now, 0, queue, text)
        for uuid, text in zip(new_uuids(len(texts)), texts, strict=True)
    ]
    if options is not DEFAULTS:
        for record in records:
            _carry_over(options, record, consumer)
    if consumer.account or consumer.bucket_by:
        for record in records:
            _set_pool_fields(options, record, consumer)
    return records


def named(consumer: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """A dict of these arguments that is nobody else's."""
    if not isinstance(args, dict | Mapping):  # a dict is told in a tenth of the time
        raise InvalidArguments(consumer, [f"arguments: must be a dict of names and values, not {quote(args)}"])
    return dict(args)


def _carry_over(options: TaskOptions, record: TaskRecord, consumer: Consumer) -> None:
    if options.timeout_s is not None and consumer.timeout_s is not None and options.timeout_s > consumer.timeout_s:
        raise InvalidInput(
            f"{options.timeout_s:g} is longer than the {consumer.timeout_s:g} s that {consumer.name!r} allows",
            field="timeout_s",
            hint="a task can only have a shorter one. Raise it where the consumer is defined",
        )
    record.priority = options.priority.value
    record.key = options.key
    record.bucket = options.bucket
    record.requires = encode_requirements(options.requires or {})
    record.timeout_s = options.timeout_s
    record.retry = options.retry
    extra = TaskExtra(
        title=options.title or "",
        labels=options.labels or {},
        trace=options.trace or "",
        submitted_by=options.submitted_by or "",
    )
    record.extra = None if extra == NO_EXTRA else extra
    if options.dedupe is not Dedupe.ALLOW:
        record.dedupe_slot = make_slot(consumer.name, record.args, options.dedupe_key)
        record.dedupe_scope = options.dedupe_scope
    if options.after:
        record.on_failure = options.on_failure
    elif options.after is None and options.on_failure is not OnFailure.FAIL:
        raise InvalidInput(
            f"{options.on_failure.value!r} is about the tasks that it waits for, and it waits for none",
            field="on_failure",
            fields=("after",),
            hint="name them with {after}, or leave it out",
        )


def dedupe_of(consumer: Consumer, options: TaskOptions) -> Dedupe:
    """What becomes of a task whose work is there already. Unless the submitter says otherwise, one of an account is
    refused."""
    return Dedupe.REFUSE if consumer.account and options.dedupe is Dedupe.ALLOW else options.dedupe


def _set_pool_fields(options: TaskOptions, record: TaskRecord, consumer: Consumer) -> None:
    """What a task on a device has of its arguments and its requirements."""
    if consumer.bucket_by and record.bucket is None:
        record.bucket = options.requires.get(consumer.bucket_by)
    if consumer.account:
        _set_account(options, record, consumer)


def _set_account(options: TaskOptions, record: TaskRecord, consumer: Consumer) -> None:
    """Give a task the key of its account, unless the submitter says something else."""
    key = set_account(record, consumer.account)
    if key is None:
        return
    if options.key not in (None, key) or options.dedupe_key not in (None, key):
        field = "key" if options.key not in (None, key) else "dedupe_key"
        raise InvalidInput(f"must be {key!r}, the key of the account, or be left out", field=field)
    if options.dedupe_scope not in (DedupeScope.PENDING, DedupeScope.KEY_IDLE):
        raise InvalidInput("must be 'key_idle' for a task of an account, or be left out", field="dedupe_scope")
    if options.connection is not None:
        raise InvalidInput(
            "a task of an account does not go into a transaction of your own",
            field="connection",
            hint="submit it when you have committed",
        )


def check_size(source: str, args: str, max_bytes: int) -> None:
    """`PayloadTooLarge` if these arguments are; most are so short that they need not be counted."""
    if len(args) * 4 > max_bytes and len(args.encode()) > max_bytes:
        raise PayloadTooLarge(f"the arguments of {source!r}", len(args.encode()), max_bytes)
