"""Bijections from data to real numbers: dequantised pixels to the whole line, standardised columns."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Generator, Tensor

from bruno.flow.bijection import Bijection, Transformed

_FREQUENT = 0.05  # fraction of the pixels from which a level has its own normal; saved models depend on it
_APART = 4.0  # distance of the centres of two normals, in standard deviations; saved models depend on it
FURTHEST = 1e9  # standard deviations from the mean
_SCALES = ("linear", "log", "asinh")
LINEAR, LOG, ASINH = range(3)  # their positions
_WORTHWHILE = 0.1  # nats per number that a scale other than linear must gain
_LOG_BELOW = 2000  # a log scale reaches this factor below the smallest number that it was fitted to
_COARSE = 20  # a step is coarse if the standard deviation is less than this many steps
_IMAGES_AT_A_TIME = 1024
_DECIMALS = 4  # of a step, at most
_MAX_WHOLE = 2.0**52  # below it, float64 resolves whole numbers


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
        inside = x.nan_to_num(0.0).clamp(0.0, top)
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


class LevelNormals(NamedTuple):
    """The normal that each level of the pixels is mapped to.

    Attributes:
        centre: its centre.
        below: its probability below the level.
        inside: its probability in the level.
    """

    centre: Tensor
    below: Tensor
    inside: Tensor


class Gaussianise(Pixels):
    """Pixels to a standard normal: Φ⁻¹(α + (1 − 2α)·F(x)), with F the distribution of the pixels in `fit`.

    F rises linearly within each level, by the level's fraction of all pixels. A background level then covers
    most of the normal. A logit maps its noise to a one-sided tail and a linear scale to a thin slab, neither
    of which affine couplings can make normal: that costs up to 0.6 bits for every such pixel.

    The map is computed in double precision, in which 1 − p is accurate for any useful α.
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
        levels, counts = self.levels, torch.zeros_like(self.shares)
        for part in x.split(_IMAGES_AT_A_TIME):  # all training images, of which 64-bit copies may not fit
            counts += quantise(part, levels).flatten().long().bincount(minlength=levels)
        self.fitted.fill_(True)
        self.shares.copy_(0.99 * counts / counts.sum() + 0.01 / levels)
        return self

    def forward(self, x: Tensor) -> Transformed:  # noqa: D102
        level, normals = x.detach().floor().clamp(0, self.levels - 1).long(), self._normals()
        t = torch.special.ndtri(normals.below[level] + normals.inside[level] * (x.double() - level))
        return (normals.centre[level] + t).to(x.dtype), self._log_det(normals, level, t).to(x.dtype)

    def inverse(self, z: Tensor) -> Transformed:  # noqa: D102
        z, dtype, normals = z.double(), z.dtype, self._normals()
        starts = normals.centre + torch.special.ndtri(normals.below)
        level = (torch.searchsorted(starts, z.contiguous(), right=True) - 1).clamp(0, self.levels - 1)
        t = z - normals.centre[level]
        x = level + (torch.special.ndtr(t) - normals.below[level]) / normals.inside[level]
        return x.to(dtype), -self._log_det(normals, level, t).to(dtype)

    def _normals(self) -> LevelNormals:
        """All levels share one normal, without α at each end."""
        inside = (1 - 2 * self.alpha) * self.shares
        return LevelNormals(torch.zeros_like(inside), self.alpha + inside.cumsum(0) - inside, inside)

    def _thinnest_end(self) -> Tensor:
        inside = self._normals().inside
        return torch.minimum(inside[0], inside[-1])

    @staticmethod
    def _log_det(normals: LevelNormals, level: Tensor, t: Tensor) -> Tensor:
        slope = normals.inside[level].log() + (math.log(2 * math.pi) + t**2) / 2
        return slope.flatten(1).sum(1)


class GaussianMixture(Gaussianise):
    """Pixels to a mixture of normals: one for each frequent level, one for each range of levels in between.

    A level with at least 5 % of the pixels, such as the background, is frequent. The normals are 4 apart and
    cut off midway between two of them. In the normal of component k, which has the fraction w_k of the pixels
    and the fraction F_k below it::

        z = c_k + Φ⁻¹(a_k + (b_k − a_k)·(F(x) − F_k)/w_k),   a_k, b_k = Φ(−2), Φ(2), or α and 1 − α at the
                                                             ends of the range

    The noise of a background pixel is then nearly a whole normal, which a coupling only has to shift.
    """

    def _normals(self) -> LevelNormals:
        shares, alpha, cut = self.shares, self.alpha, self.shares.new_full((), _APART / 2)
        frequent = shares >= _FREQUENT
        starts = (frequent | frequent.roll(1, 0)).long()  # 1 for the first level of a component
        component = starts.cumsum(0) - starts[0]
        weights = shares.new_zeros(self.levels).scatter_add(0, component, shares)
        first, last = component == 0, component == component[-1]
        low = torch.where(first, alpha, torch.special.ndtr(-cut))
        high = torch.where(last, 1 - alpha, torch.special.ndtr(cut))
        scale = (high - low) / weights[component]
        below = shares.cumsum(0) - shares - (weights.cumsum(0) - weights)[component]
        centre = _APART * component
        return LevelNormals(centre - (shares * centre).sum(), low + scale * below, scale * shares)


