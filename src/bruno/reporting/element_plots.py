"""Plots that show elements beside their numbers, each as the bytes of a PNG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from bruno.reporting.figure import (
    COLOURS,
    GRID,
    HEIGHT,
    PALE,
    WIDTH,
    Values,
    check_lengths,
    new_figure,
    open_frame,
    shortened,
    to_png,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STRIP = 12  # images in a strip above a timeline
_STRIP_HEIGHT = 0.8  # inches
_DOTS = 300  # longer timelines are drawn as lines without dots


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
            _show(cell, image)
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


def score_timeline(
    scores: Values,
    thresholds: Sequence[float | None],
    flagged: Sequence[bool],
    out_of_distribution: Sequence[bool],
    *,
    outliers: Mapping[int, UInt8[Tensor, "channels height width"]] | None = None,
    inliers: Mapping[int, UInt8[Tensor, "channels height width"]] | None = None,
    first: int = 1,
    xlabel: str = "element of the stream",
) -> bytes:
    """Scores along a stream or batch, with outliers marked and some images above.

    Scores of out-of-distribution elements are extreme and would flatten the rest, so each is drawn as a
    triangle at the lowest other score or threshold.

    Args:
        scores: one per element.
        thresholds: one per element, or None.
        flagged: whether each element is an outlier.
        out_of_distribution: whether each element is out-of-distribution.
        outliers: images of some outliers by position in the stream, at most `STRIP`.
        inliers: images of some inliers, by position in the stream.
        first: position of the first score.
        xlabel: label of the x axis.
    """
    check_lengths(
        scores,
        {"thresholds": thresholds, "flagged": flagged, "out_of_distribution": out_of_distribution},
    )
    kinds = (("outliers", outliers or {}, COLOURS[1]), ("inliers", inliers or {}, COLOURS[0]))
    strips = [kind for kind in kinds if kind[1]]
    heights = [_STRIP_HEIGHT] * len(strips) + [HEIGHT]
    figure = new_figure(WIDTH, sum(heights))
    *above, axes = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False).flat
    for strip, (name, images, colour) in zip(above, strips, strict=True):
        _draw_strip(strip, name, images, colour)
    limits = [math.nan if threshold is None else threshold for threshold in thresholds]
    _draw_scores(
        axes, first, np.array(scores), np.array(limits), np.array(flagged), np.array(out_of_distribution)
    )
    axes.set(xlabel=xlabel, ylabel="score (nats)")
    return to_png(figure)


def _draw_scores(
    axes: Axes,
    first: int,
    scores: Float[np.ndarray, " n"],
    limits: Float[np.ndarray, " n"],
    flagged: Bool[np.ndarray, " n"],
    beyond: Bool[np.ndarray, " n"],
) -> None:
    place, margin = np.arange(first, first + len(scores)), max(0.5, 0.015 * len(scores))
    marked, shown = flagged & ~beyond, np.where(beyond, math.nan, scores)
    line = "o-" if len(scores) <= _DOTS else "-"
    axes.plot(place, shown, line, color=COLOURS[0], markersize=3, linewidth=0.8)
    if np.isfinite(limits).any():
        axes.plot(place, limits, "--", color=COLOURS[5], linewidth=0.8, label="threshold")
    if marked.any():
        axes.plot(place[marked], shown[marked], "o", color=COLOURS[1], markersize=5, label="outlier")
    if beyond.any():
        finite = [value for value in (*shown, *limits) if math.isfinite(value)]
        lowest = np.full(beyond.sum(), min(finite, default=0.0))
        axes.plot(place[beyond], lowest, "v", color=COLOURS[1], label="out-of-distribution")
    axes.set_xlim(place[0] - margin, place[-1] + margin)
    axes.locator_params(axis="x", integer=True, min_n_ticks=1)
    axes.grid(**GRID)
    open_frame(axes)
    if axes.get_legend_handles_labels()[1]:  # between images and scores, where it covers nothing
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False)


def _draw_strip(
    axes: Axes, name: str, images: Mapping[int, UInt8[Tensor, "channels height width"]], colour: str
) -> None:
    """Images side by side, each with its position above."""
    axes.set_axis_off()
    for i, (position, image) in enumerate(images.items()):
        _show(axes, image, (i, i + 0.92, 0, 0.92))
        axes.text(i + 0.46, 1.0, str(position), ha="center", fontsize=8, color=colour)
    axes.text(-0.15, 0.46, name, ha="right", va="center", color=colour)
    axes.set(xlim=(0, STRIP), ylim=(0, 1.2))


def _show(
    axes: Axes,
    image: UInt8[Tensor, "channels height width"],
    extent: tuple[float, float, float, float] | None = None,
) -> None:
    pixels = image.cpu().movedim(0, -1).squeeze(-1).numpy()
    axes.imshow(pixels, cmap="gray", vmin=0, vmax=255, extent=extent)
