"""What a simulated phone is inside: its apps and their screens, its files, and how a person sees it.

Every app has the same screens. A tap on a button leads to another one:

    home -Start-> title -Play-> news -OK-> lobby -Claim-> reward -OK-> lobby
                                           lobby -Fight-> fight -OK-> lobby,  lobby -Leave-> home
"""

from __future__ import annotations

from collections import deque
from datetime import datetime
from typing import Any, NamedTuple

from taskyard.devices.extra import import_extra

WIDTH, HEIGHT = 360, 640

COMMANDS_KEPT = 4
"""As many as fit on the screen."""

GAME = "game"
"""The app that the button of the home screen starts."""


class Button(NamedTuple):
    """It covers `width` × `height` pixels from its left top corner on."""

    label: str
    left: int
    top: int
    width: int
    height: int
    leads_to: str

    @property
    def center(self) -> tuple[int, int]:
        return self.left + self.width // 2, self.top + self.height // 2

    def covers(self, x: int, y: int) -> bool:
        return self.left <= x < self.left + self.width and self.top <= y < self.top + self.height


class Screen(NamedTuple):
    title: str
    color: tuple[int, int, int]
    """Blue, green, red."""
    buttons: tuple[Button, ...]


SCREENS = {
    "home": Screen("Home", (96, 64, 32), (Button("Start", 110, 260, 140, 60, "title"),)),
    "title": Screen("Welcome", (120, 60, 90), (Button("Play", 110, 400, 140, 60, "news"),)),
    "news": Screen("News", (60, 100, 60), (Button("OK", 130, 330, 100, 50, "lobby"),)),
    "lobby": Screen(
        "Lobby",
        (110, 90, 40),
        (
            Button("Claim", 30, 180, 130, 60, "reward"),
            Button("Fight", 200, 180, 130, 60, "fight"),
            Button("Leave", 110, 470, 140, 50, "home"),
        ),
    ),
    "reward": Screen("Reward", (40, 120, 140), (Button("OK", 130, 330, 100, 50, "lobby"),)),
    "fight": Screen("Victory", (50, 50, 130), (Button("OK", 130, 330, 100, 50, "lobby"),)),
}


class Phone:
    """A simulated phone without its connections. There may be thousands, so it holds nothing but small values until
    something is done with it."""

    __slots__ = (
        "app",
        "booted_mono",
        "boots",
        "commands",
        "files",
        "last_tap",
        "load_s",
        "loads_until",
        "name",
        "number",
        "screen",
        "typed",
    )

    def __init__(self, name: str, number: int, *, load_s: float = 0.0) -> None:
        self.name, self.number, self.load_s = name, number, load_s
        self.files: dict[str, bytes] | None = None
        self.commands: deque[str] | None = None
        self.boots = 0
        self.boot(until_mono=0.0)

    def boot(self, *, until_mono: float) -> None:
        """Everything but the files is as it was when new. It has booted at that time."""
        self.boots += 1
        self.booted_mono = until_mono
        self.app = ""
        """The app in front; empty on the home screen."""
        self.screen = "home"
        """A name of `SCREENS`."""
        self.loads_until = 0.0
        self.typed = ""
        self.last_tap: tuple[int, int] | None = None
        self.commands = None

    def start_app(self, app: str, *, mono: float) -> None:
        self.app, self.screen, self.typed = app, "title", ""
        self.loads_until = mono + self.load_s

    def stop_app(self, app: str) -> None:
        if self.app == app:
            self.app, self.screen, self.typed = "", "home", ""

    def is_loading(self, mono: float) -> bool:
        return mono < self.loads_until

    def tap(self, x: int, y: int, *, mono: float) -> None:
        self.last_tap = (x, y)
        if self.is_loading(mono):
            return
        for button in SCREENS[self.screen].buttons:
            if button.covers(x, y):
                self._follow(button, mono)
                return

    def _follow(self, button: Button, mono: float) -> None:
        if button.leads_to == "home":
            self.stop_app(self.app)
        elif self.screen == "home":
            self.start_app(GAME, mono=mono)
        else:
            self.screen = button.leads_to

    def remember(self, command: str) -> None:
        """Show it among the last commands."""
        if self.commands is None:
            self.commands = deque(maxlen=COMMANDS_KEPT)
        self.commands.append(command)

    def read(self, path: str) -> bytes | None:
        return (self.files or {}).get(path)

    def write(self, path: str, content: bytes) -> None:
        if self.files is None:
            self.files = {}
        self.files[path] = content


