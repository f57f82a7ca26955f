"""Plots of contributions to scores, each as the bytes of a PNG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, UInt8
from torch import Tensor

from bruno.reporting.figure import (
    COLOURS,
    GRID,
    PALE,
    check_lengths,
    new_figure,
    open_frame,
    shortened,
    show_image,
    to_png,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BARS = 10  # columns of an element, those with the largest contributions
_ACROSS = 4  # images with their maps in a row
_NUMBERED = 8  # rows or columns of a map that have a number, at most
_THOUSANDS = 10_000  # contributions from here on are written as 10k
_UNIT = "contribution to the score (nats)"


def contribution_bars(
    titles: Sequence[str],
    features: Sequence[str],
    contributions: Float[np.ndarray, "n features"],
    errors: Float[np.ndarray, "n features"],
) -> bytes:
    """A panel per element: bars of its contributions with standard errors, largest first.

    Args:
        titles: name of each element.
        features: names of the columns.
        contributions: of each column to the score, in nats; negative ones make the element an outlier.
        errors: standard errors.
    """
    check_lengths(titles, {"contributions": contributions, "errors": errors})
    down, lines = math.ceil(len(titles) / 2), min(_BARS, len(features))
    figure = new_figure(height=0.25 + down * (0.55 + 0.2 * lines))
    cells = figure.subplots(down, 2, squeeze=False)
    for cell in cells.flat[len(titles) :]:
        cell.set_axis_off()
    for cell, title, values, spread in zip(cells.flat, titles, contributions, errors, strict=False):
        _draw_bars(cell, features, values, spread)
        cell.set_title(shortened(title, 40), fontsize=8, loc="left", parse_math=False)
    for cell in cells.flat[max(0, len(titles) - 2) : len(titles)]:  # the lowest of each column
        cell.set_xlabel(_UNIT, fontsize=8)
    return to_png(figure)


def _draw_bars(
    axes: Axes,
    features: Sequence[str],
    values: Float[np.ndarray, " features"],
    errors: Float[np.ndarray, " features"],
) -> None:
    from matplotlib.ticker import EngFormatter

    order = np.argsort(-np.abs(values), kind="stable")[:_BARS]
    colours = [COLOURS[1] if value < 0 else COLOURS[0] for value in values[order]]
    axes.barh(range(len(order)), values[order], xerr=errors[order], color=colours, ecolor=PALE)
    names = [shortened(features[i]) for i in order]
    axes.set_yticks(range(len(order)), names, fontsize=8, parse_math=False)
    axes.set_ylim(len(order) - 0.5, -0.5)  # largest at the top
    axes.axvline(0, color=PALE, linewidth=0.8)
    axes.grid(axis="x", **GRID)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8)
    axes.locator_params(axis="x", nbins=4)
    if np.abs(values).max(initial=0) >= _THOUSANDS:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 300k
    open_frame(axes)


def contribution_maps(
    titles: Sequence[str],
    images: UInt8[Tensor, "n channels height width"],
    maps: Float[np.ndarray, "n down across"],
) -> bytes:
    """Images, and below each the contributions of its patches: red patches make it an outlier.

    Args:
        titles: name of each image.
        images: the images.
        maps: contributions of the patches.
    """
    limit = float(np.abs(maps).max(initial=1e-9))
    return _maps(titles, images, maps, _UNIT, cmap="RdBu", vmin=-limit, vmax=limit)


def patch_score_maps(
    titles: Sequence[str],
    images: UInt8[Tensor, "n channels height width"],
    maps: Float[np.ndarray, "n down across"],
) -> bytes:
    """Images, and below each the scores of its patches, of at most 0: dark patches make it an outlier.

    Args:
        titles: name of each image.
        images: the images.
        maps: scores of the patches.
    """
    lowest = float(maps.min(initial=-1e-9))
    return _maps(titles, images, maps, "score of a patch (typical: −1)", cmap="Reds_r", vmin=lowest, vmax=0)


def _without_common_folder(names: Sequence[str]) -> list[str]:
    """The names without the folders that all of them begin with."""
    parts, shared = [name.split("/") for name in names], 0
    while all(len(part) > shared + 1 for part in parts) and len({part[shared] for part in parts}) == 1:
        shared += 1
    return ["/".join(part[shared:]) for part in parts]


def _maps(
    titles: Sequence[str],
    images: UInt8[Tensor, "n channels height width"],
    maps: Float[np.ndarray, "n down across"],
    label: str,
    **colours: Any,
) -> bytes:
    """Images, and below each its map, with the numbers of rows and columns."""
    check_lengths(titles, {"images": images, "maps": maps})
    titles = _without_common_folder(titles)
    across, rows = min(_ACROSS, len(titles)), math.ceil(len(titles) / _ACROSS)
    figure = new_figure(width=1.7 * across, height=3.5 * rows)
    cells = figure.subplots(2 * rows, across, squeeze=False)
    for cell in cells.flat:
        cell.set_axis_off()
    for i, title in enumerate(titles):
        above, below = (cells[2 * (i // across) + j, i % across] for j in range(2))
        show_image(above, images[i])
        above.set_title(shortened(title, 20), fontsize=8, loc="left", parse_math=False)
        shown = below.imshow(maps[i], **colours)
        below.set_axis_on()
        for axis, count in zip((below.yaxis, below.xaxis), maps[i].shape, strict=True):
            ticks = range(0, count, math.ceil(count / _NUMBERED))
            axis.set_ticks(ticks, [str(tick + 1) for tick in ticks], fontsize=6)
        below.tick_params(length=0, pad=1)
        below.spines[:].set_color(PALE)
    figure.colorbar(shown, ax=cells, shrink=0.5, label=label)
    return to_png(figure)
