"""Algorithms as a user runs them: their life in workers, what they take and give, what they see of their request."""

import asyncio
import hashlib
import logging
import os
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest

from taskyard import (
    Algorithm,
    AlgorithmContext,
    AlgorithmSpec,
    ErrorKind,
    ExecutionDispatcher,
    ExecutionHints,
    ExecutionRequest,
    InvalidInput,
    MockExecutor,
    ProcessPoolExecutor,
    Progress,
)
from taskyard.algorithms import InvalidAlgorithm
from taskyard.execution.installed import Payload
from taskyard.futures import PoolSettings
from tests.execution import algorithms
from tests.execution.algorithms import AsyncLedger, Ledger, NeedsFile, Number, Served, SlowToLoad
from tests.execution.asking import spec

PLACES = pytest.mark.parametrize("place", ["inline", "thread", "process", "isolated"])


def describe(place: str) -> tuple[Callable[..., Any], AlgorithmSpec]:
    code = algorithms.describe_async if place == "inline" else algorithms.describe
    return code, spec("describe", executor=place)


# --- life in a worker -------------------------------------------------------------------------------------------------


@pytest.mark.spec("EXE-09")
async def test_a_worker_initializes_once_and_keeps_the_instance(dispatch):
    """One worker, many runs: initialized once, and the instance is the same."""
    dispatcher = dispatch(Ledger)
    results = [await dispatcher.run(Ledger, {"n": n}, request_id=f"r{n}") for n in range(4)]
    served = [result.data for result in results]
    assert [one.n for one in served] == [0, 1, 4, 9]
    assert {(one.pid, one.opened) for one in served} == {(results[0].worker_pid, 1)}
    assert served[3].before == ["r0:NoneType", "r1:NoneType", "r2:NoneType"]


@pytest.mark.spec("EXE-09", "EXE-16")
async def test_every_worker_initializes_and_shuts_down(dispatch, tmp_path):
    """A worker that is replaced after two runs shuts its instance down, and the next has one of its own."""
    recycled = AlgorithmSpec("recycled", execution=ExecutionHints(recycle_after=2))
    dispatcher = dispatch((Ledger, recycled))
    served = [(await dispatcher.run("recycled", Number(n=n, folder=str(tmp_path)))).data for n in range(4)]
    pids = [one.pid for one in served]
    assert pids[0] == pids[1] != pids[2] == pids[3]
    assert [one.opened for one in served] == [1, 1, 1, 1]
    assert [len(one.before) for one in served] == [0, 1, 0, 1]
    await dispatcher.shutdown()
    assert {path.name for path in tmp_path.iterdir()} == {f"shutdown-{pid}" for pid in pids}


@pytest.mark.spec("EXE-09")
@pytest.mark.parametrize(
    ("algorithm", "hints"),
    [
        (Ledger, {"isolated_pool": True}),
        (Ledger, {"executor": "thread"}),
        (Ledger, {"executor": "inline"}),
        (AsyncLedger, {}),
        (AsyncLedger, {"executor": "thread"}),
        (AsyncLedger, {"executor": "isolated"}),
    ],
    ids=["isolated", "thread", "inline", "inline-async", "thread-async", "isolated-async"],
)
async def test_after_run_follows_a_failure_too(dispatch, algorithm, hints):
    """`after_run` hears of every run, with what it raised, and the instance goes on."""
    dispatcher = dispatch((algorithm, spec("any", **hints)))
    failed = await dispatcher.run("any", {"n": -1}, request_id="bad")
    assert (failed.error.kind, failed.error.type) == (ErrorKind.RUNTIME, "ValueError")
    assert "in run" in failed.error.traceback
    assert (await dispatcher.run("any", {"n": 2})).data.before == ["bad:ValueError"]


async def test_instances_of_this_process_are_shut_down_too(dispatch, tmp_path):
    """In threads and on the loop `shutdown` comes with the dispatcher's, on the loop that `initialize` was on."""
    in_thread = AsyncLedger, spec("async-thread", executor="thread")
    dispatcher = dispatch((Ledger, spec("thread", executor="thread")), AsyncLedger, in_thread)
    before = AsyncLedger.shut
    await dispatcher.run("thread", {"n": 1, "folder": str(tmp_path)})
    await dispatcher.run("async-thread", {"n": 1})
    await dispatcher.run(AsyncLedger, {"n": 1})
    await dispatcher.shutdown()
    assert [path.name for path in tmp_path.iterdir()] == [f"shutdown-{os.getpid()}"]
    assert AsyncLedger.shut == before + 2


