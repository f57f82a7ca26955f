"""Outliers, the most unusual first, as the bytes of a PNG: images with captions, or rows of a table."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from jaxtyping import UInt8
from torch import Tensor

from bruno.reporting.figure import (
    COLOURS,
    GRID,
    INK,
    WIDTH,
    Canvas,
    check_lengths,
    minus,
    shortened,
    text_width,
    to_png,
)
from bruno.text import printable

_FONT, _SMALL = 8.0, 7.0
_GAP, _LINE = 0.16, 0.15  # inches: between columns, and height of a line of a caption
_HEADER, _ROW, _BAR = 0.35, 0.25, 1.5  # inches: height of the header and of a row, length of the longest bar
_ACROSS = 6  # images in a row
_OUT_OF_DISTRIBUTION = "out-of-distribution"
_EXTENSION = re.compile(r"\.\w{1,5}$")  # of a file
_BASIS = "p-values: = exact, ≈ estimated"


class Outlier(NamedTuple):
    """An outlier with the texts and numbers that pictures show.

    Attributes:
        name: name of the element.
        score: its score.
        threshold: its threshold; None without one.
        p: its p-value in words, with the basis; empty without one.
        out_of_distribution: whether it is out-of-distribution, so that its score is meaningless.
        group: its set; empty if there is only one.
        column: the most unusual column in words; empty if unknown.
    """

    name: str
    score: float
    threshold: float | None
    p: str
    out_of_distribution: bool
    group: str = ""
    column: str = ""

    @property
    def depth(self) -> float:
        """How far the score is below the threshold, in nats; 0 if that is meaningless."""
        if (
            self.threshold is None
            or self.out_of_distribution
            or not math.isfinite(self.threshold - self.score)
        ):
            return 0.0
        return max(0.0, self.threshold - self.score)

    @property
    def verdict(self) -> str:
        """The score, or that the element is out-of-distribution."""
        return _OUT_OF_DISTRIBUTION if self.out_of_distribution else minus(f"{self.score:+,.1f}")


def outlier_sheet(outliers: Sequence[Outlier], images: UInt8[Tensor, "n channels height width"]) -> bytes:
    """Images of outliers in the order given, each with its rank, p-value, score, set and name below.

    Args:
        outliers: at least one.
        images: one for each outlier.
    """
    check_lengths(outliers, {"images": images})
    width = (WIDTH - _GAP) / _ACROSS
    size = width - _GAP
    captions = [_caption(rank, one, size + 0.1) for rank, one in enumerate(outliers, start=1)]
    image_height = size * min(1.5, images.shape[2] / images.shape[3])
    height = image_height + max(map(len, captions)) * _LINE + 0.2
    bottom = 0.1 + math.ceil(len(outliers) / _ACROSS) * height
    canvas = Canvas.new(_GAP + width * min(_ACROSS, max(3, len(outliers))), bottom + _LINE)
    for i, caption in enumerate(captions):
        left, top = _GAP + i % _ACROSS * width, 0.1 + i // _ACROSS * height
        canvas.image((left, top, size, image_height), images[i])
        for line, (text, colour) in enumerate(caption):
            place = (left, top + image_height + 0.04 + line * _LINE)
            canvas.text(place, text, _SMALL, va="top", color=colour)
    _explain(canvas, outliers, bottom - 0.05)
    return to_png(canvas.figure)


def _caption(rank: int, outlier: Outlier, width: float) -> list[tuple[str, str]]:
    """Lines and their colours."""
    ood = outlier.out_of_distribution
    lines = [
        (f"{rank}.  {outlier.p}".rstrip(), INK),
        (outlier.verdict if ood else f"score {outlier.verdict}", COLOURS[3] if ood else INK),
    ]
    if outlier.group:
        lines.append((_fitting(outlier.group, width), COLOURS[5]))
    return lines + [(text, COLOURS[5]) for text in _in_two_lines(printable(outlier.name), width)]


def _in_two_lines(name: str, width: float) -> list[str]:
    """A name in lines of a width in inches, at most two; it does not break inside the extension."""
    first = next((n for n in range(len(name), 0, -1) if text_width(name[:n], _SMALL) <= width), 1)
    if first == len(name):
        return [name]
    extension = _EXTENSION.search(name)
    if extension is not None and extension.start():
        first = min(first, extension.start())
    return [name[:first], _fitting(name[first:], width)]


def outlier_chart(outliers: Sequence[Outlier]) -> bytes:
    """Outliers in the order given, one per line: set, name, score, p-value and most unusual column.

    The length of a bar is the logarithm of how far the score is below the threshold. Columns without any
    text are left out.

    Args:
        outliers: at least one.
    """
    texts = {
        "": [f"{rank}." for rank in range(1, len(outliers) + 1)],
        "set": [shortened(one.group, 28) for one in outliers],
        "element": [shortened(one.name, 36) for one in outliers],
        "score": [one.verdict for one in outliers],
        "p-value": [one.p for one in outliers],
        "most unusual column": [shortened(one.column, 60) for one in outliers],
    }
    columns = {title: cells for title, cells in texts.items() if any(cells)}
    widths = {
        title: max(text_width(text, _FONT) for text in (title, *cells)) + _GAP
        for title, cells in columns.items()
    }
    bar = _BAR + _GAP if any(one.depth for one in outliers) else 0.0
    bottom = _HEADER + _ROW * len(outliers)
    canvas = Canvas.new(max(4.0, sum(widths.values()) + bar + _GAP), bottom + 0.3)
    left = _GAP / 2
    for title, cells in columns.items():
        _draw_column(canvas, title, cells, left, widths[title] - _GAP)
        left += widths[title]
        if title == "score" and bar:
            _draw_bars(canvas, outliers, left)
            left += bar
    for row in range(len(outliers) + 1):
        line = (0.0, _HEADER + row * _ROW, canvas.figure.get_figwidth(), 0.0)
        canvas.box(line, edge=GRID["color"], linewidth=0.6)
    _explain(canvas, outliers, bottom)
    return to_png(canvas.figure)


def _draw_column(canvas: Canvas, title: str, cells: Sequence[str], left: float, width: float) -> None:
    """Text below its title; numbers end at the right."""
    is_number = title in ("", "score")
    x, side = left + width * is_number, "right" if is_number else "left"
    canvas.text((x, _HEADER - 0.15), title, _FONT, ha=side, va="center", color=COLOURS[5])
    for row, text in enumerate(cells):
        colour = COLOURS[3] if text == _OUT_OF_DISTRIBUTION else INK
        canvas.text((x, _HEADER + (row + 0.5) * _ROW), text, _FONT, ha=side, va="center", color=colour)


def _draw_bars(canvas: Canvas, outliers: Sequence[Outlier], left: float) -> None:
    title = "below the threshold (log)"
    canvas.text((left, _HEADER - 0.15), title, _FONT, va="center", color=COLOURS[5])
    deepest = max(math.log1p(one.depth) for one in outliers)
    for row, one in enumerate(outliers):
        length = _BAR * math.log1p(one.depth) / deepest
        canvas.box((left, _HEADER + (row + 0.5) * _ROW - 0.07, length, 0.14), face=COLOURS[1])


def _explain(canvas: Canvas, outliers: Sequence[Outlier], top: float) -> None:
    if any(one.p for one in outliers):
        canvas.text((_GAP, top + 0.05), _BASIS, _SMALL, va="top", color=COLOURS[5])


def _fitting(text: str, width: float) -> str:
    """The text, shortened in the middle until it fits a width in inches."""
    text = shortened(text, 100)
    lengths = range(len(text), 4, -1)
    return next((cut for n in lengths if text_width(cut := shortened(text, n), _SMALL) <= width), text[:4])
