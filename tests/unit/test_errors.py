"""Errors as values: every public one crosses to another process as it is."""

import copy
import pickle
import re
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

import taskyard
import taskyard.futures
from taskyard import errors
from taskyard.execution import forks, raising
from taskyard.execution.owned import ManagerOwns
from taskyard.manager import ManagerClosed
from taskyard.ports import explain

EXAMPLES = [
    errors.ArtifactElsewhere("scan.png", "lab-3", "/data/scan.png"),
    errors.BatchTooLarge(100),
    errors.BlockingOnLoop("submit"),
    errors.Cancel("no longer wanted"),
    errors.ChangedMeanwhile("a-1", "retry", "running"),
    errors.ClaimLost("a-1", 7),
    errors.ResultsPruned("g-1", 3, 5),
    errors.CommandRefused("a-1", "cancel", "completed", code="same_task", detail="look again"),
    errors.DependencyCycle(["a-1", "a-2"]),
    errors.DependencyLost("a-1", "failed", "a-2", "canceled", "was canceled"),
    errors.DuplicateConsumer("fetch"),
    errors.DuplicateTask("a-1", "slot"),
    errors.EventsMissed(3, 9),
    errors.ForkedStore(),
    errors.IllegalMove("failed", "running"),
    errors.InvalidAlgorithm("detector", "it has no spec"),
    errors.InvalidArguments("fetch", ["url: missing"], names=["url"]),
    errors.InvalidConsumer("it has no name"),
    errors.InvalidInput("that cannot be"),
    errors.InvalidOutput("detector", ["boxes: missing"]),
    errors.InvalidRetry("max_retries must not be negative"),
    errors.NaiveDatetime("schedule_at", datetime(2026, 1, 1, tzinfo=UTC)),
    errors.NoCurrentRun(),
    errors.NotInTransaction(),
    errors.NotJson("the result", "a set"),
    errors.NotOpen("the yard is not open"),
    errors.OtherDatabase("postgresql://db/app"),
    errors.OutcomeUnknown("disk I/O error"),
    errors.PayloadTooLarge("the result", 2_000_000, 1_000_000),
    errors.ResultGone("a-1"),
    errors.RetryLater(30, "busy"),
    errors.SlotTaken("a-1", "failed", "a-2", until=datetime(2026, 1, 1, tzinfo=UTC)),
    errors.StaleTransaction(),
    errors.StoreBusy("work.db"),
    errors.StoreCorrupt("work.db", "not a database"),
    errors.StoreDenied("postgresql://db/app", "no", "ask"),
    errors.StoreError("it could not"),
    errors.StoreFolderMissing("x/work.db", "x"),
    errors.StoreForeign("work.db", "a text file"),
    errors.StoreIncomplete("the schema 'taskyard'", "a table is missing"),
    errors.StoreFull("work.db"),
    errors.UnknownArtifact("a-1", "scan.png", ["log.txt"]),
    errors.StoreOnNetwork("work.db", "nfs"),
    errors.StoreReadOnly("work.db", "EACCES"),
    errors.StoreReplaced("work.db", "work.db-wal"),
    errors.StoreTooNew("work.db", 9, 3),
    errors.StoreMigrationChanged("work.db", "0001_baseline.sql"),
    errors.StoreNotUtf8("postgresql://db/app", "LATIN1"),
    errors.StoreTooOld("postgresql://db/app", 9, 15),
    errors.StoreUnavailable("no idea"),
    errors.StoreUnreachable("postgresql://db/app", "no answer"),
    errors.ScheduleExists("nightly", "take another name"),
    errors.ItemsFailed("nightly", "list_accounts() raised OSError"),
    errors.StoreUrlInvalid("mysql://"),
    errors.StoredArgumentsInvalid("fetch", ["url: missing"]),
    errors.SubmitPending(),
    errors.TaskCanceled("a-1", "by hand"),
    errors.TaskEnded("a-1", "it ended"),
    errors.TaskFailed("a-1", kind="runtime", message="boom", error_type="ValueError", traceback="line 1"),
    errors.TaskSkipped("a-1"),
    errors.TaskyardError("anything"),
    errors.MiddlewareFault("add_tenant", "did not await call_next()"),
    errors.NoScript(),
    errors.UnguardedScript(),
    errors.UnknownAlgorithm("detector", ["words 1.0"]),
    errors.UnknownConsumer("fetch", ["shrink"]),
    errors.UnknownGroup("a-1"),
    errors.UnknownNode("host-1"),
    errors.DeviceError("the app is not installed"),
    errors.DeviceLost("it did not answer for 20 s"),
    errors.UnknownDevice("emu-9"),
    errors.StepFailed("tap 'start'", "DeviceError: no screen"),
    errors.CleanupFailed("TimeoutError"),
    errors.InvalidTemplate("start", "it has one color only"),
    errors.TemplateNotSeen("'start'", 10, threshold=0.85, score=0.62, at=(3, 4)),
    errors.TemplateNotGone("'start'", 10, threshold=0.85, score=0.92, at=(3, 4)),
    errors.AccountQuarantined(7, "daily", "phones"),
    errors.DeviceExists("emu-1", "address", "emulator-5554"),
    errors.DeviceBusy("emu-1", "a-1"),
    errors.UnknownSchedule("nightly"),
    errors.UnknownTask("a-1"),
    errors.UnusableConnection("it is closed"),
    errors.WrongLoop(),
    raising.CallKilled("work", "killed"),
    raising.CallTimedOut("work", "it ran longer than its timeout of 1 s"),
    raising.CannotCross("work", "its result is a socket", has_run=True),
    forks.PoolForked(),
    raising.RemoteError(("Odd", "ValueError"), "boom"),
    explain.RemoteTraceback("line 1"),
    raising.WorkerDied("work", "it was ended by SIGSEGV (11)"),
    ManagerClosed(),
    ManagerOwns(),
]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("way", [lambda error: pickle.loads(pickle.dumps(error, 5)), copy.copy], ids=["pickle", "copy"])
def test_an_error_crosses_as_it_is(error, way):
    """Class, message and fields of every public error are the same after it was pickled or copied."""
    error.add_note("seen by a test")
    arrived = way(error)
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert vars(arrived) == vars(error)


