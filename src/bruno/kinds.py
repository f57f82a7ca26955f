"""The two kinds of element: images, whose pixels are integers, and rows of real numbers."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import torch
from jaxtyping import Integer
from torch import Tensor


@dataclass(frozen=True)
class Images:
    """Images (channels, height, width) whose pixels are integers from 0 to levels − 1.

    >>> kind = Images((1, 28, 28), levels=2)
    >>> f"{kind.plural} of {kind.levels} levels, {kind.size[0]} × {kind.size[1]} {kind.features}"
    'images of 2 levels, 28 × 28 pixels'
    """

    shape: tuple[int, ...]
    levels: int = 256

    is_images: ClassVar[bool] = True
    noun: ClassVar[str] = "image"
    plural: ClassVar[str] = "images"
    features: ClassVar[str] = "pixels"

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        return self.shape[-2], self.shape[-1]

    @property
    def is_grey(self) -> bool:
        """Whether the images have one channel."""
        return self.shape[0] == 1

    def check(self, x: Tensor, name: str = "x") -> None:
        """Raise unless integers are levels and dequantised pixels lie on [0, levels].

        Warns about floating-point images that look like integers or like values from 0 to 1. Reads the
        values, so it synchronises with the GPU.
        """
        low, high = x.min().item(), x.max().item()
        top = self.levels - (not x.is_floating_point())
        if not (low >= 0 and high <= top):  # also rejects NaN
            wrong = low if not low >= 0 else high
            raise ValueError(f"`{name}` must be from 0 to {top} for this model; got {wrong:g}.")
        if self.levels == 2 or not x.is_floating_point():
            return
        if high > 1 and bool((x == x.floor()).all()):
            warnings.warn(
                f"`{name}` is floating point and is taken as dequantised pixels, but all values are whole "
                f"numbers. Pass levels as integers: {name}.byte(), or .astype('uint8') in numpy.",
                stacklevel=4,
            )
        if 0 < high <= 1:
            warnings.warn(
                f"`{name}` is taken as dequantised pixels from 0 to {self.levels}, but no value is above 1. "
                f"Convert brightness from 0 to 1 to levels: ({name} * {self.levels - 1}).round().byte(), or "
                ".astype('uint8') in numpy.",
                stacklevel=4,
            )


@dataclass(frozen=True)
class Rows:
    """Rows of real numbers (dim,), with the names of their columns if they are known.

    >>> kind = Rows((2,), columns=("voltage", "current"))
    >>> kind.noun, kind.features, kind.levels
    ('row', 'columns', 0)
    """

    shape: tuple[int, ...]
    columns: tuple[str, ...] = ()

    is_images: ClassVar[bool] = False
    levels: ClassVar[int] = 0
    noun: ClassVar[str] = "row"
    plural: ClassVar[str] = "rows"
    features: ClassVar[str] = "columns"

    def check(self, x: Tensor, name: str = "x") -> None:
        """Raise unless all values are finite; synchronises with the GPU."""
        for value in (x.min().item(), x.max().item()):
            if not math.isfinite(value):
                hint = f" Models with `missing` set to 'impute' impute NaN: model.impute({name})."
                hint *= math.isnan(value)
                raise ValueError(f"`{name}` must be finite; got {value}.{hint}")


Kind: TypeAlias = Images | Rows


def kind_of(shape: Sequence[int], levels: int, columns: Sequence[str] = ()) -> Kind:
    """The kind of elements of this shape: images, or rows if `levels` is 0."""
    return Images(tuple(shape), levels) if levels else Rows(tuple(shape), tuple(columns))


def rescale_levels(pixels: Integer[Tensor, "*batch"], now: int, wanted: int) -> Integer[Tensor, "*batch"]:
    """Rescale pixels from the range 0 to now − 1 to the range 0 to wanted − 1.

    >>> rescale_levels(torch.tensor([0, 8, 16]), 17, 256)
    tensor([  0, 128, 255], dtype=torch.uint8)
    """
    if now == wanted:
        return pixels
    dtype = torch.uint8 if wanted <= 256 else torch.long
    return (pixels.double() * ((wanted - 1) / (now - 1))).round().to(dtype)
