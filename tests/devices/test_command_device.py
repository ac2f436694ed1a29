"""Devices that are reached by commands: how these are read, run and ended."""

import asyncio
import os
import sys
import time
from pathlib import Path

import pytest

from taskyard.devices import CommandDevice, command
from taskyard.devices.kinds import make_definition
from taskyard.errors import DeviceError, DeviceLost, InvalidInput
from taskyard.ports.device import DeviceAdapter
from tests.devices.waiting import PATIENCE_S, process_ended


async def connected(**settings: object) -> DeviceAdapter:
    adapter = CommandDevice(1, **{"health": "true", **settings}).make_adapter()  # type: ignore[arg-type]
    await adapter.connect()
    return adapter


async def test_no_shell_reads_a_command_without_a_prefix() -> None:
    """What a shell would act on is plain text; quotes join words as in a shell."""
    device = await connected()
    assert await device.shell("echo $HOME '|' >x 'a  b' ; echo") == "$HOME | >x a  b ; echo"
    assert await device.shell("sh -c 'echo one | cat; echo two'") == "one\ntwo"
    with pytest.raises(DeviceError, match="is no command line"):
        await device.shell("echo 'open")


async def test_a_prefix_gets_the_command_as_one_argument() -> None:
    """Nothing but the shell at the far end reads a command, so that it needs no further quotes."""
    device = await connected(prefix="sh -c")
    assert await device.shell("echo 'a  b' | tr a c; echo \"$(echo in)\"") == "c  b\nin"


async def test_files_without_a_prefix_are_files_of_this_machine(tmp_path: Path) -> None:
    """A shell is run to write one; its path is quoted."""
    device = await connected()
    target = tmp_path / "new $(folder)" / "it's; a file"
    await device.push(b"content", str(target))
    assert target.read_bytes() == b"content"
    assert await device.pull(str(target)) == b"content"


async def test_cancelling_a_command_kills_all_that_it_has_started(tmp_path: Path) -> None:
    """The processes that a command has started end with it, also those that ignore polite signals."""
    os.mkfifo(tmp_path / "child")  # the script waits there until it is read
    (tmp_path / "run.sh").write_text("trap '' TERM INT HUP\nsleep 600 &\necho $! >child\nwait\n")
    device = await connected()
    running = asyncio.create_task(device.shell(f"sh -c 'cd {tmp_path} && . ./run.sh'", timeout_s=600))
    async with asyncio.timeout(PATIENCE_S):
        child = int(await asyncio.to_thread((tmp_path / "child").read_text))
    running.cancel()
    await asyncio.wait([running])
    assert running.cancelled()
    await process_ended(child)


async def test_its_health_is_that_of_its_command(tmp_path: Path) -> None:
    """A health command that fails says why the device is down, and `connect` fails with it."""
    adapter = CommandDevice(1, name="gpu-1", health=f"ls {tmp_path}/gpu").make_adapter()
    with pytest.raises(DeviceError, match=r"gpu-1: .* ended with status 2: ls: .*No such file"):
        await adapter.connect()
    (tmp_path / "gpu").touch()
    await adapter.connect()
    (tmp_path / "gpu").unlink()
    with pytest.raises(DeviceError, match="No such file"):
        await adapter.health()


async def test_a_program_that_is_not_there_loses_the_device() -> None:
    """A health command that cannot be started is a `DeviceLost` that names the program."""
    with pytest.raises(DeviceLost, match="cannot run 'no-such-program'"):
        await connected(health="no-such-program -L")


async def test_a_command_that_names_no_program_is_its_own_fault() -> None:
    """On this machine a missing program is an error of the command, and so is a command that no process can get."""
    device = await connected()
    for line, match in [("no-such-program", "cannot run"), ("echo a\0b", "is no command"), ("-x", "cannot run")]:
        with pytest.raises(DeviceError, match=match) as caught:
            await device.shell(line)
        assert not isinstance(caught.value, DeviceLost)
    with pytest.raises(DeviceError, match="too long") as caught:
        await device.shell(f"echo {'x' * 200_000}")
    assert not isinstance(caught.value, DeviceLost)


