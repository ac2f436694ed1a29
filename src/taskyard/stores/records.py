"""The one description of stored records: columns, row mapping and JSON documents follow from the fields of a struct.

A field's Python type says its SQL type, whether it may be null, and how it is encoded; its `Mark` says who writes it.
Readers and writers are generated once, at import, because they run for every task.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from enum import Enum, StrEnum, auto
from functools import lru_cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from taskyard.model.attempt import Artifact, LogLine
from taskyard.model.audit import AuditEntry
from taskyard.model.state import RUNNING
from taskyard.model.task import Attempt, Mark, Outcome, TaskExtra, TaskRecord

log = logging.getLogger("taskyard")

T = TypeVar("T")

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)

NO_MARK = Mark(0)


class Kind(Enum):
    """How a value is stored."""

    TEXT = auto()
    """Also a `Literal` of texts, which is not checked."""
    BYTES = auto()
    INTEGER = auto()
    REAL = auto()
    BOOLEAN = auto()
    TIME = auto()
    ENUM = auto()
    DOCUMENT = auto()
    """JSON text."""


class Field(NamedTuple):
    """One field of a record, which is one column of its table."""

    name: str
    kind: Kind
    type: Any
    is_nullable: bool
    marks: Mark


class Dialect(NamedTuple):
    """How a database stores values: column types by kind, and whether times are microseconds since 1970."""

    types: Mapping[Kind, str]
    has_times: bool


SQLITE = Dialect(
    {Kind.TEXT: "TEXT", Kind.BYTES: "BLOB", Kind.INTEGER: "INTEGER", Kind.REAL: "REAL", Kind.BOOLEAN: "INTEGER",
     Kind.TIME: "INTEGER", Kind.ENUM: "TEXT", Kind.DOCUMENT: "TEXT"},
    has_times=False,
)  # fmt: skip
POSTGRES = Dialect(
    {Kind.TEXT: "text", Kind.BYTES: "bytea", Kind.INTEGER: "bigint", Kind.REAL: "double precision",
     Kind.BOOLEAN: "boolean", Kind.TIME: "timestamp with time zone", Kind.ENUM: "text", Kind.DOCUMENT: "text"},
    has_times=True,
)  # fmt: skip

_KINDS: dict[type, Kind] = {
    str: Kind.TEXT,
    bytes: Kind.BYTES,
    int: Kind.INTEGER,
    float: Kind.REAL,
    bool: Kind.BOOLEAN,
    datetime: Kind.TIME,
}


class Description:
    """The fields of a stored record, in the order of its struct."""

    def __init__(self, record: type) -> None:
        self.record = record
        hints = get_type_hints(record, include_extras=True)
        self.fields = {name: _field(name, hints[name]) for name in record.__struct_fields__}  # type: ignore[attr-defined]
        self.columns = tuple(self.fields)

    def select(self, having: Mark = NO_MARK, *, without: Mark = NO_MARK) -> tuple[str, ...]:
        """The columns that have one of these marks (any, if none is named) and none of the others."""
        return tuple(
            field.name
            for field in self.fields.values()
            if (not having or field.marks & having) and not field.marks & without
        )

    def reader(
        self,
        dialect: Dialect,
        columns: Iterable[str] | None = None,
        computed: Mapping[str, str] | None = None,
        arguments: str = "",
    ) -> Callable[..., Any]:
        """A function from a row with these columns to a record. `computed` has expressions for fields that do not come
        from the row as they are, over the names of columns and of further `arguments`."""
        columns, computed = tuple(columns or self.columns), computed or {}
        scope: dict[str, Any] = {"record": self.record, "from_us": from_us, "RUNNING": RUNNING}
        values = []
        for name, field in self.fields.items():
            if name in computed:
                values.append(computed[name])
            elif name in columns:
                values.append(_decoding(field, dialect, scope))
            else:
                values.append(f"default_{name}")
                scope[f"default_{name}"] = _default(self.record, name)
        body = f"({', '.join(columns)},) = row\n    return record({', '.join(values)})"
        return _compile(f"row{', ' * bool(arguments)}{arguments}", body, scope)

    def writer(
        self, dialect: Dialect, columns: Iterable[str], computed: Mapping[str, str] | None = None, arguments: str = ""
    ) -> Callable[..., tuple[Any, ...]]:
        """A function from a record `r` to a row of these columns. `computed` columns are no fields of the record, or
        are not taken from it."""
        scope: dict[str, Any] = {"to_us": to_us, "to_document": to_document}
        computed = computed or {}
        values = [
            computed[name] if name in computed else _encoding(self.fields[name], dialect, f"r.{name}")
            for name in columns
        ]
        return _compile(f"r{', ' * bool(arguments)}{arguments}", f"return ({', '.join(values)},)", scope)

    def has_any(self, columns: Iterable[str]) -> Callable[[Any], bool]:
        """A function that tells whether a record has a value in one of these nullable fields."""
        terms = [f"r.{name} is not None" for name in columns if self.fields[name].is_nullable]
        return _compile("r", f"return {' or '.join(terms)}", {})


def _compile(parameters: str, body: str, scope: dict[str, Any]) -> Callable[..., Any]:
    exec(f"def made({parameters}):\n    {body}", scope)
    made: Callable[..., Any] = scope["made"]
    return made


def _field(name: str, hint: Any) -> Field:
    marks = NO_MARK
    if get_origin(hint) is Annotated:
        hint, *extra = get_args(hint)
        marks = next((mark for mark in extra if isinstance(mark, Mark)), marks)
    kinds = [kind for kind in get_args(hint) if kind is not NoneType] if _is_union(hint) else [hint]
    is_nullable = _is_union(hint) and NoneType in get_args(hint)
    (kind,) = kinds
    if get_origin(kind) is Literal:
        return Field(name, Kind.TEXT, str, is_nullable, marks)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return Field(name, Kind.ENUM, kind, is_nullable, marks)
    return Field(name, _KINDS.get(kind, Kind.DOCUMENT), kind, is_nullable, marks)


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, UnionType)


def _default(record: type, name: str) -> Any:
    found = next(field for field in msgspec.structs.fields(record) if field.name == name)
    return None if found.default is msgspec.NODEFAULT else found.default


def _decoding(field: Field, dialect: Dialect, scope: dict[str, Any]) -> str:
    name = field.name
    match field.kind:
        case Kind.TIME if not dialect.has_times:
            decoded = f"from_us({name})"
        case Kind.BOOLEAN if not dialect.has_times:
            return f"bool({name})"
        case Kind.ENUM:
            scope[f"members_{name}"] = {str(member): member for member in field.type}
            decoded = f"members_{name}[{name}]"
        case Kind.DOCUMENT:
            scope[f"decode_{name}"] = document_reader(field.type)
            decoded = f"decode_{name}({name})"
        case _:
            return name
    return f"None if {name} is None else {decoded}" if field.is_nullable else decoded


def _encoding(field: Field, dialect: Dialect, value: str) -> str:
    match field.kind:
        case Kind.TIME if not dialect.has_times:
            encoded = f"to_us({value})"
        case Kind.DOCUMENT:
            encoded = f"to_document({value})"
        case _:
            return value
    return f"None if {value} is None else {encoded}" if field.is_nullable else encoded


# --- values -----------------------------------------------------------------------------------------------------------


def to_us(at: datetime) -> int:
    return (at - EPOCH) // _MICROSECOND


def from_us(us: int) -> datetime:
    return EPOCH + timedelta(microseconds=us)


def to_document(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def to_document_or_none(value: Any) -> str | None:
    return None if value is None else msgspec.json.encode(value).decode()


@lru_cache
def document_reader(kind: type[T]) -> Callable[[str], T | None]:
    """A function that reads JSON text. A text that does not decode is logged and left out: one bad cell must never
    keep a whole lane from being read. The last few hundred texts are remembered, since most are alike."""
    decoder = msgspec.json.Decoder(kind)

    @lru_cache(maxsize=256)
    def read(text: str) -> T | None:
        try:
            return decoder.decode(text)
        except msgspec.MsgspecError:
            log.warning("a stored %s cannot be read: %.200s", kind.__name__, text)
            return None

    return read


# --- tasks and attempts -----------------------------------------------------------------------------------------------

TASK = Description(TaskRecord)
EXTRA = Description(TaskExtra)
ATTEMPT = Description(Attempt)
OUTCOME = Description(Outcome)
LINE = Description(LogLine)
ARTIFACT = Description(Artifact)
AUDIT = Description(AuditEntry)

OF_ATTEMPT = ("task", "token")
"""The columns that say which attempt a line or an artifact belongs to, before the columns of its own."""

ARTIFACT_FACTS = tuple(name for name in ARTIFACT.columns if name != "data")
"""An artifact without its data, which may be large."""

RELATIONS = TASK.select(Mark.RELATION)
"""What a task has to do with others."""

PUBLIC = TASK.select(without=Mark.INTERNAL)
"""What a document says of a task."""

LISTED = tuple(name for name in TASK.columns if name not in ("args", "result", "checkpoint"))
"""A task without what may be large."""

NEW_TASK = TASK.select(Mark.INSERT, without=Mark.RELATION | Mark.RARE)
"""What every insert writes."""

RARE_FIELDS = TASK.select(Mark.RARE) + RELATIONS
"""What most inserts leave out."""

MOVED_TASK = ("id", *TASK.select(Mark.MOVE))
"""What a move or a command can change, after the id that finds the row."""

_FIRST = ("priority", "position", "id", "queue", "consumer", "requires", "uuid", "due_at")

CLAIM_READS = (*_FIRST, *(name for name in TASK.select(without=Mark.CLAIM) if name not in _FIRST))
"""What is read of a task to start it: all but what the start sets, in order of the first two columns."""

SET_BY_START = {"state": "RUNNING", "updated_at": "now", "started_at": "now"}
"""What the start of a task sets; the other fields that it sets get their defaults."""

NEW_TASK_FIELDS = tuple(name for name in TASK.select(Mark.INSERT, without=Mark.STORE | Mark.RELATION) if name != "note")
"""What a client says of a new task; the store computes the rest. Notes go apart: hardly any new task has one."""

CLAIM_FIELDS = ("token", *TASK.select(without=Mark.CLAIM | Mark.RELATION))
"""What a claim says of its task; relations go apart."""

CARRIED_FIELDS = tuple(
    name
    for name in TASK.select(without=Mark.RELATION | Mark.LIVE | Mark.FINAL)
    if name not in ("state", "updated_at", "note", "error", "crashes", "cancel")
)
"""What a finished task keeps as it was. The exceptions are set by the way it finished."""

COMPLETED_FIELDS = (*(name for name in CARRIED_FIELDS if name != "checkpoint"), "crashes", "cancel")
"""The same for a completed task, which keeps no checkpoint."""

has_relations = TASK.has_any(RELATIONS)
has_rare_fields = TASK.has_any(RARE_FIELDS)


def started_record(record: TaskRecord, now: datetime) -> TaskRecord:
    """A record that was inserted a moment ago, as it is once started, but for its node and token."""
    started = record.clone()
    started.state, started.is_parked, started.note = RUNNING, False, None
    started.updated_at = started.started_at = now
    started.attempt = 1
    return started
