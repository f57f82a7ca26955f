"""Synthetic tiles in colour, classes of striped patterns with a shape on them, and tiles with defects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from bruno.data.examples import Examples

DEFECTS = ("none", "scratch", "blob", "missing shape", "stain")
_SHAPES = 3  # a disc, a square, a ring
_NOISE = 6.0  # standard deviation of a pixel
_SHIFT = 1.0  # standard deviation of the place of the shape, in pixels
_LIGHT = 0.04  # standard deviation of the brightness of a tile, relative to its mean
_PHASE = 0.3  # standard deviation of the phase of the stripes, in radians

Grid = NDArray[np.float64]


class Tiles(NamedTuple):
    """Tiles in colour, and the defect of each as an index of `DEFECTS`."""

    examples: Examples
    defect: Int[Tensor, " tiles"]


def simulate_tiles(
    classes: int = 24,
    tiles: int = 30,
    *,
    defects: int = 0,
    size: int = 32,
    any_phase: bool = False,
    seed: int = 0,
) -> Tiles:
    """Draw classes of tiles: uint8 (classes · tiles, 3, size, size); the first `defects` of each are faulty.

    A class has two colours of stripes, their angle and frequency, and the colour, kind, size and place of a
    shape. The tiles of a class differ in phase, place, brightness and noise. The defects take turns: a
    scratch, a blob, a missing shape, a faint stain.

    Args:
        classes: number of classes.
        tiles: number of tiles of each.
        defects: number of tiles of each class that have a defect.
        size: height and width in pixels.
        any_phase: the phase of the stripes is uniform, as in tiles that are cut anywhere from a fabric.
        seed: seed of the classes and tiles.
    """
    if not 0 <= defects <= tiles:
        raise ValueError(f"`defects` must be from 0 to `tiles`, {tiles}; got {defects}.")
    random = np.random.default_rng(seed)
    images, kinds = [], []
    for _ in range(classes):
        pattern = _Pattern.draw(size, random)
        for tile in range(tiles):
            kinds.append(1 + tile % (len(DEFECTS) - 1) if tile < defects else 0)
            images.append(pattern.tile(kinds[-1], any_phase, random))
    examples = Examples(
        np.ascontiguousarray(np.stack(images)),
        np.repeat(np.arange(classes), tiles),
        tuple(f"pattern{i:02d}" for i in range(1, classes + 1)),
    )
    return Tiles(examples, torch.tensor(kinds))


@dataclass(frozen=True)
class _Pattern:
    """The properties that tiles of a class share; colours are (2 or none, 3), lengths are in pixels."""

    size: int
    stripes: Grid
    angle: float
    frequency: float
    phase: float
    colour: Grid
    shape: int
    radius: float
    place: Grid

    @classmethod
    def draw(cls, size: int, random: np.random.Generator) -> _Pattern:
        colours = random.uniform(30, 225, (3, 3))
        return cls(
            size,
            colours[:2],
            random.uniform(0, np.pi),
            random.uniform(1.5, 5) * 2 * np.pi / size,
            random.uniform(0, 2 * np.pi),
            colours[2],
            int(random.integers(_SHAPES)),
            random.uniform(0.12, 0.25) * size,
            random.uniform(0.35, 0.65, 2) * size,
        )

    def tile(self, defect: int, any_phase: bool, random: np.random.Generator) -> NDArray[np.uint8]:
        """Draw a tile (3, size, size)."""
        rows, columns = np.mgrid[: self.size, : self.size].astype(np.float64)
        phase = random.uniform(0, 2 * np.pi) if any_phase else random.normal(self.phase, _PHASE)
        along = rows * np.sin(self.angle) + columns * np.cos(self.angle)
        wave = 0.5 + 0.5 * np.tanh(3 * np.sin(self.frequency * along + phase))
        image = _mixed(self.stripes[0], self.stripes[1], wave)
        if DEFECTS[defect] != "missing shape":
            row, column = self.place + random.normal(0, _SHIFT, 2)
            image = _mixed(image, self.colour, self._shape(rows - row, columns - column))
        if DEFECTS[defect] in ("scratch", "blob", "stain"):
            image = _damaged(image, DEFECTS[defect], rows, columns, random)
        image = image * random.normal(1, _LIGHT) + random.normal(0, _NOISE, image.shape)
        return image.round().clip(0, 255).astype(np.uint8).transpose(2, 0, 1)

    def _shape(self, down: Grid, across: Grid) -> Grid:
        """The fraction of each pixel that the shape covers."""
        distance = np.hypot(down, across)
        if self.shape == 1:
            distance = np.maximum(abs(down), abs(across))
        elif self.shape == 2:
            distance = self.radius / 2 + abs(distance - 0.75 * self.radius) * 2
        cover: Grid = (self.radius - distance + 0.5).clip(0, 1)
        return cover


def _damaged(image: Grid, defect: str, rows: Grid, columns: Grid, random: np.random.Generator) -> Grid:
    """An image (size, size, 3) with a scratch, a blob or a stain at a random place."""
    size, centre = len(image), random.uniform(0.2, 0.8, 2) * len(image)
    down, across = rows - centre[0], columns - centre[1]
    if defect == "scratch":
        angle = random.uniform(0, np.pi)
        aside = abs(down * np.cos(angle) - across * np.sin(angle))
        along = abs(down * np.sin(angle) + across * np.cos(angle))
        cover = (1.1 - aside).clip(0, 1) * (along < random.uniform(0.2, 0.35) * size)
        return _mixed(image, np.full(3, random.choice([10.0, 245.0])), cover)
    if defect == "blob":
        radius = random.uniform(0.06, 0.1) * size
        return _mixed(image, random.uniform(0, 255, 3), (radius - np.hypot(down, across) + 0.5).clip(0, 1))
    spread = np.exp(-0.5 * (np.hypot(down, across) / (0.15 * size)) ** 2)
    return _mixed(image, np.zeros(3), 0.3 * spread)


def _mixed(first: Grid, second: Grid, share: Grid) -> Grid:
    """Interpolate from `first`, where the share is 0, to `second`, where it is 1; (3) or (…, 3)."""
    weight = share[..., None]
    mixed: Grid = (1 - weight) * first + weight * second
    return mixed
