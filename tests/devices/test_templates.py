"""Templates: what is found on a screen, what cannot be a template, and how code waits for one."""

import asyncio
import json
import sys
import threading
from typing import Any

import cv2
import numpy as np
import pytest

from taskyard.devices import (
    Match,
    SimulatedDevice,
    Template,
    cut_image,
    image_matching,
    load_templates,
    run_on_device,
    templates,
)
from taskyard.devices.simulated_screen import SCREENS
from taskyard.errors import DeviceError, DeviceLost, InvalidInput, InvalidTemplate, TemplateNotGone, TemplateNotSeen
from tests.devices.painted import Kept, PaintedAdapter, make_device

BACKGROUND = (96, 64, 32)
BUTTON = (200, 120, 100, 40)
"""Left, top, width, height."""


def to_png(image) -> bytes:
    return cv2.imencode(".png", image)[1].tobytes()


def paint(*, text="Start", color=(60, 160, 240), background=BACKGROUND, at=BUTTON, size=(400, 300)):
    """A screen with a button; with an empty text, one without."""
    width, height = size
    image = np.full((height, width, 3), background, np.uint8)
    cv2.putText(image, "12:00", (10, 20), cv2.FONT_HERSHEY_SIMPLEX, 0.5, (255, 255, 255), 1, cv2.LINE_AA)
    if text:
        left, top, w, h = at
        cv2.rectangle(image, (left, top), (left + w - 1, top + h - 1), color, cv2.FILLED)
        cv2.putText(image, text, (left + 10, top + 28), cv2.FONT_HERSHEY_SIMPLEX, 0.8, (20, 20, 20), 2, cv2.LINE_AA)
    return image


def crop(image, at=BUTTON) -> bytes:
    left, top, width, height = at
    return to_png(image[top : top + height, left : left + width])


def round_template(color=(60, 160, 240)) -> tuple[Any, bytes]:
    """A disc with a letter, and its template, whose corners are transparent."""
    disc = np.zeros((60, 60, 4), np.uint8)
    cv2.circle(disc, (30, 30), 28, (*color, 255), cv2.FILLED)
    cv2.putText(disc, "K", (16, 44), cv2.FONT_HERSHEY_SIMPLEX, 1.2, (20, 20, 20, 255), 3)
    return disc, to_png(disc)


def place(image, disc, left, top):
    """Put a picture with transparency on another one."""
    part = image[top : top + 60, left : left + 60]
    part[disc[:, :, 3] > 0] = disc[:, :, :3][disc[:, :, 3] > 0]
    return image


START_PNG = crop(paint())
START = Template(START_PNG, name="start")
EMPTY, STARTING = to_png(paint(text="")), to_png(paint())


def device_showing(png: bytes) -> Any:
    return make_device(PaintedAdapter(png))


# --- finding ----------------------------------------------------------------------------------------------------------


async def test_a_template_is_found_where_it_is():
    """The match of a template has the place and the size of what it was cut from."""
    match = await device_showing(STARTING).find(START)
    assert match is not None
    assert (match.x, match.y, match.width, match.height) == BUTTON
    assert match.center == (250, 140)
    assert match.score > 0.99


@pytest.mark.parametrize(
    "screen",
    [
        pytest.param(paint(text=""), id="nothing-there"),
        pytest.param(paint(text="Close"), id="another-text"),
        pytest.param(paint(color=(60, 240, 60), text=""), id="one-color"),
        pytest.param(np.full((300, 400, 3), 7, np.uint8), id="blank"),
        pytest.param(np.random.default_rng(1).integers(0, 256, (300, 400, 3), np.uint8), id="noise"),
    ],
)
async def test_a_template_is_not_found_where_it_is_not(screen):
    """A screen without the template has no match, and that is no failed step."""
    device = device_showing(to_png(screen))
    assert await device.find(START) is None
    assert [step.outcome for step in device.steps] == ["ok"]