@pytest.fixture
def ssh(tmp_path: Path) -> Path:
    """Stands for ssh: it keeps the commands that it gets, and reaches the machine unless the file `down` exists."""
    ssh = tmp_path / "ssh"
    ssh.write_text(
        "#!/bin/sh\n"
        'cd "$(dirname "$0")" && echo "$2" >>commands\n'
        '[ ! -e down ] || { echo "ssh: connect to host $1: No route to host" >&2; exit 255; }\n'
        'exec sh -c "$2"\n'
    )
    ssh.chmod(0o700)
    return ssh


async def test_an_option_is_never_handed_to_the_prefix(ssh: Path) -> None:
    """ssh reads options after the name of the host, and `-oProxyCommand=…` would run on this machine."""
    device = await connected(prefix=f"{ssh} lab-3")
    for line in ("-oProxyCommand=touch /tmp/here", "  -v"):
        with pytest.raises(DeviceError, match="begins with -, which the program of the prefix would take"):
            await device.shell(line)
    assert (ssh.parent / "commands").read_text().split() == ["true"]


async def test_ssh_itself_has_to_fail_before_the_machine_is_lost(ssh: Path) -> None:
    """A command that ends with the status of a broken ssh is an ordinary failure while ssh reaches the machine, also if
    it is the health command."""
    device = await connected(prefix=f"{ssh} lab-3")
    with pytest.raises(DeviceError, match="ended with status 255") as caught:
        await device.shell("exit 255")
    assert not isinstance(caught.value, DeviceLost)
    with pytest.raises(DeviceError, match="ended with status 255") as caught:
        await connected(prefix=f"{ssh} lab-3", health="exit 255")
    assert not isinstance(caught.value, DeviceLost)
    (ssh.parent / "down").touch()
    for call in (device.shell("true"), device.health()):
        with pytest.raises(DeviceLost, match="ssh does not reach it: ssh: connect to host lab-3: No route"):
            await call


async def test_commands_do_not_get_the_address_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """`TASKYARD_STORE` may have a password, so no command gets a variable of ours; it gets all others."""
    monkeypatch.setenv("TASKYARD_STORE", "postgresql://me:secret@db/farm")
    monkeypatch.setenv("LAB", "3")
    device = await connected(restart="sh -c 'test -z \"$TASKYARD_STORE\"'")
    lines = (await device.shell("env")).splitlines()
    assert "LAB=3" in lines
    assert not [line for line in lines if "TASKYARD" in line or "secret" in line]
    await device.restart()


