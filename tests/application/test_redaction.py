"""Secrets among the data of a task are kept out of its documents."""

import msgspec
import pytest

from taskyard.application.task_documents import TaskDocument, attempt_document, task_document, waiting_task
from taskyard.model.execution import ErrorKind, ExecutionError, Progress
from taskyard.model.notes import AuditStamp, Note
from taskyard.model.redaction import Redactor, collect_secrets, hide_secrets, is_secret_name, redact
from taskyard.model.state import TaskState
from taskyard.model.task import Attempt, Mark, TaskExtra
from taskyard.model.why import Reason, Why
from taskyard.stores.records import ATTEMPT, TASK
from taskyard.testing.samples import NOON, a_record

SECRET = "xyzzy-42"
ERROR = ExecutionError(kind=ErrorKind.RUNTIME, message=f"refused: {SECRET}", traceback=f"token={SECRET}")

SECRET_NAMES = ["password", "DB_PASSWORD", "apiKey", "api-key", "x_token", "clientSecret", "AUTH", "key", "Set-Cookie"]
PLAIN_NAMES = ["path", "monkey", "keyboard", "author", "tokenizer", "secretary", "passage", "url", "turkey"]


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_secret_names_are_known(name: str) -> None:
    """A word in the name that means a secret hides the value, however the name is written."""
    assert is_secret_name(name)


@pytest.mark.parametrize("name", PLAIN_NAMES)
def test_other_names_are_not_secret(name: str) -> None:
    """A name that only contains the letters of such a word hides nothing."""
    assert not is_secret_name(name)


def test_secrets_are_hidden_at_any_depth() -> None:
    """Secrets inside of lists and objects are hidden, with the passwords of URLs; empty ones and the rest are kept."""
    data = {"a": [{"token": "abcdef", "n": 1}], "password": "", "url": "https://me:pw@example.org/x"}
    assert redact(data) == {
        "a": [{"token": "***", "n": 1}], "password": "", "url": "https://me:***@example.org/x",
    }  # fmt: skip
    assert hide_secrets("bad token abcdef", collect_secrets(data)) == "bad token ***"


def test_every_public_field_of_a_task_is_in_its_document() -> None:
    """A new field of the record needs a line in the document, unless it is the engine's own."""
    internal = set(TASK.select(Mark.INTERNAL))
    assert {"id", "token", "extra"} <= internal
    fields = set(TaskDocument.__struct_fields__)
    assert not internal & fields
    assert {*TASK.columns, *TaskExtra.__struct_fields__} - internal - fields == {"group_id"}
    assert task_document(a_record(extra=None, group_id="album")).group == "album"


def test_every_field_of_an_attempt_is_in_its_document() -> None:
    """With the name of its node, the number of its device, and how long it took."""
    attempt = Attempt(1, 7, "here", TaskState.COMPLETED, NOON, NOON, device="emu-1")
    document = attempt_document(attempt, Redactor(a_record()), {"here": "host-1"}, {"emu-1": 1})
    assert set(ATTEMPT.columns) <= set(document.__struct_fields__)
    assert msgspec.structs.asdict(document) == {
        **msgspec.structs.asdict(attempt), "duration_s": 0.0, "node_name": "host-1", "device_number": 1,
    }  # fmt: skip


@pytest.mark.parametrize("reveal", [False, True])
def test_no_text_says_a_secret_of_the_arguments(reveal: bool) -> None:
    """Wherever a person or the code has quoted it."""
    record = a_record(
        args=f'{{"api_token":"{SECRET}"}}',
        extra=TaskExtra(title=f"with {SECRET}", labels={"used": SECRET}),
        error=ERROR,
        note=Note.remark(f"took {SECRET}"),
        hold=AuditStamp("ann", NOON, f"not with {SECRET}"),
        progress=Progress(0.5, f"sent {SECRET}", facts={"last": SECRET}),
    )
    attempt = Attempt(1, 7, "here", TaskState.FAILED, NOON, NOON, error=ERROR)
    documents = task_document(record, reveal=reveal), attempt_document(attempt, Redactor(record, reveal=reveal), {}, {})
    texts = [msgspec.json.encode(document).decode() for document in documents]
    assert [SECRET in text for text in texts] == [reveal, reveal]


@pytest.mark.parametrize("reveal", [False, True])
def test_no_text_says_a_secret_of_the_values_of_middleware(reveal: bool) -> None:
    """A secret that middleware added is hidden where it is, and where an error or another value quotes it; `reveal`
    shows it."""
    values = {"tenant": "acme", "session": {"auth_token": SECRET}, "seen": [f"with {SECRET}"]}
    record = a_record(extra=TaskExtra(values=values), error=ERROR)
    document = task_document(record, reveal=reveal)
    assert (SECRET in msgspec.json.encode(document).decode()) is reveal
    hidden = {"tenant": "acme", "session": {"auth_token": "***"}, "seen": ["with ***"]}
    assert document.values == (values if reveal else hidden)
    assert document.error is not None
    assert document.error.message == (f"refused: {SECRET}" if reveal else "refused: ***")


def test_a_reason_to_wait_says_no_secret() -> None:
    """The text of a wait may quote what a person said when they held the task."""
    why = Why(reason=Reason.HELD, text=f"held: {SECRET}", remedy="release it")
    document = waiting_task(a_record(args=f'{{"api_token":"{SECRET}"}}'), why)
    assert document.why is not None
    assert document.why.text == "held: ***"