class Standardise(Bijection):
    """Real data with mean 0 and standard deviation 1 in each column: (x − mean)/deviation, learnt by `fit`.

    The map is computed in double precision, as float32 cannot resolve the minutes of a Unix time. Values
    beyond 1e9 standard deviations, such as placeholders for missing values, are clamped, as their squares
    would overflow. `fit` ignores missing values, NaN. The buffers stay in double precision in a model that is
    cast to another one.
    """

    mean: Tensor
    deviation: Tensor
    fitted: Tensor

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.double))
        self.register_buffer("deviation", torch.ones(shape, dtype=torch.double))
        self.register_buffer("fitted", torch.tensor(False))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Standardise:
        """Move the buffers as `fn` does, such as `to` or `float`, without a change of their dtype."""
        before = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            setattr(self, name, buffer.to(getattr(self, name).device))
        return self

    def fit(self, x: Tensor) -> Standardise:
        """Estimate mean and deviation from data (batch, *shape), once; a constant column keeps its scale."""
        if self.fitted:
            return self
        self.fitted.fill_(True)
        x = x.double()
        mean = x.nanmean(0).nan_to_num(0.0)
        deviation = (x - mean).square().nanmean(0).sqrt()
        self.mean.copy_(mean)
        self.deviation.copy_(torch.where(_is_constant(x) | (deviation == 0), 1.0, deviation))
        return self

    def forward(self, x: Tensor) -> Transformed:  # noqa: D102
        return ((x - self.mean) / self.deviation).clamp(-FURTHEST, FURTHEST), self._log_det(x)

    def inverse(self, z: Tensor) -> Transformed:  # noqa: D102
        return z * self.deviation + self.mean, -self._log_det(z)

    def clamped(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The numbers with overflows replaced by the mean, and the mask of the overflows."""
        overflows = ~torch.isfinite(x)
        return torch.where(overflows, self.mean, x), overflows

    def _log_det(self, x: Tensor) -> Tensor:
        return -self.deviation.log().sum().expand(x.shape[0])


class ColumnScales(Standardise):
    """Columns of real numbers on a scale that suits each, then standardised; `fit` chooses and learns it.

    With u = (x − centre)/width, the scale is g(u) = u, log u or asinh u::

        linear  g = u
        log     g = log u for u > 1, u − 1 below: for positive numbers, width is 1/2000 of the smallest
        asinh   g = log(u + √(u² + 1)): for heavy tails on both sides

    All three are bijections of the whole line. `fit` takes the scale whose g is closest to normal, by the
    density of the data, and keeps a linear one unless another gains a tenth of a nat for each number.

    Columns of whole numbers, or of numbers rounded to a step that is coarse for their spread, have a `step`:
    `dequantise` adds uniform noise of this width, and decoded numbers are rounded to it.
    """

    kind: Tensor
    centre: Tensor
    width: Tensor
    step: Tensor
    origin: Tensor

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__(shape)
        self.register_buffer("kind", torch.zeros(shape, dtype=torch.long))
        for name, value in (("centre", 0.0), ("width", 1.0), ("step", 0.0), ("origin", 0.0)):
            self.register_buffer(name, torch.full(shape, value, dtype=torch.double))

    @property
    def kinds(self) -> tuple[str, ...]:
        """The scale of each column: "linear", "log" or "asinh"."""
        return tuple(_SCALES[kind] for kind in self.kind.tolist())

    def fit(self, x: Tensor) -> ColumnScales:
        """Choose the scales, and estimate mean and deviation on them, from data (batch, columns), once."""
        if self.fitted:
            return self
        self.fitted.fill_(True)
        x = x.double()
        for i, column in enumerate(x.T):
            values = column[~column.isnan()]
            if len(values):
                self.step[i], self.origin[i] = _step_of(values), values.min()
                self.kind[i], self.centre[i], self.width[i] = _scale_of(values)
        rescaled = self._rescale(x)[0]
        mean = rescaled.nanmean(0).nan_to_num(0.0)
        variance = torch.where(_is_constant(x), 0.0, (rescaled - mean).square().nanmean(0))
        # A constant column of whole numbers has the spread of its dequantisation noise.
        variance = torch.where(
            (variance > 0) | (self.step == 0), variance, (self.step / self.width) ** 2 / 12
        )
        self.mean.copy_(mean)
        self.deviation.copy_(torch.where(variance > 0, variance.sqrt(), 1.0))
        return self

    def dequantise(self, x: Tensor, generator: Generator) -> Tensor:
        """Numbers with uniform noise of the width of their column's step, centred on them."""
        noise = torch.rand(x.shape, generator=generator, dtype=torch.double, device=x.device) - 0.5
        return torch.where(self.step > 0, x + self.step * noise, x.double())

    def forward(self, x: Tensor) -> Transformed:  # noqa: D102
        rescaled, log_slope = self._rescale(x)
        z = ((rescaled - self.mean) / self.deviation).clamp(-FURTHEST, FURTHEST)
        return z, (log_slope - self.deviation.log()).sum(1)

    def inverse(self, z: Tensor) -> Transformed:  # noqa: D102
        u = self._unscaled(z * self.deviation + self.mean)
        return u * self.width + self.centre, (self.deviation.log() - self._log_slope(u)).sum(1)

    def scale_log_det(self, x: Tensor) -> Tensor:
        """The log-det of log and asinh scales, relative to that at the middle of each column, (batch,).

        Without it, the log-det of `forward` is that of linear columns. Densities are then compared on the
        scales of the columns: a small number on a log scale is not likely for being close to 0.
        """
        slope = self._log_slope((x - self.centre) / self.width)
        return (slope - self._log_slope(self._unscaled(self.mean))).sum(1)

    def clamped(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The numbers rounded to the step of their column, overflows replaced, and the mask of overflows."""
        middle = self.inverse(torch.zeros_like(self.mean).unsqueeze(0))[0].squeeze(0)
        overflows = ~torch.isfinite(x)
        x = torch.where(overflows, middle, x)
        step = torch.where(self.step > 0, self.step, 1.0)
        rounded = _nearest_decimal(((x - self.origin) / step).round() * step + self.origin)
        return torch.where(self.step > 0, rounded, x), overflows

    def _rescale(self, x: Tensor) -> Transformed:
        """g(u) and log dg/dx of each number."""
        u = (x - self.centre) / self.width
        rescaled = torch.where(self.kind == LOG, torch.where(u > 1, u.clamp(min=1).log(), u - 1), u)
        return torch.where(self.kind == ASINH, u.asinh(), rescaled), self._log_slope(u)

    def _unscaled(self, rescaled: Tensor) -> Tensor:
        """The number u with this g(u)."""
        u = torch.where(self.kind == LOG, torch.where(rescaled > 0, rescaled.exp(), rescaled + 1), rescaled)
        return torch.where(self.kind == ASINH, rescaled.sinh(), u)

    def _log_slope(self, u: Tensor) -> Tensor:
        of_log = torch.where(self.kind == LOG, -u.clamp(min=1).log(), 0.0)
        # log √(u² + 1) without squaring a large u
        of_asinh = -torch.hypot(u, torch.ones_like(u)).log()
        return torch.where(self.kind == ASINH, of_asinh, of_log) - self.width.log()


def _is_constant(x: Tensor) -> Tensor:
    """Which columns of (n, *shape) have at most one value; rounding would give them a tiny variance."""
    return x.nan_to_num(math.inf).amin(0) >= x.nan_to_num(-math.inf).amax(0)


def _scale_of(values: Tensor) -> tuple[int, float, float]:
    """The scale of a column: its position in `_SCALES`, its centre and its width."""
    ordered = values.sort().values
    lowest, low, centre, high = (ordered[len(values) * quarter // 4].item() for quarter in range(4))
    choices = [(LINEAR, 0.0, 1.0)]
    if lowest == ordered[-1]:
        return choices[0]
    if lowest > 0:
        choices.append((LOG, 0.0, lowest / _LOG_BELOW))
    if high > low:
        choices.append((ASINH, centre, (high - low) / 2))
    scales = ColumnScales((1,))
    best, best_fit = choices[0], -math.inf
    for choice in choices:
        for buffer, value in zip((scales.kind, scales.centre, scales.width), choice, strict=True):
            buffer.fill_(value)
        rescaled, log_slope = scales._rescale(values.unsqueeze(1).cpu())
        # The mean log-density of a normal distribution fitted to g, up to a constant.
        density = (log_slope.mean() - rescaled.std(correction=0).log()).item()
        fit = density + _WORTHWHILE * (choice[0] == LINEAR)
        if fit > best_fit:
            best, best_fit = choice, fit
    return best


def _nearest_decimal(x: Tensor) -> Tensor:
    """The numbers of at most four decimals that are nearest: 3.6 instead of 3.6000000000000005."""
    scaled = x * 10.0**_DECIMALS
    return torch.where(scaled.abs() < _MAX_WHOLE, scaled.round() / 10.0**_DECIMALS, x)


def _step_of(values: Tensor) -> float:
    """The step between the numbers of a column, of up to four decimals; 0 if there is none or it is fine."""
    for decimals in range(_DECIMALS + 1):
        scaled = values * 10.0**decimals
        if scaled.abs().max() > _MAX_WHOLE:
            return 0.0
        whole = scaled.round()
        if ((scaled - whole).abs() <= 1e-9 * scaled.abs().clamp(min=1)).all():
            differences = (whole - whole.min()).long().unique().cpu().numpy()
            step = (int(np.gcd.reduce(differences)) or 1) / 10.0**decimals
            return step if values.std(correction=0).item() < _COARSE * step else 0.0
    return 0.0
