"""`taskyard device`: what devices do, and steering them, on a store that a worker serves or nobody does."""

import json
import re
import signal
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from taskyard.application.device_documents import DeviceDetail, DeviceDocument, DeviceHistory, DeviceReceipt
from taskyard.model.device import QuarantinedAccount
from taskyard.model.notes import AuditStamp
from tests.cli.farm import ADD, Farm
from tests.cli.shell import Done

# --- looking ----------------------------------------------------------------------------------------------------------


def test_a_farm_at_work_is_shown(farm: Farm) -> None:
    """A device that runs a task is busy, with task, account, node and labels; a drained one lets its task go on, and is
    drained when that has ended. `show` of the task names device and number."""
    worker, watch = farm.serve()
    assert farm.enqueue("daily", 7, path=str(farm.shell.folder / "gate"))
    worker.hear("daily has begun")
    busy, idle = sorted(farm.json("ls"), key=lambda one: str(one["state"]))
    assert (busy["state"], busy["account"], busy["consumer"]) == ("busy", 7, "daily")
    assert (idle["state"], idle["task"], idle["reason"]) == ("idle", None, "")
    assert busy["node"] == idle["node"] != ""
    assert datetime.fromisoformat(busy["since"]) == datetime.fromisoformat(busy["busy_since"])
    head, first, second, _, counts = farm.ok("ls", COLUMNS="140").splitlines()
    assert head.split() == ["DEVICE", "NO", "STATE", "FOR", "ACCOUNT", "TASK", "NODE", "LABELS"]
    for text in (busy["name"], "● busy", " 7 ", f"daily {busy['task'][-8:]}", "role=", "50 % · half way"):
        assert text in first + second
    assert counts == "● 1 busy   ○ 1 idle"
    listed = farm.shell.here("ls", "--queue", "phones", "--store", farm.shell.url, COLUMNS="140").out
    assert "PLACE" in listed
    assert busy["name"] in listed
    told = farm.ok("drain", busy["name"], "--reason", "battery")
    assert f"‖ draining; task daily {busy['task'][-8:]} goes on, and no new one starts" in told
    assert f"task {busy['task']} runs on the device" in farm.do("rm", busy["name"]).out
    watch.hear(f"drained     device {busy['name']}  battery")
    (farm.shell.folder / "gate").touch()
    assert f"on {busy['name']}" in watch.hear("completed   daily")
    assert "‖ drained" in farm.ok("ls")
    shown = farm.shell.here("show", busy["task"], "--store", farm.shell.url).out
    assert "DEVICE" in shown
    assert f"{busy['name']} ({busy['number']})" in shown
    detail = farm.json("show", busy["name"])
    assert (detail["tally"]["completed"], detail["tally"]["success_rate"]) == (1, 1.0)
    assert detail["beat_at"] is None  # nothing is reported for a heartbeat: while it is up, the last report is old
    assert "last beat" not in farm.ok("show", busy["name"])
    assert [(run["account"], run["outcome"]) for run in detail["runs"]] == [(7, "completed")]
    assert "it takes tasks again" in farm.ok("give-back", busy["name"])


def test_a_task_of_an_account_is_submitted_at_a_shell(farm: Farm) -> None:
    """A bare number or text is an account, and stays what it is; one that is quarantined is refused. The banner of the
    worker counts no devices before they have answered."""
    worker, _ = farm.serve()
    worker.hear("stop ")
    assert "daily on phones" in worker.said
    assert " × 0" not in worker.said

    def submit(account: str) -> Done:
        return farm.shell.here("submit", "daily", f"account={account}", "--wait", "--store", farm.shell.url)

    for account, key in (("3", "3"), ("ann", "ann"), ('"3"', '"3"'), ('{"account_id": 3}', "3")):
        done = submit(account)
        assert (done.code, done.out) == (0, key.strip('"') + "\n"), done
        assert farm.shell.record(done.err.split()[0]).key == key
    farm.write(lambda opened: opened.devices.quarantine_account("phones", 3, "daily"))
    refused = submit("3")
    assert refused.code != 0
    assert "tasks of 'daily' are refused for account 3" in refused.err + refused.out
    assert submit('"3"').code == 0


