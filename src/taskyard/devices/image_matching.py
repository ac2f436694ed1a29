"""Finds an image in another one with OpenCV. Slow (up to 0.3 s a screen of a phone): only threads of its own run it.

The score is the normalized correlation, from -1 to 1, of all colors together: 1 is the same image, also if it is
brighter or darker as a whole. Pixels that the mask leaves out do not count, and a place of one color scores 0.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from taskyard.devices.extra import import_extra

T = TypeVar("T")

THREADS = max(1, min(4, os.cpu_count() or 1))
"""For all devices together: OpenCV uses several cores for one image by itself."""

LEAST_VARIANCE = 4.0
"""Of the pixels, in squares of the 256 grey levels. With less, an area has one color, and noise would be matched."""

LEAST_PIXELS = 16
"""That count in a template: fewer are found everywhere."""

_pool: tuple[int, ThreadPoolExecutor] | None = None


async def run_matching(function: Callable[..., T], *args: Any) -> T:
    """Call it in one of the threads that all devices share."""
    global _pool
    if _pool is None or _pool[0] != os.getpid():  # after a fork the threads are gone
        _pool = os.getpid(), ThreadPoolExecutor(THREADS, thread_name_prefix="taskyard-matching")
    return await asyncio.get_running_loop().run_in_executor(_pool[1], function, *args)


class Picture(NamedTuple):
    """Pixels as blue, green, red. `mask` is 1 where a pixel counts and 0 elsewhere; None if all count."""

    pixels: Any
    mask: Any = None

    @property
    def size(self) -> tuple[int, int]:
        """Width and height."""
        height, width = self.pixels.shape[:2]
        return int(width), int(height)


class Spot(NamedTuple):
    """Where an image fits best. `x` and `y` are its left top corner."""

    x: int
    y: int
    score: float


def read_picture(content: bytes) -> Picture | None:
    """The picture in a file of any format that OpenCV knows; None if it is none. What is transparent is masked."""
    cv2, numpy = import_extra("cv2"), import_extra("numpy")
    try:
        image = cv2.imdecode(numpy.frombuffer(content, numpy.uint8), cv2.IMREAD_UNCHANGED)
    except cv2.error:
        return None
    if image is None:
        return None
    if image.dtype == numpy.uint16:
        image = (image >> 8).astype(numpy.uint8)
    if image.dtype != numpy.uint8:
        return None
    channels = 1 if image.ndim == 2 else image.shape[2]
    if channels == 1:
        return Picture(cv2.cvtColor(image, cv2.COLOR_GRAY2BGR))
    if channels == 3:
        return Picture(image)
    if channels != 4:
        return None
    mask = (image[:, :, 3] >= 128).astype(numpy.uint8)
    return Picture(numpy.ascontiguousarray(image[:, :, :3]), None if mask.all() else mask)


def write_png(picture: Picture) -> bytes:
    """Its pixels as a file, without the mask."""
    content: bytes = import_extra("cv2").imencode(".png", picture.pixels)[1].tobytes()
    return content


def resize(picture: Picture, scale: float) -> Picture:
    """The same picture so many times as large; at least a pixel wide and high."""
    if scale == 1:
        return picture
    cv2 = import_extra("cv2")
    width, height = picture.size
    size = max(1, round(width * scale)), max(1, round(height * scale))
    how = cv2.INTER_AREA if scale < 1 else cv2.INTER_LINEAR
    mask = None if picture.mask is None else cv2.resize(picture.mask, size, interpolation=cv2.INTER_NEAREST)
    return Picture(cv2.resize(picture.pixels, size, interpolation=how), mask)


def find_fault(picture: Picture) -> str:
    """Why this picture cannot be searched for; empty if it can."""
    pixels = picture.pixels.reshape(-1, 3) if picture.mask is None else picture.pixels[picture.mask > 0]
    if len(pixels) < LEAST_PIXELS:
        return f"it has {len(pixels)} pixels that count, and needs {LEAST_PIXELS}"
    if pixels.astype(float).var(axis=0).sum() < LEAST_VARIANCE:
        return "it has one color only, and would be found everywhere"
    return ""


def find_best(screen: Picture, wanted: Picture) -> Spot | None:
    """Where `wanted` fits best; None if it is larger than the screen."""
    if wanted.size[0] > screen.size[0] or wanted.size[1] > screen.size[1]:
        return None
    cv2 = import_extra("cv2")
    if wanted.mask is None:
        scores = cv2.matchTemplate(screen.pixels, wanted.pixels, cv2.TM_CCOEFF_NORMED)
    else:
        scores = _masked_scores(screen.pixels, wanted)
    _, score, _, (x, y) = cv2.minMaxLoc(scores)
    return Spot(int(x), int(y), float(score))


def _masked_scores(screen: Any, wanted: Picture) -> Any:
    """What `TM_CCOEFF_NORMED` is with a mask. OpenCV's own divides by zero where a place has one color, and its results
    are not finite there, or noise that looks like a match."""
    cv2, numpy = import_extra("cv2"), import_extra("numpy")
    mask = wanted.mask.astype(numpy.float32)
    count = float(mask.sum())
    image = screen.astype(numpy.float32) - 128  # small numbers lose less in sums of 32 bits
    colors = wanted.pixels.astype(numpy.float32)
    means = colors[wanted.mask > 0].mean(axis=0)
    centered = (colors - means) * mask[:, :, None]
    # The pixels of `centered` add up to 0, so the mean of each place has no effect here.
    products = cv2.matchTemplate(image, centered, cv2.TM_CCORR)
    squares = cv2.matchTemplate(image * image, cv2.merge([mask] * 3), cv2.TM_CCORR)
    for channel in cv2.split(image):
        sums = cv2.matchTemplate(channel, mask, cv2.TM_CCORR)
        squares -= sums * sums / count
    variances = squares / count
    norm = float(numpy.sqrt((centered * centered).sum()))
    scores = products / (numpy.sqrt(numpy.maximum(squares, 1.0)) * norm)
    scores[variances < LEAST_VARIANCE] = 0
    return numpy.clip(scores, -1, 1)
