"""Pictures of results, each as the bytes of a PNG: images side by side; curves, bars and dots with errors."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from bruno.tasks.analysis import ToyComparison
from bruno.tasks.few_shot import FewShotResult
from bruno.tasks.generation import prefix_grid
from bruno.tasks.stability import Curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#2b6cb0", "#c05621", "#2f855a", "#805ad5", "#b83280", "#4a5568")
_INK, _PALE = "#1a202c", "#a0aec0"
_GRID: dict[str, Any] = {"color": "#e2e8f0", "linewidth": 0.8}
BACKGROUND = 60  # the grey between images
ACROSS = 12  # images of a stream in a row
_WIDTH = 1000  # pixels that a picture of images is enlarged to, at most
_LETTER = 13  # pixels high
_GAP = 12  # pixels between sets


def to_uint8(images: Tensor, levels: int) -> UInt8[Tensor, "*batch channels height width"]:
    """Integers from 0 to levels − 1 as grey values from 0 to 255."""
    return (images.double() * (255 / (levels - 1))).round().clamp(0, 255).to(torch.uint8)


def picture(pixels: UInt8[np.ndarray, "rows columns channels"]) -> bytes:
    """A PNG of pixels, enlarged by a whole number so that each stays a square."""
    return _png(_enlarged(pixels, max(1, _WIDTH // max(pixels.shape[:2]))))


def prefix_sheet(
    sets: Sequence[tuple[UInt8[Tensor, "n channels height width"], UInt8[Tensor, "columns samples *image"]]],
    seen: Sequence[int],
) -> bytes:
    """The paper's picture of some sets, with the number of elements seen above each column.

    For each set what `prefix_grid` takes: the inputs, and the samples once the model had seen so many.
    """
    grids = [prefix_grid(inputs, samples, 1, BACKGROUND) for inputs, samples in sets]
    high, wide = grids[0].shape[:2]
    across = math.ceil(math.sqrt(len(grids)))
    if len(grids) <= 3:  # no empty corner: beside each other if they are narrow, else below
        across = len(grids) if wide < 1.5 * high else 1
    down = math.ceil(len(grids) / across)
    factor = max(1, _WIDTH // max(across * wide, down * high))
    cell = [factor * (size + 1) for size in sets[0][0].shape[-2:]]  # height and width, with its border
    font = _font()
    gutter, header = round(max(map(font.getlength, ("given", "samples")))) + _GAP, _LETTER + 8
    tile = (factor * high + header + _GAP, factor * wide + _GAP)
    sheet = Image.new("RGB", (gutter + across * tile[1], down * tile[0]), "white")
    pen = ImageDraw.Draw(sheet)
    # Where columns are narrower than their numbers, some go without.
    every = math.ceil((max(font.getlength(str(n)) for n in seen) + 4) / cell[1])
    for i, pixels in enumerate(grids):
        top, left = i // across * tile[0] + header, gutter + i % across * tile[1]
        sheet.paste(_enlarged(pixels, factor), (left, top))
        for column in range(0, len(seen), every):
            place = (left + (column + 0.5) * cell[1], top - header / 2)
            pen.text(place, str(seen[column]), _INK, font, anchor="mm")
        if i % across == 0:
            for row, name in enumerate(("seen", "given", "samples")):
                y = top + (row - 0.5) * cell[0] if row else top - header / 2
                pen.text((left - _GAP / 2, y), name, _INK, font, anchor="rm")
    return _png(sheet)


def learning_curve(log: Sequence[Mapping[str, Any]]) -> bytes:
    """Bits/dim (smoothed), on validation sets too where measured, and accuracy of episodes, by step."""
    bits, validation = _column(log, "bits_per_dim"), _column(log, "validation")
    with _axes("step", "bits/dim") as (axes, file):
        if bits:
            values = np.array([value for _, value in bits])
            # The first steps tower above all the rest: they are drawn as high as the highest but those.
            smooth = _smoothed(np.minimum(values, np.nanquantile(values, 0.98)), max(1, len(bits) // 50))
            axes.plot([step for step, _ in bits], smooth, color=_COLOURS[0], label="training")
        if validation:
            axes.plot(
                *zip(*validation, strict=True), "o-", color=_COLOURS[1], label="validation", markersize=4
            )
        accuracy = _column(log, "accuracy")
        if accuracy:
            other = axes.twinx()
            other.set_ylabel("accuracy of episodes")
            other.spines["top"].set_visible(False)
            smooth = _smoothed([value for _, value in accuracy], max(1, len(accuracy) // 50))
            other.plot([step for step, _ in accuracy], smooth, color=_COLOURS[2])
            axes.plot([], [], color=_COLOURS[2], label="accuracy, on the right")
        axes.figure.legend(loc="outside upper center", ncols=3, frameon=False)
    return file.getvalue()


def curves(
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    x: str,
    y: str,
    *,
    logarithmic: str = "",
    errors: Mapping[str, Sequence[float]] | None = None,
    top: float | None = None,
) -> bytes:
    """Named lines (x values, y values), with bands of ± an error.

    Args:
        lines: by their names.
        x: what the one axis says.
        y: what the other says.
        logarithmic: which axes are, as "xy".
        errors: of the lines that have some.
        top: what is above is not shown.
    """
    with _axes(x, y) as (axes, file):
        for colour, (name, (xs, ys)) in zip(_COLOURS * 4, lines.items(), strict=False):
            axes.plot(xs, ys, "o-", color=colour, label=name, markersize=3)
            if errors and name in errors:
                low, high = (np.array(ys) + sign * np.array(errors[name]) for sign in (-1, 1))
                axes.fill_between(xs, low, high, color=colour, alpha=0.15, linewidth=0)
        _logarithmic(axes, logarithmic)
        if top is not None:
            low = min(min(ys) for _, ys in lines.values())
            axes.set_ylim(low - 0.05 * (top - low), top)
        if not logarithmic and all(float(value).is_integer() for xs, _ in lines.values() for value in xs):
            axes.locator_params(axis="x", integer=True)
        if len(lines) > 1:
            axes.legend(frameon=False)
    return file.getvalue()


class Measured(NamedTuple):
    """A number and its error."""

    value: float
    error: float


def bars(
    groups: Sequence[str], heights: Mapping[str, Sequence[Measured]], y: str, *, chance: Sequence[float]
) -> bytes:
    """In each group a bar of every name, ± its error and with its value, and a line across it for chance."""
    _check_lengths(groups, {**heights, "chance": chance})
    place, width = np.arange(len(groups)), 0.8 / len(heights)
    with _axes("", y, (max(7.0, 0.4 * len(groups) * len(heights)), 3.6)) as (axes, file):
        for i, (name, measured) in enumerate(heights.items()):
            values, errors = zip(*measured, strict=True)
            xs = place + (i - (len(heights) - 1) / 2) * width
            axes.bar(xs, values, 0.9 * width, color=_COLOURS[i % len(_COLOURS)], label=name)
            axes.errorbar(xs, values, errors, fmt="none", ecolor=_INK, elinewidth=1, capsize=3)
            for x, (value, error) in zip(xs, measured, strict=True):
                label, top = f"{value:.1f}", (x, value + error)
                axes.annotate(label, top, (0, 3), textcoords="offset points", ha="center", fontsize=8)
        axes.errorbar(place, chance, xerr=0.45, fmt="none", ecolor=_INK, elinewidth=1, label="chance")
        axes.set_xticks(place, groups)
        room = max(len(groups), 3) / 2  # for no bar to be as broad as the picture
        axes.set_xlim(place.mean() - room, place.mean() + room)
        axes.grid(visible=False, axis="x")
        axes.set_axisbelow(True)
        axes.figure.legend(loc="outside upper center", ncols=4, frameon=False)
    return file.getvalue()


def accuracy_bars(results: Mapping[str, Sequence[FewShotResult]]) -> bytes:
    """Accuracy of named methods, ± the standard error of its mean over trials, in the same settings."""
    settings = next(iter(results.values()))
    heights = {
        name: [Measured(100 * r.accuracy, 100 * r.spread / math.sqrt(r.trials)) for r in found]
        for name, found in results.items()
    }
    groups = [f"{r.way}-way\n{r.shot}-shot" for r in settings]
    return bars(groups, heights, "accuracy, %", chance=[100 / r.way for r in settings])


def dots(rows: Sequence[str], panels: Mapping[str, Mapping[str, Sequence[Measured]]]) -> bytes:
    """A panel for each measure; in each of its rows a dot of every name, ± its error, one below the other."""
    names = list(next(iter(panels.values())))
    down, place = math.ceil(len(panels) / 2), np.arange(len(rows))
    row_height = 0.16 + 0.1 * len(names)
    with _axes("", "", (7.0, 0.5 + down * (0.5 + row_height * len(rows)))) as (axes, file):
        figure = axes.figure
        axes.remove()
        across = figure.subplots(down, min(2, len(panels)), sharey=True, squeeze=False)
        for panel in across.flat[len(panels) :]:
            panel.set_axis_off()
        for panel, (measure, by_name) in zip(across.flat, panels.items(), strict=False):
            _check_lengths(rows, by_name)
            for i, (name, measured) in enumerate(by_name.items()):
                values, errors = zip(*measured, strict=True)
                ys = place + (i - (len(names) - 1) / 2) * 0.7 / len(names)
                colour = _COLOURS[i % len(_COLOURS)]
                panel.errorbar(values, ys, xerr=errors, fmt="o", color=colour, label=name, markersize=4)
            panel.set_title(measure, fontsize=9, loc="left")
            panel.set_yticks(place, rows)
            panel.set_yticks(place[1:] - 0.5, minor=True)  # between rows, where the lines are
            panel.tick_params(axis="y", which="both", length=0)
            panel.grid(axis="x", **_GRID)
            panel.grid(axis="y", which="minor", **_GRID)
            panel.set_ylim(len(rows) - 0.5, -0.5)  # the first at the top
            panel.spines[["top", "right"]].set_visible(False)
        if len(names) > 1:
            handles = across[0, 0].get_legend_handles_labels()
            figure.legend(*handles, loc="outside upper center", ncols=4, frameon=False)
    return file.getvalue()


def likely_classes(
    titles: Sequence[str],
    shares: Sequence[Sequence[tuple[str, float]]],
    images: UInt8[Tensor, "n channels height width"] | None = None,
) -> bytes:
    """For each element its image, if it has one, beside bars of class probabilities, the likeliest first."""
    _check_lengths(titles, {"shares": shares, "images": shares if images is None else images})
    down, lines = math.ceil(len(titles) / 2), max(map(len, shares))
    widths = (3,) if images is None else (1, 3)
    with _axes("", "", (7.0, down * (0.4 + 0.17 * lines))) as (axes, file):
        figure = axes.figure
        axes.remove()
        cells = figure.subplots(down, 2 * len(widths), width_ratios=widths * 2, squeeze=False)
        for cell in cells.flat:
            cell.set_axis_off()
        if images is not None:
            for cell, image in zip(cells[:, ::2].flat, images.cpu(), strict=False):
                cell.imshow(image.movedim(0, -1).squeeze(-1).numpy(), cmap="gray", vmin=0, vmax=255)
        # Of every row of cells, those to the right of an image.
        beside = cells[:, len(widths) - 1 :: len(widths)].flat
        for cell, title, classes in zip(beside, titles, shares, strict=False):
            names, values = zip(*classes, strict=True)
            cell.set_axis_on()
            cell.barh(range(len(values)), values, color=[_COLOURS[0], *[_PALE] * (len(values) - 1)])
            for y, value in enumerate(values):
                cell.text(value + 0.02, y, f"{100 * value:.1f} %", va="center", fontsize=7)
            cell.set_title(_shortened(title, 24), fontsize=8, loc="left", parse_math=False)
            cell.set_yticks(range(len(names)), map(_shortened, names), fontsize=8, parse_math=False)
            cell.set_ylim(lines - 0.5, -0.5)  # the first at the top
            cell.set_xlim(0, 1.3)  # room for the number
            cell.set_xticks([])
            cell.tick_params(length=0)
            cell.spines[["top", "right", "bottom"]].set_visible(False)
    return file.getvalue()


def points(xs: Sequence[float], ys: Sequence[float], x: str, y: str) -> bytes:
    """A point for each pair, on logarithmic axes."""
    with _axes(x, y) as (axes, file):
        axes.plot(xs, ys, ".", color=_COLOURS[0], alpha=0.6, markersize=5)
        _logarithmic(axes, "xy")
    return file.getvalue()


def scores_over_time(
    scores: Sequence[float],
    thresholds: Sequence[float | None],
    flagged: Sequence[bool],
    out_of_distribution: Sequence[bool],
    *,
    odd: Mapping[int, UInt8[Tensor, "channels height width"]] | None = None,
    ordinary: Mapping[int, UInt8[Tensor, "channels height width"]] | None = None,
    first: int = 1,
    what: str = "stream",
) -> bytes:
    """Scores along a stream (or batch) from its `first` element on, those that are flagged marked.

    Absurd ones would make a line of all others: a mark where the lowest of these is points down to them.
    Above are some elements that are odd and some that are not, by their place in the stream.
    """
    kinds = (("odd", odd or {}, _COLOURS[1]), ("ordinary", ordinary or {}, _COLOURS[0]))
    rows = [row for row in kinds if row[1]]
    with _axes("", "", (7.0, 3.6 + 0.8 * len(rows))) as (axes, file):
        figure = axes.figure
        axes.remove()
        heights = [0.8] * len(rows) + [3.6]
        *strips, axes = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False).flat
        for strip, (name, images, colour) in zip(strips, rows, strict=True):
            strip.set_axis_off()
            for i, (number, image) in enumerate(images.items()):
                pixels = image.cpu().movedim(0, -1).squeeze(-1).numpy()
                strip.imshow(pixels, cmap="gray", vmin=0, vmax=255, extent=(i, i + 0.92, 0, 0.92))
                strip.text(i + 0.46, 1.0, str(number), ha="center", fontsize=8, color=colour)
            strip.text(-0.15, 0.46, name, ha="right", va="center", color=colour)
            strip.set(xlim=(0, ACROSS), ylim=(0, 1.2))
        place = np.arange(first, first + len(scores))
        limit = np.array([math.nan if t is None else t for t in thresholds])
        beyond = np.array(out_of_distribution)
        marked = np.array(flagged) & ~beyond
        shown = np.where(beyond, math.nan, scores)
        axes.plot(place, shown, "o-", color=_COLOURS[0], markersize=3, linewidth=0.8)
        axes.plot(place, limit, "--", color=_COLOURS[5], linewidth=0.8, label="threshold")
        axes.locator_params(axis="x", integer=True)
        if marked.any():
            axes.plot(place[marked], shown[marked], "o", color=_COLOURS[1], label="odd one out")
        if beyond.any():
            lowest = np.full(beyond.sum(), 0.0 if beyond.all() else np.nanmin(shown))
            label = "unlike anything in any set"
            axes.plot(place[beyond], lowest, "v", color=_COLOURS[1], label=label)
        axes.set(xlabel=f"element of the {what}", ylabel="score, nats")
        axes.grid(**_GRID)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    return file.getvalue()


def toy_figure(found: ToyComparison) -> bytes:
    """What each process expects next, ± 2 standard deviations, over the observations."""
    with _axes("", "", (7.0, 5.6)) as (axes, file):
        figure = axes.figure
        axes.remove()
        kinds = [("Gaussian", found.gaussian)]
        kinds += [(f"Student-t, {p.dof:g} degrees of freedom", p) for p in found.student_t]
        panels = figure.subplots(len(kinds), 1, sharex=True, sharey=True)
        place = np.arange(1, len(found.observations) + 1)
        for panel, colour, (name, said) in zip(panels, _COLOURS, kinds, strict=False):
            mean, spread = np.array(said.mean), 2 * np.sqrt(said.variance)
            panel.fill_between(place, mean - spread, mean + spread, color=colour, alpha=0.2, linewidth=0)
            panel.plot(place, mean, color=colour, linewidth=1)
            panel.plot(place, found.observations, ".", color=_COLOURS[5], markersize=3)
            panel.set_title(name, fontsize=9, loc="left")
            panel.spines[["top", "right"]].set_visible(False)
        panels[-1].set_xlabel("observation")
    return file.getvalue()


def study_curves(found: Sequence[Curve]) -> bytes:
    """A panel for each variant, a line for each process."""
    variants = list(dict.fromkeys(curve.variant for curve in found))
    with _axes("", "", (7.0, 2.3 * math.ceil(len(variants) / 2))) as (axes, file):
        figure = axes.figure
        axes.remove()
        panels = figure.subplots(math.ceil(len(variants) / 2), 2, sharex=True, squeeze=False).flat
        everything = np.concatenate([curve.bits_per_dim for curve in found])
        low, high = np.nanquantile(everything[np.isfinite(everything)], [0.0, 0.97])
        for panel, variant in zip(panels, variants, strict=False):
            for i, curve in enumerate(c for c in found if c.variant == variant):
                how = {"color": _COLOURS[i % len(_COLOURS)], "linestyle": ("-", "--")[i % 2]}
                panel.plot(curve.bits_per_dim, color=how["color"], linewidth=0.5, alpha=0.25)
                panel.plot(_smoothed(curve.bits_per_dim, 5), **how, linewidth=1.2, label=curve.process)
            panel.set_ylim(low - 0.1, high + 0.3)
            panel.set_title(variant, fontsize=9, loc="left")
            panel.spines[["top", "right"]].set_visible(False)
        figure.axes[0].legend(frameon=False, fontsize=8)
        figure.supxlabel("step", fontsize=9)
        figure.supylabel("bits/dim", fontsize=9)
    return file.getvalue()


def _enlarged(pixels: UInt8[np.ndarray, "rows columns channels"], factor: int) -> Image.Image:
    image = Image.fromarray(pixels.squeeze(2) if pixels.shape[2] == 1 else pixels)
    return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)


def _png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return file.getvalue()


def _font() -> ImageFont.FreeTypeFont:
    """The one that plots have."""
    from matplotlib.font_manager import findfont

    return ImageFont.truetype(findfont("DejaVu Sans"), _LETTER)


class _axes:  # noqa: N801 a context manager that reads as one: with _axes(...) as (axes, file)
    """Bare axes in the project's style; on leaving, the file holds their PNG."""

    def __init__(self, x: str, y: str, size: tuple[float, float] = (7.0, 3.6)) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        self.figure = Figure(figsize=size, dpi=130, layout="constrained")
        FigureCanvasAgg(self.figure)
        self.axes = self.figure.add_subplot()
        self.axes.set_xlabel(x)
        self.axes.set_ylabel(y)
        self.axes.grid(**_GRID)
        self.axes.spines[["top", "right"]].set_visible(False)
        self.file = io.BytesIO()

    def __enter__(self) -> tuple[Axes, io.BytesIO]:
        return self.axes, self.file

    def __exit__(self, *exception: object) -> None:
        self.figure.savefig(self.file, format="png")


