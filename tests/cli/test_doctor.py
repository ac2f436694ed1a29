"""`taskyard doctor`, on stores that are well and on stores that are not."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import apsw
import pytest

from taskyard.application.doctor import machine
from taskyard.application.doctor.machine import check_limits
from taskyard.application.formatting import size
from taskyard.resources.cpu import cpu_budget
from taskyard.resources.memory import memory_budget
from taskyard.resources.workers import worker_counts
from tests.cli.shell import LONG_S, Shell
from tests.resources.trees import GB, HOST, MEMINFO, plant, v2

TAKE_THE_TURN = """
import fcntl, os, signal
turn = open("work.db-yard/turn")
fcntl.flock(turn, fcntl.LOCK_EX)
print("taken", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_a_healthy_store_is_well(shell: Shell) -> None:
    """With a worker alive and work done, everything is listed and the exit code is 0."""
    shell.seed(("add", {"a": 1}), work=True)
    worker = shell.start_worker()
    done = shell.ok("doctor", "--store", shell.url)
    for text in (
        "sqlite  ",
        "schema ",
        "quick check passed",
        f"(pid {worker.process.pid})",
        "1 completed",
        "no problems found",
    ):
        assert text in done.out
    findings = shell.here("doctor", "--store", shell.url, "--json").json
    assert findings["ok"] is True
    assert {finding["level"] for finding in findings["findings"]} <= {"ok", "warning"}


def test_a_process_stopped_in_its_turn_is_named(shell: Shell) -> None:
    """A process that is stopped while it holds the write lock is named with what to do, and no command waits for it."""
    shell.seed(("add", {"a": 1}))
    holder = subprocess.Popen([sys.executable, "-c", TAKE_THE_TURN], cwd=shell.folder, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == b"taken\n"
        os.waitpid(holder.pid, os.WUNTRACED)  # returns when it is stopped
        done = shell.here("doctor", "--store", shell.url)
        assert done.code == 1
        assert f"kill -CONT {holder.pid}" in done.out
        refused = shell.run("ls", "--store", shell.url)
        assert refused.code == 3
        assert f"process {holder.pid} " in refused.err
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait(timeout=LONG_S)
        holder.stdout.close()
    assert shell.here("ls", "--store", shell.url).code == 0


def test_a_dead_worker_is_told(shell: Shell) -> None:
    """A worker that was killed with a task, while no other runs, is a problem that a new worker solves."""
    worker = shell.start_worker("-v")
    (uuid,) = shell.seed(("hold", {}))
    worker.hear(f"started   hold {uuid}")
    worker.process.kill()
    worker.end()
    done = shell.here("doctor", "--store", shell.url)
    assert done.code == 1
    assert f"(pid {worker.process.pid})" in done.out
    assert "is dead and held 1 task" in done.out
    assert "start a worker" in done.out
    shell.start_worker("-v").hear(f"started   hold {uuid}")
    assert shell.here("doctor", "--store", shell.url).code == 0


def test_a_stopped_worker_is_told(shell: Shell) -> None:
    """A worker that was stopped with a task in its hands is a problem; the advice is how to let it go on."""
    worker = shell.start_worker("-v")
    (uuid,) = shell.seed(("hold", {}))
    worker.hear(f"started   hold {uuid}")
    worker.signal(signal.SIGSTOP)
    os.waitpid(worker.process.pid, os.WUNTRACED)  # returns when it is stopped
    done = shell.here("doctor", "--store", shell.url)
    assert done.code == 1
    assert f"(pid {worker.process.pid})" in done.out
    assert "is stopped and holds 1 task" in done.out
    assert f"kill -CONT {worker.process.pid}" in done.out
    worker.signal(signal.SIGCONT)
    assert shell.here("doctor", "--store", shell.url).code == 0


def test_a_removed_folder_is_told(shell: Shell) -> None:
    """When the folder beside the store is removed under a worker, worker and doctor say so and what to do about it."""
    worker = shell.start_worker()
    shutil.rmtree(shell.folder / "work.db-yard")
    assert "start them again, which makes it anew" in worker.hear("was removed while the store")
    done = shell.here("doctor", "--store", shell.url)
    assert "its file beside the store was removed" in done.out
    assert "restart it" in done.out


def test_tasks_that_nobody_can_run_are_told(shell: Shell) -> None:
    """Tasks that wait while no worker has their consumer are a warning."""
    shell.seed(("add", {"a": 1}))
    done = shell.here("doctor", "--store", shell.url)
    assert done.code == 0
    assert "tasks for 'add' wait, and no worker is running" in done.out


def no_file(path: Path) -> None:
    path.unlink()


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def rubbish(path: Path) -> None:
    path.write_bytes(b"this is a diary, not a database " * 1000)


def torn(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(3 * 4096)
        file.write(b"\xff" * 6000)


def newer(path: Path) -> None:
    _execute(path, "PRAGMA user_version = 99")


def changed(path: Path) -> None:
    _execute(path, "UPDATE migration SET checksum = 'another'")


def changed_bundle(path: Path) -> None:
    _execute(path, "UPDATE bundle SET checksum = 'another'")


def newer_bundle(path: Path) -> None:
    _execute(path, "UPDATE bundle SET version = 99, needs_program = 98")


def foreign(path: Path) -> None:
    path.unlink()
    _execute(path, "CREATE TABLE diary (line TEXT)")


def _execute(path: Path, sql: str) -> None:
    conn = apsw.Connection(str(path))
    conn.execute(sql)
    conn.close()


SICK = [
    pytest.param(no_file, "there is no file", 3, id="missing"),
    pytest.param(folder, "is a folder", 3, id="folder"),
    pytest.param(pipe, "is not a regular file", 3, id="pipe"),
    pytest.param(rubbish, "the file is damaged, or no database at all", 3, id="rubbish"),
    pytest.param(torn, "the file is damaged", None, id="torn"),
    pytest.param(newer, "upgrade Taskyard", 3, id="newer"),
    pytest.param(changed, "another text of 0001_baseline.sql", 3, id="changed"),
    pytest.param(changed_bundle, "another text of bundle version", 3, id="changed-bundle"),
    pytest.param(newer_bundle, "bundle version 99, while this Taskyard knows up to", 3, id="newer-bundle"),
    pytest.param(foreign, "another program's database", 3, id="foreign"),
]


@pytest.mark.parametrize(("spoil", "said", "ls_code"), SICK)
def test_a_store_that_cannot_be_used_is_explained(
    spoil: Callable[[Path], None], said: str, ls_code: int | None, shell: Shell
) -> None:
    """Whatever is wrong with the file, the doctor says so with advice and exits with 1; other commands exit with 3."""
    shell.seed(("add", {"a": 1}))
    spoil(shell.path)
    done = shell.here("doctor", "--store", shell.url)
    assert done.code == 1
    assert said in done.out
    assert "→ " in done.out
    assert "\\n" not in done.out
    assert "Traceback" not in done.out + done.err
    if ls_code is not None:
        assert shell.here("ls", "--store", shell.url).code == ls_code


AS_NOBODY = """
import os, sys
from taskyard.cli.app import run

# What is imported when first needed is read now: the next user may not read this interpreter's files.
keep, sys.stdout = sys.stdout, open(os.devnull, "w")
run([sys.argv[2], "--store", sys.argv[1]])
sys.stdout = keep
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
sys.exit(run([sys.argv[2], "--store", sys.argv[1]]))
"""


def run_as_nobody(command: str, path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", AS_NOBODY, f"sqlite:///{path}", command], capture_output=True, text=True, check=False
    )


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that any user can reach: those of `tmp_path` are closed to others."""
    with tempfile.TemporaryDirectory(prefix="taskyard-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_a_store_that_cannot_be_written_is_explained(open_folder: Path) -> None:
    """On a store of another user the doctor still looks inside, and says which permission is missing."""
    shell = Shell(open_folder)
    shell.seed(("add", {"a": 1}))
    shell.path.chmod(0o444)
    open_folder.chmod(0o555)
    try:
        done = run_as_nobody("doctor", shell.path)
    finally:
        open_folder.chmod(0o755)
    assert done.returncode == 1, done
    assert "cannot write to" in done.stdout
    assert "1 queued" in done.stdout


def test_a_store_that_cannot_be_reached_is_explained(open_folder: Path) -> None:
    """In a folder that this user may not enter, the doctor finds that, and other commands exit with 3."""
    open_folder.chmod(0)
    try:
        found, refused = (run_as_nobody(command, open_folder / "work.db") for command in ("doctor", "ls"))
    finally:
        open_folder.chmod(0o755)
    assert (found.returncode, refused.returncode) == (1, 3), (found, refused)
    assert "Permission denied" in found.stdout
    assert "Permission denied" in refused.stderr


def test_a_network_file_system_is_told(shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store on a network file system is a problem, because locks do not protect it there."""
    shell.seed(("add", {"a": 1}))
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"22 1 0:20 / / rw - ext4 /dev/vda rw\n36 22 0:33 / {tmp_path} rw - nfs4 server:/export rw\n")
    monkeypatch.setattr(machine, "MOUNTS", mounts)
    done = shell.here("doctor", "--store", shell.url)
    assert done.code == 1
    assert "nfs4, a network file system" in done.out
    assert "move the store to a local disk" in done.out


def test_low_room_on_the_disk_is_told(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Little room is a warning; next to none is a problem."""
    shell.seed(("add", {"a": 1}), work=True)
    monkeypatch.setattr(machine, "LOW_BYTES", 1 << 62)
    assert shell.here("doctor", "--store", shell.url).code == 0
    monkeypatch.setattr(machine, "VERY_LOW_BYTES", 1 << 62)
    done = shell.here("doctor", "--store", shell.url)
    assert done.code == 1
    assert "free some space" in done.out


def test_a_store_in_memory_cannot_be_examined(shell: Shell) -> None:
    """Of a store in memory the doctor says that nobody else can see it, not that all is well."""
    done = shell.here("doctor", "--store", "memory://")
    assert done.code == 0
    assert "exists only inside its own process" in done.out
    assert "no problems found" not in done.out


def test_without_a_store_the_machine_is_looked_at(shell: Shell) -> None:
    """With nothing to examine the doctor tells the versions and how to name a store."""
    done = shell.here("doctor")
    assert done.code == 0
    assert "apsw" in done.out
    assert "--store sqlite:///work.db" in done.out


# --- the budget -------------------------------------------------------------------------------------------------------

UNSET = {"CPU_EXECUTOR_WORKERS": "", "IO_EXECUTOR_WORKERS": "", "EXECUTOR_GLOBAL_MAX_WORKERS": ""}


@pytest.mark.spec("MGR-12")
def test_the_budget_is_shown_with_its_source(shell: Shell) -> None:
    """CPU, memory and workers of this machine are in the list and in its JSON, each with what sets it."""
    cpu, memory = cpu_budget(), memory_budget()
    counts = worker_counts({}, cores=cpu.cores)
    assert memory is not None
    out = shell.here("doctor", COLUMNS="250", **UNSET).out
    assert f"usable {'core' if cpu.cores == 1 else 'cores'}: {cpu.source}" in out
    assert f"{size(memory.bytes)}: {memory.source}" in out
    assert f"{counts.cpu} for CPU work ({counts.cpu_source}), {counts.io} for I/O" in out
    found = {finding["topic"]: finding["data"] for finding in shell.here("doctor", "--json", **UNSET).json["findings"]}
    assert (found["cpu"]["cpus"], found["cpu"]["cores"]) == (cpu.cpus, cpu.cores)
    assert (found["memory"]["memory_bytes"], found["memory"]["source"]) == (memory.bytes, memory.source)
    assert (found["pool sizes"]["cpu_workers"], found["pool sizes"]["io_workers"]) == (counts.cpu, counts.io)


@pytest.mark.spec("MGR-12")
def test_the_limits_of_a_container_are_shown(tmp_path: Path) -> None:
    """In a container its own limits are shown, with where they are set."""
    plant(tmp_path, {"proc/meminfo": MEMINFO})
    v2(tmp_path, "/", {".": {"cpu.max": "50000 100000", "memory.max": f"{2 * GB}", "memory.high": f"{GB}"}})
    assert [finding.text for finding in check_limits({}, root=tmp_path)] == [
        "1 usable core: cgroup quota of 0.5 CPUs in /sys/fs/cgroup",
        "2.1 GB: cgroup limit in /sys/fs/cgroup",
        "slowed down above 1.1 GB: memory.high in /sys/fs/cgroup",
        "1 for CPU work (the only core), 5 for I/O (cores * 5, at most 20)",
    ]


def test_a_system_that_does_not_tell_its_memory_is_well(tmp_path: Path) -> None:
    """Where memory is unknown that is said, and is no problem."""
    _, memory, _ = check_limits({}, root=tmp_path)
    assert memory.level == "ok"
    assert memory.data == {"memory_bytes": None}


@pytest.mark.spec("MGR-03")
def test_the_environment_is_shown_as_source(tmp_path: Path) -> None:
    """A variable that lowers the budget is named, beside what there would be."""
    environ = {"CPU_EXECUTOR_WORKERS": "1"}
    cpu, _, workers = check_limits(environ, root=tmp_path, allowed=HOST)
    assert cpu.text == "1 usable core: CPU_EXECUTOR_WORKERS; without it 64: affinity of 64 CPUs"
    assert workers.text == "1 for CPU work (CPU_EXECUTOR_WORKERS), 20 for I/O (cores * 5, at most 20)"


@pytest.mark.spec("MGR-03")
def test_variables_that_do_harm_are_told(shell: Shell) -> None:
    """More CPU workers than cores, and a variable that makes no sense, are warnings with advice, not log lines."""
    done = shell.here("doctor", COLUMNS="250", CPU_EXECUTOR_WORKERS="5000", IO_EXECUTOR_WORKERS="some")
    assert done.code == 0
    assert done.err == ""
    assert "5000 for CPU work (CPU_EXECUTOR_WORKERS)" in done.out
    assert "→ lower CPU_EXECUTOR_WORKERS" in done.out
    assert "IO_EXECUTOR_WORKERS is 'some'" in done.out
    assert "2 warnings" in done.out
