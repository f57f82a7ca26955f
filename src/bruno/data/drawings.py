"""Line drawings from any source, redrawn like Omniglot's: bright ink, and the same frame, pen and filter.

A model of Omniglot has seen drawings of 105 × 105 pixels made with one pen and reduced by one filter. The
same drawings are unlikely under it if their pen is thicker or their filter is sharper. Other images are
therefore scaled to 105 × 105, binarised, redrawn with Omniglot's pen if their pen differs, and reduced by the
filter that was used in training.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Bool, UInt8
from numpy.typing import NDArray
from PIL import Image, ImageFilter

# Measured on the training split of Omniglot, in pixels of its drawings.
_SIDE = 105
_EXTENTS = (50.0, 88.0)  # longer side of the ink: 13th and 95th percentile
_CENTRES = (41.0, 60.0)  # centre of the ink along both axes: 5th and 95th percentile
_PEN = 5  # squared radius of the disc that redraws the skeletons with the same amount of ink
_SIMILAR = 0.2  # relative difference from the redrawn image; it is smaller for 99 % of the drawings

_LARGEST = 2 * _SIDE  # images are reduced to this side before anything else
_MIN_CONTRAST = 16  # grey values between ink and paper; an image with less is blank
_CUTOFF = 0.55  # brightness of the edge of a stroke, as a fraction of that of its core
_COVERED = 0.3  # fraction of a pixel that a thin stroke covers at least
_NOISE = 4.0  # standard deviations of the paper's noise that a stroke exceeds
_WIDEST = 1 / 3  # widest stroke, as a fraction of the side: wider structures are shadows on the paper

Grey = NDArray[np.uint8]  # (height, width)
Mask = NDArray[np.bool_]


def normalise_drawing(
    image: UInt8[NDArray[Any], "height width"],
    size: tuple[int, int] = (28, 28),
    *,
    invert: bool | None = None,
) -> UInt8[NDArray[Any], "rows columns"]:
    """Redraw a line drawing like those of Omniglot: bright ink on black, reduced to `size`.

    - Polarity: ink covers less of the image than paper. Uneven lighting is removed.
    - Frame: the image is padded to a square. If the ink is larger, smaller or further from the centre than in
      most of Omniglot's drawings, it is scaled and moved into their range.
    - Pen: if strokes were not made with Omniglot's pen, their centre lines are redrawn with it.
    - Sharpness: strokes are binarised at 105 × 105 and reduced by Pillow's bilinear filter, as in training.

    For a drawing of Omniglot, 105 × 105, the result equals the reduction alone, except for a few drawings
    with unusual strokes, which are redrawn. An image without ink is only reduced.

    Args:
        image: grey values of any size.
        size: (height, width) of the result.
        invert: whether ink is darker than paper; detected by default.
    """
    ink = _ink(_at_most(image, _LARGEST), invert)
    brightness = _ink_brightness(ink)
    if brightness < _MIN_CONTRAST:
        return _resized(ink, size, Image.Resampling.BILINEAR)
    cutoff = _CUTOFF * brightness
    strokes = ink > cutoff
    framed = _framed(ink, strokes)
    if len(ink) > _SIDE:
        cutoff = min(cutoff, _reduced_cutoff(framed, _framed(_as_grey(strokes), strokes)))
    drawing = framed > cutoff
    redrawn = _dilate(_skeleton(drawing))
    as_drawn, with_pen = (_resized(_as_grey(x), size, Image.Resampling.BILINEAR) for x in (drawing, redrawn))
    difference = np.abs(as_drawn.astype(int) - with_pen).sum()
    return as_drawn if difference < _SIMILAR * as_drawn.sum() else with_pen


# --- polarity ----------------------------------------------------------------------------------------------


def _ink(image: Grey, invert: bool | None) -> Grey:
    """Brightness of the ink over the paper, in a square of the longer side."""
    invert = _has_dark_ink(image) if invert is None else invert
    ink = _without_paper(255 - image if invert else image)
    height, width = ink.shape
    side = max(height, width)
    top, left = (side - height) // 2, (side - width) // 2
    square = np.zeros((side, side), np.uint8)
    square[top : top + height, left : left + width] = ink
    return square


def _has_dark_ink(image: Grey) -> bool:
    """Whether ink is darker than paper: the few pixels that differ most from their surroundings are ink."""
    radius = max(image.shape) / 4
    around = np.asarray(Image.fromarray(image).filter(ImageFilter.BoxBlur(radius)), float)
    return bool(((image - around) ** 3).sum() < 0)


def _without_paper(image: Grey) -> Grey:
    """The image minus everything wider than a stroke, such as unevenly lit paper: a top-hat filter."""
    window = 2 * int(max(image.shape) * _WIDEST / 2) + 1
    paper = _extremes(_extremes(image, window, np.minimum), window, np.maximum)
    return image - paper


def _extremes(image: Grey, window: int, choose: Callable[[Grey, Grey], Grey]) -> Grey:
    """The minimum or maximum of the square window around every pixel."""
    for _ in range(2):
        padded, width = np.pad(image, ((window // 2,) * 2, (0, 0)), mode="edge"), 1
        while width < window:
            step = min(width, window - width)
            padded, width = choose(padded[:-step], padded[step:]), width + step
        image = padded.T
    return image


def _ink_brightness(ink: Grey) -> float:
    """Brightness of the core of the strokes: a high percentile of the pixels above Otsu's threshold."""
    strokes = ink[ink > _otsu(ink)]
    return float(np.percentile(strokes, 97)) if len(strokes) else 0.0