@pytest.mark.parametrize("scale", [0.6, 1.5, 2.0])
async def test_a_template_is_found_at_several_scales(scale):
    """A screen of another resolution is matched if the template is looked for at its scale, and only then."""
    screen = cv2.resize(paint(), None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA)
    device = device_showing(to_png(screen))
    match = await device.find(Template(crop(paint()), scales=(0.6, 1.0, 1.5, 2.0)))
    assert match is not None
    assert match.scale == scale
    x, y = match.center
    assert abs(x - 250 * scale) <= 2
    assert abs(y - 140 * scale) <= 2
    assert await device.find(START) is None


@pytest.mark.parametrize("background", [(255, 255, 255), (0, 0, 0), (200, 30, 90)])
async def test_transparent_pixels_do_not_count(background):
    """A round button is found on any background by a template with transparent corners."""
    disc, png = round_template()
    screen = place(paint(background=background), disc, 33, 200)
    masked = await device_showing(to_png(screen)).find(Template(png, threshold=0.95))
    assert masked is not None
    assert (masked.x, masked.y) == (33, 200)


@pytest.mark.parametrize("screen", [np.full((300, 400, 3), 128, np.uint8), paint(text=""), paint(text="Close")])
async def test_a_masked_template_is_not_found_on_one_color(screen):
    """Areas of one color, where a masked correlation divides by zero, are no match."""
    _, png = round_template()
    assert await device_showing(to_png(screen)).find(Template(png, threshold=0.7)) is None


async def test_a_masked_score_is_that_of_opencv():
    """With nothing masked, the score with a mask is the one without."""
    screen = image_matching.read_picture(to_png(paint(text="Stark")))
    wanted = image_matching.read_picture(crop(paint()))
    assert screen is not None
    assert wanted is not None
    everything = np.ones(wanted.pixels.shape[:2], np.uint8)
    plain = image_matching.find_best(screen, wanted)
    masked = image_matching.find_best(screen, wanted._replace(mask=everything))
    assert plain is not None
    assert masked is not None
    assert masked == pytest.approx(plain, abs=1e-3)
    assert 0.5 < plain.score < 1


@pytest.mark.parametrize("seed", range(5))
def test_a_masked_score_is_the_correlation_of_the_pixels_that_count(seed):
    """The place and the score of a masked search are those of the formula, worked out pixel by pixel."""
    rng = np.random.default_rng(seed)
    screen = cv2.GaussianBlur(rng.integers(0, 256, (40, 50, 3), np.uint8), (5, 5), 0)
    screen[:20, :25] = 90  # one color
    wanted = rng.integers(0, 256, (9, 7, 3), np.uint8)
    wanted[2:] = screen[23:30, 31:38]
    mask = (rng.random((9, 7)) < 0.7).astype(np.uint8)
    centered = [wanted[mask > 0].astype(float)[:, c] - wanted[mask > 0][:, c].mean() for c in range(3)]
    best = (-2.0, 0, 0)
    for y in range(40 - 9 + 1):
        for x in range(50 - 7 + 1):
            part = screen[y : y + 9, x : x + 7][mask > 0].astype(float)
            part -= part.mean(axis=0)
            norm = np.sqrt((part**2).sum()) * np.sqrt(sum((c**2).sum() for c in centered))
            score = sum((part[:, c] * centered[c]).sum() for c in range(3)) / norm if norm > 1 else 0.0
            best = max(best, (score, x, y))
    spot = image_matching.find_best(image_matching.Picture(screen), image_matching.Picture(wanted, mask))
    assert spot is not None
    assert (spot.x, spot.y) == best[1:]
    assert spot.score == pytest.approx(best[0], abs=1e-3)


async def test_a_region_limits_where_a_template_is_found():
    """A template is found inside of its region only, at its place on the whole screen."""
    device = device_showing(STARTING)
    inside = await device.find(Template(crop(paint()), region=(190, 100, 150, 100)))
    assert inside is not None
    assert (inside.x, inside.y) == BUTTON[:2]
    assert await device.find(Template(crop(paint()), region=(0, 0, 200, 300))) is None
    assert await device.find(Template(crop(paint()), region=(390, 290, 500, 500))) is None
    assert await device.find(Template(crop(paint()), region=(5000, 0, 10, 10))) is None


