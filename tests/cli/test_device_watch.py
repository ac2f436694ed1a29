"""`taskyard device watch`: one frame for any window and any number of devices, and lines in a pipe."""

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from io import StringIO

import msgspec
import pytest
from rich.console import Console

from taskyard.application.device_documents import DeviceDocument, DeviceOverview, OrdersDocument, PoolDocument
from taskyard.application.event_documents import EventDocument
from taskyard.cli.device_formatting import percent, pool_rate
from taskyard.cli.device_frame import DeviceFrame
from taskyard.model.device import DeviceState
from taskyard.model.event import EventKind
from tests.cli.farm import Farm
from tests.cli.shell import LONG_S, Shell

NOW = datetime(2030, 1, 31, 12, tzinfo=UTC)
SIZES = [(60, 20), (80, 24), (100, 30), (120, 40), (200, 50)]


def a_device(number: int, state: DeviceState = DeviceState.IDLE, *, reason: str = "") -> DeviceDocument:
    busy = state is DeviceState.BUSY
    return DeviceDocument(
        name=f"emu-{number}",
        number=number,
        pool="phones",
        adapter="simulated",
        address="",
        settings={},
        labels={"role": "eu"},
        host="",
        from_code=True,
        state=state,
        since=NOW - timedelta(seconds=12),
        reason=reason,
        by="cli:ana" if state is DeviceState.TAKEN else "",
        until=None,
        step="",
        takes_tasks=state in (DeviceState.IDLE, DeviceState.BUSY),
        orders=OrdersDocument(),
        node="n",
        node_name="lab",
        beat_at=NOW,
        task=f"{number:032x}" if busy else None,
        consumer="daily" if busy else None,
        account=1000 + number if busy else None,
        busy_since=NOW - timedelta(seconds=12) if busy else None,
        progress=None,
        version=1,
    )


def an_overview(devices: list[DeviceDocument], *, events: int = 10) -> DeviceOverview:
    states = {state: n for state in DeviceState if (n := sum(one.state is state for one in devices))}
    pool = PoolDocument(
        name="phones", devices=len(devices), states=states, queued=34, waiting=2, running=1, rate=0.25,
        success_rate=0.98, success_since=NOW - timedelta(hours=1),
    )  # fmt: skip
    told = [
        EventDocument(
            seq=n,
            at=NOW,
            kind=EventKind.DEVICE_DOWN,
            uuid="",
            consumer="",
            queue="phones",
            device=f"emu-{n}",
            code="gone",
        )
        for n in range(events, 0, -1)
    ]
    return DeviceOverview(at=NOW, pools=(pool,), devices=tuple(devices), events=tuple(told))


def draw(seen: DeviceOverview, width: int, height: int) -> list[str]:
    """The lines of a frame, without their trailing spaces."""
    out = StringIO()
    console = Console(file=out, width=width, color_system=None)
    console.print(DeviceFrame(seen, title="sqlite:///work.db", width=width, height=height, now=NOW).draw())
    return [line.rstrip() for line in out.getvalue().splitlines()]


def a_farm(count: int) -> list[DeviceDocument]:
    """Every second one is busy, every tenth down, and the fifth is taken."""
    every = {0: DeviceState.DOWN, 5: DeviceState.TAKEN}
    kinds = (every.get(n % 10) or (DeviceState.BUSY if n % 2 else DeviceState.IDLE) for n in range(1, count + 1))
    return [a_device(n, state, reason="no answer") for n, state in enumerate(kinds, 1)]


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("count", [0, 1, 4, 12, 50, 500, 2000])
def test_a_frame_fits_any_window(count: int, width: int, height: int) -> None:
    """No frame is higher or wider than its window; head, pool and some events are always there."""
    lines = draw(an_overview(a_farm(count)), width, height)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    assert f"{count:,} device{'' if count == 1 else 's'}" in lines[0]
    text = "\n".join(lines)
    assert "34 queued + 2 later · 15/min · 98 % success in 1 h" in text
    if count != 0:
        assert "LAST EVENTS" in text
        assert lines[-1].endswith("down        device emu-10  gone")


def test_few_devices_have_a_line_each() -> None:
    """With state, time, account, task and why."""
    text = "\n".join(draw(an_overview(a_farm(5)), 100, 30))
    assert re.search(r"emu-1 +1 +● busy +12s +1001 +daily 00000001 +role=eu", text)
    assert re.search(r"emu-5 +5 +◆ taken +12s +role=eu +by ana · no answer", text)


