"""Class probabilities beside the elements, as the bytes of a PNG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, UInt8
from torch import Tensor

from bruno.reporting.figure import (
    COLOURS,
    GRID,
    INK,
    WIDTH,
    Canvas,
    Values,
    check_lengths,
    shortened,
    text_width,
    to_png,
)

_FONT = 8.0
_GAP = 0.08  # inches
_ROW, _IMAGE_ROW = 0.24, 0.46  # inches: height of a row without and with an image
_NARROW, _WIDE = 0.3, 1.0  # inches: range of the width of a column
_NONE_WIDTH = 0.6  # inches: of the column for none of these
_THUMBNAIL, _STACK = 0.38, 3  # inches, and rows, of the support images of a class
_WHITE = np.ones(3)


def classification_matrix(
    queries: Sequence[str],
    classes: Sequence[str],
    probabilities: Float[Tensor, "queries classes"],
    *,
    images: UInt8[Tensor, "queries channels height width"] | None = None,
    support: Sequence[UInt8[Tensor, "_ channels height width"]] | None = None,
    none_of_these: Sequence[bool] | None = None,
    largest_p: Values | None = None,
) -> bytes:
    """A matrix of class probabilities in per cent: a row per query, a column per class.

    The decision of each row is framed: the most probable class, or none of these. Cells that round to 0 are
    empty.

    Args:
        queries: names of the queries.
        classes: names of the classes.
        probabilities: probability of each class for each query.
        images: image of each query, beside its row.
        support: support images of each class, above its column, as many as fit.
        none_of_these: whether each query belongs to none of the classes; adds a column.
        largest_p: largest p-value of each query for any class, shown in that column.
    """
    given = {
        "probabilities": probabilities,
        "images": images,
        "none_of_these": none_of_these,
        "largest_p": largest_p,
    }
    check_lengths(queries, {name: some for name, some in given.items() if some is not None})
    check_lengths(
        classes, {"probabilities": probabilities[0]} | ({} if support is None else {"support": support})
    )
    shown, rows = [shortened(name, 28) for name in queries], probabilities.double().tolist()
    rejected = [False] * len(queries) if none_of_these is None else list(none_of_these)
    layout = _Layout.of(shown, classes, images is not None, support, none_of_these is not None)
    canvas = Canvas.new(layout.width, layout.height(len(queries)))
    _draw_classes(canvas, layout, classes, support)
    for i, (name, row) in enumerate(zip(shown, rows, strict=True)):
        _draw_query(canvas, layout, i, name, None if images is None else images[i])
        for column, p in enumerate(row):
            _draw_cell(canvas, layout, i, column, _per_cent(p, layout.column), COLOURS[0], p)
        if none_of_these is not None:
            text = "none" * rejected[i] if largest_p is None else _p_value(largest_p[i])
            _draw_cell(canvas, layout, i, len(classes), text, COLOURS[1], 0.9 * rejected[i])
        decision = len(classes) if rejected[i] else row.index(max(row))
        canvas.box(layout.cell(i, decision), edge=INK, linewidth=1.4, zorder=4)
    left, bottom = layout.left, layout.height(len(queries)) - 0.16
    canvas.text((left, bottom), "probability (%); the decision is framed", 7, va="center", color=COLOURS[5])
    return to_png(canvas.figure)


@dataclass(frozen=True)
class _Layout:
    """Places of the parts of a matrix, in inches from the upper left corner.

    Attributes:
        left: left edge of the first column.
        top: upper edge of the first row.
        column: width of a column.
        row: height of a row.
        classes: number of classes.
        names: height of the names of classes.
        vertical: whether names of classes are written vertically.
        thumbnail: size of a support image.
        per_line: support images side by side.
        has_images: whether queries have images.
        has_none: whether there is a column for none of these.
    """

    left: float
    top: float
    column: float
    row: float
    classes: int
    names: float
    vertical: bool
    thumbnail: float
    per_line: int
    has_images: bool
    has_none: bool

    @classmethod
    def of(
        cls,
        queries: Sequence[str],
        classes: Sequence[str],
        has_images: bool,
        support: Sequence[Tensor] | None,
        has_none: bool,
    ) -> _Layout:
        row = _IMAGE_ROW if has_images else _ROW
        left = 2 * _GAP + max(text_width(name, _FONT) for name in queries) + (row + _GAP) * has_images
        room = WIDTH - left - _GAP - (_NONE_WIDTH + _GAP) * has_none
        column = min(max(room / len(classes), _NARROW), _WIDE)
        longest = max(text_width(shortened(name), _FONT) for name in classes)
        vertical = longest + 0.04 > column
        names = (longest if vertical else 0.16) + _GAP
        names = max(names, 0.4) if has_none else names
        thumbnail = min(_THUMBNAIL, column - 0.04)
        per_line = max(1, int((column - 0.02) / (thumbnail + 0.03)))
        most = max(map(len, support)) if support else 0
        lines = min(_STACK, math.ceil(most / per_line))
        top = _GAP + lines * (thumbnail + 0.03) + names
        return cls(
            left, top, column, row, len(classes), names, vertical, thumbnail, per_line, has_images, has_none
        )

    @property
    def width(self) -> float:
        """Width of the picture."""
        cells = self.classes * self.column + (_GAP + _NONE_WIDTH) * self.has_none
        return max(self.left + cells + _GAP, 4.0)

    def height(self, queries: int) -> float:
        """Height of the picture."""
        return self.top + queries * self.row + 0.32

    def cell(self, row: int, column: int) -> tuple[float, float, float, float]:
        """Left, top, width and height of a cell; the column after the classes is for none of these."""
        is_none = column == self.classes
        left = self.left + column * self.column + _GAP * is_none
        return left, self.top + row * self.row, _NONE_WIDTH if is_none else self.column, self.row


def _draw_classes(
    canvas: Canvas, layout: _Layout, classes: Sequence[str], support: Sequence[Tensor] | None
) -> None:
    """Names and support images above the columns."""
    for column, name in enumerate(classes):
        left, top, width, _ = layout.cell(0, column)
        place = (left + width / 2, top - 0.05)
        canvas.text(place, shortened(name), _FONT, ha="center", va="bottom", rotation=90 * layout.vertical)
        some = () if support is None else support[column][: layout.per_line * _STACK].unbind()
        across, down = min(layout.per_line, len(some)), math.ceil(len(some) / layout.per_line)
        step = layout.thumbnail + 0.03
        for i, image in enumerate(some):
            line, across_line = divmod(i, layout.per_line)
            x = left + (width - across * step) / 2 + 0.015 + across_line * step
            y = top - layout.names - (down - line) * step
            canvas.image((x, y, layout.thumbnail, layout.thumbnail), image)
    if layout.has_none:
        left, top, width, _ = layout.cell(0, layout.classes)
        canvas.text((left + width / 2, top - 0.05), "none of\nthese (p)", _FONT, ha="center", va="bottom")


def _draw_query(
    canvas: Canvas, layout: _Layout, row: int, name: str, image: UInt8[Tensor, "channels height width"] | None
) -> None:
    _, top, _, height = layout.cell(row, 0)
    right = layout.left - _GAP
    if image is not None:
        size = height - 0.06
        canvas.image((right - size, top + 0.03, size, size), image)
        right -= height + 0.02
    canvas.text((right, top + height / 2), name, _FONT, ha="right", va="center")


def _draw_cell(
    canvas: Canvas, layout: _Layout, row: int, column: int, text: str, colour: str, strength: float
) -> None:
    """A cell whose colour is mixed with white."""
    from matplotlib.colors import to_rgb

    left, top, width, height = place = layout.cell(row, column)
    mixed = _WHITE + strength * (np.array(to_rgb(colour)) - _WHITE)
    canvas.box(place, face=tuple(mixed), edge=GRID["color"], linewidth=0.6)
    canvas.text(
        (left + width / 2, top + height / 2),
        text,
        _FONT if layout.column > 0.4 else 7,
        ha="center",
        va="center",
        color="white" if strength > 0.55 else INK,
    )


def _per_cent(probability: float, width: float) -> str:
    """The probability with as many digits as fit; empty if it rounds to 0."""
    text = f"{100 * probability:.1f}" if width > 0.4 else f"{100 * probability:.0f}"
    return text if float(text) else ""


def _p_value(p: float) -> str:
    return f"{p:.2f}" if p >= 0.095 else f"{p:.2g}"
