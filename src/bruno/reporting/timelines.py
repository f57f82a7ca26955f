"""Scores along streams and batches, as the bytes of a PNG: one set as a plot, several as rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import UInt8
from torch import Tensor

from bruno.reporting.figure import (
    COLOURS,
    GRID,
    HEIGHT,
    INK,
    WIDTH,
    Values,
    check_lengths,
    legend_above,
    minus,
    new_figure,
    open_frame,
    shortened,
    show_image,
    to_png,
)
from bruno.reporting.scores import (
    CLIPPED,
    OUT_OF_DISTRIBUTION,
    OUTLIER,
    Cells,
    ScoreRow,
    binned,
    positions_in_sets,
    score_cells,
    score_rows,
    visible_range,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STRIP = 12  # images in a strip above a timeline
MAX_SETS = 200  # rows of a picture
_PANELS = 12  # sets with a plot of their own; more are rows of a heat map
_STRIP_HEIGHT, _PANEL_HEIGHT = 0.8, 0.85  # inches
_DOTS = 300  # longer timelines are drawn as lines without dots
_LINE = 1200  # longer timelines are drawn as the range of scores in bins
_BINS, _CELLS = 400, 300  # of a plot, and in a row of a heat map
_MARKS = {  # of outliers: colour and name
    OUTLIER: (COLOURS[1], "outlier"),
    CLIPPED: ("#742a2a", "outlier, off the scale"),
    OUT_OF_DISTRIBUTION: (COLOURS[3], "out-of-distribution"),
}
_UNJUDGED, _NEAR, _TYPICAL = "#cbd5e0", COLOURS[0], "#e3eefb"  # cells: no threshold, at it, far above it


def score_timeline(
    scores: Values,
    thresholds: Sequence[float | None],
    flagged: Sequence[bool],
    out_of_distribution: Sequence[bool],
    *,
    groups: Sequence[str] | None = None,
    positions: Sequence[int] | None = None,
    outliers: Mapping[int, UInt8[Tensor, "channels height width"]] | None = None,
    inliers: Mapping[int, UInt8[Tensor, "channels height width"]] | None = None,
    xlabel: str = "element of the stream",
    unit: str = "(nats)",
    in_order: bool = False,
) -> bytes:
    """Scores along a stream or batch, with outliers marked; several sets are rows.

    Sets with the most outliers come first. Up to 12 sets have a plot each. More sets, at most `MAX_SETS`, are
    rows of a heat map, in which a cell shows the lowest score of its elements relative to the threshold. Long
    timelines are drawn as the median and the range of scores in bins. Every outlier is marked, also in bins
    and cells. Triangles at the edge mark extreme scores, which are clipped. Crosses at the lower edge mark
    out-of-distribution elements, whose scores are meaningless.

    Args:
        scores: one per element.
        thresholds: one per element, or None.
        flagged: whether each element is an outlier.
        out_of_distribution: whether each element is out-of-distribution.
        groups: name of the set of each element; one set if None.
        positions: position of each element in its set; counted from 1 if None.
        outliers: images of some outliers of a single set by position, at most `STRIP`.
        inliers: images of some inliers of a single set by position.
        xlabel: label of the x axis.
        unit: unit of the scores.
        in_order: keep the sets in order of appearance, which is the order in time for consecutive sets.
    """
    groups = [""] * len(scores) if groups is None else groups
    positions = positions_in_sets(groups) if positions is None else positions
    columns = {
        "positions": positions,
        "scores": scores,
        "thresholds": [math.nan if threshold is None else threshold for threshold in thresholds],
        "flagged": flagged,
        "out_of_distribution": out_of_distribution,
    }
    check_lengths(scores, {"groups": groups, **columns})
    rows = score_rows(groups, *columns.values())[:MAX_SETS]
    if in_order:
        place = {name: i for i, name in enumerate(dict.fromkeys(groups))}
        rows.sort(key=lambda row: place[row.name])
    if len(rows) > _PANELS:
        return to_png(_heat_map(rows, xlabel, unit))
    if len(rows) > 1:
        return to_png(_panels(rows, xlabel, unit))
    kinds = (("outliers", outliers or {}, _MARKS[OUTLIER][0]), ("inliers", inliers or {}, COLOURS[0]))
    return to_png(_single(rows[0], [kind for kind in kinds if kind[1]], xlabel, unit))


# --- plots -----------------------------------------------------------------------------------------------


def _single(
    row: ScoreRow, strips: list[tuple[str, Mapping[int, Tensor], str]], xlabel: str, unit: str
) -> Figure:
    heights = [_STRIP_HEIGHT] * len(strips) + [HEIGHT]
    figure = new_figure(WIDTH, sum(heights))
    *above, axes = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False).flat
    for strip, (name, images, colour) in zip(above, strips, strict=True):
        _draw_strip(strip, name, images, colour)
    _draw_scores(axes, row, _range([row]))
    axes.set(xlabel=xlabel, ylabel=f"score {unit}")
    if axes.get_legend_handles_labels()[1]:  # between images and scores, where it covers nothing
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, frameon=False, fontsize=9)
    return figure


def _panels(rows: Sequence[ScoreRow], xlabel: str, unit: str) -> Figure:
    figure = new_figure(WIDTH, 1.0 + _PANEL_HEIGHT * len(rows))
    panels = figure.subplots(len(rows), 1, sharex=True, sharey=True)
    limits = _range(rows)
    for axes, row in zip(panels, rows, strict=True):
        _draw_scores(axes, row, limits)
        axes.set_title(_name(row, 60), fontsize=8, loc="left", pad=3, parse_math=False)
        axes.set_title(f"{_found(row)} outliers", fontsize=8, loc="right", pad=3)
        axes.tick_params(labelsize=8)
        axes.locator_params(axis="y", nbins=3)
    panels[0].set_xlim(*_x_range(*rows))
    panels[-1].set_xlabel(xlabel)
    figure.supylabel(f"score {unit}", fontsize=10)
    legend_above(figure, *panels)
    return figure


def _found(row: ScoreRow) -> str:
    return f"{row.outlier.sum():,} of {len(row.outlier):,}"


def _x_range(*rows: ScoreRow) -> tuple[float, float]:
    first = min(int(row.position.min()) for row in rows)
    last = max(int(row.position.max()) for row in rows)
    margin = max(0.5, 0.015 * (last - first))
    return first - margin, last + margin


def _count_positions(axes: Axes) -> None:
    """Whole numbers on the x axis."""
    axes.locator_params(axis="x", integer=True, min_n_ticks=1)
    axes.xaxis.set_major_formatter("{x:,.0f}")


def _name(row: ScoreRow, length: int) -> str:
    return shortened(row.name, length) or "(no name)"


def _range(rows: Sequence[ScoreRow]) -> tuple[float, float]:
    return visible_range(
        np.concatenate([row.shown for row in rows]),
        np.concatenate([row.threshold for row in rows]),
        np.concatenate([row.outlier for row in rows]),
    )


def _draw_scores(axes: Axes, row: ScoreRow, limits: tuple[float, float]) -> None:
    low, high = limits
    shown = np.clip(row.shown, low, high)
    position, threshold = row.position, row.threshold
    if len(position) > _LINE:
        bins = binned(position, np.where(row.outlier, math.nan, shown), _BINS)  # outliers have marks
        axes.fill_between(bins.position, bins.low, bins.high, color=COLOURS[0], alpha=0.25, linewidth=0)
        axes.plot(bins.position, bins.median, color=COLOURS[0], linewidth=0.8, label="median and range")
        position, _, threshold, _ = binned(position, threshold, _BINS)
    else:
        line = "o-" if len(position) <= _DOTS else "-"
        axes.plot(position, shown, line, color=COLOURS[0], markersize=2.5, linewidth=0.8)
    if np.isfinite(threshold).any():
        axes.plot(position, threshold, "--", color=COLOURS[5], linewidth=0.8, label="threshold")
    _draw_marks(axes, row, low, high)
    axes.set_xlim(*_x_range(row))
    axes.set_ylim(low - 0.08 * (high - low), high + 0.08 * (high - low))
    _count_positions(axes)
    axes.grid(**GRID)
    open_frame(axes)


def _draw_marks(axes: Axes, row: ScoreRow, low: float, high: float) -> None:
    """Mark outliers, clipped scores and out-of-distribution elements, and print the lowest clipped score."""
    below, above = row.shown < low, row.shown > high
    inside = row.outlier & ~row.out_of_distribution & ~below & ~above
    size = 5 if len(row.position) <= _LINE else 3.5
    for marker, chosen, height, (colour, label) in (
        ("o", inside, row.score, _MARKS[OUTLIER]),
        ("v", below & row.outlier, low, _MARKS[CLIPPED]),
        ("v", below & ~row.outlier, low, (COLOURS[0], "off the scale")),
        ("^", above, high, (COLOURS[0], "off the scale")),
        ("X", row.out_of_distribution, low, _MARKS[OUT_OF_DISTRIBUTION]),
    ):
        if chosen.any():
            heights = np.broadcast_to(height, row.score.shape)[chosen]
            axes.plot(
                row.position[chosen], heights, marker, color=colour, label=label, markersize=size, zorder=4
            )
    if below.any():
        deepest = int(np.where(below, row.score, math.inf).argmin())
        at_the_end = row.position[deepest] > 0.9 * row.position.max() + 0.1 * row.position.min()
        axes.annotate(
            minus(f"{row.score[deepest]:,.0f}"),
            (row.position[deepest], low),
            (-5 if at_the_end else 5, 4),
            textcoords="offset points",
            ha="right" if at_the_end else "left",
            va="bottom",
            fontsize=7,
            color=INK,
            bbox={"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 0.5},
        )


def _draw_strip(
    axes: Axes, name: str, images: Mapping[int, UInt8[Tensor, "channels height width"]], colour: str
) -> None:
    """Images side by side, each with its position above."""
    axes.set_axis_off()
    for i, (position, image) in enumerate(images.items()):
        show_image(axes, image, (i, i + 0.92, 0, 0.92))
        axes.text(i + 0.46, 1.0, str(position), ha="center", fontsize=8, color=colour)
    axes.text(-0.15, 0.46, name, ha="right", va="center", color=colour)
    axes.set(xlim=(0, STRIP), ylim=(0, 1.2))


# --- heat map --------------------------------------------------------------------------------------------


def _heat_map(rows: Sequence[ScoreRow], xlabel: str, unit: str) -> Figure:
    """A row per set, with its name to the left and its number of outliers to the right."""
    cells = score_cells(rows, _CELLS)
    row_height = float(np.clip(12 / len(rows), 0.1, 0.2))  # inches
    font = min(8.0, 0.8 * 72 * row_height)
    figure = new_figure(WIDTH, 1.3 + row_height * len(rows))
    axes = figure.add_subplot(xlabel=xlabel)
    _draw_cells(figure, axes, cells, unit)
    names = [_name(row, 22) for row in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=font, parse_math=False)
    for y, row in enumerate(rows):
        place: dict[str, Any] = {"x": 1.01, "y": y, "transform": axes.get_yaxis_transform(), "fontsize": font}
        colour = _MARKS[OUTLIER][0] if row.outlier.any() else COLOURS[5]
        axes.text(s=_found(row), va="center", color=colour, **place)
    axes.set_title("outliers", fontsize=8, loc="right", pad=3)
    axes.hlines(np.arange(1, len(rows)) - 0.5, *axes.get_xlim(), color="white", linewidth=0.8)
    axes.tick_params(axis="y", length=0)
    _count_positions(axes)
    axes.spines[:].set_visible(False)
    return figure


def _draw_cells(figure: Figure, axes: Axes, cells: Cells, unit: str) -> None:
    from matplotlib.colors import LinearSegmentedColormap, ListedColormap
    from matplotlib.patches import Patch

    sets, columns = cells.lowest.shape
    left = cells.first - 0.5
    place: dict[str, Any] = {
        "extent": (left, left + columns * cells.width, sets - 0.5, -0.5),
        "aspect": "auto",
        "interpolation": "nearest",
    }
    seen = np.ma.masked_where(cells.elements == 0, np.zeros((sets, columns)))
    axes.imshow(seen, cmap=ListedColormap([_UNJUDGED]), **place)
    finite = cells.lowest[np.isfinite(cells.lowest)]
    low = 0.0 if cells.has_thresholds else float(np.quantile(finite, 0.01)) if len(finite) else 0.0
    high = max(low + 1, float(np.quantile(finite, 0.9))) if len(finite) else 1.0
    scale = LinearSegmentedColormap.from_list("scores", [_NEAR, _TYPICAL])
    lowest = np.ma.masked_invalid(cells.lowest)
    drawn = axes.imshow(lowest, cmap=scale, vmin=low, vmax=high, **place)
    colours = [colour for colour, _ in _MARKS.values()]
    marks = np.ma.masked_where(cells.mark == 0, cells.mark)
    axes.imshow(marks, cmap=ListedColormap(colours), vmin=OUTLIER, vmax=OUT_OF_DISTRIBUTION, **place)
    label = f"score{' − threshold' * cells.has_thresholds} {unit}"
    of = f", lowest of {cells.width} elements" if cells.width > 1 else ""
    bar = figure.colorbar(drawn, ax=axes, location="top", extend="both", aspect=40, shrink=0.6, pad=0.01)
    bar.set_label(label + of, fontsize=8)
    bar.ax.tick_params(labelsize=8)
    shown = [_MARKS[mark] for mark in _MARKS if (cells.mark == mark).any()]
    handles = [Patch(color=colour, label=name) for colour, name in shown]
    if ((cells.elements > 0) & ~np.isfinite(cells.lowest) & (cells.mark == 0)).any():
        handles.append(Patch(color=_UNJUDGED, label="not judged"))
    if handles:
        figure.legend(handles=handles, loc="outside upper center", ncols=4, frameon=False, fontsize=8)
