"""Templates: images that are looked for on the screen of a device."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from taskyard.devices.image_matching import Picture, find_best, find_fault, read_picture, resize, write_png
from taskyard.errors import DeviceError, InvalidInput, InvalidTemplate, quote
from taskyard.model.given import check_name

DEFAULT_THRESHOLD = 0.85
"""Of the score: the same button scores above 0.95 on the same device, another one of its shape below 0.8."""

LARGEST_FILE_BYTES = 32 << 20
"""Of a template: a screenshot of a whole phone has a tenth of that."""

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp"})


class Match(NamedTuple):
    """Where a template was seen, in pixels of the screenshot: its left top corner, and its size there."""

    template: str
    x: int
    y: int
    width: int
    height: int
    score: float
    scale: float

    @property
    def center(self) -> tuple[int, int]:
        """Where to tap."""
        return self.x + self.width // 2, self.y + self.height // 2


class Template:
    """An image to look for on a screen. It is read once, when it is defined: from a path, or from bytes of a file.

    `threshold` is the score from which it counts as seen, from 0 to 1. Of several `scales` the best counts: the image
    is looked for in each of these sizes, so each takes as long. `region` is the part of the screenshot to look in, as
    left, top, width, height: a small one is fast, and excludes what is alike elsewhere. Transparent pixels do not
    count."""

    def __init__(
        self,
        source: str | os.PathLike[str] | bytes,
        *,
        name: str = "",
        threshold: float = DEFAULT_THRESHOLD,
        scales: Iterable[float] = (1.0,),
        region: tuple[int, int, int, int] | None = None,
    ) -> None:
        content = _check_source(source)
        self.name = check_name("name", name or ("template" if isinstance(content, bytes) else Path(content).stem))
        self.threshold = _check_threshold(threshold)
        self.scales = _check_scales(scales)
        self.region = _check_region(region)
        picture = read_picture(content if isinstance(content, bytes) else _read_file(self.name, content))
        if picture is None:
            what = "these bytes are" if isinstance(content, bytes) else f"{content!r} is"
            raise InvalidTemplate(self.name, f"{what} no image that OpenCV can read")
        self.size = picture.size
        self._sizes: list[tuple[float, Picture]] = []
        for scale in self.scales:
            sized = resize(picture, scale)
            fault = find_fault(sized)
            if fault:
                raise InvalidTemplate(self.name, fault if scale == 1 else f"at scale {scale:g} {fault}")
            self._sizes.append((scale, sized))

    def __repr__(self) -> str:
        return f"<Template {self.name!r}, {self.size[0]}x{self.size[1]}>"

    def accepts(self, match: Match | None) -> bool:
        """Whether this match is good enough."""
        return match is not None and match.score >= self.threshold

    def search(self, screen: Picture) -> Match | None:
        """The best match on a screen, whatever its score; None if it is larger than the screen, or than its region of
        it."""
        left, top, screen = _cut(screen, self.region)
        best: Match | None = None
        for scale, picture in self._sizes:
            spot = find_best(screen, picture)
            if spot is not None and (best is None or spot.score > best.score):
                best = Match(self.name, left + spot.x, top + spot.y, *picture.size, spot.score, scale)
        return best


def load_templates(folder: str | os.PathLike[str], **settings: Any) -> dict[str, Template]:
    """All images of a folder by name, which is that of the file without its suffix. `settings` are those of `Template`,
    for all of them."""
    try:
        paths = sorted(path for path in Path(folder).iterdir() if path.suffix.lower() in IMAGE_SUFFIXES)
    except OSError as exc:
        raise InvalidTemplate(os.fspath(folder), f"the folder cannot be read: {exc.strerror}") from exc
    if not paths:
        raise InvalidTemplate(os.fspath(folder), "the folder has no images")
    return {path.stem: Template(path, name=path.stem, **settings) for path in paths}


def cut_image(screenshot: bytes, left: int, top: int, width: int, height: int) -> bytes:
    """A part of a screenshot as a PNG. Write it to a file of the templates, or pass it to `Template`."""
    region = _check_region((left, top, width, height))
    screen = read_picture(screenshot)
    if screen is None:
        raise InvalidInput(f"the screenshot of {len(screenshot)} bytes is no image")
    _, _, part = _cut(screen, region)
    if part.size != (width, height):
        size = "x".join(map(str, screen.size))
        raise InvalidInput(f"the part must lie on the screen of {size} pixels", given=region)
    return write_png(part)


def check_templates(templates: Any) -> dict[str, Template]:
    """Templates by name, checked."""
    if not isinstance(templates, Mapping) or not all(isinstance(found, Template) for found in templates.values()):
        raise InvalidInput("must map names to Template objects", field="templates", given=templates)
    return dict(templates)


def find_template(wanted: str | Template, templates: Mapping[str, Template]) -> Template:
    """The template of this name, or this one."""
    if isinstance(wanted, Template):
        return wanted
    template = templates.get(wanted)
    if template is None:
        known = ", ".join(sorted(templates)) or "none"
        raise InvalidInput(
            f"no template is called {quote(wanted)} (known: {known})", hint="pass a Template, or name it in `templates`"
        )
    return template


def search_screen(png: bytes, templates: Iterable[Template]) -> list[Match | None]:
    """The best match of each on a screenshot."""
    screen = read_picture(png)
    if screen is None:
        raise DeviceError(f"the screenshot of {len(png)} bytes is no image")
    return [template.search(screen) for template in templates]


def _cut(screen: Picture, region: tuple[int, int, int, int] | None) -> tuple[int, int, Picture]:
    if region is None:
        return 0, 0, screen
    left, top, width, height = region
    return left, top, Picture(screen.pixels[top : top + height, left : left + width])


def _check_source(source: Any) -> str | bytes:
    if isinstance(source, bytes):
        return source
    try:
        path = os.fspath(source)
    except TypeError:
        path = None
    if not isinstance(path, str):
        raise InvalidInput("must be a path, or the bytes of an image", field="source", given=source)
    return path


def _read_file(name: str, path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            content = file.read(LARGEST_FILE_BYTES + 1)
    except (OSError, ValueError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else exc
        raise InvalidTemplate(name, f"{path!r} cannot be read: {why}") from exc
    if len(content) > LARGEST_FILE_BYTES:
        raise InvalidTemplate(name, f"{path!r} has more than {LARGEST_FILE_BYTES} bytes")
    return content


def _check_threshold(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise InvalidInput("must be a number above 0 and up to 1", field="threshold", given=value)
    return float(value)


def _check_scales(values: Any) -> tuple[float, ...]:
    try:
        scales = tuple(values)
    except TypeError:
        raise InvalidInput("must be a list of numbers", field="scales", given=values) from None
    numbers = [value for value in scales if isinstance(value, int | float) and not isinstance(value, bool)]
    if not scales or len(numbers) < len(scales) or not all(0.05 <= value <= 20 for value in numbers):
        raise InvalidInput("must be numbers from 0.05 to 20, at least one", field="scales", given=values)
    return tuple(map(float, numbers))


def _check_region(region: Any) -> tuple[int, int, int, int] | None:
    if region is None:
        return None
    numbers = tuple(region) if isinstance(region, tuple | list) else ()
    if len(numbers) != 4 or not all(isinstance(value, int) and not isinstance(value, bool) for value in numbers):
        raise InvalidInput("must be left, top, width and height in pixels", field="region", given=region)
    left, top, width, height = numbers
    if left < 0 or top < 0 or width < 1 or height < 1:
        raise InvalidInput("must lie on the screen", field="region", given=region)
    return left, top, width, height