def test_every_public_error_has_an_example():
    """The list above leaves no public error out."""
    named = [*vars(errors).values(), *(getattr(taskyard.futures, name) for name in taskyard.futures.__all__)]
    public = {found for found in named if isinstance(found, type) and issubclass(found, BaseException)}
    public -= {errors.Steer}  # the base of `RetryLater` and `Cancel`, never raised itself
    assert public <= {type(error) for error in EXAMPLES}


def all_errors(base: type[errors.TaskyardError] = errors.TaskyardError) -> Iterator[type[errors.TaskyardError]]:
    for cls in base.__subclasses__():
        if cls.__module__.startswith("taskyard."):
            yield cls
            yield from all_errors(cls)


CODES = """
    account_quarantined artifact_elsewhere batch_too_large blocking_on_loop changed_meanwhile claim_lost
    cleanup_failed command_refused dependency_cycle dependency_lost device_busy device_error device_exists
    device_lost duplicate_consumer duplicate_task events_missed forked_store illegal_move invalid_algorithm
    invalid_arguments invalid_consumer invalid_input invalid_output invalid_retry invalid_template items_failed
    middleware_fault naive_datetime no_current_run no_script not_in_transaction not_json not_open other_database
    outcome_unknown payload_too_large result_gone results_pruned schedule_exists slot_taken stale_transaction
    step_failed store_busy store_corrupt store_denied store_error store_folder_missing store_foreign store_full
    store_incomplete store_migration_changed store_not_utf8 store_on_network store_read_only store_replaced
    store_too_new store_too_old store_unavailable store_unreachable store_url_invalid stored_arguments_invalid
    submit_pending task_canceled task_ended task_failed task_skipped taskyard_error template_not_gone
    template_not_seen unguarded_script unknown_algorithm unknown_artifact unknown_consumer unknown_device
    unknown_group unknown_node unknown_schedule unknown_task unusable_connection wrong_loop
"""
"""Programs compare them: a class that gets another name keeps its code."""