async def test_output_without_end_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that writes too much, as output or as errors, is killed with all that it has started, at once; a file
    that is too large to pull is refused. The device goes on."""
    device = await connected()
    began = time.monotonic()
    with pytest.raises(DeviceError, match="more than 64 MB; let a command write to a file and pull that") as caught:
        await device.shell(f"sh -c 'sleep 600 & echo $! >{tmp_path}/child; yes'", timeout_s=600)
    assert not isinstance(caught.value, DeviceLost)
    child = int((tmp_path / "child").read_text())
    await process_ended(child)
    with pytest.raises(DeviceError, match="more than 64 MB"):
        await device.shell("sh -c 'yes >&2'", timeout_s=600)
    assert time.monotonic() - began < PATIENCE_S
    monkeypatch.setattr(command, "LARGEST_PULL", 1 << 20)
    (tmp_path / "file").write_bytes(bytes(1 << 20))
    assert await device.pull(f"{tmp_path}/file") == bytes(1 << 20)
    (tmp_path / "file").write_bytes(bytes((1 << 20) + 1))
    with pytest.raises(DeviceError, match=r"more than 1 MB; .* pull a larger file in parts"):
        await device.pull(f"{tmp_path}/file")
    await device.health()


async def test_a_prefix_without_a_shell_is_explained() -> None:
    """A prefix that takes the whole command for the name of a program is told to end in a shell; a command that a shell
    has not found is not."""
    device = await connected(health="true", prefix="nice")
    assert await device.shell("pwd")
    with pytest.raises(DeviceError, match=r"status 127: .*such as 'nice sh -c'"):
        await device.shell("echo hello")
    device = await connected(health="true", prefix="nice sh -c")
    assert await device.shell("echo hello") == "hello"
    with pytest.raises(DeviceError, match="status 127") as caught:
        await device.shell("no-such-program now")
    assert "prefix" not in str(caught.value)


async def test_a_copy_without_progress_is_given_up(tmp_path: Path) -> None:
    """A push that goes nowhere is a `DeviceLost` after `timeout_s`, and one that is slow is not."""
    stuck = await connected(prefix="sh -c 'case $0 in *cat*) sleep 600;; esac'", timeout_s=0.3)
    with pytest.raises(DeviceLost, match=r"made no progress for 0\.3 s"):
        await stuck.push(bytes(5_000_000), "/file")
    slow = tmp_path / "slow.py"
    slow.write_text(
        "import sys, time\n"
        "if 'cat' in sys.argv[1]:\n"
        "    for _ in range(10): time.sleep(0.1); sys.stdout.write('x'); sys.stdout.flush()\n"
    )
    device = await connected(prefix=f"{sys.executable} {slow}", timeout_s=0.8)
    assert await device.pull("/file") == b"x" * 10


async def test_a_restart_returns_when_the_device_is_healthy(tmp_path: Path) -> None:
    """The restart command runs on this machine, and then `health` is asked until it succeeds."""
    script = f"rm {tmp_path}/up; (sleep 0.5; touch {tmp_path}/up) >/dev/null 2>&1 &"
    (tmp_path / "up").touch()
    device = await connected(health=f"test -e {tmp_path}/up", prefix="sh -c", restart=f'sh -c "{script}"')
    await device.restart()
    assert (tmp_path / "up").exists()
    await device.health()


async def test_a_restart_that_fails_is_told(tmp_path: Path) -> None:
    """Without a restart command, with one that fails, and if the device stays down, the error says which it is."""
    with pytest.raises(DeviceError, match="restart=…"):
        await (await connected()).restart()
    with pytest.raises(DeviceError, match="restart_app=…"):
        await (await connected()).restart_app()
    with pytest.raises(DeviceError, match="'false' ended with status 1"):
        await (await connected(restart="false")).restart()
    (tmp_path / "up").touch()
    device = await connected(
        health=f"test -e {tmp_path}/up", restart=f"rm {tmp_path}/up", restart_timeout_s=0.3, prefix="sh -c"
    )
    with pytest.raises(DeviceLost, match=r"not back within 0\.3 s"):
        await device.restart()


def test_a_stored_device_is_made_again() -> None:
    """The definition that is made of a spec has the same spec."""
    spec = CommandDevice(3, name="gpu-3", health="nvidia-smi -L", prefix="ssh lab-3", restart="reset 3").spec("gpus")
    assert make_definition(spec).spec("gpus") == spec


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"health": " "}, "succeeds while the device works"),
        ({"health": "echo 'open"}, "is no command line"),
        ({"health": "true", "prefix": 'ssh "lab'}, "is no command line"),
        ({"health": "true", "timeout_s": -1}, "timeout_s"),
        ({"health": "-oProxyCommand=true", "prefix": "ssh lab"}, "begins with -"),
        ({"health": "true", "prefix": "ssh lab", "restart_app": " -v"}, "begins with -"),
    ],
)
def test_settings_that_make_no_sense_are_told(settings: dict[str, str], match: str) -> None:
    """A bad setting is an `InvalidInput` that says what is wrong."""
    with pytest.raises(InvalidInput, match=match):
        CommandDevice(1, **settings)  # type: ignore[arg-type]