def test_devices_of_a_dead_worker_are_down(farm: Farm) -> None:
    """A worker that was killed leaves no device that looks busy or idle, also if nobody takes its tasks back."""
    worker, _ = farm.serve()
    assert farm.enqueue("daily", 7, path=str(farm.shell.folder / "gate"))
    worker.hear("daily has begun")
    worker.signal(signal.SIGKILL)
    worker.end()
    found = farm.json("ls")
    assert {one["state"] for one in found} == {"down"}
    assert all(one["reason"].startswith("its node ") for one in found)
    (held,) = [one for one in found if one["task"]]
    assert (held["account"], held["consumer"]) == (7, "daily")
    assert "is dead" in farm.ok("show", held["name"])
    assert json.loads(farm.ok("watch", "--once", "--json"))["pools"][0]["states"] == {"down": 2}


def test_devices_that_nobody_serves_are_down(farm: Farm) -> None:
    """Without a worker each device is down, and says that no node serves it; `--state` and `--pool` narrow the list."""
    farm.add("emu-1", "emu-2")
    farm.ok("add", "gpu-1", "--pool", "gpus", "--adapter", "command", "--setting", "health=true")
    farm.ok("take", "emu-2", "--for", "30m", "--reason", "a bug")
    lines = farm.ok("ls").splitlines()
    assert lines[0].split() == ["DEVICE", "NO", "POOL", "STATE", "FOR"]
    assert "no node serves it" in next(line for line in lines if line.startswith("emu-1"))
    taken = next(line for line in lines if line.startswith("emu-2"))
    assert "◆ taken" in taken
    assert "a bug" in taken
    assert [one["name"] for one in farm.json("ls", "--pool", "phones", "--state", "down,busy")] == ["emu-1"]
    assert "no device is in this state" in farm.ok("ls", "--state", "idle")
    assert farm.do("ls", "--state", "sleepy").code == 2
    unknown = farm.do("ls", "--pool", "phnes")
    assert (unknown.code, unknown.out) == (1, "")
    assert "did you mean 'phones'?" in unknown.err


@pytest.mark.parametrize("columns", [60, 80, 100, 120, 200])
def test_a_list_fits_its_window(farm: Farm, columns: int) -> None:
    """No line of a list, of one device or of the history is longer than the window."""
    farm.add("emu-1", "a-device-with-a-very-long-name-" + "x" * 60)
    farm.ok("label", "emu-1", "role=" + "y" * 90)
    farm.ok("quarantine", "emu-1", "--reason", "z" * 200)
    for words in (("ls",), ("watch", "--once"), ("history",), ("accounts",)):
        lines = farm.ok(*words, COLUMNS=str(columns)).splitlines()
        assert max(map(len, lines)) <= columns, words


def test_a_pool_that_nothing_serves_is_told(farm: Farm) -> None:
    """A device of a pool that may be mistyped is added, with a warning that names the other pools."""
    farm.add("emu-1")
    words = ("device", "add", "emu-2", "--pool", "phoens", "--adapter", "simulated", "--store", farm.shell.url)
    shown = farm.shell.on_a_terminal(*words)
    assert shown.code == 0
    assert "no running node serves the pool 'phoens' of the device emu-2; other pools: phones" in shown.out
    assert [one["pool"] for one in farm.json("ls")] == ["phoens", "phones"]
    assert "no running node" not in farm.shell.on_a_terminal(*words[:2], "emu-3", *ADD, *words[-2:]).out


@pytest.mark.spec("DEV-12")
def test_a_line_that_no_device_fits_is_told(farm: Farm) -> None:
    """The list and the live view name the task that no device fits, and say how many wait behind it; `ls` of the tasks
    shows their accounts."""
    farm.serve()
    assert farm.enqueue("daily", 7, requires={"role": "none"})
    assert farm.enqueue("daily", 8)
    for words in (("ls",), ("watch", "--once")):
        shown = farm.ok(*words, COLUMNS="120")
        assert re.search(
            r"phones is stuck: taskyard why [0-9a-f]{8}: no device fits the first task; 1 task behind it", shown
        )
    (pool,) = farm.json("watch", "--once")["pools"]
    first, second = sorted(
        farm.shell.here("ls", "--store", farm.shell.url, "--json").json["tasks"], key=lambda t: t["uuid"]
    )
    assert (first["key"], second["key"], pool["misfit"]) == ("7", "8", first["uuid"])
    listed = farm.shell.here("ls", "--store", farm.shell.url, COLUMNS="80").out.splitlines()
    assert listed[0].split()[:4] == ["ID", "STATE", "CONSUMER", "KEY"]
    assert listed[1].split()[4] == "8"


def test_without_devices_it_says_how_to_add_one(farm: Farm) -> None:
    """An empty store names the next command, in the list and in the live view."""
    for words in (("ls",), ("watch", "--once")):
        assert "taskyard device add NAME --pool POOL --adapter ADAPTER" in farm.ok(*words, COLUMNS="120")
    assert farm.json("ls") == []
    assert farm.ok("accounts") == "no account is quarantined\n"