async def test_an_instance_never_serves_two_runs_at_once(dispatch):
    """Two runs that meet in threads have two instances; runs one after the other share one."""
    meeting = threading.Barrier(2)

    class Meet(Algorithm):
        spec = AlgorithmSpec("meet", execution=ExecutionHints(executor="thread"))

        def run(self, given: bool, context: AlgorithmContext) -> int:
            if given:
                meeting.wait(10)
            return id(self)

    dispatcher = dispatch(Meet)
    one, other = await asyncio.gather(dispatcher.run(Meet, True), dispatcher.run(Meet, True))
    assert one.data != other.data
    assert (await dispatcher.run(Meet, False)).data in (one.data, other.data)


@pytest.mark.spec("EXE-09", "EXE-05")
async def test_loading_is_not_held_against_the_first_request(dispatch):
    """An `initialize` that takes longer than a run may is part of the start of its worker."""
    result = await dispatch(SlowToLoad).run(SlowToLoad, 7)
    assert result.data == 7, result.error


@pytest.mark.spec("EXE-05")
@pytest.mark.parametrize("place", ["process", "isolated"])
async def test_the_time_to_load_is_the_algorithm_s_own(dispatch, place):
    """In the shared pool as in its own, an `initialize` that takes too long is ended, and named."""
    dispatcher = dispatch((SlowToLoad, spec("slow", executor=place, load_s=0.3, timeout_s=60)))
    error = (await dispatcher.run("slow", 7)).error
    assert error.kind is ErrorKind.TIMEOUT
    assert error.message == "its code could not be imported and its `initialize` be done within 0.3 s"


async def test_what_cannot_be_loaded_says_so_and_is_tried_again(dispatch, tmp_path, monkeypatch):
    """A failing `initialize` answers the request; the next one initializes anew, with all the time for it."""
    file = tmp_path / "model"
    monkeypatch.setenv("TASKYARD_TEST_FILE", str(file))
    dispatcher = dispatch(NeedsFile)
    error = (await dispatcher.run(NeedsFile, None)).error
    assert (error.kind, error.type) == (ErrorKind.RUNTIME, "FileNotFoundError")
    assert "could not be loaded" in error.message
    file.write_text("loaded")
    result = await dispatcher.run(NeedsFile, None)
    assert result.data == "loaded", result.error


