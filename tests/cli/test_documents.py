"""What `--json` says of a task and of an attempt follows from the description of each."""

import msgspec
import pytest

from taskyard.cli.documents import Revealed, attempt_document, task_document
from taskyard.model.execution import ErrorKind, ExecutionError, Progress
from taskyard.model.notes import AuditStamp, Note
from taskyard.model.state import TaskState
from taskyard.model.task import Attempt, Mark, TaskExtra
from taskyard.stores.records import ATTEMPT, TASK
from taskyard.testing.samples import NOON, a_record

SECRET = "xyzzy-42"
ERROR = ExecutionError(kind=ErrorKind.RUNTIME, message=f"refused: {SECRET}", traceback=f"token={SECRET}")


def test_every_public_field_of_a_task_is_in_its_document() -> None:
    """A new field needs no line in the documents; what is the engine's own stays out."""
    document = task_document(a_record(extra=None, group_id="album"))
    internal = set(TASK.select(Mark.INTERNAL))
    assert {"id", "token", "extra"} <= internal
    assert not internal & document.keys()
    missing = {*TASK.columns, *TaskExtra.__struct_fields__} - internal - document.keys()
    assert (missing, document["group"]) == ({"group_id"}, "album")


def test_every_field_of_an_attempt_is_in_its_document() -> None:
    """With how long it took."""
    attempt = Attempt(1, 7, "here", TaskState.COMPLETED, NOON, NOON)
    document = attempt_document(attempt, Revealed(a_record()))
    assert {**document} == {**msgspec.structs.asdict(attempt), "duration_s": 0.0}
    assert tuple(document)[: len(ATTEMPT.columns)] == ATTEMPT.columns


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
    documents = task_document(record, reveal=reveal), attempt_document(attempt, Revealed(record, reveal=reveal))
    texts = [msgspec.json.encode(document).decode() for document in documents]
    assert [SECRET in text for text in texts] == [reveal, reveal]