def test_many_devices_have_a_cell_each() -> None:
    """With account and time while there is room, then the name, then the number; all of them are shown."""
    assert "● emu-1  1001 daily  12s" in "\n".join(draw(an_overview(a_farm(50)), 120, 40))
    assert re.search("● emu-1 +1001 +12s", "\n".join(draw(an_overview(a_farm(250)), 200, 50)))
    named = "\n".join(draw(an_overview(a_farm(500)), 200, 50))
    assert all(f" emu-{n}" in named for n in range(1, 501))
    numbered = " ".join(draw(an_overview(a_farm(500)), 120, 40))
    assert {int(n) for n in re.findall(r"[●○✘◆](\d+)", numbered)} == set(range(1, 501))


def test_a_thousand_devices_have_a_symbol_each() -> None:
    """In lines that begin with the name of their first device; what does not fit is left out at the end."""
    lines = draw(an_overview(a_farm(1000)), 120, 40)
    rows = [line for line in lines if re.match(r"emu-\d+ +[●○✘◆]{10}", line)]
    assert rows[0].startswith("emu-1 ")
    assert sum(len(re.findall("[●○✘◆]", row)) for row in rows) == 1000


def test_devices_that_need_a_person_are_listed() -> None:
    """Where each device is only a cell, those that are not in service have a line with the reason, the worst first."""
    devices = a_farm(200)
    devices[7] = a_device(8, DeviceState.QUARANTINED, reason="restarted 3 times")
    lines = draw(an_overview(devices), 120, 40)
    at = lines.index("NOT IN SERVICE")
    assert re.match(r"emu-8 +■ quarantined 12s +restarted 3 times", lines[at + 1])
    assert re.match(r"emu-10 +✘ down 12s +no answer", lines[at + 2])
    assert lines[at + 6] == "… and 36 more"


@pytest.mark.parametrize(("width", "height"), [(40, 24), *SIZES])
def test_a_line_that_no_device_fits_is_shown(width: int, height: int) -> None:
    """The pool says which task holds the line up, in one line of any window, and how many wait behind it."""
    seen = an_overview(a_farm(12))
    (pool,) = seen.pools
    stuck = msgspec.structs.replace(seen, pools=(msgspec.structs.replace(pool, misfit="01a1e0f9-7f11-00003f259cf1"),))
    lines = draw(stuck, width, height)
    assert len(lines) <= height
    (line,) = [line for line in lines if "is stuck" in line]
    assert line.startswith("phones is stuck: taskyard why 3f259cf1")
    assert width < 100 or line.endswith(": no device fits the first task; 33 tasks behind it")


def test_a_narrow_window_has_device_and_state() -> None:
    """In 40 columns no heading and no state is cut: then come the account and the task, or why it takes none."""
    lines = draw(an_overview(a_farm(5)), 40, 30)
    assert re.match(r"Taskyard  \S+  5 devices · ", lines[0])
    assert "DEVICE  STATE" in lines
    assert "emu-1   ● busy   1001 daily 00000001" in lines
    assert "emu-5   ◆ taken  by ana · no answer" in lines


def test_a_store_that_is_away_is_told() -> None:
    """The devices stay as they were."""
    away = msgspec.structs.replace(an_overview(a_farm(3)), away_since=NOW, away_reason="gone")
    lines = draw(away, 100, 30)
    assert "the store is away since" in lines[0]
    assert any(line.startswith("emu-3") for line in lines)


@pytest.mark.parametrize(
    ("rate", "text"),
    [
        (None, "–"),
        (0.0, "0 %"),
        (1.0, "100 %"),
        (0.9999, "99.9 %"),
        (0.0001, "0.1 %"),
        (0.5, "50 %"),
        (0.996, "99.6 %"),
    ],
)
def test_a_rate_is_never_rounded_to_all_or_nothing(rate: float | None, text: str) -> None:
    """100 % is said only if nothing has failed, 0 % only if nothing has completed."""
    assert percent(rate) == text


def test_a_slow_pool_is_counted_by_the_minute() -> None:
    """Tasks of phones take minutes: 0.1/s would say nothing."""
    assert (pool_rate(0.0), pool_rate(0.05), pool_rate(3.24)) == ("0/min", "3/min", "3.2/s")