@pytest.mark.spec("EXE-16")
async def test_a_worker_sees_the_device_it_is_given(dispatch, monkeypatch):
    """`gpu` is in the worker's environment before the algorithm's module is imported; the host's stays as it is."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    dispatcher = dispatch(
        (algorithms.see_device, spec("one", gpu=1)),
        (algorithms.see_device, spec("none", gpu="")),
        (algorithms.see_device, spec("host", isolated_pool=True)),
    )
    assert [(await dispatcher.run(name, None)).data for name in ("one", "none", "host")] == ["1", "", "5"]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "5"


@pytest.mark.spec("EXE-16")
async def test_a_worker_has_the_memory_it_is_given(dispatch):
    """An allocation beyond `memory_limit` is a `system` error, and the next run is served."""
    dispatcher = dispatch((algorithms.allocate, spec("allocate", memory_limit=256 << 20)))
    error = (await dispatcher.run("allocate", 512 << 20)).error
    assert (error.kind, error.type) == (ErrorKind.SYSTEM, "MemoryError")
    assert (await dispatcher.run("allocate", 1 << 20)).data == 1 << 20


# --- what goes in and comes out ---------------------------------------------------------------------------------------


@pytest.mark.spec("EXE-04")
async def test_bad_input_never_reaches_an_executor(dispatch):
    """Input that does not fit is `validation`, names what is wrong, and nothing was asked of the executor."""
    mock = MockExecutor(otherwise=None)
    dispatcher = dispatch(Ledger, executors={"isolated": mock})
    error = (await dispatcher.run(Ledger, {"n": "many"})).error
    assert error.kind is ErrorKind.VALIDATION
    assert error.details == {"problems": ["n: Input should be a valid integer, unable to parse string as an integer"]}
    assert mock.requests == []
    assert (await dispatcher.run(Ledger, {"n": 1})).success
    assert len(mock.requests) == 1


@pytest.mark.spec("EXE-04")
async def test_input_that_was_checked_passes(dispatch):
    """A model is handed on as it is, without being checked or copied again."""
    mock = MockExecutor(otherwise=None)
    dispatcher = dispatch(Ledger, executors={"isolated": mock})
    number = Number.model_construct(n=1, folder=7)  # type: ignore[arg-type]
    await dispatcher.run(Ledger, number)
    assert mock.requests[0].payload[0] is number


@pytest.mark.spec("EXE-04")
@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ("leger", "no algorithm is called 'leger' (installed: ledger 1.2)"),
        (AlgorithmSpec("ledger", "2.0"), "'ledger 2.0'"),
        (AlgorithmSpec("other"), "'other'"),
    ],
)
async def test_what_is_not_installed_is_refused(dispatch, asked, says):
    """A name or version that is not there is `validation`, with what is."""
    request = ExecutionRequest(spec=asked, payload={"n": 1}, request_id="r")
    error = (await dispatch(Ledger).submit(request)).error
    assert error.kind is ErrorKind.VALIDATION
    assert says in error.message


@pytest.mark.parametrize(
    "fields",
    [{"request_id": "r" * 300}, {"timeout_s": -1.0}, {"timeout_s": float("nan")}, {"wait_s": 0}, {"context": {}}],
    ids=lambda fields: next(iter(fields)),
)
async def test_a_request_that_makes_no_sense_is_refused(dispatch, fields):
    """Ids, limits and contexts are checked like the payload."""
    request = ExecutionRequest(**{"spec": Ledger.spec, "payload": {"n": 1}, "request_id": "r", **fields})
    assert (await dispatch(Ledger).submit(request)).error.kind is ErrorKind.VALIDATION


@pytest.mark.spec("EXE-07")
async def test_output_that_does_not_fit_is_the_algorithm_s_fault(dispatch):
    """It is `runtime`, and names what is wrong; output that only looks different becomes an `Output`."""
    dispatcher = dispatch(Ledger, AsyncLedger)
    error = (await dispatcher.run(Ledger, {"n": 13})).error
    assert (error.kind, error.type) == (ErrorKind.RUNTIME, "InvalidOutput")
    assert "n: Input should be a valid integer" in error.message
    assert isinstance((await dispatcher.run(AsyncLedger, {"n": 3})).data, Served)


@pytest.mark.spec("EXE-03")
@pytest.mark.parametrize("place", ["inline", "thread", "process", "isolated"])
@pytest.mark.parametrize("code", [algorithms.double, algorithms.double_async])
async def test_functions_are_algorithms_as_well(dispatch, place, code):
    """A function, async or not, needs a spec and no more; its annotations are its Input and Output."""
    dispatcher = dispatch((code, spec("double", executor=place)))
    assert (await dispatcher.run("double", "21")).data == 42
    assert (await dispatcher.run("double", "x")).error.kind is ErrorKind.VALIDATION


def three_parameters(one: int, two: int, three: int) -> None: ...


class NoAlgorithm:
    pass


def an_algorithm(**members: Any) -> type[Algorithm]:
    """One that is all right but for `members`."""
    usual = {"spec": AlgorithmSpec("made"), "run": lambda self, given, context: given}
    made: type[Algorithm] = type("Made", (Algorithm,), usual | members)
    return made


async def wait(self: Any) -> None: ...


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ({"run": Algorithm.run}, "has no `run`"),
        ({"run": lambda self, given: given}, r"write `def run\(self, given, context\)`"),
        ({"after_run": lambda self: None}, r"write `def after_run\(self, context, error\)`"),
        ({"initialize": lambda self, path: None}, r"write `def initialize\(self\)`"),
        ({"shutdown": staticmethod(lambda hard: None)}, r"write `def shutdown\(\)`"),
        ({"initialize": wait}, "`initialize` is async and its `run` is not"),
        ({"__init__": lambda self, path: None}, "constructor must need no arguments"),
    ],
)
@pytest.mark.spec("EXE-09")
def test_a_hook_that_cannot_be_called_is_refused_when_it_is_installed(members, says):
    """A wrong signature is named at once: at the end of a run it would cost the result."""
    with pytest.raises(InvalidAlgorithm, match=says):
        ExecutionDispatcher().install(an_algorithm(**members))


def test_hooks_may_be_written_in_any_way_that_can_be_called():
    """Defaults, class methods, static methods and rest parameters are all right."""
    made = an_algorithm(
        __init__=lambda self, path="here": None,
        initialize=classmethod(lambda cls, *, again=False: None),
        run=lambda self, *given: given,
        after_run=staticmethod(lambda context, error, **more: None),
    )
    dispatcher = ExecutionDispatcher()
    dispatcher.install(made)
    assert list(dispatcher.health()) == [made.spec.name]


@pytest.mark.parametrize(
    ("target", "given", "says"),
    [
        (algorithms.double, None, "has no spec"),
        (lambda given: given, spec("a"), "top level of a module"),
        (three_parameters, spec("a"), "must take the input"),
        (NoAlgorithm, spec("a"), "subclass of Algorithm"),
    ],
)
def test_what_cannot_be_run_is_refused_when_it_is_installed(target, given, says):
    """The mistake is named at once, not by the first request."""
    with pytest.raises(InvalidAlgorithm, match=says):
        ExecutionDispatcher().install(target, spec=given)


def test_two_algorithms_of_one_name_are_refused():
    """The second is told."""
    dispatcher = ExecutionDispatcher()
    dispatcher.install(Ledger)
    with pytest.raises(InvalidAlgorithm, match="installed already"):
        dispatcher.install(Ledger)


def test_a_place_that_does_not_exist_is_refused():
    """A slip in an executor's name is told with the names that there are."""
    with pytest.raises(InvalidInput, match=r"no executor called 'proces' .*process"):
        ExecutionDispatcher().install(algorithms.double, spec=spec("a", executor="proces"))


