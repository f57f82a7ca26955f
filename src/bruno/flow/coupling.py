"""Couplings: one part of a sample determines an elementwise map of the other part."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bruno.flow.bijection import Bijection, Transformed
from bruno.flow.spline import inverse_spline, parameter_count, spline


class Partition(nn.Module):
    """A division of a sample into a part that stays and a part that moves, which a coupling transforms."""

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
    """Squares of one colour stay, the others move; both parts keep the size of the image."""

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
        x = torch.empty((fixed.shape[0], self.dim), dtype=moved.dtype, device=moved.device)
        x[:, self.parity :: 2], x[:, 1 - self.parity :: 2] = fixed, moved
        return x


class Coupling(Bijection):
    """An elementwise map of the part that moves; its parameters are functions of the part that stays.

    Subclasses define the map in `transform` and `inverse_transform`, given the output of the network. Every
    map ends with y = x · exp(s) + t, where s = bound · tanh(·) with a learnt bound.

    On a GPU, the network may run in a lower-precision dtype than the samples (`network_dtype`); the map and
    the log-det keep the dtype of the samples. `recompute` enables activation checkpointing: less memory for
    more time. `compiled` runs the forward pass through torch.compile, compiled once for all couplings of the
    same kind and shape.
    """

    network_dtype: torch.dtype | None = None
    recompute: bool = False
    compiled: bool = False

    def __init__(self, partition: Partition, network: nn.Module) -> None:
        super().__init__()
        self.partition = partition
        self.network = network
        self.bound = nn.Parameter(torch.ones(()))

    def transform(
        self, x: Float[Tensor, "batch *shape"], output: Float[Tensor, "batch outputs *space"]
    ) -> Transformed:
        """(y, log dy/dx) for each number that moves, given the output of the network."""
        raise NotImplementedError

    def inverse_transform(
        self, y: Float[Tensor, "batch *shape"], output: Float[Tensor, "batch outputs *space"]
    ) -> Transformed:
        """(x, log dx/dy): the inverse of `transform`."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Transformed:  # noqa: D102
        return _compiled_forward()(self, x) if self.compiled else self._forward(x)

    def inverse(self, z: Tensor) -> Transformed:  # noqa: D102
        return self._apply_to_moved(self.inverse_transform, z)

    def _forward(self, x: Tensor) -> Transformed:
        return self._apply_to_moved(self.transform, x)

    def _apply_to_moved(self, transform: Callable[[Tensor, Tensor], Transformed], x: Tensor) -> Transformed:
        fixed, moved = self.partition.split(x)
        y, log_slope = map(self.partition.on_moved, transform(moved, self._output(fixed)))
        return self.partition.join(fixed, y), log_slope.flatten(1).sum(1)

    def _output(self, fixed: Float[Tensor, "batch *shape"]) -> Float[Tensor, "batch outputs *space"]:
        short = self.network_dtype
        with torch.autocast(fixed.device.type, short) if short else nullcontext():
            if self.recompute and torch.is_grad_enabled():
                # The networks draw no random numbers; reading the random state would end a graph's capture.
                output = checkpoint(self.network, fixed, use_reentrant=False, preserve_rng_state=False)
            else:
                output = self.network(fixed)
        return output.to(fixed.dtype)  # type: ignore[no-any-return]

    def _log_scale(self, raw: Tensor) -> Tensor:
        return self.bound * raw.tanh()


class AffineCoupling(Coupling):
    """y = x · exp(s) + t, with log dy/dx = s; the network outputs all s, then all t."""

    def transform(self, x: Tensor, output: Tensor) -> Transformed:  # noqa: D102
        s, t = self._scale_and_shift(output)
        return x * s.exp() + t, s

    def inverse_transform(self, y: Tensor, output: Tensor) -> Transformed:  # noqa: D102
        s, t = self._scale_and_shift(output)
        return (y - t) * (-s).exp(), -s

    def _scale_and_shift(self, output: Tensor) -> tuple[Tensor, Tensor]:
        s, t = output.chunk(2, dim=1)
        return self._log_scale(s), t


class SplineCoupling(Coupling):
    """y = spline(x) · exp(s) + t: a monotone spline, then the affine map.

    An affine map only shifts and scales a density. A spline also changes its shape: it can map the uniform
    noise of a background pixel to a normal distribution. The network outputs 3·bins + 1 parameters for each
    number that moves: all s, all t, then those of the splines. If all are 0, the coupling is the identity.

    Args:
        partition: the part that stays and the part that moves.
        network: (batch, *fixed) -> (batch, (3·bins + 1)·C, *space), if (batch, C, *space) moves.
        bins: bins of each spline.
        interval: the splines are defined on [−interval, interval], and the identity outside.
    """

    def __init__(
        self, partition: Partition, network: nn.Module, *, bins: int = 8, interval: float = 5.0
    ) -> None:
        super().__init__(partition, network)
        self.bins, self.interval = bins, interval

    def transform(self, x: Tensor, output: Tensor) -> Transformed:  # noqa: D102
        s, t, parameters = self._split_output(output)
        bent, log_slope = spline(x, parameters, self.interval)
        return bent * s.exp() + t, log_slope + s

    def inverse_transform(self, y: Tensor, output: Tensor) -> Transformed:  # noqa: D102
        s, t, parameters = self._split_output(output)
        x, log_slope = inverse_spline((y - t) * (-s).exp(), parameters, self.interval)
        return x, log_slope - s

    def _split_output(self, output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        parameters = output.unflatten(1, (2 + parameter_count(self.bins), -1))
        return self._log_scale(parameters[:, 0]), parameters[:, 1], parameters[:, 2:]


def set_network_dtype(module: nn.Module, dtype: torch.dtype | None) -> None:
    """Run the networks of all couplings in this dtype (bfloat16 on a GPU), or in the dtype of their input."""
    for coupling in _couplings(module):
        coupling.network_dtype = dtype


def set_recompute(module: nn.Module, recompute: bool) -> None:
    """Turn activation checkpointing of the networks of all couplings on or off."""
    for coupling in _couplings(module):
        coupling.recompute = recompute


def set_compiled(module: nn.Module, compiled: bool) -> None:
    """Turn compilation of the forward pass of all couplings on or off."""
    for coupling in _couplings(module):
        coupling.compiled = compiled


def _couplings(module: nn.Module) -> list[Coupling]:
    return [m for m in module.modules() if isinstance(m, Coupling)]


@cache
def _compiled_forward() -> Callable[[Coupling, Tensor], Transformed]:
    """The compiled function of all couplings, with one variant for each kind and shape.

    Raises the compiler's limit of eight variants, beyond which it silently gives up. Keeps channels last in
    memory, which the compiler would not choose for so few channels; otherwise, cuDNN spends a third of the
    time on rearranging them.
    """
    import torch._dynamo  # takes a second to import, and only training on a GPU needs it

    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    return torch.compile(Coupling._forward, dynamic=False, options={"force_layout_optimization": True})
