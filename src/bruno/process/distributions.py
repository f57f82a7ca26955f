"""The two predictive distributions: Student-t and normal, exact in float32 and sampled from a generator."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Generator, Size, Tensor
from torch import distributions as td

# log Γ(u + 3/4) − log Γ(u + 1/4) = log(u)/2 + Σ_k c_k u^(−2k): the odd powers vanish by symmetry.
_HALF_STEP_SERIES = (1 / 64, -5 / 2048, 61 / 49152, -1385 / 1048576)
_HALF_STEP_SERIES_FROM = 20.0  # the first neglected term is below 3e-16 from here on


def log_gamma_half_step(x: Tensor) -> Tensor:
    """log Γ(x + ½) − log Γ(x) for x > 0, in float64 and without the cancellation of two large numbers."""
    x = x.double()
    u = x.clamp(min=_HALF_STEP_SERIES_FROM) - 0.25
    w = u.square().reciprocal()
    series = torch.zeros_like(w)
    for coefficient in reversed(_HALF_STEP_SERIES):
        series = w * (series + coefficient)
    near = x.clamp(max=_HALF_STEP_SERIES_FROM)
    exact = torch.lgamma(near + 0.5) - torch.lgamma(near)
    return torch.where(x < _HALF_STEP_SERIES_FROM, exact, 0.5 * u.log() + series)


def log_gamma_step(x: Tensor, step: Tensor) -> Tensor:
    """log Γ(x + step) − log Γ(x) for x ≥ 1 and step ≥ 0, in float64.

    Stirling's series differenced term by term where x is large, plain lgamma where it is not.
    """
    x, step = x.double(), step.double()
    far = x.clamp(min=_HALF_STEP_SERIES_FROM)
    grown = far + step

    def tail(y: Tensor) -> Tensor:
        w = y.square().reciprocal()
        return (1 / 12 - w * (1 / 360 - w * (1 / 1260 - w * (1 / 1680 - w / 1188)))) / y

    growth = (far - 0.5) * torch.log1p(step / far) + step * grown.log() - step
    near = x.clamp(max=_HALF_STEP_SERIES_FROM)
    exact = torch.lgamma(near + step) - torch.lgamma(near)
    return torch.where(x < _HALF_STEP_SERIES_FROM, exact, growth + tail(grown) - tail(far))


class StudentT(td.StudentT):
    """`torch.distributions.StudentT` with an accurate density and a generator for its samples.

    The density computes log Γ((ν+1)/2) − log Γ(ν/2) as one quantity: the difference of two `lgamma` is off
    by 1e-4 at ν = 1e3 and by 0.5 at ν = 1e6 in float32.
    """

    def log_prob(self, value: Tensor) -> Tensor:  # noqa: D102
        if self._validate_args:
            self._validate_sample(value)
        standardised = (value - self.loc) / self.scale
        normaliser = log_gamma_half_step(self.df / 2) - 0.5 * (math.pi * self.df.double()).log()
        density = 0.5 * (self.df + 1) * torch.log1p(standardised.square() / self.df)
        return normaliser.to(density.dtype) - self.scale.log() - density

    def rsample(self, sample_shape: Sequence[int] = Size(), *, generator: Generator | None = None) -> Tensor:
        """Bailey's polar method with no rejection (appendix D of the paper, less its stray 1/r).

        With a, b uniform on (0, 1), r = max(a, b) and α = 2π min(a, b)/r::

            t = cos(α) · sqrt(ν · (r^(−4/ν) − 1))

        is Student-t with ν degrees of freedom; `expm1` keeps its digits when ν is large.
        """
        shape = self._extended_shape(Size(sample_shape))
        a, b = _open_uniform((2, *shape), self.loc, generator)
        r = torch.maximum(a, b)
        radius = torch.sqrt(self.df * torch.expm1(-4.0 * r.log() / self.df))
        return self.loc + self.scale * radius * torch.cos(2 * math.pi * torch.minimum(a, b) / r)

    def sample(self, sample_shape: Sequence[int] = Size(), *, generator: Generator | None = None) -> Tensor:
        """As `rsample`, with no gradient."""
        with torch.no_grad():
            return self.rsample(sample_shape, generator=generator)


class Normal(td.Normal):
    """`torch.distributions.Normal` with a generator for its samples."""

    def rsample(self, sample_shape: Sequence[int] = Size(), *, generator: Generator | None = None) -> Tensor:
        """Differentiable samples, reproducible with a generator."""
        shape = self._extended_shape(Size(sample_shape))
        noise = torch.randn(shape, dtype=self.loc.dtype, device=self.loc.device, generator=generator)
        return self.loc + self.scale * noise

    def sample(self, sample_shape: Sequence[int] = Size(), *, generator: Generator | None = None) -> Tensor:
        """As `rsample`, with no gradient."""
        with torch.no_grad():
            return self.rsample(sample_shape, generator=generator)


def _open_uniform(shape: Sequence[int], like: Tensor, generator: Generator | None) -> Tensor:
    """Uniform on (0, 1): an exact 0, which `torch.rand` can give, would put a sample at infinity.

    It stands for the interval up to the next number that `torch.rand` can give, 2^-24 in float32.
    """
    uniform = torch.rand(shape, dtype=like.dtype, device=like.device, generator=generator)
    return uniform.clamp(min=torch.finfo(like.dtype).eps / 4)