# --- what is no template ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "why"),
    [
        pytest.param(b"", "no image", id="empty"),
        pytest.param(b"no image at all", "no image", id="text"),
        pytest.param(STARTING[:60], "no image", id="cut-off"),
        pytest.param(to_png(np.full((30, 30, 3), 9, np.uint8)), "one color only", id="one-color"),
        pytest.param(to_png(np.zeros((30, 30, 4), np.uint8)), "0 pixels that count", id="transparent"),
        pytest.param(to_png(np.eye(3, dtype=np.uint8) * 255), "9 pixels", id="tiny"),
    ],
)
def test_an_image_that_cannot_be_found_is_refused(content, why, tmp_path):
    """A template that could never work is refused when it is defined, from bytes and from a file alike."""
    with pytest.raises(InvalidTemplate, match=why):
        Template(content, name="start")
    (tmp_path / "start.png").write_bytes(content)
    with pytest.raises(InvalidTemplate, match=why) as refused:
        Template(tmp_path / "start.png")
    assert refused.value.template == "start"


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    """A missing file, and a folder, are errors that name the path."""
    with pytest.raises(InvalidTemplate, match=r"gone\.png.*No such file"):
        Template(tmp_path / "gone.png")
    with pytest.raises(InvalidTemplate, match="directory"):
        Template(tmp_path)
    source: Any = 5  # a file descriptor, which `open` would take
    with pytest.raises(InvalidInput, match="must be a path"):
        Template(source)


@pytest.mark.parametrize(
    "settings",
    [
        {"threshold": 0},
        {"threshold": 1.1},
        {"threshold": "0.9"},
        {"scales": ()},
        {"scales": (0,)},
        {"scales": 1.0},
        {"region": (0, 0, 10)},
        {"region": (0, 0, 0, 10)},
        {"region": (-1, 0, 10, 10)},
        {"scales": (0.05,)},
    ],
)
def test_settings_that_make_no_sense_are_refused(settings):
    """Thresholds, scales and regions that could never match are refused when the template is defined."""
    with pytest.raises(InvalidInput):
        Template(crop(paint()), name="start", **settings)


@pytest.mark.parametrize("depth", ["grey", "16-bit", "opaque"])
async def test_images_of_other_kinds_are_templates(depth):
    """Grey images, images of 16 bits a color, and an alpha channel that hides nothing are read as they look."""
    image = np.repeat(paint()[:, :, 1:2], 3, axis=2)
    left, top, width, height = BUTTON
    part = image[top : top + height, left : left + width]
    if depth == "grey":
        part = part[:, :, 0]
    elif depth == "16-bit":
        part = part.astype(np.uint16) * 257
    else:
        part = cv2.cvtColor(part, cv2.COLOR_BGR2BGRA)
    match = await device_showing(to_png(image)).find(Template(to_png(part)))
    assert match is not None
    assert match.score > 0.99


def test_a_folder_of_templates_is_loaded_by_name(tmp_path):
    """Each image of a folder is a template with the name of its file; a folder without images is refused."""
    with pytest.raises(InvalidTemplate, match="no images"):
        load_templates(tmp_path)
    (tmp_path / "start.png").write_bytes(crop(paint()))
    (tmp_path / "close.PNG").write_bytes(crop(paint(text="Close")))
    (tmp_path / "notes.txt").write_text("not an image")
    loaded = load_templates(tmp_path, threshold=0.9)
    assert {name: found.threshold for name, found in loaded.items()} == {"start": 0.9, "close": 0.9}
    with pytest.raises(InvalidTemplate, match="cannot be read"):
        load_templates(tmp_path / "gone")


def test_without_opencv_the_error_says_how_to_install_it(monkeypatch):
    """Where the extra is not installed, a template is refused with the command that installs it."""
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(InvalidInput, match=r"pip install taskyard\[devices\]"):
        Template(START_PNG, name="start")


async def test_a_template_is_cut_from_a_screenshot():
    """A part of a screenshot is found where it was cut; a part that is not on it is refused."""
    match = await device_showing(STARTING).find(Template(cut_image(STARTING, *BUTTON)))
    assert match is not None
    assert (match.x, match.y, match.width, match.height) == BUTTON
    with pytest.raises(InvalidInput, match=r"on the screen of 400x300 pixels, not \(350, 0, 60, 10\)"):
        cut_image(STARTING, 350, 0, 60, 10)
    with pytest.raises(InvalidInput, match="no image"):
        cut_image(b"", 0, 0, 10, 10)


