"""The interface of all bijections, and those that only rearrange numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

Shape = tuple[int, ...]
Transformed = tuple[Tensor, Tensor]


class Bijection(nn.Module):
    """An invertible map of samples, with the logarithm of its Jacobian determinant.

    ``forward(x) -> (z, log_det)`` and ``inverse(z) -> (x, log_det)`` take a batch ``(batch, *shape)`` and
    return one log-det per sample, ``(batch,)``. Each log-det belongs to the map just applied, so one is the
    negative of the other. A map that changes the shape of a sample overrides `output_shape`.
    The size of the batch is ``x.shape[0]``: ``len(x)`` would be a constant in an exported graph.

    >>> class Double(Bijection):
    ...     def forward(self, x):
    ...         return 2 * x, torch.full((x.shape[0],), x[0].numel() * math.log(2))
    ...
    ...     def inverse(self, z):
    ...         return z / 2, torch.full((z.shape[0],), -z[0].numel() * math.log(2))
    >>> z, log_det = Chain([Double(), Flatten((1, 2))])(torch.ones(1, 1, 2))
    >>> z.tolist(), round(log_det.item(), 4)
    ([[2.0, 2.0]], 1.3863)
    """

    def forward(self, x: Float[Tensor, "batch *shape"]) -> Transformed:
        """From data towards latents."""
        raise NotImplementedError

    def inverse(self, z: Float[Tensor, "batch *shape"]) -> Transformed:
        """From latents towards data."""
        raise NotImplementedError

    def output_shape(self, shape: Shape) -> Shape:
        """The shape of the result for a sample of this shape; raises ValueError if it cannot be mapped."""
        return shape


class Chain(Bijection):
    """A composition of bijections; log-dets add up."""

    def __init__(self, bijections: Iterable[Bijection]) -> None:
        super().__init__()
        self.bijections = nn.ModuleList(bijections)

    def forward(self, x: Tensor) -> Transformed:  # noqa: D102
        total = x.new_zeros(x.shape[0])
        for bijection in self.bijections:
            x, log_det = bijection(x)
            total = total + log_det
        return x, total

    def inverse(self, z: Tensor) -> Transformed:  # noqa: D102
        total = z.new_zeros(z.shape[0])
        for bijection in reversed(self.bijections):
            z, log_det = cast(Bijection, bijection).inverse(z)
            total = total + log_det
        return z, total

    def output_shape(self, shape: Shape) -> Shape:  # noqa: D102
        for bijection in self.bijections:
            shape = cast(Bijection, bijection).output_shape(shape)
        return shape


class Squeeze(Bijection):
    """Trade resolution for channels: (C, H, W) -> (4C, H/2, W/2); a 2 × 2 patch becomes four channels.

    >>> Squeeze()(torch.arange(4.0).view(1, 1, 2, 2))[0].flatten().tolist()
    [0.0, 1.0, 2.0, 3.0]
    """

    def forward(self, x: Tensor) -> Transformed:  # noqa: D102
        self.output_shape(tuple(x.shape[1:]))
        return F.pixel_unshuffle(x, 2), x.new_zeros(x.shape[0])

    def inverse(self, z: Tensor) -> Transformed:  # noqa: D102
        return F.pixel_shuffle(z, 2), z.new_zeros(z.shape[0])

    def output_shape(self, shape: Shape) -> Shape:  # noqa: D102
        if len(shape) != 3 or shape[1] % 2 or shape[2] % 2:
            raise ValueError(
                f"`shape` must be (channels, height, width) with even height and width to be squeezed; got "
                f"{tuple(shape)}. Use fewer scales, or resize the images (`data.size`)."
            )
        channels, height, width = shape
        return 4 * channels, height // 2, width // 2


class FactorOut(Bijection):
    """Map the first half of the channels by a bijection; the rest become latents as they are.

    (C, H, W) -> (C·H·W,): the transformed half first, both flattened.
    """

    def __init__(self, inner: Bijection, shape: Sequence[int]) -> None:
        super().__init__()
        channels, height, width = shape
        if channels % 2:
            raise ValueError(
                f"`shape` must have an even number of channels to factor out half; got {channels}."
            )
        self.inner, self.shape = inner, tuple(shape)
        self.rest_shape = (channels // 2, height, width)
        self.inner_shape = inner.output_shape(self.rest_shape)

    def forward(self, x: Tensor) -> Transformed:  # noqa: D102
        kept, out = x.chunk(2, dim=1)
        z, log_det = self.inner(kept)
        return torch.cat([z.flatten(1), out.flatten(1)], 1), log_det

    def inverse(self, z: Tensor) -> Transformed:  # noqa: D102
        kept, out = z.chunk(2, dim=1)
        x, log_det = self.inner.inverse(kept.reshape(-1, *self.inner_shape))
        return torch.cat([x, out.reshape(-1, *self.rest_shape)], 1), log_det

    def output_shape(self, shape: Shape) -> Shape:  # noqa: D102
        return _flat(shape, self.shape)


class Flatten(Bijection):
    """Reshape a sample of any shape to a vector."""

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self.shape = tuple(shape)

    def forward(self, x: Tensor) -> Transformed:  # noqa: D102
        return x.flatten(1), x.new_zeros(x.shape[0])

    def inverse(self, z: Tensor) -> Transformed:  # noqa: D102
        return z.reshape(-1, *self.shape), z.new_zeros(z.shape[0])

    def output_shape(self, shape: Shape) -> Shape:  # noqa: D102
        return _flat(shape, self.shape)


def _flat(shape: Shape, expected: Shape) -> Shape:
    """The shape of a flattened sample; raises ValueError unless the sample has the expected shape."""
    if tuple(shape) != expected:
        raise ValueError(f"`shape` must be {expected}, for which the bijection was made; got {tuple(shape)}.")
    return (math.prod(shape),)
