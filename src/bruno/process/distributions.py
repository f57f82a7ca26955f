"""The two predictive distributions: Student-t and normal, accurate in float32, with seeded samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Generator, Size, Tensor
from torch import distributions as td
from torch.distributions.utils import broadcast_all

from bruno.arrays import Arrays, as_tensor
from bruno.process.checks import check_generator

# Stirling's series from here on, lgamma below: either way the error is below 1e-12.
_SERIES_FROM = 1e3


def log_gamma_half_step(x: Tensor) -> Tensor:
    """g(x) = log Γ(x + ½) − log Γ(x) for x > 0, in float64, without cancellation at large x.

    With u = x − ¼ the series of g has even powers only: g = log(u)/2 + 1/(64 u²) − 5/(2048 u⁴) + …
    """
    if torch.jit.is_tracing():  # type: ignore[attr-defined]  # an exported graph has no backward pass
        return _LogGammaHalfStep.forward(x.double())
    return _LogGammaHalfStep.apply(x.double())  # type: ignore[no-any-return]


class _LogGammaHalfStep(torch.autograd.Function):
    """Few kernels forward and backward: on a GPU a launch costs more than the arithmetic."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        u = x - 0.25
        far = torch.addcdiv(0.5 * u.log(), torch.ones_like(u), u * u, value=1 / 64)
        return torch.where(x < _SERIES_FROM, torch.lgamma(x + 0.5) - torch.lgamma(x), far)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * log_gamma_half_step_slope(x)


def log_gamma_half_step_slope(x: Tensor) -> Tensor:
    """The derivative of `log_gamma_half_step`: 1/(2u) − 1/(32 u³) + … where x is large."""
    v = (x - 0.25).reciprocal()
    far = torch.addcmul(0.5 * v, v * v, v, value=-1 / 32)
    return torch.where(x < _SERIES_FROM, torch.digamma(x + 0.5) - torch.digamma(x), far)


def log_gamma_step(x: Tensor, step: Tensor) -> Tensor:
    """log Γ(x + step) − log Γ(x) for x ≥ 1 and step ≥ 0, in float64.

    Stirling's series differenced term by term where x is large, plain lgamma where it is not.
    """
    x, step = x.double(), step.double()
    far = x.clamp(min=_SERIES_FROM)
    grown = far + step

    def tail(y: Tensor) -> Tensor:
        w = y.square().reciprocal()
        return (1 / 12 - w * (1 / 360 - w / 1260)) / y

    growth = (far - 0.5) * torch.log1p(step / far) + step * grown.log() - step
    near = x.clamp(max=_SERIES_FROM)
    exact = torch.lgamma(near + step) - torch.lgamma(near)
    return torch.where(x < _SERIES_FROM, exact, growth + tail(grown) - tail(far))


class _Seeded(td.Distribution):
    """A distribution whose samples are drawn from a generator; base of both."""

    def sample(
        self,
        sample_shape: Sequence[int] = Size(),
        *,
        generator: Generator | None = None,
        common: bool = False,
    ) -> Tensor:
        """Like `rsample`, without gradients."""
        check_generator(generator)
        with torch.no_grad():
            return self.rsample(sample_shape, generator=generator, common=common)  # type: ignore[call-arg, arg-type]


class StudentT(_Seeded, td.StudentT):
    """`torch.distributions.StudentT` with an accurate density and a generator for its samples.

    The density computes log Γ((ν+1)/2) − log Γ(ν/2) as one quantity: the difference of two `lgamma` is off
    by 1e-4 at ν = 1e3 and by 0.5 at ν = 1e6 in float32.
    """

    def __init__(
        self,
        df: Tensor | float,
        loc: Tensor | float = 0.0,
        scale: Tensor | float = 1.0,
        validate_args: bool | None = None,
    ) -> None:
        # torch's own constructor makes a chi-square, which is not needed here and which CUDA graphs cannot
        # capture.
        self.df, self.loc, self.scale = broadcast_all(df, loc, scale)
        td.Distribution.__init__(self, self.df.shape, validate_args=validate_args)

    def expand(self, batch_shape: Sequence[int], _instance: td.Distribution | None = None) -> StudentT:
        """The same distribution for a larger batch."""
        df, loc, scale = (part.expand(Size(batch_shape)) for part in (self.df, self.loc, self.scale))
        return StudentT(df, loc, scale, validate_args=False)

    def log_prob(self, value: Tensor | Arrays) -> Tensor:  # noqa: D102
        value = as_tensor(value, "value", device=self.loc.device)
        if self._validate_args:
            self._validate_sample(value)
        standardised = (value - self.loc) / self.scale
        normaliser = log_gamma_half_step(self.df / 2) - 0.5 * (math.pi * self.df.double()).log()
        density = 0.5 * (self.df + 1) * torch.log1p(standardised.square() / self.df)
        return normaliser.to(density.dtype) - self.scale.log() - density

    def rsample(
        self,
        sample_shape: Sequence[int] = Size(),
        *,
        generator: Generator | None = None,
        common: bool = False,
    ) -> Tensor:
        """Bailey's polar method with no rejection (appendix D of the paper, without its stray 1/r).

        With a, b uniform on (0, 1), r = max(a, b) and α = 2π min(a, b)/r::

            t = cos(α) · sqrt(ν · (r^(−4/ν) − 1))

        is Student-t with ν degrees of freedom; `expm1` keeps it accurate when ν is large. If `common`, all
        members of the batch (*batch, dim) have the same a and b: one for each sample and dimension.
        """
        shape = _shape_of_noise(self, sample_shape, common)
        a, b = _open_uniform((2, *shape), self.loc, generator)
        r = torch.maximum(a, b)
        radius = torch.sqrt(self.df * torch.expm1(-4.0 * r.log() / self.df))
        return self.loc + self.scale * radius * torch.cos(2 * math.pi * torch.minimum(a, b) / r)


class Normal(_Seeded, td.Normal):
    """`torch.distributions.Normal` with a generator for its samples."""

    def log_prob(self, value: Tensor | Arrays) -> Tensor:  # noqa: D102
        return super().log_prob(as_tensor(value, "value", device=self.loc.device))  # type: ignore[no-any-return]

    def rsample(
        self,
        sample_shape: Sequence[int] = Size(),
        *,
        generator: Generator | None = None,
        common: bool = False,
    ) -> Tensor:
        """Differentiable samples, reproducible with a generator; `common` as in `StudentT.rsample`."""
        shape = _shape_of_noise(self, sample_shape, common)
        noise = torch.randn(shape, dtype=self.loc.dtype, device=self.loc.device, generator=generator)
        return self.loc + self.scale * noise


def _shape_of_noise(distribution: td.Distribution, sample_shape: Sequence[int], common: bool) -> Size:
    """Shape of the random numbers of samples (*samples, *batch, dim), or (*samples, 1, …, dim) if common."""
    batch = distribution.batch_shape
    if common:
        batch = Size((*[1] * len(batch[:-1]), *batch[-1:]))
    return Size((*sample_shape, *batch))


def _open_uniform(shape: Sequence[int], like: Tensor, generator: Generator | None) -> Tensor:
    """Uniform on (0, 1): an exact 0 from `torch.rand` would make a sample infinite.

    A 0 is replaced by a number within the interval that it represents, which is 2^-24 wide in float32.
    """
    uniform = torch.rand(shape, dtype=like.dtype, device=like.device, generator=generator)
    return uniform.clamp(min=torch.finfo(like.dtype).eps / 4)
