"""Pictures of results, each as the bytes of a PNG: images side by side, curves with their errors."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image
from torch import Tensor

from bruno.tasks.analysis import ToyComparison
from bruno.tasks.study import Curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#2b6cb0", "#c05621", "#2f855a", "#805ad5", "#b83280", "#4a5568")
BACKGROUND = 60  # the grey between images
_WIDTH = 900  # pixels that a picture of images is enlarged to, at most


def visible(images: Tensor, levels: int) -> UInt8[Tensor, "*batch channels height width"]:
    """Integers from 0 to levels − 1 as grey values from 0 to 255."""
    return (images.double() * (255 / (levels - 1))).round().clamp(0, 255).to(torch.uint8)


def picture(pixels: UInt8[np.ndarray, "rows columns channels"]) -> bytes:
    """A PNG of pixels, enlarged by a whole number so that each stays a square."""
    factor = max(1, _WIDTH // max(pixels.shape[:2]))
    image = Image.fromarray(pixels.squeeze(2) if pixels.shape[2] == 1 else pixels)
    image = image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return file.getvalue()


def learning_curve(log: Sequence[Mapping[str, Any]]) -> bytes:
    """Bits/dim (smoothed), on validation sets too where measured, and accuracy of episodes, by step."""
    bits = _column(log, "bits_per_dim")
    with _axes("step", "bits/dim") as (axes, file):
        if bits:
            smooth = _smoothed([value for _, value in bits], max(1, len(bits) // 50))
            axes.plot([step for step, _ in bits], smooth, color=_COLOURS[0], label="training")
            # The first steps tower above all the rest.
            axes.set_ylim(top=float(np.quantile(smooth, 0.98)) + 0.05 * float(np.ptp(smooth)))
        validation = _column(log, "validation")
        if validation:
            axes.plot(
                *zip(*validation, strict=True), "o-", color=_COLOURS[1], label="validation", markersize=4
            )
        accuracy = _column(log, "accuracy")
        if accuracy:
            other = axes.twinx()
            other.set_ylabel("accuracy of episodes")
            smooth = _smoothed([value for _, value in accuracy], max(1, len(accuracy) // 50))
            other.plot([step for step, _ in accuracy], smooth, color=_COLOURS[2])
        axes.legend(frameon=False)
    return file.getvalue()


def curves(
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    x: str,
    y: str,
    *,
    logarithmic: str = "",
    errors: Mapping[str, Sequence[float]] | None = None,
) -> bytes:
    """Named lines (x values, y values), with bands of ± an error; `logarithmic` names axes, as "xy"."""
    with _axes(x, y) as (axes, file):
        for colour, (name, (xs, ys)) in zip(_COLOURS * 4, lines.items(), strict=False):
            axes.plot(xs, ys, "o-", color=colour, label=name, markersize=3)
            if errors and name in errors:
                low, high = (np.array(ys) + sign * np.array(errors[name]) for sign in (-1, 1))
                axes.fill_between(xs, low, high, color=colour, alpha=0.15, linewidth=0)
        _logarithmic(axes, logarithmic)
        if not logarithmic and all(float(value).is_integer() for xs, _ in lines.values() for value in xs):
            axes.locator_params(axis="x", integer=True)
        if len(lines) > 1:
            axes.legend(frameon=False)
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
    outliers: Mapping[int, UInt8[Tensor, "channels height width"]],
    first: int = 1,
) -> bytes:
    """Scores along a stream from its `first` element on, those below the threshold marked.

    The elements in `outliers`, by their place in the stream, are shown.
    """
    with _axes("element of the stream", "score, nats", (7.0, 4.6 if outliers else 3.6)) as (axes, file):
        place = np.arange(first, first + len(scores))
        limit = np.array([math.nan if t is None else t for t in thresholds])
        below = np.array(scores) < limit
        axes.plot(place, scores, "o-", color=_COLOURS[0], markersize=3, linewidth=0.8)
        axes.plot(place, limit, "--", color=_COLOURS[5], linewidth=0.8, label="threshold")
        if below.any():
            axes.plot(place[below], np.array(scores)[below], "o", color=_COLOURS[1], label="odd one out")
        axes.legend(frameon=False)
        for i, (number, image) in enumerate(outliers.items()):
            inset = axes.inset_axes((i / 12, 1.06, 1 / 13, 0.16))
            inset.imshow(image.cpu().movedim(0, -1).squeeze(-1).numpy(), cmap="gray", vmin=0, vmax=255)
            inset.set_title(str(number), fontsize=8, color=_COLOURS[1])
            inset.set_axis_off()
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
            for colour, curve in zip(_COLOURS, [c for c in found if c.variant == variant], strict=False):
                panel.plot(curve.bits_per_dim, color=colour, linewidth=0.5, alpha=0.25)
                panel.plot(_smoothed(curve.bits_per_dim, 5), color=colour, linewidth=1, label=curve.process)
            panel.set_ylim(low - 0.1, high + 0.3)
            panel.set_title(variant, fontsize=9, loc="left")
            panel.spines[["top", "right"]].set_visible(False)
        figure.axes[0].legend(frameon=False, fontsize=8)
        figure.supxlabel("step", fontsize=9)
        figure.supylabel("bits/dim", fontsize=9)
    return file.getvalue()


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
        self.axes.grid(color="#e2e8f0", linewidth=0.8)
        self.axes.spines[["top", "right"]].set_visible(False)
        self.file = io.BytesIO()

    def __enter__(self) -> tuple[Axes, io.BytesIO]:
        return self.axes, self.file

    def __exit__(self, *exception: object) -> None:
        self.figure.savefig(self.file, format="png")


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


def _smoothed(values: Sequence[float], width: int) -> np.ndarray:
    """The mean over a window around each value, smaller at the ends."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    centre = np.arange(len(values))
    low, high = np.maximum(centre - width, 0), np.minimum(centre + width + 1, len(values))
    smooth: np.ndarray = (total[high] - total[low]) / (high - low)
    return smooth if math.isfinite(total[-1]) else np.array(values)
