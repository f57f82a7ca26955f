"""Plots of measured values, each as the bytes of a PNG: lines, bars, dots, points and learning curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bruno.reporting.figure import (
    COLOURS,
    GRID,
    INK,
    PALE,
    WIDTH,
    Values,
    check_lengths,
    legend_above,
    minus,
    new_axes,
    new_figure,
    open_frame,
    set_log_axes,
    shortened,
    smoothed,
    to_png,
)


class Measured(NamedTuple):
    """A value and its standard error."""

    value: float
    error: float


def learning_curve(log: Sequence[Mapping[str, Any]]) -> bytes:
    """Smoothed bits/dim by step, with validation bits/dim and episode accuracy if measured.

    Args:
        log: entries with `index` and `bits_per_dim`, `validation`, `accuracy`, each missing or None if
            not measured.
    """
    figure, axes = new_axes("step", "bits/dim")
    if bits := _column(log, "bits_per_dim"):
        steps, values = zip(*bits, strict=True)
        # The first steps would flatten the rest of the curve: clip them.
        clipped = np.minimum(values, np.quantile(values, 0.98))
        axes.plot(steps, smoothed(clipped, max(1, len(bits) // 50)), color=COLOURS[0], label="training")
    if validation := _column(log, "validation"):
        axes.plot(*zip(*validation, strict=True), "o-", color=COLOURS[1], label="validation", markersize=4)
    if accuracy := _column(log, "accuracy"):
        steps, values = zip(*accuracy, strict=True)
        right = axes.twinx()
        right.set_ylabel("episode accuracy")
        right.spines["top"].set_visible(False)
        right.plot(steps, smoothed(values, max(1, len(accuracy) // 50)), color=COLOURS[2])
        axes.plot([], [], color=COLOURS[2], label="episode accuracy (right axis)")
    legend_above(figure, axes)
    return to_png(figure)


def line_plot(
    lines: Mapping[str, tuple[Values, Values]],
    xlabel: str,
    ylabel: str,
    *,
    log: str = "",
    errors: Mapping[str, Values] | None = None,
    ymax: float | None = None,
) -> bytes:
    """Lines with optional bands of ± one standard error.

    Args:
        lines: x and y values by name.
        xlabel: label of the x axis.
        ylabel: label of the y axis.
        log: logarithmic axes: "x", "y" or "xy".
        errors: standard errors of y, by name of the line.
        ymax: upper end of the y axis.
    """
    figure, axes = new_axes(xlabel, ylabel)
    for i, (name, (xs, ys)) in enumerate(lines.items()):
        colour = COLOURS[i % len(COLOURS)]
        axes.plot(xs, ys, "o-", color=colour, label=name, markersize=3)
        if errors and name in errors:
            low, high = (np.array(ys) + sign * np.array(errors[name]) for sign in (-1, 1))
            axes.fill_between(xs, low, high, color=colour, alpha=0.15, linewidth=0)
    set_log_axes(axes, log)
    if ymax is not None:
        lowest = min(min(ys) for _, ys in lines.values())
        axes.set_ylim(lowest - 0.05 * (ymax - lowest), ymax)
    if not log and all(float(x).is_integer() for xs, _ in lines.values() for x in xs):
        axes.locator_params(axis="x", integer=True, min_n_ticks=1)
    if len(lines) > 1:
        legend_above(figure, axes)
    return to_png(figure)


def bar_plot(
    groups: Sequence[str], bars: Mapping[str, Sequence[Measured]], ylabel: str, *, chance: Sequence[float]
) -> bytes:
    """Groups of bars with error bars and values, and a line across each group at chance level.

    Args:
        groups: label of each group.
        bars: by name, one value per group.
        ylabel: label of the y axis.
        chance: chance level of each group.
    """
    check_lengths(groups, {**bars, "chance": chance})
    place, width = np.arange(len(groups)), 0.8 / len(bars)
    figure, axes = new_axes("", ylabel, max(WIDTH, 0.4 * len(groups) * len(bars)))
    for i, (name, measured) in enumerate(bars.items()):
        values, errors = zip(*measured, strict=True)
        xs = place + (i - (len(bars) - 1) / 2) * width
        axes.bar(xs, values, 0.9 * width, color=COLOURS[i % len(COLOURS)], label=name)
        axes.errorbar(xs, values, errors, fmt="none", ecolor=INK, elinewidth=1, capsize=3)
        for x, (value, error) in zip(xs, measured, strict=True):
            top = (x, value + error)
            axes.annotate(f"{value:.1f}", top, (0, 3), textcoords="offset points", ha="center", fontsize=8)
    axes.errorbar(place, chance, xerr=0.45, fmt="none", ecolor=INK, elinewidth=1, label="chance")
    axes.set_xticks(place, groups)
    margin = max(len(groups), 3) / 2  # prevents a single bar from filling the plot
    axes.set_xlim(place.mean() - margin, place.mean() + margin)
    axes.margins(y=0.1)  # room for the values
    axes.grid(visible=False, axis="x")
    axes.set_axisbelow(True)
    legend_above(figure, axes)
    return to_png(figure)


def accuracy_bars(
    settings: Sequence[str], accuracies: Mapping[str, Sequence[Measured]], chance: Sequence[float]
) -> bytes:
    """Accuracy of several methods in the same settings, in per cent.

    Args:
        settings: names of the settings, such as "5-way 1-shot".
        accuracies: by method, one per setting, from 0 to 1.
        chance: accuracy by chance in each setting, from 0 to 1.
    """
    per_cent = {
        name: [Measured(100 * m.value, 100 * m.error) for m in measured]
        for name, measured in accuracies.items()
    }
    groups = [setting.replace(" ", "\n") for setting in settings]
    return bar_plot(groups, per_cent, "accuracy (%)", chance=[100 * level for level in chance])


def dot_plot(rows: Sequence[str], panels: Mapping[str, Mapping[str, Sequence[Measured]]]) -> bytes:
    """A panel per measure; in it a row per label with a dot and error bar per series.

    Args:
        rows: labels, top to bottom.
        panels: by measure, then by series: one value per row.
    """
    names = list(next(iter(panels.values())))
    down, place = math.ceil(len(panels) / 2), np.arange(len(rows))
    row_height = 0.16 + 0.1 * len(names)
    figure = new_figure(height=0.5 + down * (0.5 + row_height * len(rows)))
    grid = figure.subplots(down, min(2, len(panels)), sharey=True, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for axes, (measure, series) in zip(grid.flat, panels.items(), strict=False):
        check_lengths(rows, series)
        for i, (name, measured) in enumerate(series.items()):
            values, errors = zip(*measured, strict=True)
            ys = place + (i - (len(names) - 1) / 2) * 0.7 / len(names)
            colour = COLOURS[i % len(COLOURS)]
            axes.errorbar(values, ys, xerr=errors, fmt="o", color=colour, label=name, markersize=4)
        axes.set_title(measure, fontsize=9, loc="left")
        axes.set_yticks(place, rows)
        axes.set_yticks(place[1:] - 0.5, minor=True)  # grid lines between rows
        axes.tick_params(axis="y", which="both", length=0)
        axes.grid(axis="x", **GRID)
        axes.grid(axis="y", which="minor", **GRID)
        axes.set_ylim(len(rows) - 0.5, -0.5)  # first row at the top
        open_frame(axes)
    if len(names) > 1:
        legend_above(figure, grid[0, 0])
    return to_png(figure)


def ranking_plot(names: Sequence[str], scores: Values) -> bytes:
    """A bar per element, best first, with its rank, name and score; bars of at most 0 are pale.

    Args:
        names: names of the elements, in order of rank.
        scores: score of each, in nats.
    """
    check_lengths(names, {"scores": scores})
    place, values = np.arange(len(names)), np.asarray(scores, float)
    figure, axes = new_axes("score (nats)", "", WIDTH, 0.8 + 0.2 * len(names))
    axes.barh(place, values, 0.7, color=np.where(values > 0, COLOURS[0], PALE))
    for y, value in zip(place, values, strict=True):
        side: dict[str, Any] = (
            {"ha": "left", "xytext": (3, 0)} if value > 0 else {"ha": "right", "xytext": (-3, 0)}
        )
        axes.annotate(
            minus(f"{value:+.1f}"), (value, y), textcoords="offset points", va="center", fontsize=7, **side
        )
    labels = [f"{rank}.  {shortened(name, 40)}" for rank, name in enumerate(names, start=1)]
    axes.set_yticks(place, labels, fontsize=8, parse_math=False)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(names) - 0.4, -0.6)  # best at the top
    axes.margins(x=0.12)  # room for the scores
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
    axes.set_axisbelow(True)
    return to_png(figure)


def scatter_plot(xs: Values, ys: Values, xlabel: str, ylabel: str, *, log: str = "") -> bytes:
    """A point per pair; `log` is "x", "y" or "xy" for logarithmic axes."""
    figure, axes = new_axes(xlabel, ylabel)
    axes.plot(xs, ys, ".", color=COLOURS[0], alpha=0.6, markersize=5)
    set_log_axes(axes, log)
    return to_png(figure)


def predictive_bands(observations: Values, predictions: Mapping[str, tuple[Values, Values]]) -> bytes:
    """A panel per process: predictive mean ± 2 standard deviations, over the observations.

    Args:
        observations: the observations, in order.
        predictions: by name of the process, mean and variance of each observation given those before it.
    """
    figure = new_figure(height=0.5 + 1.3 * len(predictions))
    panels = figure.subplots(len(predictions), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    place = np.arange(1, len(observations) + 1)
    for i, (axes, (name, (mean, variance))) in enumerate(zip(panels, predictions.items(), strict=True)):
        centre, band, colour = np.array(mean), 2 * np.sqrt(variance), COLOURS[i % len(COLOURS)]
        low, high, label = centre - band, centre + band, "± 2 standard deviations"
        axes.plot(place, observations, ".", color=COLOURS[5], markersize=3, label="observation")
        axes.plot(place, centre, color=colour, linewidth=1, label="predictive mean")
        axes.fill_between(place, low, high, color=colour, alpha=0.2, linewidth=0, label=label)
        axes.set_title(name, fontsize=9, loc="left")
        open_frame(axes)
    panels[-1].set_xlabel("position in the sequence")
    legend_above(figure, panels[0])
    return to_png(figure)


def training_curves(curves: Sequence[tuple[str, str, Values]]) -> bytes:
    """Bits/dim by step: a panel per variant, a line per process; every step faint, the running mean bold.

    Args:
        curves: variant, process, and bits/dim of every step.
    """
    variants, processes = (list(dict.fromkeys(curve[i] for curve in curves)) for i in (0, 1))
    down = math.ceil(len(variants) / 2)
    figure = new_figure(height=0.5 + 2.2 * down)
    panels = figure.subplots(down, min(2, len(variants)), sharex=True, squeeze=False)
    everything = np.concatenate([np.asarray(values, float) for _, _, values in curves])
    low, high = np.quantile(everything[np.isfinite(everything)], [0.0, 0.97])
    for axes, variant in zip(panels.flat, variants, strict=False):
        for name, process, values in curves:
            if name == variant:
                i = processes.index(process)
                colour, style = COLOURS[i % len(COLOURS)], ("-", "--")[i % 2]
                axes.plot(values, color=colour, linewidth=0.5, alpha=0.25)
                axes.plot(smoothed(values, 5), style, color=colour, linewidth=1.2, label=process)
        axes.set_ylim(low - 0.1, high + 0.3)
        axes.set_title(variant, fontsize=9, loc="left")
        open_frame(axes)
    for axes in panels.flat[len(variants) :]:
        axes.set_axis_off()
    for axes in panels.flat[max(0, len(variants) - 2) : len(variants)]:
        axes.tick_params(labelbottom=True)  # sharing the x axis hides them above an empty panel
    legend_above(figure, figure.axes[0])
    figure.supxlabel("step", fontsize=9)
    figure.supylabel("bits/dim", fontsize=9)
    return to_png(figure)


def _column(log: Sequence[Mapping[str, Any]], name: str) -> list[tuple[int, float]]:
    return [(entry["index"], entry[name]) for entry in log if entry.get(name) is not None]