# --- waiting ----------------------------------------------------------------------------------------------------------


def appears(adapter: PaintedAdapter, png: bytes, *, after: int) -> None:
    """Show another screen from that look on."""
    looks = iter(range(10_000))

    def look() -> None:
        if next(looks) == after:
            adapter.png = png

    adapter.on_look = look


@pytest.mark.spec("DEV-19")
async def test_waiting_for_a_template_ends_when_it_appears():
    """A wait looks at the screen again until the template is on it, and returns where."""
    adapter = PaintedAdapter(EMPTY)
    appears(adapter, STARTING, after=3)
    match = await make_device(adapter).wait_for(START, timeout_s=30, poll_s=0)
    assert isinstance(match, Match)
    assert match.center == (250, 140)
    assert adapter.calls == ["screenshot"] * 4


@pytest.mark.spec("DEV-09", "DEV-19")
async def test_a_wait_that_fails_says_what_it_saw_instead():
    """A template that does not appear fails the step with the best match, and leaves the screen as an artifact."""
    adapter, kept = PaintedAdapter(to_png(paint(text="Close"))), Kept()
    device = make_device(adapter)
    with pytest.raises(TemplateNotSeen) as failed:
        await run_on_device(device, lambda: device.wait_for(START, timeout_s=0.02, poll_s=0.01), keep=kept)
    assert str(failed.value).startswith("did not see 'start' within 0.02 s; best match 0.")
    assert failed.value.at == (250, 140)
    assert "threshold 0.85" in str(failed.value)
    (step,) = json.loads(kept["steps.json"])["steps"]
    assert step["outcome"] == "failed"
    assert step["error"].startswith("TemplateNotSeen: did not see 'start'")
    assert kept[step["screenshot"]] == adapter.png


async def test_waiting_for_a_template_to_go():
    """A wait for the end of a template returns when it is gone, and fails with its place if it stays."""
    adapter = PaintedAdapter(STARTING)
    appears(adapter, EMPTY, after=2)
    await make_device(adapter).wait_gone(START, timeout_s=30, poll_s=0)
    assert len(adapter.calls) == 3
    with pytest.raises(TemplateNotGone, match=r"'start' did not go within 0 s; match 1\.00 at \(250, 140\)"):
        await device_showing(STARTING).wait_gone(START, timeout_s=0)


async def test_waiting_for_one_of_several_says_which():
    """The match of a wait for several templates has the name of the one on the screen."""
    close = Template(crop(paint(text="Close")), name="close")
    match = await device_showing(to_png(paint(text="Close"))).wait_for(START, close, timeout_s=0)
    assert match.template == "close"
    with pytest.raises(TemplateNotSeen, match="did not see 'start' or 'close' on the screen"):
        await device_showing(EMPTY).wait_for(START, close, timeout_s=0)


async def test_a_template_larger_than_the_screen_is_not_seen():
    """The error tells a template that cannot fit from one that is not there."""
    small = to_png(paint()[:30, :30])
    with pytest.raises(TemplateNotSeen, match="larger than the screen") as failed:
        await device_showing(small).tap(START)
    assert failed.value.score is None


async def test_tapping_a_template_touches_its_middle():
    """A tap on a template, on a match or on a point is one touch, at its middle."""
    adapter = PaintedAdapter(STARTING)
    device = make_device(adapter)
    await device.tap(START)
    await device.tap(await device.wait_for(START))
    await device.tap_when(START)
    await device.tap(3, 4)
    assert [call for call in adapter.calls if call != "screenshot"] == ["tap 250 140"] * 3 + ["tap 3 4"]
    adapter.png = EMPTY
    with pytest.raises(TemplateNotSeen):
        await device.tap(START)