def test_json_has_the_schema_of_its_document(farm: Farm) -> None:
    """What `--json` prints is the document that the interface promises, and nothing else."""
    farm.add("emu-1")
    for words, kind in (
        (("ls",), tuple[DeviceDocument, ...]), (("show", "emu-1"), DeviceDetail), (("history",), DeviceHistory),
        (("drain", "emu-1"), tuple[DeviceReceipt, ...]), (("rm", "emu-1"), tuple[DeviceReceipt, ...]),
    ):  # fmt: skip
        text = farm.ok(*words, "--json")
        document = msgspec.json.decode(text, type=kind)
        assert json.loads(msgspec.json.encode(document)) == json.loads(text)


# --- definitions ------------------------------------------------------------------------------------------------------


@pytest.mark.spec("DEV-12")
def test_a_device_is_added_edited_and_removed(farm: Farm) -> None:
    """Number, labels and settings are stored; an edit merges settings, and an empty value removes one; every command is
    in the audit record, as it is typed."""
    told = farm.ok("add", "emu-1", *ADD, "--setting", "seed=3", "--setting", "latency_s=0.1", "--label", "role=eu")
    assert "number 1 of pool phones" in told
    farm.ok("add", "emu-9", *ADD, "--number", "9", "--host", "lab-3")
    assert "number 10 of pool phones" in farm.ok("add", "emu-10", *ADD)
    edited = farm.ok("edit", "emu-1", "--setting", "seed=4", "--setting", "latency_s=")
    assert edited.endswith("; seed 4 · latency_s default\n")
    labeled = farm.ok("label", "emu-1", "emu-9", "role=", "region=de")
    assert [line.partition("; ")[2] for line in labeled.splitlines()] == ["labels region=de"] * 2
    assert "nothing to change" in farm.ok("label", "emu-1", "region=de")
    first, nine, _ = farm.json("ls")
    assert (first["settings"], first["labels"]) == ({"seed": 4}, {"region": "de"})
    assert (nine["number"], nine["host"], nine["labels"]) == (9, "lab-3", {"region": "de"})
    removed = farm.do("rm", "emu-10", "zz")
    assert "emu-10  removed; its runs stay in the history" in removed.out
    assert "'emu-10'" not in removed.out
    assert [one["name"] for one in farm.json("ls")] == ["emu-1", "emu-9"]
    audit = farm.shell.here("audit", "--device", "emu-1", "--store", farm.shell.url)
    assert [line.split()[5] for line in audit.out.splitlines()[1:]] == ["label", "edit", "add"]
    audited = farm.shell.here("audit", "--command", "rm", "--store", farm.shell.url).out
    assert "device emu-10" in audited


REFUSED = [
    pytest.param(("add", "emu-1", *ADD), "'emu-1' already exists, as number 1 of the pool 'phones'", id="name"),
    pytest.param(
        ("add", "emu-2", *ADD, "--number", "1"), "'emu-1' of the pool 'phones' already has the number 1", id="number"
    ),
    pytest.param(
        ("add", "adb-2", "--pool", "phones", "--adapter", "adb", "--serial", "emulator-5554"),
        "'adb-1' of the pool 'phones' already has the address 'emulator-5554'",
        id="address",
    ),
    pytest.param(("edit", "emu-3", "--setting", "seed=1"), "no device 'emu-3' is in this store", id="edit"),
    pytest.param(("show", "emu-11"), "did you mean 'emu-1'", id="show"),
    pytest.param(("history", "emu-11"), "did you mean 'emu-1'", id="history"),
    pytest.param(("release", "7"), "account 7 is not quarantined; quarantined accounts: none", id="release"),
]

SENSELESS = [
    pytest.param(
        ("add", "emu-2", *ADD, "--setting", "sed=1"),
        "error: a device of the adapter 'simulated' has no setting 'sed'; it has ",
        id="setting",
    ),
    pytest.param(("edit", "emu-1", "--setting", "sed=1"), "has no setting 'sed'; it has ", id="edit"),
    pytest.param(("add", "emu-2", *ADD, "--serial", "x"), "--serial has no meaning", id="serial"),
    pytest.param(
        ("add", "emu-2", "--pool", "phones", "--adapter", "nokia"), "error: there is no adapter 'nokia'", id="adapter"
    ),
    pytest.param(
        ("add", "adb-2", "--pool", "phones", "--adapter", "adb"),
        "error: --serial is missing: give the serial that `adb devices` shows",
        id="no-serial",
    ),
    pytest.param(
        ("add", "emu-2", *ADD, "--setting", "latency_s=long"), "the setting latency_s must be", id="setting-value"
    ),
]


