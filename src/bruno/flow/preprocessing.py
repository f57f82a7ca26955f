"""Bijections from data to real numbers: dequantised pixels to the whole line, standardised columns."""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor

from bruno.flow.bijection import Bijection, Transformed

_FURTHEST = 1e9  # standard deviations from the mean


def dequantise(x: Tensor, generator: Generator | None = None) -> Tensor:
    """Integers with dequantisation noise: x + u, with u uniform on [0, 1).

    Without a generator u is ½, so that the same integers always give the same numbers.

    >>> dequantise(torch.tensor([0, 3]))
    tensor([0.5000, 3.5000])
    """
    x = x.to(torch.get_default_dtype())
    if generator is None:
        return x + 0.5
    noisy = x + torch.rand(x.shape, generator=generator, dtype=x.dtype, device=x.device)
    return torch.where(noisy.floor() == x, noisy, x + 0.5)  # rounding may reach the next integer


def quantise(x: Tensor, levels: int = 256) -> Tensor:
    """Real numbers on [0, levels) back to integers: uint8 for up to 256 levels."""
    return x.floor().clamp(0, levels - 1).to(torch.uint8 if levels <= 256 else torch.long)


class Pixels(Bijection):
    """Dequantised pixels on [0, levels) to the whole line; subclasses define the map.

    The log-det includes the rescaling, so that densities and bits/dim are those of the pixels themselves.
    `alpha` is the margin at each end, as a fraction of the range: it keeps 0 from mapping to −∞.
    """

    def __init__(self, levels: int = 256, alpha: float = 1e-6) -> None:
        super().__init__()
        if not 0 < alpha < 0.5:
            raise ValueError(f"`alpha` must be between 0 and 0.5; got {alpha}.")
        self.levels, self.alpha = levels, alpha

    def clamped(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Numbers clamped to [0, levels), and the mask of those that were outside by more than the margin."""
        top = math.nextafter(self.levels, 0) if x.dtype == torch.double else self.levels * (1 - 2**-24)
        inside = x.nan_to_num(0.0).clamp(0, top)
        # The map extends beyond the data by α at each end; numbers in this margin count as inside.
        margin = 2 * self.alpha / self._thinnest_end()
        return inside, ~((x >= -margin) & (x <= self.levels + margin))

    def _thinnest_end(self) -> float | Tensor:
        """The fraction of the range that the first or the last level covers, whichever is smaller."""
        return 1 / self.levels


class Logit(Pixels):
    """The map of the paper: logit(α + (1 − 2α)·x/levels).

    Both tails are computed from their own end, since 1 − p loses precision near p = 1.
    """

    def forward(self, x: Tensor) -> Transformed:  # noqa: D102
        log_p, log_q = self._log_tails(x)
        return log_p - log_q, self._log_det(log_p, log_q)

    def inverse(self, z: Tensor) -> Transformed:  # noqa: D102
        x = (z.sigmoid() - self.alpha) * (self.levels / (1 - 2 * self.alpha))
        return x, -self._log_det(-(-z).logaddexp(torch.zeros_like(z)), -z.logaddexp(torch.zeros_like(z)))

    def _log_tails(self, x: Tensor) -> tuple[Tensor, Tensor]:
        width = (1 - 2 * self.alpha) / self.levels
        return (self.alpha + width * x).log(), (self.alpha + width * (self.levels - x)).log()

    def _log_det(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        log_width = math.log((1 - 2 * self.alpha) / self.levels)
        return (log_width - log_p - log_q).flatten(1).sum(1)


class Gaussianise(Pixels):
    """Pixels to a standard normal: Φ⁻¹(α + (1 − 2α)·F(x)), with F the distribution of the pixels in `fit`.

    F rises linearly within each level, by the level's fraction of all pixels. A background level then covers
    most of the normal. A logit maps its noise to a one-sided tail and a linear scale to a thin slab, neither
    of which affine couplings can make normal: that costs up to 0.6 bits for every such pixel.

    Computed in double precision, in which 1 − p is accurate for any useful α.
    """

    shares: Tensor
    fitted: Tensor

    def __init__(self, levels: int = 256, alpha: float = 1e-6) -> None:
        super().__init__(levels, alpha)
        self.register_buffer("shares", torch.full((levels,), 1 / levels, dtype=torch.double))
        self.register_buffer("fitted", torch.tensor(False))

    def fit(self, x: Tensor) -> Gaussianise:
        """Estimate the distribution from pixels, once; 1 % is spread evenly over all levels."""
        if self.fitted:
            return self
        counts = quantise(x, self.levels).flatten().long().bincount(minlength=self.levels).double()
        self.fitted.fill_(True)
        self.shares.copy_(0.99 * counts / counts.sum() + 0.01 / self.levels)
        return self

    def forward(self, x: Tensor) -> Transformed:  # noqa: D102
        level = x.detach().floor().clamp(0, self.levels - 1).long()
        p = self._below()[level] + self.shares[level] * (x.double() - level)
        z = torch.special.ndtri(self.alpha + (1 - 2 * self.alpha) * p)
        return z.to(x.dtype), self._log_det(level, z).to(x.dtype)

    def inverse(self, z: Tensor) -> Transformed:  # noqa: D102
        z, dtype = z.double(), z.dtype
        p, below = (torch.special.ndtr(z) - self.alpha) / (1 - 2 * self.alpha), self._below()
        level = (torch.searchsorted(below, p, right=True) - 1).clamp(0, self.levels - 1)
        x = level + (p - below[level]) / self.shares[level]
        return x.to(dtype), -self._log_det(level, z).to(dtype)

    def _thinnest_end(self) -> Tensor:
        return torch.minimum(self.shares[0], self.shares[-1])

    def _below(self) -> Tensor:
        """The fraction of all pixels below each level."""
        return self.shares.cumsum(0) - self.shares

    def _log_det(self, level: Tensor, z: Tensor) -> Tensor:
        slope = math.log((1 - 2 * self.alpha) * math.sqrt(2 * math.pi)) + self.shares[level].log() + z**2 / 2
        return slope.flatten(1).sum(1)


class Standardise(Bijection):
    """Real data with mean 0 and standard deviation 1 in each column: (x − mean)/deviation, learnt by `fit`.

    In double precision: float32 cannot resolve the minutes of a Unix time. Values beyond 1e9 standard
    deviations, such as placeholders for missing ones, are clamped: their squares would overflow. `fit`
    ignores missing values, NaN.
    """

    mean: Tensor
    deviation: Tensor
    fitted: Tensor

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.double))
        self.register_buffer("deviation", torch.ones(shape, dtype=torch.double))
        self.register_buffer("fitted", torch.tensor(False))

    def fit(self, x: Tensor) -> Standardise:
        """Estimate mean and deviation from data (batch, *shape), once; a constant column keeps its scale."""
        if self.fitted:
            return self
        self.fitted.fill_(True)
        x = x.double()
        mean = x.nanmean(0).nan_to_num(0.0)
        deviation = (x - mean).square().nanmean(0).sqrt()
        self.mean.copy_(mean)
        self.deviation.copy_(torch.where(deviation > 0, deviation, 1.0))
        return self

    def forward(self, x: Tensor) -> Transformed:  # noqa: D102
        return ((x - self.mean) / self.deviation).clamp(-_FURTHEST, _FURTHEST), self._log_det(x)

    def inverse(self, z: Tensor) -> Transformed:  # noqa: D102
        return z * self.deviation + self.mean, -self._log_det(z)

    def clamped(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Numbers with overflowed ones replaced by the mean, and the mask of those."""
        astray = ~torch.isfinite(x)
        return torch.where(astray, self.mean, x), astray

    def _log_det(self, x: Tensor) -> Tensor:
        return -self.deviation.log().sum().expand(len(x))
