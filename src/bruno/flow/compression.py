"""8-bit weights, for small files of models.

A weight-normalised layer has the weight magnitude · direction/|direction|, with one magnitude per output. The
length of a direction does not matter: each is scaled to whole numbers from −127 to 127, and the scale is not
stored.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int8
from torch import Tensor

_LARGEST = 127
_DIRECTION, _MAGNITUDE = ".direction", ".magnitude"


def compress(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The directions among the tensors of a model's state, by name, in 8 bits."""
    return {name: _rounded(tensors[name]) for name in _directions(tensors)}


def restore(tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The inverse of `compress`, up to rounding, with |direction| = |magnitude|, as in a new layer."""
    return {
        name: _lengthened(tensors[name].to(dtype), tensors[_magnitude(name)].to(dtype))
        for name in _directions(tensors)
        if tensors[name].dtype == torch.int8
    }


def _directions(tensors: dict[str, Tensor]) -> list[str]:
    """Names of directions with one magnitude per output: without weight norm, a direction is the weight."""
    named = (name for name in tensors if name.endswith(_DIRECTION) and _magnitude(name) in tensors)
    return [name for name in named if tensors[_magnitude(name)].shape == _per_output(tensors[name])]


def _magnitude(name: str) -> str:
    return name.removesuffix(_DIRECTION) + _MAGNITUDE


def _per_output(direction: Tensor) -> tuple[int, ...]:
    """The shape of one number per output."""
    return (*direction.shape[:1], *[1] * (direction.ndim - 1))


def _rounded(direction: Float[Tensor, "outputs *inputs"]) -> Int8[Tensor, "outputs *inputs"]:
    largest = direction.abs().flatten(1).amax(1).view(_per_output(direction))
    scale = torch.where(largest > 0, _LARGEST / largest, 0.0)
    return (direction * scale).round().to(torch.int8)


def _lengthened(direction: Tensor, magnitude: Tensor) -> Tensor:
    axes = tuple(range(1, direction.ndim))
    length: Tensor = torch.linalg.vector_norm(direction, dim=axes, keepdim=True)
    wanted = torch.where(magnitude == 0, 1.0, magnitude.abs())
    return direction * (wanted / length.clamp(min=1))
