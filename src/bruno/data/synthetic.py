"""New characters from the project's own pen: random smooth strokes, each character redrawn by many hands.

They belong to no alphabet and no data set, so they can be shown and shipped, and no model has seen them.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from bruno.data.examples import Examples

_CANVAS = 105  # pixels, as Omniglot's drawings; resized like them
_PEN = 2  # its radius, in pixels: strokes as wide as there
_EXTENT = 0.62  # of the canvas that a character takes up, the longer way

Points = NDArray[np.float64]


def draw_characters(characters: int = 40, drawings: int = 20, *, size: int = 28, seed: int = 0) -> Examples:
    """So many characters, each drawn so many times: uint8 (n, 1, size, size), ink bright.

    A character is one to three strokes, each a smooth curve through three to five points. A drawing of it
    moves, turns, random_shears and stretches the whole, and shakes every point.
    """
    random = np.random.default_rng(seed)
    pictures = []
    for _ in range(characters):
        plan = _plan(random)
        pictures += [_drawing(_by_another_hand(plan, random), size) for _ in range(drawings)]
    labels = torch.arange(characters).repeat_interleave(drawings)
    names = tuple(f"drawn/character{i:02d}" for i in range(1, characters + 1))
    return Examples(torch.from_numpy(np.stack(pictures)).unsqueeze(1), labels, names)


def _plan(random: np.random.Generator) -> list[Points]:
    """The points that the strokes of a character go through, in the unit square.

    Every stroke walks across it in steps that like to go on as they went; a later stroke begins on
    an earlier one as often as not, as those of letters do.
    """
    strokes: list[Points] = []
    for _ in range(random.choice([1, 2, 3], p=[0.3, 0.45, 0.25])):
        if strokes and random.random() < 0.6:
            other = strokes[random.integers(len(strokes))]
            start = other[random.integers(len(other))]
        else:
            start = random.uniform(0, 1, 2)
        points, direction = [start], random.uniform(0, 2 * np.pi)
        for _ in range(random.integers(2, 5)):
            for _ in range(20):  # until a step stays inside
                rotated = direction + random.normal(0, 1.0)
                there = points[-1] + random.uniform(0.3, 0.7) * np.array([np.cos(rotated), np.sin(rotated)])
                if np.all((there > 0) & (there < 1)):
                    break
            direction = rotated
            points.append(np.clip(there, 0, 1))
        strokes.append(np.array(points))
    everything = np.concatenate(strokes)
    low, high = everything.min(0), everything.max(0)
    scale = _EXTENT / (high - low).max()
    return [0.5 + scale * (points - (low + high) / 2) for points in strokes]


def _by_another_hand(strokes: list[Points], random: np.random.Generator) -> list[Points]:
    angle, slant = random.normal(0, 0.08), random.normal(0, 0.1)
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    shape = turn @ np.array([[1, slant], [0, 1]]) @ np.diag(random.normal(1, 0.08, 2))
    shift = random.normal(0, 0.03, 2)
    return [
        (points - 0.5) @ shape.T + 0.5 + shift + random.normal(0, 0.018, points.shape) for points in strokes
    ]


def _drawing(strokes: list[Points], size: int) -> NDArray[np.uint8]:
    image = Image.new("L", (_CANVAS, _CANVAS), 0)
    pen = ImageDraw.Draw(image)
    for points in strokes:
        for x, y in (_smooth(points) * _CANVAS).round():  # close enough for a round pen to leave an even line
            pen.ellipse((x - _PEN, y - _PEN, x + _PEN, y + _PEN), fill=255)
    return np.asarray(image.resize((size, size), Image.Resampling.BILINEAR))


def _smooth(points: Points, steps: int = 100) -> Points:
    """A Catmull-Rom curve through the points."""
    ends = np.concatenate([[2 * points[0] - points[1]], points, [2 * points[-1] - points[-2]]])
    t = np.linspace(0, 1, steps)[:, None]
    pieces = [
        0.5 * (2 * b + (c - a) * t + (2 * a - 5 * b + 4 * c - d) * t**2 + (3 * b - a - 3 * c + d) * t**3)
        for a, b, c, d in zip(ends, ends[1:], ends[2:], ends[3:], strict=False)
    ]
    return np.concatenate(pieces)