@pytest.mark.parametrize(
    ("code", "words", "said"),
    [pytest.param(1, *one.values, id=one.id) for one in REFUSED]
    + [pytest.param(2, *one.values, id=f"senseless-{one.id}") for one in SENSELESS],
)
def test_what_cannot_be_done_is_refused(farm: Farm, code: int, words: tuple[str, ...], said: str) -> None:
    """In the words of the command line, and nothing is changed: with exit code 2 if the definition makes no sense, 1 if
    the store refuses it."""
    farm.add("emu-1")
    farm.ok("add", "adb-1", "--pool", "phones", "--adapter", "adb", "--serial", "emulator-5554")
    before = farm.json("ls")
    done = farm.do(*words)
    assert (done.code, done.out) == (code, "")
    assert said in done.err
    assert [one["version"] for one in farm.json("ls")] == [one["version"] for one in before]


USAGE = [
    pytest.param(("drain",), "name the devices, or pass --pool POOL or --all", id="nothing"),
    pytest.param(("drain", "a", "--all"), "exclude each other", id="both"),
    pytest.param(("take", "a", "--for", "soon"), "--for", id="for"),
    pytest.param(("take", "a", "--for", "0"), "--for must be more than 0", id="no-time"),
    pytest.param(("history", "--since", "yesterday"), "--since", id="since"),
    pytest.param(("add", "a", *ADD, "--setting", "seed"), "--setting 'seed' has no value", id="setting"),
    pytest.param(("label", "a"), "name one or more devices and one or more labels", id="label"),
    pytest.param(
        ("label", "a", "no name=x"),
        "must have names of 1 to 40 letters, digits, dots, dashes and underscores, not 'no name'",
        id="label-name",
    ),
    pytest.param(("edit", "a"), "there is nothing to change", id="edit"),
    pytest.param(("show", ""), "the name of a device must be", id="name"),
]


@pytest.mark.parametrize(("words", "said"), USAGE)
def test_what_makes_no_sense_is_a_usage_error(farm: Farm, words: tuple[str, ...], said: str) -> None:
    """With exit code 2, before a store is asked."""
    done = farm.do(*words)
    assert (done.code, done.out) == (2, "")
    assert said in done.err


# --- orders -----------------------------------------------------------------------------------------------------------


def test_each_device_is_answered_for(farm: Farm) -> None:
    """One that is unknown is refused with close names, the others are changed, and the exit code is 1; what changes
    nothing says so."""
    farm.add("emu-1", "emu-2")
    done = farm.do("drain", "emu-1", "emu-3", "emu-2", "--reason", "moving")
    assert done.code == 1
    first, second, third = done.out.splitlines()
    assert first.startswith("emu-1  ✘ down; it takes no tasks until: taskyard device give-back emu-1")
    assert "no device 'emu-3' is in this store; did you mean" in second
    assert third.startswith("emu-2")
    assert "it was drained already; nothing to change" in farm.ok("drain", "emu-1")
    (again,) = farm.json("drain", "emu-1")
    assert (again["ok"], again["changed"], again["device"]["orders"]["drained"]["reason"]) == (True, False, "moving")
    refused = farm.do("drain", "emu-3", "--json")
    assert json.loads(refused.out)[0]["error"]["code"] == "unknown_device"


def test_a_device_is_taken_for_a_time(farm: Farm) -> None:
    """The answer says until when and how to give it back; the list says who has it and why."""
    farm.add("emu-1")
    assert "it is yours until" in farm.ok("take", "emu-1", "--for", "30m", "--reason", "a bug")
    (taken,) = farm.json("ls")
    left = datetime.fromisoformat(taken["until"]) - datetime.now(UTC)
    assert timedelta(minutes=29) < left <= timedelta(minutes=30)
    assert (taken["state"], taken["reason"], taken["by"][:4]) == ("taken", "a bug", "cli:")
    (given,) = farm.json("give-back", "emu-1")
    assert (given["device"]["state"], given["device"]["orders"]["taken"]) == ("down", None)
    assert "it was neither drained, taken nor quarantined" in farm.ok("give-back", "emu-1")
    assert "■ quarantined" in farm.ok("quarantine", "emu-1", "--reason", "it burns")
    assert "■ 1 quarantined" in farm.ok("ls")


