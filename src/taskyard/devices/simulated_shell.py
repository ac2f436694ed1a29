"""The shell of a simulated phone: the few commands that consumers and adapters use."""

from __future__ import annotations

import shlex
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from taskyard.devices.device_settings import command_failed
from taskyard.devices.simulated_screen import HEIGHT, WIDTH, Phone
from taskyard.ports.clock import Clock

NOT_FOUND = 127
"""The exit status of a command that the shell does not know."""

BOOT_ID = "/proc/sys/kernel/random/boot_id"
"""The file of Linux that has another content after each boot."""

_JOINTS = (";", "&&", "||")


class ShellResult(NamedTuple):
    status: int = 0
    stdout: bytes = b""
    stderr: bytes = b""

    def checked(self, device: str, command: str) -> str:
        """Its output without the line ends at its end; a `DeviceError` if its status is not 0."""
        output = (self.stdout + self.stderr).decode(errors="replace").rstrip("\r\n")
        if self.status:
            raise command_failed(device, command, self.status, output)
        return output


class Shell:
    """One command line. `sleep` waits on the device."""

    def __init__(
        self, phone: Phone, clock: Clock, *, sleep: Callable[[float], Awaitable[None]], draw: Callable[[], bytes]
    ) -> None:
        self._phone, self._clock, self._sleep, self._draw = phone, clock, sleep, draw

    async def run(self, line: str) -> ShellResult:
        """Its commands are joined by `;`, `&&` and `||`; `$?` is the status of the one before. There are no pipes."""
        try:
            tokens = _tokens(line)
        except ValueError as error:
            return _failed(f"sh: syntax error: {error}", 2)
        status, outputs, errors = 0, b"", b""
        words: list[str] = []
        is_skipped = False
        for token in [*tokens, ";"]:
            if token not in _JOINTS:
                words.append(token)
                continue
            if words and not is_skipped:
                result = await self._run_one([word.replace("$?", str(status)) for word in words])
                status, outputs, errors = result.status, outputs + result.stdout, errors + result.stderr
            words = []
            is_skipped = (token == "&&" and status != 0) or (token == "||" and status == 0)
        return ShellResult(status, outputs, errors)

    async def _run_one(self, words: list[str]) -> ShellResult:
        name, *arguments = words
        command = _COMMANDS.get(name)
        if command is None:
            return _failed(f"sh: {name}: not found", NOT_FOUND)
        try:
            done = command(self, arguments)
            return done if isinstance(done, ShellResult) else await done
        except (ValueError, IndexError, OverflowError):
            return _failed(f"{name}: bad arguments: {shlex.join(arguments)}", 1)

    def _am(self, arguments: list[str]) -> ShellResult:
        match arguments:
            case ["start", *options, component] if component:
                if options not in ([], ["-n"], ["-W", "-n"]):
                    return _failed(f"Error: unknown option: {' '.join(options)}", 255)
                self._phone.start_app(component.partition("/")[0], mono=self._clock.monotonic())
                return _said(f"Starting: Intent {{ cmp={component} }}")
            case ["force-stop", app]:
                self._phone.stop_app(app)
                return ShellResult()
        return _failed("usage: am start [-W] [-n] APP[/ACTIVITY] | am force-stop APP", 255)

    def _monkey(self, arguments: list[str]) -> ShellResult:
        """`monkey -p APP -c android.intent.category.LAUNCHER 1` starts an app without knowing its activity."""
        app = arguments[arguments.index("-p") + 1]
        self._phone.start_app(app, mono=self._clock.monotonic())
        return _said("Events injected: 1")

    def _input(self, arguments: list[str]) -> ShellResult:
        match arguments:
            case ["tap", x, y]:
                self._phone.tap(round(float(x)), round(float(y)), mono=self._clock.monotonic())
            case ["text", text]:
                self._phone.typed += text.replace("%s", " ")
            case ["keyevent", key]:
                if key in ("3", "KEYCODE_HOME"):
                    self._phone.stop_app(self._phone.app)
            case ["swipe", *_]:
                pass
            case _:
                return _failed("usage: input tap X Y | text TEXT | keyevent KEY | swipe X1 Y1 X2 Y2", 255)
        return ShellResult()

    def _getprop(self, arguments: list[str]) -> ShellResult:
        values = {
            "ro.product.model": "simulated",
            "ro.product.name": self._phone.name,
            "ro.serialno": f"simulated-{self._phone.number}",
            "sys.boot_completed": "1" if self._clock.monotonic() >= self._phone.booted_mono else "",
        }
        if arguments:
            return _said(values.get(arguments[0], ""))
        return _said("\n".join(f"[{name}]: [{value}]" for name, value in values.items()))

    async def _wait(self, arguments: list[str]) -> ShellResult:
        await self._sleep(float(arguments[0]))
        return ShellResult()

    def _echo(self, arguments: list[str]) -> ShellResult:
        return _said(" ".join(arguments))

    def _seq(self, arguments: list[str]) -> ShellResult:
        return _said("\n".join(str(number) for number in range(1, int(arguments[0]) + 1)))

    def _ls(self, arguments: list[str]) -> ShellResult:
        folder = arguments[0].rstrip("/") if arguments else ""
        files = self._phone.files or {}
        if folder in files:
            return _said(folder)
        inside = {path[len(folder) + 1 :].partition("/")[0] for path in files if path.startswith(f"{folder}/")}
        if not inside and folder:
            return _failed(f"ls: {folder}: No such file or directory", 1)
        return _said("\n".join(sorted(inside))) if inside else ShellResult()

    def _cat(self, arguments: list[str]) -> ShellResult:
        content = b""
        for path in arguments:
            part = f"{self._phone.name}-{self._phone.boots}\n".encode() if path == BOOT_ID else self._phone.read(path)
            if part is None:
                return ShellResult(1, content, f"cat: {path}: No such file or directory\n".encode())
            content += part
        return ShellResult(0, content)

    def _rm(self, arguments: list[str]) -> ShellResult:
        is_forced, paths = "-f" in arguments, [path for path in arguments if path != "-f"]
        for path in paths:
            if (self._phone.files or {}).pop(path, None) is None and not is_forced:
                return _failed(f"rm: {path}: No such file or directory", 1)
        return ShellResult()

    def _pidof(self, arguments: list[str]) -> ShellResult:
        is_running = bool(arguments) and arguments[0] == self._phone.app
        return _said("4711") if is_running else ShellResult(1)

    def _screencap(self, arguments: list[str]) -> ShellResult:
        if arguments == ["-p"]:
            return ShellResult(0, self._draw())
        return _failed("usage: screencap -p", 1)

    def _date(self, _: list[str]) -> ShellResult:
        return _said(f"{self._clock.now():%a %b %e %H:%M:%S UTC %Y}")

    def _wm(self, arguments: list[str]) -> ShellResult:
        return _said(f"Physical size: {WIDTH}x{HEIGHT}") if arguments == ["size"] else _failed("usage: wm size", 255)

    def _true(self, _: list[str]) -> ShellResult:
        return ShellResult()

    def _false(self, _: list[str]) -> ShellResult:
        return ShellResult(1)


_COMMANDS: dict[str, Callable[[Shell, list[str]], ShellResult | Awaitable[ShellResult]]] = {
    "am": Shell._am,
    "cat": Shell._cat,
    "date": Shell._date,
    "echo": Shell._echo,
    "false": Shell._false,
    "getprop": Shell._getprop,
    "input": Shell._input,
    "ls": Shell._ls,
    "monkey": Shell._monkey,
    "pidof": Shell._pidof,
    "rm": Shell._rm,
    "screencap": Shell._screencap,
    "seq": Shell._seq,
    "sleep": Shell._wait,
    "true": Shell._true,
    "wm": Shell._wm,
}


def _tokens(line: str) -> list[str]:
    """The words and the joints of a line, or a `ValueError` if it wants more than this shell has."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = ""
    tokens = list(lexer)
    strange = [token for token in tokens if token not in _JOINTS and set(token) <= set("();<>|&")]
    if strange:
        raise ValueError(f"the shell of a simulated device has no {strange[0]!r}")
    return tokens


def _said(text: str) -> ShellResult:
    return ShellResult(0, f"{text}\n".encode())


def _failed(message: str, status: int) -> ShellResult:
    return ShellResult(status, b"", f"{message}\n".encode())
