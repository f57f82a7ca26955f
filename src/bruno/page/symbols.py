"""The symbols that the page starts with: invented symbols, drawn by hand as points of strokes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from bruno.data.examples import Examples
from bruno.data.synthetic import Points, rasterise, smooth_curve, vary_strokes

Stroke = tuple[tuple[float, float], ...]

# Points (x, y) in the unit square, from the top left. Strokes are smooth curves through them.
SYMBOLS: dict[str, tuple[Stroke, ...]] = {
    "goblet": (
        ((0.29, 0.20), (0.34, 0.43), (0.50, 0.52), (0.66, 0.43), (0.71, 0.20)),
        ((0.27, 0.20), (0.73, 0.20)),
        ((0.50, 0.52), (0.50, 0.82)),
        ((0.32, 0.82), (0.68, 0.82)),
    ),
    "sail": (
        ((0.46, 0.15), (0.46, 0.82)),
        ((0.46, 0.17), (0.70, 0.34), (0.78, 0.58), (0.48, 0.60)),
        ((0.20, 0.80), (0.80, 0.84)),
    ),
    "fish": (
        ((0.16, 0.68), (0.45, 0.35), (0.72, 0.34), (0.86, 0.50), (0.70, 0.67), (0.45, 0.65), (0.16, 0.32)),
    ),
    "fork": (
        ((0.24, 0.18), (0.27, 0.44), (0.50, 0.54), (0.73, 0.44), (0.76, 0.18)),
        ((0.50, 0.18), (0.50, 0.86)),
    ),
    "snail": (
        (
            (0.50, 0.52),
            (0.58, 0.46),
            (0.50, 0.37),
            (0.36, 0.45),
            (0.39, 0.64),
            (0.60, 0.68),
            (0.76, 0.50),
            (0.66, 0.24),
            (0.40, 0.18),
        ),
    ),
    "hook": (
        ((0.25, 0.22), (0.75, 0.22)),
        ((0.55, 0.22), (0.55, 0.60), (0.45, 0.80), (0.25, 0.72)),
        ((0.40, 0.50), (0.76, 0.50)),
    ),
}
DRAWINGS = 8  # of each symbol
_SEED, _STEPS = 6, 8  # seed of the drawings; interpolated points between two points of a stroke


def draw_symbols() -> list[list[list[Points]]]:
    """The drawings of each symbol, as points of their strokes: symbol, drawing, stroke."""
    random = np.random.default_rng(_SEED)
    return [
        [vary_strokes([np.array(stroke) for stroke in strokes], random) for _ in range(DRAWINGS)]
        for strokes in SYMBOLS.values()
    ]


def as_lists(symbols: list[list[list[Points]]]) -> list[Any]:
    """Drawings as lists of numbers, with points dense enough to join them by lines."""
    return [
        [[smooth_curve(points, _STEPS).round(3).tolist() for points in strokes] for strokes in drawings]
        for drawings in symbols
    ]


def as_examples(symbols: list[list[list[Points]]], size: int) -> Examples:
    """Drawings as examples, with a class for each symbol."""
    images = as_images(symbols, size)
    labels = torch.arange(len(images)).repeat_interleave(images.shape[1])
    return Examples(images.flatten(0, 1), labels, tuple(SYMBOLS))


def as_images(symbols: list[list[list[Points]]], size: int) -> Tensor:
    """Drawings as images: uint8 (symbols, drawings, 1, size, size), bright ink."""
    images = [[rasterise(strokes, size) for strokes in drawings] for drawings in symbols]
    return torch.from_numpy(np.array(images)).unsqueeze(2)