async def test_a_screen_that_fails_once_is_looked_at_again():
    """A screenshot that fails, or is no image, does not end a wait; one that fails until the end is its error."""
    adapter = PaintedAdapter(b"half an ima")
    appears(adapter, STARTING, after=2)
    await make_device(adapter).wait_for(START, timeout_s=30, poll_s=0)
    with pytest.raises(DeviceError, match="is no image"):
        await device_showing(b"half an ima").wait_for(START, timeout_s=0)
    nothing: Any = None
    adapter.png, adapter.on_look = nothing, lambda: None
    adapter.answers_nothing = True
    with pytest.raises(DeviceError, match="no screenshot: None"):
        await make_device(adapter).wait_for(START, timeout_s=0)
    adapter.is_lost = True
    with pytest.raises(DeviceLost):
        await make_device(adapter).wait_for(START, timeout_s=30)


@pytest.mark.spec("DEV-08")
async def test_matching_never_blocks_the_loop(monkeypatch):
    """While an image is looked for, the event loop goes on: it is what lets the search end here."""
    may_end, searching = threading.Event(), threading.Event()

    def search(*_args):
        searching.set()
        assert may_end.wait(20)
        assert threading.current_thread().name.startswith("taskyard-matching")

    monkeypatch.setattr(templates, "find_best", search)
    finding = asyncio.create_task(device_showing(STARTING).find(START))
    await asyncio.to_thread(searching.wait, 20)
    may_end.set()
    assert await finding is None


async def test_a_screen_that_stays_the_same_is_searched_once(monkeypatch):
    """A wait that sees the same screen again does not search it again, and sees what has changed at once."""
    searched: list[bytes] = []

    def search(png: bytes, wanted: Any) -> Any:
        searched.append(png)
        return templates.search_screen(png, wanted)

    monkeypatch.setattr("taskyard.devices.device.search_screen", search)
    adapter = PaintedAdapter(EMPTY)
    appears(adapter, STARTING, after=3)
    device = make_device(adapter)
    await device.wait_for(START, timeout_s=30, poll_s=0)
    assert searched == [EMPTY, STARTING]
    assert await device.find(Template(crop(paint(text="Close")))) is None
    assert len(searched) == 3


async def test_a_name_stands_for_a_template_of_the_consumer():
    """Code calls the templates of its consumer by name; an unknown name is refused with the known ones."""
    device = device_showing(STARTING)
    await run_on_device(device, lambda: device.wait_for("start"), templates={"start": START})
    with pytest.raises(InvalidInput, match=r"no template is called 'stop' \(known: start\)"):
        await device.find("stop")
    with pytest.raises(InvalidInput, match="wait_for needs a template"):
        await device.wait_for()


@pytest.mark.parametrize("settings", [{"timeout_s": -1}, {"timeout_s": float("nan")}, {"poll_s": -1}])
async def test_times_that_make_no_sense_are_refused(settings):
    """A wait without a sensible time limit is refused."""
    with pytest.raises(InvalidInput):
        await device_showing(STARTING).wait_for(START, **settings)


@pytest.mark.spec("DEV-19")
async def test_steps_drive_a_simulated_phone():
    """Templates that were cut from the screens of a simulated phone lead through its app."""
    phone = SimulatedDevice(
        1,
        name="emu-1",
    )
    shown = phone.make_adapter()
    await shown.connect()

    async def cut(label: str) -> Template:
        png = await shown.screenshot()
        image = cv2.imdecode(np.frombuffer(png, np.uint8), cv2.IMREAD_COLOR)
        button = next(b for b in SCREENS[phone.phone.screen].buttons if b.label == label)
        return Template(crop(image, (button.left, button.top, button.width, button.height)), name=label)

    start = await cut("Start")
    await shown.restart_app()
    play = await cut("Play")
    phone.phone.stop_app("game")
    phone.phone.load_s = 0.05

    adapter = phone.make_adapter()
    await adapter.connect()
    device = make_device(adapter)

    async def work():
        await device.tap(start)
        await device.wait_gone(start)
        await device.tap_when(play)
        return await device.find(play)

    assert await run_on_device(device, work) is None
    assert phone.phone.screen == "news"
    assert [step.name for step in device.steps] == [
        "wait_for 'Start'",
        "tap 'Start'",
        "wait_gone 'Start'",
        "wait_for 'Play'",
        "tap 'Play'",
        "find 'Play'",
    ]
