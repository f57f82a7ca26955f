"""Helpers that all plots share: colours, axes, legends, PNG."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Mapping, Sequence, Set, Sized
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import UInt8
from torch import Tensor

from bruno.extras import imports_of
from bruno.text import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from PIL.ImageFont import FreeTypeFont

COLOURS = ("#2b6cb0", "#c05621", "#2f855a", "#805ad5", "#b83280", "#4a5568")
INK, PALE = "#1a202c", "#a0aec0"
GRID: dict[str, Any] = {"color": "#e2e8f0", "linewidth": 0.8}
WIDTH, HEIGHT = 7.0, 3.6  # inches
_OTHER_SCRIPTS = (
    *(f"Noto Sans CJK {place}" for place in ("SC", "TC", "JP", "KR")),
    *("PingFang SC", "Hiragino Sans", "Microsoft YaHei", "Yu Gothic", "Malgun Gothic", "WenQuanYi Zen Hei"),
    *("Noto Sans Devanagari", "Noto Sans Thai", "Nirmala UI", "Arial Unicode MS", "Unifont"),
)
_MEASURED = 100  # pixels: size at which text is measured
_BOX_WIDTH = 1.15  # of the box of a character that no font has, in font sizes; other characters are narrower
Box = tuple[float, float, float, float]  # left, top, width and height
Values = Sequence[float] | np.ndarray


def new_figure(width: float = WIDTH, height: float = HEIGHT) -> Figure:
    """An empty figure with a size in inches, independent of pyplot and its global state."""
    with imports_of("plots", "pictures"):
        from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=130, layout="constrained")


def new_axes(xlabel: str, ylabel: str, width: float = WIDTH, height: float = HEIGHT) -> tuple[Figure, Axes]:
    """A figure with a single plot."""
    figure = new_figure(width, height)
    axes = figure.add_subplot(xlabel=xlabel, ylabel=ylabel)
    axes.grid(**GRID)
    open_frame(axes)
    return figure, axes


def open_frame(axes: Axes) -> None:
    """Hide the frame above and to the right."""
    axes.spines[["top", "right"]].set_visible(False)


def legend_above(figure: Figure, *axes: Axes) -> None:
    """Add a legend above all plots, where it covers nothing, with as many columns as fit the width."""
    found = [plot.get_legend_handles_labels() for plot in axes]
    named = {
        label: handle for handles, labels in found for handle, label in zip(handles, labels, strict=True)
    }
    handles, labels = list(named.values()), list(named)
    if labels:
        widths = [0.6 + 0.08 * len(label) for label in labels]  # inches, roughly
        room = figure.get_figwidth()
        columns = len(labels) if sum(widths) < room else max(1, int(room / max(widths)))
        figure.legend(handles, labels, loc="outside upper center", ncols=columns, frameon=False)


def to_png(figure: Figure) -> bytes:
    """The figure as PNG; characters that no font has are drawn as boxes, without a warning."""
    from matplotlib import rc_context

    file, layout = io.BytesIO(), figure.get_layout_engine()
    with (
        rc_context({"figure.autolayout": False, "figure.constrained_layout.use": False}),
        rc_context({"font.sans-serif": _fonts()}),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        if layout is not None:
            layout.execute(figure)
            figure.set_layout_engine(None)  # with a layout engine, `savefig` would draw everything twice
        figure.savefig(file, format="png")
    return file.getvalue()


@cache
def _fonts() -> list[str]:
    """The font of plots, and the installed fonts that have other scripts."""
    from matplotlib.font_manager import fontManager

    installed = set(fontManager.get_font_names())
    return ["DejaVu Sans", *(name for name in _OTHER_SCRIPTS if name in installed)]


def show_image(
    axes: Axes,
    image: UInt8[Tensor, "channels height width"],
    extent: tuple[float, float, float, float] | None = None,
) -> None:
    """Draw an image, grey or colour, into the plot or into a part of it (left, right, bottom, top)."""
    pixels = image.cpu().movedim(0, -1).squeeze(-1).numpy()
    axes.imshow(pixels, cmap="gray", vmin=0, vmax=255, extent=extent)


def set_log_axes(axes: Axes, which: str) -> None:
    """Logarithmic axes ("x", "y" or "xy") with plain tick labels: 0.5, not 5 · 10⁻¹."""
    from matplotlib.ticker import LogFormatter

    class Plain(LogFormatter):
        def __call__(self, x: float, pos: int | None = None) -> str:
            return f"{x:g}" if super().__call__(x, pos) else ""

    for name in which:
        getattr(axes, f"set_{name}scale")("log")
        axis = getattr(axes, f"{name}axis")
        axis.set_major_formatter(Plain())
        axis.set_minor_formatter(Plain(minor_thresholds=(1.5, 0.4)))


def smoothed(values: Values, width: int) -> np.ndarray:
    """Mean over a window of ± `width` values around each value, truncated at the ends."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    centre = np.arange(len(values))
    low, high = np.maximum(centre - width, 0), np.minimum(centre + width + 1, len(values))
    mean: np.ndarray = (total[high] - total[low]) / (high - low)
    return mean if math.isfinite(total[-1]) else np.array(values)


