"""Synthetic data that no model has seen: characters of random strokes, and machines with sensors and faults.

The characters belong to no alphabet and no published dataset, so they can be distributed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from torch import Tensor

from bruno.data.examples import Examples

_CANVAS = 105  # pixels, as in the drawings of Omniglot
_PEN = 2  # radius in pixels: strokes as wide as those of Omniglot
_EXTENT = 0.62  # longer side of a character, as a fraction of the canvas

Points = NDArray[np.float64]

# --- characters ------------------------------------------------------------------------------------------


def draw_characters(characters: int = 40, drawings: int = 20, *, size: int = 28, seed: int = 0) -> Examples:
    """Draw random characters, `drawings` times each: uint8 (n, 1, size, size), bright ink.

    A character has one to three strokes, each a smooth curve through three to five points. Every drawing
    shifts, rotates, shears and stretches the character, and jitters every point.
    """
    random = np.random.default_rng(seed)
    images = []
    for _ in range(characters):
        strokes = _new_character(random)
        images += [rasterise(vary_strokes(strokes, random), size) for _ in range(drawings)]
    labels = torch.arange(characters).repeat_interleave(drawings)
    names = tuple(f"drawn/character{i:02d}" for i in range(1, characters + 1))
    return Examples(np.stack(images)[:, None], labels, names)


def _new_character(random: np.random.Generator) -> list[Points]:
    """Return the points of each stroke, centred in the unit square.

    A stroke is a random walk that tends to keep its direction. Most later strokes start on an earlier one, as
    in letters.
    """
    strokes: list[Points] = []
    for _ in range(random.choice([1, 2, 3], p=[0.3, 0.45, 0.25])):
        if strokes and random.random() < 0.6:
            other = strokes[random.integers(len(strokes))]
            start = other[random.integers(len(other))]
        else:
            start = random.uniform(0, 1, 2)
        strokes.append(_random_walk(start, random))
    everything = np.concatenate(strokes)
    low, high = everything.min(0), everything.max(0)
    scale = _EXTENT / (high - low).max()
    return [0.5 + scale * (points - (low + high) / 2) for points in strokes]


def _random_walk(start: Points, random: np.random.Generator) -> Points:
    points, direction = [start], random.uniform(0, 2 * np.pi)
    for _ in range(random.integers(2, 5)):
        for _ in range(20):  # until a step stays inside the unit square
            turned = direction + random.normal(0, 1.0)
            end = points[-1] + random.uniform(0.3, 0.7) * np.array([np.cos(turned), np.sin(turned)])
            if np.all((end > 0) & (end < 1)):
                break
        direction = turned
        points.append(np.clip(end, 0, 1))
    return np.array(points)


def vary_strokes(strokes: list[Points], random: np.random.Generator) -> list[Points]:
    """Return strokes as another drawing of the same character has them, in the unit square."""
    angle, shear = random.normal(0, 0.08), random.normal(0, 0.1)
    rotation = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    linear = rotation @ np.array([[1, shear], [0, 1]]) @ np.diag(random.normal(1, 0.08, 2))
    shift = random.normal(0, 0.03, 2)
    return [
        (points - 0.5) @ linear.T + 0.5 + shift + random.normal(0, 0.018, points.shape) for points in strokes
    ]


def rasterise(strokes: list[Points], size: int) -> NDArray[np.uint8]:
    """Return strokes in the unit square as an image (size, size), with the pen of Omniglot."""
    image = Image.new("L", (_CANVAS, _CANVAS), 0)
    pen = ImageDraw.Draw(image)
    pixels = (np.concatenate([smooth_curve(points) for points in strokes]) * _CANVAS).round()
    for x, y in set(map(tuple, pixels.tolist())):
        pen.ellipse((x - _PEN, y - _PEN, x + _PEN, y + _PEN), fill=255)
    return np.asarray(image.resize((size, size), Image.Resampling.BILINEAR))


def smooth_curve(points: Points, steps: int = 100) -> Points:
    """Return a Catmull-Rom curve through the points, dense enough for a line of even width."""
    ends = np.concatenate([[2 * points[0] - points[1]], points, [2 * points[-1] - points[-2]]])
    t = np.linspace(0, 1, steps)[:, None]
    pieces = [
        0.5 * (2 * b + (c - a) * t + (2 * a - 5 * b + 4 * c - d) * t**2 + (3 * b - a - 3 * c + d) * t**3)
        for a, b, c, d in zip(ends, ends[1:], ends[2:], ends[3:], strict=False)
    ]
    return np.concatenate(pieces)


# --- machines --------------------------------------------------------------------------------------------

SENSORS = ("heat", "current", "pressure", "flow", "speed", "torque", "noise", "vibration")
FAULTS = ("none", "another machine", "spike", "broken correlation")

# Rows of a machine vary by two common factors, load and cooling, and by independent noise. All machines share
# these loadings. Vibration is log-normal: the exponential of a normal variable.
_LOADINGS = np.array(
    [[1.0, 0.3], [1.0, 0.0], [0.2, 1.0], [-0.3, 1.0], [0.9, -0.3], [1.0, 0.2], [0.6, -0.6], [0.8, 0.3]]
)
_NOISE = 0.25  # of a sensor, relative to its loadings
_BETWEEN = 2.0  # standard deviation of the means of machines, relative to that of the rows of a machine
_CENTRE = np.array([60.0, 15.0, 3.0, 40.0, 1450.0, 90.0, 70.0, 0.0])
_SCALE = np.array([2.0, 0.6, 0.15, 1.5, 12.0, 4.0, 1.2, 0.3])
_SPIKE, _BROKEN = (4.0, 8.0), (1.0, 2.5)  # standard deviations of the rows of a machine


class Machines(NamedTuple):
    """Rows of machines, one class for each machine, and the fault of each row as an index of `FAULTS`."""

    examples: Examples
    fault: Int[Tensor, " rows"]


def simulate_machines(
    machines: int = 60, rows: int = 60, *, fault_rate: float = 0.0, seed: int = 0
) -> Machines:
    """Simulate the sensors of machines: rows (machines · rows, 8), with faults at random places.

    Machines differ in their means, and share the correlations between sensors. With probability `fault_rate`,
    a row has a fault, of three kinds with equal probability: the row is of another machine; one sensor has a
    spike of 4 to 8 standard deviations; or a correlation is broken: one sensor is on the wrong side of its
    mean, at 1 to 2.5 standard deviations, which is not unusual for that sensor alone.
    """
    if not 0 <= fault_rate < 1:
        raise ValueError(f"`fault_rate` must be at least 0 and below 1; got {fault_rate}.")
    if machines < 2:
        raise ValueError(f"`machines` must be at least 2; got {machines}.")
    random = np.random.default_rng(seed)
    means = random.normal(0, _BETWEEN, (machines, len(SENSORS)))
    deviations = _deviations((machines, rows), random)
    fault = np.where(
        random.random((machines, rows)) < fault_rate, random.integers(1, len(FAULTS), (machines, rows)), 0
    )
    others = (np.arange(machines)[:, None] + random.integers(1, machines, (machines, rows))) % machines
    sensor = np.eye(len(SENSORS))[random.integers(len(SENSORS), size=(machines, rows))]
    spike = random.uniform(*_SPIKE, (machines, rows, 1)) * random.choice([-1, 1], (machines, rows, 1))
    mirrored = -np.sign(deviations) * random.uniform(*_BROKEN, (machines, rows, 1))
    of_another, moved, broken = ((fault == kind)[..., None] for kind in range(1, len(FAULTS)))
    deviations = np.where(moved, deviations + sensor * spike, deviations)
    deviations = np.where(broken & (sensor > 0), mirrored, deviations)
    values = np.where(of_another, means[others], means[:, None]) + deviations
    values = _CENTRE + _SCALE * values
    values[..., -1] = np.exp(values[..., -1])
    examples = Examples(
        values.reshape(-1, len(SENSORS)),
        np.repeat(np.arange(machines), rows),
        tuple(f"machine{i:03d}" for i in range(1, machines + 1)),
        columns=SENSORS,
    )
    return Machines(examples, torch.from_numpy(fault.flatten()))


def _deviations(shape: tuple[int, ...], random: np.random.Generator) -> Points:
    """Draw deviations of rows from the mean of their machine, each sensor with standard deviation 1."""
    spread = np.sqrt((_LOADINGS**2).sum(1) + _NOISE**2)
    factors, noise = random.normal(size=(*shape, 2)), random.normal(0, _NOISE, (*shape, len(SENSORS)))
    deviations: Points = (factors @ _LOADINGS.T + noise) / spread
    return deviations
