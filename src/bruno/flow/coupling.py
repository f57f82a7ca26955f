"""Affine couplings: one part of a sample scales and shifts the other."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bruno.flow.bijection import Bijection, Transformed


class Partition(nn.Module):
    """A division of a sample into a part that stays and a part that moves."""

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(the part that stays, the part that moves)."""
        raise NotImplementedError

    def join(self, fixed: Tensor, moved: Tensor) -> Tensor:
        """The sample with these parts: the inverse of `split`."""
        raise NotImplementedError

    def on_moved(self, x: Tensor) -> Tensor:
        """The output of the network, zero where nothing moves."""
        return x


class Checkerboard(Partition):
    """The squares of one colour stay, the others move; both parts keep the size of the image."""

    mask: Tensor

    def __init__(self, height: int, width: int, parity: int) -> None:
        super().__init__()
        rows, columns = torch.arange(height).unsqueeze(1), torch.arange(width)
        mask = ((rows + columns + parity) % 2).to(torch.get_default_dtype())
        self.register_buffer("mask", mask, persistent=False)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:  # noqa: D102
        fixed = x * self.mask
        return fixed, x - fixed

    def join(self, fixed: Tensor, moved: Tensor) -> Tensor:  # noqa: D102
        return fixed + moved

    def on_moved(self, x: Tensor) -> Tensor:  # noqa: D102
        return x * (1 - self.mask)


class Channels(Partition):
    """Some channels stay, the others move.

    After a squeeze the four channels of a 2 × 2 patch are (0 1 / 2 3), so that the groups 0, 3 and 1, 2 are
    the two colours of a checkerboard, at half the resolution.
    """

    order: Tensor
    back: Tensor

    def __init__(self, channels: int, parity: int, *, diagonal: bool = False) -> None:
        super().__init__()
        if channels < 2:
            raise ValueError(f"`channels` must be at least 2 to be divided; got {channels}.")
        index = torch.arange(channels)
        stays = ((index % 4 == 0) | (index % 4 == 3)) if diagonal else index < channels // 2
        if parity:
            stays = ~stays
        self.kept = int(stays.sum())
        order = torch.cat([index[stays], index[~stays]])
        self.register_buffer("order", order, persistent=False)
        self.register_buffer("back", order.argsort(), persistent=False)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:  # noqa: D102
        x = x[:, self.order]
        return x[:, : self.kept], x[:, self.kept :]

    def join(self, fixed: Tensor, moved: Tensor) -> Tensor:  # noqa: D102
        return torch.cat([fixed, moved], 1)[:, self.back]


class OddEven(Partition):
    """Every other number of a vector stays; the ones between move."""

    def __init__(self, dim: int, parity: int) -> None:
        super().__init__()
        if dim < 2:
            raise ValueError(f"`dim` must be at least 2 to be divided into odd and even; got {dim}.")
        self.dim, self.parity = dim, parity

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:  # noqa: D102
        return x[:, self.parity :: 2], x[:, 1 - self.parity :: 2]

    def join(self, fixed: Tensor, moved: Tensor) -> Tensor:  # noqa: D102
        x = torch.empty((len(fixed), self.dim), dtype=moved.dtype, device=moved.device)
        x[:, self.parity :: 2], x[:, 1 - self.parity :: 2] = fixed, moved
        return x


class AffineCoupling(Bijection):
    """y = x · exp(s) + t on the part that moves, with s and t functions of the part that stays.

    log |det| = Σ s, and s = bound · tanh(·) with a learnt bound. On a GPU the network may run in a shorter
    type than the samples (`network_dtype`); s, t and the log-det keep the type of the samples. `recompute`
    enables activation checkpointing: less memory for more time. `compiled` runs the forward pass through
    torch.compile, compiled once for all couplings of one kind and shape.
    """

    network_dtype: torch.dtype | None = None
    recompute: bool = False
    compiled: bool = False

    def __init__(self, partition: Partition, network: nn.Module) -> None:
        super().__init__()
        self.partition = partition
        self.network = network
        self.bound = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Transformed:  # noqa: D102
        return _compiled_transform()(self, x) if self.compiled else self._transform(x)

    def inverse(self, z: Tensor) -> Transformed:  # noqa: D102
        fixed, moved = self.partition.split(z)
        s, t = self._scale_and_shift(fixed)
        return self.partition.join(fixed, (moved - t) * (-s).exp()), -s.flatten(1).sum(1)

    def _transform(self, x: Tensor) -> Transformed:
        fixed, moved = self.partition.split(x)
        s, t = self._scale_and_shift(fixed)
        return self.partition.join(fixed, moved * s.exp() + t), s.flatten(1).sum(1)

    def _scale_and_shift(self, fixed: Float[Tensor, "batch *shape"]) -> tuple[Tensor, Tensor]:
        short = self.network_dtype
        with torch.autocast(fixed.device.type, short) if short else nullcontext():
            if self.recompute and torch.is_grad_enabled():
                output = checkpoint(self.network, fixed, use_reentrant=False)
            else:
                output = self.network(fixed)
        s, t = output.to(fixed.dtype).chunk(2, dim=1)
        return self.partition.on_moved(self.bound * s.tanh()), self.partition.on_moved(t)


@cache
def _compiled_transform() -> Callable[[AffineCoupling, Tensor], Transformed]:
    """One compiled function for all couplings, with one variant for each kind and shape.

    There are more variants than the eight after which the compiler silently gives up by default. Channels go
    last in memory, which the compiler would not choose for this few channels: cuDNN needs them there, and
    otherwise spends a third of the time on rearranging them.
    """
    import torch._dynamo  # takes a second to import, and only training on a GPU needs it

    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    return torch.compile(
        AffineCoupling._transform, dynamic=False, options={"force_layout_optimization": True}
    )
