"""Plots that show elements beside their numbers, each as the bytes of a PNG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxtyping import UInt8
from torch import Tensor

from bruno.reporting.figure import (
    COLOURS,
    PALE,
    check_lengths,
    new_figure,
    shortened,
    show_image,
    to_png,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def class_probabilities(
    titles: Sequence[str],
    probabilities: Sequence[Sequence[tuple[str, float]]],
    images: UInt8[Tensor, "n channels height width"] | None = None,
) -> bytes:
    """A panel per element: its image, if any, beside bars of class probabilities.

    Args:
        titles: name of each element.
        probabilities: classes and their probabilities for each element, most probable first.
        images: images of the elements.
    """
    given = probabilities if images is None else images
    check_lengths(titles, {"probabilities": probabilities, "images": given})
    down, lines = math.ceil(len(titles) / 2), max(map(len, probabilities))
    widths = (3,) if images is None else (1, 3)
    figure = new_figure(height=down * (0.4 + 0.17 * lines))
    cells = figure.subplots(down, 2 * len(widths), width_ratios=widths * 2, squeeze=False)
    for cell in cells.flat:
        cell.set_axis_off()
    if images is not None:
        for cell, image in zip(cells[:, ::2].flat, images, strict=False):
            show_image(cell, image)
            cell.set_anchor("NW")
    for cell, title in zip(cells[:, :: len(widths)].flat, titles, strict=False):
        cell.set_title(shortened(title, 24), fontsize=8, loc="left", parse_math=False)
    bars = cells[:, len(widths) - 1 :: len(widths)].flat  # right of the image, if any
    for cell, classes in zip(bars, probabilities, strict=False):
        _draw_probabilities(cell, classes, lines)
    return to_png(figure)


def _draw_probabilities(axes: Axes, classes: Sequence[tuple[str, float]], lines: int) -> None:
    names, values = zip(*classes, strict=True)
    axes.set_axis_on()
    axes.barh(range(len(values)), values, color=[COLOURS[0], *[PALE] * (len(values) - 1)])
    for y, value in enumerate(values):
        axes.text(value + 0.02, y, f"{100 * value:.1f} %", va="center", fontsize=7)
    axes.set_yticks(range(len(names)), [shortened(name) for name in names], fontsize=8, parse_math=False)
    axes.set_ylim(lines - 0.5, -0.5)  # most probable at the top
    axes.set_xlim(0, 1.3)  # room for the number
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