def shortened(text: str, length: int = 17) -> str:
    """Printable text, shortened in the middle to `length` characters: names often differ at the end."""
    text = printable(text)
    return text if len(text) <= length else f"{text[: length // 2]}…{text[len(text) - (length - 1) // 2 :]}"


@dataclass(frozen=True)
class Canvas:
    """A figure without axes: parts are placed in inches from the upper left corner."""

    figure: Figure
    axes: Axes

    @classmethod
    def new(cls, width: float, height: float) -> Canvas:
        """An empty canvas of a size in inches."""
        figure = new_figure(width, height)
        figure.set_layout_engine("none")
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, width), ylim=(height, 0))
        axes.set_axis_off()
        return cls(figure, axes)

    def text(self, place: tuple[float, float], text: str, size: float, **style: Any) -> None:
        """Write text at a place; dollar signs are literal."""
        style = {"color": INK, **style}
        self.axes.text(*place, text, fontsize=size, parse_math=False, **style)

    def box(self, place: Box, *, face: Any = "none", edge: Any = "none", **style: Any) -> None:
        """Draw a rectangle."""
        from matplotlib.patches import Rectangle

        left, top, width, height = place
        self.axes.add_patch(Rectangle((left, top), width, height, facecolor=face, edgecolor=edge, **style))

    def image(self, place: Box, image: UInt8[Tensor, "channels height width"]) -> None:
        """Draw an image as large as fits into a box, in its middle, with a thin frame."""
        left, top, width, height = place
        scale = min(width / image.shape[2], height / image.shape[1])
        across, down = scale * image.shape[2], scale * image.shape[1]
        left, top = left + (width - across) / 2, top + (height - down) / 2
        show_image(self.axes, image, (left, left + across, top + down, top))
        self.box((left, top, across, down), edge=PALE, linewidth=0.5)


def text_width(text: str, size: float) -> float:
    """Width in inches of text in the font of plots; `size` in points.

    A character that this font lacks counts as the box that is drawn if no other font has it.
    """
    known = "".join(character for character in text if ord(character) in _characters())
    pixels = plot_font(_MEASURED).getlength(known) + (len(text) - len(known)) * _BOX_WIDTH * _MEASURED
    return pixels / _MEASURED * size / 72


@cache
def _characters() -> Set[int]:
    """The characters of the font of plots."""
    with imports_of("plots", "pictures"):
        from matplotlib.font_manager import findfont
        from matplotlib.ft2font import FT2Font

    return FT2Font(findfont("DejaVu Sans")).get_charmap().keys()


@cache
def plot_font(size: int) -> FreeTypeFont:
    """The font of plots, for pictures that Pillow draws; `size` in pixels."""
    with imports_of("plots", "pictures"):
        from matplotlib.font_manager import findfont
    from PIL import ImageFont

    return ImageFont.truetype(findfont("DejaVu Sans"), size)


def minus(number: str) -> str:
    """A formatted number with a minus sign instead of a hyphen."""
    return number.replace("-", "−")


def check_lengths(labels: Sized, series: Mapping[str, Sized]) -> None:
    """Raise unless every series has one value per label."""
    for name, values in series.items():
        if len(values) != len(labels):
            raise ValueError(f"`{name}` must have {len(labels)} values, one per label; got {len(values)}.")