def draw_png(phone: Phone, *, now: datetime, mono: float) -> bytes:
    """The screen as a PNG. The cross of the last tap lies below the buttons, so that these always look the same."""
    cv2, numpy = import_extra("cv2"), import_extra("numpy")
    screen = SCREENS[phone.screen]
    image = numpy.full((HEIGHT, WIDTH, 3), screen.color, dtype=numpy.uint8)
    _draw_tap(cv2, image, phone.last_tap)
    cv2.rectangle(image, (0, 0), (WIDTH, 28), (30, 30, 30), cv2.FILLED)
    _write(cv2, image, f"#{phone.number} {phone.name}"[:30], (8, 20), 0.5)
    _write(cv2, image, f"{now:%H:%M:%S}", (278, 20), 0.5)
    _write(cv2, image, phone.app[:24] or "no app", (16, 70), 0.8)
    if phone.is_loading(mono):
        _write(cv2, image, "Loading...", (110, 300), 0.8)
    else:
        _write(cv2, image, screen.title, (16, 110), 0.7, color=(200, 220, 255))
        for button in screen.buttons:
            _draw_button(cv2, image, button)
    if phone.typed:
        _write(cv2, image, f"> {phone.typed}"[:36], (16, 150), 0.5, color=(180, 255, 180))
    cv2.rectangle(image, (0, 552), (WIDTH, HEIGHT), (20, 20, 20), cv2.FILLED)
    for row, command in enumerate(phone.commands or ()):
        _write(cv2, image, f"$ {command}"[:44], (8, 572 + 20 * row), 0.42, color=(170, 210, 170))
    return _encode(cv2, image)


def _draw_tap(cv2: Any, image: Any, at: tuple[int, int] | None) -> None:
    if at is None:
        return
    x, y = at
    color = (90, 200, 250)
    cv2.line(image, (x, 0), (x, HEIGHT), color, 1)
    cv2.line(image, (0, y), (WIDTH, y), color, 1)
    cv2.circle(image, at, 14, color, 2, cv2.LINE_AA)


def _draw_button(cv2: Any, image: Any, button: Button) -> None:
    left_top, right_bottom = (button.left, button.top), (button.left + button.width, button.top + button.height)
    cv2.rectangle(image, left_top, right_bottom, (60, 160, 240), cv2.FILLED)
    cv2.rectangle(image, left_top, right_bottom, (255, 255, 255), 2)
    (width, height), _ = cv2.getTextSize(button.label, cv2.FONT_HERSHEY_DUPLEX, 0.8, 1)
    x, y = button.center
    _write(cv2, image, button.label, (x - width // 2, y + height // 2), 0.8, color=(20, 20, 20))


def _write(
    cv2: Any,
    image: Any,
    text: str,
    at: tuple[int, int],
    scale: float,
    *,
    color: tuple[int, int, int] = (255, 255, 255),
) -> None:
    cv2.putText(image, text, at, cv2.FONT_HERSHEY_DUPLEX, scale, color, 1, cv2.LINE_AA)


def _encode(cv2: Any, image: Any) -> bytes:
    # Level 1 takes a third of the time of the default, and the picture is hardly larger.
    _, encoded = cv2.imencode(".png", image, [cv2.IMWRITE_PNG_COMPRESSION, 1])
    content: bytes = encoded.tobytes()
    return content