def _check_lengths(places: Sequence[str], series: Mapping[str, Sized]) -> None:
    for name, values in series.items():
        if len(values) != len(places):
            raise ValueError(
                f"`{name}` must have {len(places)} values, one for each place; got {len(values)}."
            )


def _shortened(text: str, most: int = 17) -> str:
    """Without the middle of what is too long: names often differ at the end."""
    return text if len(text) <= most else f"{text[: most // 2]}…{text[len(text) - (most - 1) // 2 :]}"


def _logarithmic(axes: Axes, which: str) -> None:
    """Logarithmic axes, with ticks as plain numbers: 0.5, not 5 · 10⁻¹."""
    from matplotlib.ticker import LogFormatter

    class Plain(LogFormatter):
        def __call__(self, x: float, pos: int | None = None) -> str:
            return f"{x:g}" if super().__call__(x, pos) else ""

    for name in which:
        getattr(axes, f"set_{name}scale")("log")
        axis = getattr(axes, f"{name}axis")
        axis.set_major_formatter(Plain())
        axis.set_minor_formatter(Plain(minor_thresholds=(1.5, 0.4)))


def _column(log: Sequence[Mapping[str, Any]], name: str) -> list[tuple[int, float]]:
    return [(line["index"], line[name]) for line in log if line.get(name) is not None]


def _smoothed(values: Sequence[float] | np.ndarray, width: int) -> np.ndarray:
    """The mean over a window around each value, smaller at the ends."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    centre = np.arange(len(values))
    low, high = np.maximum(centre - width, 0), np.minimum(centre + width + 1, len(values))
    smooth: np.ndarray = (total[high] - total[low]) / (high - low)
    return smooth if math.isfinite(total[-1]) else np.array(values)