# --- on a store -------------------------------------------------------------------------------------------------------


def test_one_frame_is_printed(farm: Farm) -> None:
    """`--once` prints a frame and ends; with `--json` it is the overview."""
    farm.add("emu-1", "emu-2")
    text = farm.ok("watch", "--once", COLUMNS="100")
    assert "2 devices" in text
    assert "emu-2" in text
    assert "LAST EVENTS" in text
    seen = json.loads(farm.ok("watch", "--once", "--json"))
    assert [one["name"] for one in seen["devices"]] == ["emu-1", "emu-2"]
    assert [one["states"] for one in seen["pools"]] == [{"down": 2}]
    assert [one["kind"] for one in seen["events"]] == ["device_added", "device_added"]
    assert farm.do("watch", "--once", "--pool", "nix").code == 1


def test_a_pipe_gets_a_line_for_each_change(farm: Farm, shell: Shell) -> None:
    """Changes of devices and runs of their tasks are told, other tasks are not; SIGTERM ends it with 0."""
    worker, watch = farm.serve()
    shell.seed(("add", {"a": 1}))
    assert farm.enqueue("daily", 7)
    assert "daily" in watch.hear("started")
    assert "on emu-" in watch.hear("completed")
    farm.ok("take", "emu-1", "--reason", "a bug")
    assert "device emu-1  a bug · by cli:" in watch.hear("taken")
    worker.signal(signal.SIGTERM)
    for _ in range(2):
        assert "no node serves it" in watch.hear("down")
    watch.signal(signal.SIGTERM)
    assert watch.end() == 0
    assert " add " not in watch.said


def test_a_pipe_begins_with_the_states_of_each_pool(farm: Farm) -> None:
    """The states are counted by pool, and each pool is named."""
    farm.add("emu-1", "emu-2")
    farm.ok("quarantine", "emu-2")
    farm.ok("add", "gpu-1", "--pool", "gpus", "--adapter", "simulated")
    watch = farm.watch()
    assert watch.heard[-1].strip().endswith(": gpus 1 down; phones 1 down, 1 quarantined")
    watch.signal(signal.SIGTERM)
    assert watch.end() == 0


def test_json_lines_are_events(farm: Farm) -> None:
    """With `--json` each line is the document of an event, also of a pool that is made later."""
    watch = farm.watch("--json")
    farm.add("emu-1")
    event = json.loads(watch.hear("device_added"))
    assert (event["device"], event["queue"], event["is_alert"]) == ("emu-1", "phones", False)
    farm.ok("quarantine", "emu-1")
    assert json.loads(watch.hear("device_quarantined"))["is_alert"]
    watch.signal(signal.SIGINT)
    assert watch.end() == 0


class Terminal:
    """A command on a terminal, whose screen is read while it runs."""

    def __init__(self, shell: Shell, *arguments: str) -> None:
        self._ours, theirs = pty.openpty()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "taskyard.cli", *arguments],
            cwd=shell.folder,
            env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
        )
        os.close(theirs)
        self.shown = ""

    def hear(self, text: str) -> None:
        """Read until this is on the screen."""
        until = time.monotonic() + LONG_S
        while text not in self.shown:
            readable, _, _ = select.select([self._ours], [], [], max(0.0, until - time.monotonic()))
            assert readable, f"{text!r} was never shown; this was: {self.shown}"
            self.shown += os.read(self._ours, 65536).decode(errors="replace")

    def interrupt(self) -> int:
        """What Ctrl-C does, and the exit code."""
        self._process.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # the other end is closed
            while block := os.read(self._ours, 65536):
                self.shown += block.decode(errors="replace")
        return self._process.wait(timeout=LONG_S)

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        os.close(self._ours)


def test_the_live_view_redraws_on_a_terminal(farm: Farm, shell: Shell) -> None:
    """What somebody does to a device is soon on the screen; Ctrl-C ends it with 0 and brings the cursor back."""
    farm.add("emu-1")
    screen = Terminal(shell, "device", "watch", "--store", shell.url)
    with contextlib.closing(screen):
        screen.hear("no node serves it")
        farm.ok("quarantine", "emu-1", "--reason", "it burns")
        screen.hear("it burns")
        assert screen.interrupt() == 0
    assert screen.shown.rstrip().endswith("\x1b[?25h")