def test_many_devices_are_asked_about(farm: Farm) -> None:
    """A pool of more than five is drained after a question; where nobody can answer, nothing is done without --yes."""
    farm.add(*(f"emu-{n}" for n in range(6)))
    farm.ok("add", "gpu-1", "--pool", "gpus", "--adapter", "simulated")
    assert "6 devices matched; dry run" in farm.ok("drain", "--pool", "phones", "--dry-run")
    refused = farm.do("drain", "--pool", "phones")
    assert (refused.code, refused.out) == (1, "")
    assert "add --yes" in refused.err
    assert not any(one["orders"]["drained"] for one in farm.json("ls"))
    farm.ok("drain", "--pool", "phones", "--yes")
    assert [bool(one["orders"]["drained"]) for one in farm.json("ls", "--pool", "phones")] == [True] * 6
    assert farm.json("ls", "--pool", "gpus")[0]["orders"]["drained"] is None
    assert len(farm.ok("give-back", "--all", "--yes").splitlines()) == 7
    typed = farm.shell.on_a_terminal("device", "drain", "--all", "--store", farm.shell.url, typed="y\n")
    assert "Drain 7 devices?" in typed.out
    assert all(one["orders"]["drained"] for one in farm.json("ls"))


# --- history and accounts ---------------------------------------------------------------------------------------------


def test_history_counts_runs_by_device_and_account(farm: Farm) -> None:
    """Success rates per device and per account, the lowest first, and the runs with their errors; an account that
    fails again and again is quarantined, listed and released."""
    worker, watch = farm.serve()
    for _ in range(2):
        assert farm.enqueue("broken", 7)
        watch.hear("failed")
    watch.hear("quarantined")
    assert farm.enqueue("daily", "7")
    watch.hear("completed")
    assert not farm.enqueue("broken", 7)
    history = farm.json("history")
    assert [(one["account"], one["success_rate"]) for one in history["accounts"]] == [(7, 0.0), ("7", 1.0)]
    assert sum(one["failed"] for one in history["devices"]) == 2
    assert [run["outcome"] for run in history["runs"]] == ["completed", "failed", "failed"]
    page = farm.json("history", "-n", "1")
    rest = farm.json("history", "--before", page["next"])
    assert [run["outcome"] for run in (*page["runs"], *rest["runs"])] == ["completed", "failed", "failed"]
    text = farm.ok("history", "--since", "1h", "--account", "7", COLUMNS="140")
    assert "the game refused the login" in text
    assert "completed" not in text
    assert '"7"' in farm.ok("history", "--account", '"7"')
    assert "no run on a device matches" in farm.ok("history", "--account", "8")
    (pair,) = farm.json("accounts")
    assert (pair["account"], pair["consumer"], pair["pool"], pair["failures"]) == (7, "broken", "phones", 2)
    assert "tasks of broken are taken again (1 pair released)" in farm.ok("release", "7", "--consumer", "broken")
    assert farm.json("accounts") == []
    assert farm.enqueue("broken", 7)
    worker.hear("daily has begun")


def test_an_account_is_released_in_every_pool(farm: Farm) -> None:
    """Without --consumer and --pool all pairs of the account are released, those of others stay; the release is in the
    audit record."""
    stamp = AuditStamp("node", datetime.now(UTC), "it failed")

    def quarantine(pool: str, account: str, consumer: str) -> Any:
        pair = QuarantinedAccount(pool=pool, account=account, consumer=consumer, failures=5, quarantined=stamp)
        return lambda opened: opened.store.quarantine_account(pair)

    farm.write(
        quarantine("phones", "7", "daily"), quarantine("phones", "7", "weekly"), quarantine("tablets", "7", "daily"),
        quarantine("phones", '"7"', "daily"), quarantine("phones", "8", "daily"),
    )  # fmt: skip
    listed = farm.ok("accounts").splitlines()
    assert listed[0].split() == ["ACCOUNT", "CONSUMER", "POOL", "FAILURES", "FOR", "BY"]
    assert len(listed) == 6
    assert len(farm.json("release", "7", "--pool", "tablets")["released"]) == 1
    assert "tasks of daily, weekly are taken again (2 pairs released)" in farm.ok("release", "7")
    assert [one["account"] for one in farm.json("accounts")] == ["7", 8]
    said = farm.do("release", "9")
    assert (said.code, "account 9 is not quarantined; quarantined accounts: 7, 8" in said.err) == (1, True)
    audit = farm.shell.here("audit", "--command", "release", "--store", farm.shell.url).out
    assert audit.count("account 7") == 2
