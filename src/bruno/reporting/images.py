"""Images side by side, as pixels and as PNG."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from bruno.reporting.figure import INK, minus, plot_font

if TYPE_CHECKING:
    from PIL import Image

BACKGROUND = 60  # grey between images
_WIDTH = 1000  # pixels: images are enlarged up to this width
_LETTER = 13  # font size in pixels
_GAP = 12  # pixels between sets
_FOUND, _LARGEST = 200, 180  # images found that are shown, and pixels of the longer side of one
_PALE = "#718096"


def to_uint8(images: Tensor, levels: int) -> UInt8[Tensor, "*batch channels height width"]:
    """Scale integers from 0 to levels − 1 to grey values from 0 to 255."""
    return (images.double() * (255 / (levels - 1))).round().clamp(0, 255).to(torch.uint8)


def grid(
    images: UInt8[Tensor, "n channels height width"], columns: int, padding: int = 2, background: int = 255
) -> UInt8[np.ndarray, "rows columns channels"]:
    """Images side by side, row by row, with padding around each; unused cells are background."""
    n, channels, height, width = images.shape
    if n < 1 or channels not in (1, 3):
        raise ValueError(
            f"`images` must be at least one image with 1 or 3 channels; got shape {tuple(images.shape)}."
        )
    if columns < 1 or padding < 0:
        raise ValueError(
            f"`columns` must be at least 1, and `padding` at least 0; got {columns} and {padding}."
        )
    rows = -(-n // columns)
    cells = images.new_full((rows * columns, channels, height + padding, width + padding), background)
    cells[:n, :, :height, :width] = images
    joined = cells.view(rows, columns, *cells.shape[1:]).permute(0, 3, 1, 4, 2).flatten(2, 3).flatten(0, 1)
    # Each cell has its padding below and to the right; the picture also needs it above and to the left.
    picture = joined.new_full((joined.shape[0] + padding, joined.shape[1] + padding, channels), background)
    picture[padding:, padding:] = joined
    return picture.cpu().numpy()


def prefix_grid(
    inputs: UInt8[Tensor, "n channels height width"],
    samples: UInt8[Tensor, "columns samples channels height width"],
    padding: int = 2,
    background: int = 255,
) -> UInt8[np.ndarray, "picture_rows picture_columns channels"]:
    """The picture of the paper: inputs in the top row; below each input, samples given the inputs up to it.

    With one more column than inputs, the first column has no input: its samples come from the prior.
    """
    columns, channels = len(samples), samples.shape[2]
    if columns - len(inputs) not in (0, 1) or inputs.shape[1:] != samples.shape[2:]:
        raise ValueError(
            f"`samples` must have a column for each of the {len(inputs)} inputs, and at most one for the "
            f"prior, of images of the same shape; got {tuple(samples.shape)} for inputs "
            f"{tuple(inputs.shape)}."
        )
    empty = inputs.new_full((columns - len(inputs), channels, *inputs.shape[2:]), background)
    top = grid(torch.cat([empty, inputs]), columns, padding, background)
    below = grid(samples.transpose(0, 1).flatten(0, 1), columns, padding, background)
    between = np.full(
        (padding, *top.shape[1:]), background, np.uint8
    )  # separates the inputs from the samples
    return np.concatenate([top, between, below])


def png(pixels: UInt8[np.ndarray, "rows columns channels"], width: int = _WIDTH) -> bytes:
    """PNG of pixels, enlarged up to a width by a whole factor so that every pixel stays a square."""
    return _encoded(_enlarged(pixels, max(1, width // max(pixels.shape[:2]))))


def prefix_sheet(
    sets: Sequence[tuple[UInt8[Tensor, "n channels height width"], UInt8[Tensor, "columns samples *image"]]],
    seen: Sequence[int],
) -> bytes:
    """PNG of one `prefix_grid` per set, with the number of elements seen above each column.

    Args:
        sets: inputs and samples of each set, as in `prefix_grid`.
        seen: number of elements seen, one per column.
    """
    from PIL import Image, ImageDraw

    grids = [prefix_grid(inputs, samples, 1, BACKGROUND) for inputs, samples in sets]
    high, wide = grids[0].shape[:2]
    across = math.ceil(math.sqrt(len(grids)))
    if len(grids) <= 3:  # narrow grids side by side, wide ones below each other: no empty corner
        across = len(grids) if wide < 1.5 * high else 1
    down = math.ceil(len(grids) / across)
    factor = max(1, _WIDTH // max(across * wide, down * high))
    cell = [factor * (size + 1) for size in sets[0][0].shape[-2:]]  # height and width, with the border
    font = plot_font(_LETTER)
    gutter, header = round(max(map(font.getlength, ("given", "samples")))) + _GAP, _LETTER + 8
    tile = (factor * high + header + _GAP, factor * wide + _GAP)
    sheet = Image.new("RGB", (gutter + across * tile[1], down * tile[0]), "white")
    pen = ImageDraw.Draw(sheet)
    # Columns may be narrower than their numbers; then only some columns get one.
    every = math.ceil((max(font.getlength(str(n)) for n in seen) + 4) / cell[1])
    for i, pixels in enumerate(grids):
        top, left = i // across * tile[0] + header, gutter + i % across * tile[1]
        sheet.paste(_enlarged(pixels, factor), (left, top))
        for column in range(0, len(seen), every):
            place = (left + (column + 0.5) * cell[1], top - header / 2)
            pen.text(place, str(seen[column]), INK, font, anchor="mm")
        if i % across == 0:
            for row, name in enumerate(("seen", "given", "samples")):
                y = top + (row - 0.5) * cell[0] if row else top - header / 2
                pen.text((left - _GAP / 2, y), name, INK, font, anchor="rm")
    return _encoded(sheet)


def contact_sheet(
    query: UInt8[Tensor, "n channels height width"],
    found: UInt8[Tensor, "m channels height width"],
    scores: Sequence[float],
    *,
    columns: int = 10,
) -> bytes:
    """PNG of the images of a query, and below them the images found, best first.

    Rank and score are written below each image. A score of at most 0 is pale: the query makes the image no
    more likely. At most two rows of the query and 200 of the images found are shown.

    Args:
        query: images of the query.
        found: images found, in order of rank.
        scores: score of each, in nats.
        columns: images in a row.
    """
    from PIL import Image, ImageDraw

    if len(scores) != len(found):
        raise ValueError(f"`scores` must have {len(found)} values, one per image found; got {len(scores)}.")
    font, line = plot_font(_LETTER), _LETTER + 8
    columns = min(columns, max(len(query), len(found)))
    titles = (
        _title("query", len(query), 2 * columns),
        _title("found", len(found), _FOUND) + ": rank, score (nats)",
    )
    query, found = query[: 2 * columns], found[:_FOUND]
    labels = [
        (str(rank), minus(f"{score:+.1f}"), INK if score > 0 else _PALE)
        for rank, score in enumerate(scores, start=1)
    ]
    high, wide = query.shape[-2:]
    factor = max(1, min(_LARGEST, (_WIDTH - columns * _GAP) // columns) // max(high, wide))
    text = math.ceil(max((font.getlength("  ".join(label[:2])) for label in labels), default=0))
    cell_width, image_height = max(factor * wide, text) + _GAP, factor * high
    parts = [
        (titles[0], query, image_height + _GAP, [("", "", INK)] * len(query)),
        (titles[1], found, image_height + line + 4, labels[:_FOUND]),
    ]
    heights = [line + math.ceil(len(images) / columns) * cell_height for _, images, cell_height, _ in parts]
    width = max(columns * cell_width, math.ceil(max(map(font.getlength, titles))) + _GAP) + _GAP
    sheet = Image.new("RGB", (width, sum(heights) + _GAP), "white")
    pen, top = ImageDraw.Draw(sheet), 0
    for (title, images, cell_height, captions), height in zip(parts, heights, strict=True):
        pen.text((_GAP, top + line / 2), title, INK, font, anchor="lm")
        for i, (image, (rank, score, colour)) in enumerate(zip(images, captions, strict=True)):
            left, up = _GAP + i % columns * cell_width, top + line + i // columns * cell_height
            pixels = image.cpu().movedim(0, -1).contiguous().numpy()
            sheet.paste(_enlarged(pixels, factor), (left, up))
            # A frame, since images may be as white as the page.
            pen.rectangle(
                (left - 1, up - 1, left + factor * wide, up + image_height), outline=(BACKGROUND,) * 3
            )
            below = up + image_height + line / 2
            pen.text((left, below), rank, _PALE, font, anchor="lm")
            pen.text((left + cell_width - _GAP, below), score, colour, font, anchor="rm")
        top += height
    return _encoded(sheet)


def _title(name: str, images: int, most: int) -> str:
    return f"{name}, {most} of {images}" if images > most else name


def _enlarged(pixels: UInt8[np.ndarray, "rows columns channels"], factor: int) -> Image.Image:
    from PIL import Image

    image = Image.fromarray(pixels.squeeze(2) if pixels.shape[2] == 1 else pixels)
    return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)


def _encoded(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return file.getvalue()