# --- what it sees of its request --------------------------------------------------------------------------------------


@pytest.mark.spec("EXE-11", "EXE-03")
@PLACES
async def test_the_context_is_there_in_every_place(dispatch, place):
    """Request id, trace id, tenant, user and values reach the code wherever it runs, and `current_run()` works."""
    heard: list[tuple[str, Progress]] = []
    dispatcher = dispatch(describe(place), on_progress=lambda *said: heard.append(said))
    context = AlgorithmContext(tenant="acme", user="ann", values={"lane": 3})
    result = await dispatcher.run("describe", "x", context=context, request_id="r-1", trace_id="t-1")
    seen = result.data
    assert (seen["request_id"], seen["trace_id"], seen["tenant"], seen["user"]) == ("r-1", "t-1", "acme", "ann")
    assert (seen["values"], seen["algorithm"]) == ({"lane": 3}, ("describe", "1.0"))
    assert seen["run"] == ("r-1", "describe", 1)
    assert seen["cancelled"] is False
    assert (seen["pid"] == os.getpid()) is (place in ("inline", "thread"))
    assert seen["pid"] == (result.worker_pid or os.getpid())
    assert heard == [("r-1", Progress(0.5, "half way"))]
    assert (context.request_id, context.algorithm) == ("", None)


@pytest.mark.spec("EXE-11")
@PLACES
async def test_log_lines_carry_the_ids(dispatch, place, caplog):
    """A line of the context's logger has the ids as fields and in its text, and reaches the handlers of the host."""
    caplog.set_level(logging.WARNING)
    context = AlgorithmContext(tenant="acme", user="ann\nevil")
    result = await dispatch(describe(place)).run("describe", "x", context=context, request_id="50%d", trace_id="t-1")
    [line] = [record for record in caplog.records if record.name == "taskyard.algorithm.describe"]
    assert line.getMessage() == "100% of x [request_id=50%d trace_id=t-1 tenant=acme user=ann\\nevil]"
    fields = ("request_id", "trace_id", "tenant", "user", "algorithm", "version", "worker_pid")
    values = ["50%d", "t-1", "acme", "ann\nevil", "describe", "1.0", result.data["pid"]]
    assert [getattr(line, field) for field in fields] == values
    [foreign] = [record for record in caplog.records if record.name == "somebody.else"]
    assert foreign.getMessage() == "without arguments: 5 % more"
    if place in ("process", "isolated"):
        assert (foreign.request_id, foreign.tenant) == ("50%d", "acme")


# --- parts that can be replaced ---------------------------------------------------------------------------------------


@pytest.mark.spec("EXE-19")
async def test_the_maker_of_workers_can_be_replaced(dispatch):
    """A pool takes its workers from whoever it is given: here one that counts the handles it gives out."""
    from taskyard import WorkerHandle
    from taskyard.execution.spawner import Spawner

    handles: list[WorkerHandle] = []

    class Counting(Spawner):
        def spawn(self, preload=()):
            handles.append(super().spawn(preload))
            return handles[-1]

    pool = ProcessPoolExecutor(
        settings=PoolSettings(max_workers=1, spare=False), portable=True, warm=False, starter=Counting()
    )
    dispatcher = dispatch((algorithms.double, spec("double")), executors={"process": pool})
    assert [(await dispatcher.run("double", n)).data for n in range(3)] == [0, 2, 4]
    assert len(handles) == 1


@pytest.mark.spec("EXE-03")
async def test_a_place_of_one_s_own(dispatch):
    """An executor under a new name is reached by that name."""
    ours = MockExecutor({"double": 99})
    dispatcher = dispatch((algorithms.double, spec("double", executor="ours")), executors={"ours": ours})
    assert (await dispatcher.run("double", 1)).data == 99
    assert ours.requests[0].payload[0] == 1


@pytest.mark.spec("EXE-18")
async def test_bytes_are_not_copied_into_the_pickle(dispatch):
    """An input that is bytes travels beside the pickle of its request, and arrives as it was."""
    content = bytes(range(256)) * 8192
    apart: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(Payload(content, AlgorithmContext(tenant="acme")), 5, buffer_callback=apart.append)
    assert len(pickled) < 1000
    assert [len(part.raw()) for part in apart] == [len(content)]
    dispatcher = dispatch((algorithms.digest, spec("digest")))
    assert (await dispatcher.run("digest", content)).data == hashlib.sha256(content).hexdigest()