def test_every_error_has_a_code_of_its_own():
    """Each class of error has a snake_case code that no other class has."""
    found: set[type[errors.TaskyardError]] = {errors.TaskyardError, *all_errors()}
    codes = Counter(cls.code for cls in found)
    assert {
        cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, errors.TaskyardError)
    } <= found
    assert [code for code, count in codes.items() if count > 1] == []
    assert [code for code in codes if not re.fullmatch(r"[a-z0-9]+(_[a-z0-9]+)*", code)] == []
    assert sorted({cls.code for cls in found if cls.__module__ == errors.__name__}) == CODES.split()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.TaskyardError("anything"), "taskyard_error"),
        (errors.StoreUrlInvalid("mysql://"), "store_url_invalid"),
        (errors.StoreNotUtf8("postgresql://db/app", "LATIN1"), "store_not_utf8"),
        (errors.CommandRefused("a-1", "cancel", "completed"), "is_completed"),
        (errors.CommandRefused("a-1", "retry", "queued", code="not_finished"), "not_finished"),
        (errors.ChangedMeanwhile("a-1", "retry", "running", code="changed_meanwhile"), "changed_meanwhile"),
        (errors.SlotTaken("a-1", "failed", "a-2"), "slot_taken"),
        (errors.DependencyLost("a-1", "failed", "a-2", "skipped", "was skipped"), "dependency_skipped"),
    ],
)
def test_an_error_names_its_kind(error, code):
    """A program can tell errors apart by their codes, and why a command was refused as well."""
    assert error.code == code


@pytest.mark.parametrize(
    ("code", "sentence"),
    [*errors.REFUSALS.items(), ("is_running", "it is running"), ("other_line", "other line")],
)
def test_why_a_command_was_refused_is_a_sentence(code, sentence):
    """Every code of a refusal has words; one without a sentence of its own is read as it is."""
    assert errors.describe_refusal(code) == sentence


def test_a_refusal_says_the_state_and_the_reason():
    """The message of a refused command has the state that was found and what to know about it."""
    assert str(errors.CommandRefused("a-1", "hold", "running", code="never_held")) == (
        "cannot hold task a-1: it is running; a running task is never held"
    )
    assert str(errors.CommandRefused("a-1", "cancel", "completed")) == "cannot cancel task a-1: it is completed"


def test_what_is_not_known_fits_whatever_was_asked():
    """A beat or a look after old tasks that got no answer is not told to submit again."""
    assert "submit" not in str(errors.OutcomeUnknown("no answer in time"))


@pytest.mark.parametrize("what", ["the result", "the arguments of 'echo'"])
def test_one_and_many_are_too_large(what):
    """The message is a sentence whatever is too large."""
    said = str(errors.PayloadTooLarge(what, 1_100_008, 1 << 20))
    assert said.startswith(f"{what}: 1,100,008 bytes of JSON are more than the limit of 1,048,576; ")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://me:sesame@host/app", "postgresql://me:***@host/app"),
        ("postgresql://me:ses@me@host:5/app", "postgresql://me:***@host:5/app"),
        ("postgresql://me:ses/me@host/app", "postgresql://me:***@host/app"),
        ("postgresql://:sesame@/app?host=/run", "postgresql://:***@/app?host=/run"),
        ("postgresql://me@host/app?user=me&password=sesame&x=1", "postgresql://me@host/app?user=me&password=***&x=1"),
        ("postgresql:me:sesame@host/app", "postgresql:me:***@host/app"),
        ("postgres:/me:sesame@host/app", "postgres:/me:***@host/app"),
        ("postgresql//me:sesame@host/app", "postgresql//me:***@host/app"),
        ("POSTGRESQL:me@host/app", "POSTGRESQL:me@host/app"),
        ("from http://a:b@c to http://d:e@f", "from http://a:***@c to http://d:***@f"),
        ("postgresql://host:5432/app", "postgresql://host:5432/app"),
        ("sqlite:///a:b@c.db", "sqlite:///a:b@c.db"),
        ("me:sesame@host", "me:sesame@host"),
        ("host=h password=sesame user=me", "host=h password=*** user=me"),
        ("password = 'ses \\'ame' user=me", "password = *** user=me"),
    ],
)
def test_an_address_is_shown_without_its_password(text, shown):
    """A password in an address is hidden, also where it should have been escaped, and nothing else is."""
    assert errors.hide_password(text) == shown


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("me:sesame@host/app", "'me:***@host/app' is not a store"),
        ("pg:me:sesame@host/app", "'pg:***@host/app' is not a store"),
        ("mysql://me:sesame@host/app", "'mysql://me:***@host/app' is not a store"),
        ("redis://host/1", "'redis://host/1' is not a store"),
    ],
)
def test_what_is_no_store_is_repeated_without_a_password(given, shown):
    """An address that we do not know may hold a password all the same."""
    assert str(errors.StoreUrlInvalid(given)).startswith(shown)