def _otsu(image: Grey) -> int:
    """Otsu's threshold: the grey value that maximises the variance between pixels up to it and above it."""
    counts = np.bincount(image.ravel(), minlength=256)
    below, sums = counts.cumsum(), (counts * np.arange(256)).cumsum()
    total, above = below[-1], below[-1] - below
    between = (sums[-1] * below / total - sums) ** 2 / np.maximum(1, below * above)
    return int(between.argmax())


def _reduced_cutoff(ink: Grey, coverage: Grey) -> float:
    """The cutoff of reduced ink: thin strokes are darker, except where they cross; it exceeds the noise."""
    strokes = ink[coverage > 255 * _COVERED]
    paper = np.median(ink)
    noise = 1.4826 * np.median(np.abs(ink - paper))  # the standard deviation of normal noise
    return float(max(_CUTOFF * np.median(strokes), paper + _NOISE * noise)) if len(strokes) else math.inf


# --- frame -------------------------------------------------------------------------------------------------


def _framed(ink: Grey, strokes: Mask) -> Grey:
    """The ink at 105 × 105, scaled and moved if its extent or position is unusual in Omniglot."""
    side = len(ink)
    ends = [np.flatnonzero(strokes.any(axis))[[0, -1]] + (0, 1) for axis in (1, 0)]  # rows, then columns
    extent = max(high - low for low, high in ends) * _SIDE / side
    scale = np.clip(extent, *_EXTENTS) / extent * _SIDE / side  # pixels of the result per pixel of `ink`
    shown = _SIDE / scale  # side of the part of `ink` that the result shows
    starts = []
    for low, high in ends:
        centre = (low + high) / 2
        position = (centre - side / 2) * scale + _SIDE / 2
        starts.append(centre - np.clip(position, *_CENTRES) / scale)
    margin = int(np.ceil(max(0, *(-start for start in starts), *(start + shown - side for start in starts))))
    top, left = (start + margin for start in starts)
    return _resized(
        np.pad(ink, margin), (_SIDE, _SIDE), Image.Resampling.LANCZOS, (left, top, left + shown, top + shown)
    )


# --- pen ---------------------------------------------------------------------------------------------------


def _skeleton(drawing: Mask) -> Mask:
    """Centre lines of the strokes, one pixel wide, by the algorithm of Zhang and Suen (1984)."""
    padded = np.pad(drawing.astype(np.uint8), 1)
    pixels = padded[1:-1, 1:-1]
    removed = True
    while removed:
        removed = False
        for removable in _removable():
            found = removable[_neighbours(padded)] & (pixels > 0)
            pixels[found] = 0
            removed |= bool(found.any())
    return pixels > 0


# Neighbours of a pixel clockwise from the one above, as slices of the padded image.
_AROUND = [(-1, 0), (-1, 1), (0, 1), (1, 1), (1, 0), (1, -1), (0, -1), (-1, -1)]


def _neighbours(padded: Grey) -> Grey:
    """The neighbours of every pixel as bits, clockwise from the one above."""
    height, width = padded.shape
    bits = np.zeros((height - 2, width - 2), np.uint8)
    for i, (down, right) in enumerate(_AROUND):
        bits |= padded[1 + down : height - 1 + down, 1 + right : width - 1 + right] << i
    return bits


@functools.cache
def _removable() -> tuple[Bool[NDArray[Any], "256"], Bool[NDArray[Any], "256"]]:
    """Whether a pixel with these neighbours is removed, in the two alternating steps."""
    bits = (np.arange(256)[:, None] >> np.arange(8)) & 1
    starts = ((bits == 0) & (np.roll(bits, -1, 1) == 1)).sum(1)  # 1: removal does not divide the stroke
    on_edge = (bits.sum(1) >= 2) & (bits.sum(1) <= 6) & (starts == 1)  # 2: the end of a stroke stays
    up, right, down, left = (bits[:, i] for i in (0, 2, 4, 6))
    first = (up * right * down == 0) & (right * down * left == 0)
    second = (up * right * left == 0) & (up * down * left == 0)
    return on_edge & first, on_edge & second


def _dilate(skeleton: Mask) -> Mask:
    """The centre lines drawn with Omniglot's pen."""
    reach = int(_PEN**0.5)
    height, width = skeleton.shape
    padded, drawn = np.pad(skeleton, reach), np.zeros_like(skeleton)
    for down in range(2 * reach + 1):
        for right in range(2 * reach + 1):
            if (down - reach) ** 2 + (right - reach) ** 2 <= _PEN:
                drawn |= padded[down : down + height, right : right + width]
    return drawn


# --- resampling --------------------------------------------------------------------------------------------


def _at_most(image: Grey, side: int) -> Grey:
    """The image reduced to a longer side of at most `side`."""
    ratio = side / max(image.shape)
    if ratio >= 1:
        return image
    height, width = (max(1, round(length * ratio)) for length in image.shape)
    return _resized(image, (height, width), Image.Resampling.BOX)


def _resized(
    image: Grey, size: tuple[int, int], filter: Image.Resampling, box: tuple[float, ...] | None = None
) -> Grey:
    return np.asarray(Image.fromarray(image).resize(size[::-1], filter, box))  # type: ignore[arg-type]


def _as_grey(mask: Mask) -> Grey:
    return mask.astype(np.uint8) * np.uint8(255)
