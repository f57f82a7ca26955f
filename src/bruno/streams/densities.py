"""Predictive densities for streams: the process in numpy, from the evidence of many sets at once."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray

from bruno.process import ExchangeableProcess
from bruno.process.distributions import log_gamma_half_step

Numbers = NDArray[np.float64]
_TABLE = 2048  # counts whose constants are tabulated; for larger ones Stirling's series is exact


class SetEvidence(NamedTuple):
    """Count, mean and scatter of sets."""

    n: Float[np.ndarray, " k"]
    mean: Float[np.ndarray, "k dim"]
    scatter: Float[np.ndarray, "k dim"]


class _Shape(NamedTuple):
    """The predictive of sets without its location: Student-t, or Gaussian without a power.

    With d = residual²/spread, log p = constant − ½ Σ (log_scale + power · log(1 + d)), or + d.
    """

    spread: Float[np.ndarray, "n dim"]
    log_scale: Float[np.ndarray, "n dim"]
    power: Float[np.ndarray, "n dim"] | None
    constant: Float[np.ndarray, " n"]


def evidence_inside(z: Float[np.ndarray, "k m dim"], inside: Bool[np.ndarray, "k m"]) -> SetEvidence:
    """The evidence of the elements of sets that are inside."""
    weight = inside[:, :, None].astype(np.float64)
    n = weight.sum(1)
    mean = (weight * z).sum(1) / np.maximum(n, 1.0)
    gap = z - mean[:, None]
    return SetEvidence(n[:, 0], mean, (weight * gap * gap).sum(1))


class RowDensities:
    """log p(z | evidence) of `StudentTProcess` or `GaussianProcess`, in float64, from a copy of parameters.

    The formulas are those of the process. Everything is elementwise, so that a row has the same density in
    any batch, bit for bit. Counts may be fractions: those of a set that forgets have weights below 1.
    """

    def __init__(self, process: ExchangeableProcess) -> None:
        with torch.no_grad():
            mean, r, e, excess = process._parameters_in_double()
        self.dim = process.dim
        self._mean, self._r, self._e = (part.cpu().numpy() for part in (mean, r, e))
        self._excess = None if excess is None else excess.cpu().numpy()
        self._table = self._constants(np.arange(_TABLE, dtype=np.float64))
        none = np.zeros((1, self.dim))
        self._before = self._shape(np.zeros(1), self._location_and_spread(np.zeros(1), none, none)[1])

    def prior(self, z: Float[np.ndarray, "n dim"]) -> Float[np.ndarray, " n"]:
        """log p(z) without evidence."""
        return self._density(z - self._mean, self._before)

    def scores_within(
        self,
        z: Float[np.ndarray, "k m dim"],
        inside: Bool[np.ndarray, "k m"],
        prior: Float[np.ndarray, " km"],
    ) -> Float[np.ndarray, "k m"]:
        """log p(z_i | all others of the set that are inside) − log p(z_i); `prior` is log p(z_i)."""
        weight = inside[:, :, None].astype(np.float64)
        n, mean, scatter = (part[:, None] for part in evidence_inside(z, inside))
        gap = z - mean
        # An element inside is removed from the evidence; one outside is not part of it.
        rest = n[:, :, None] - weight
        others = np.where(rest > 0, mean - weight * gap / np.maximum(rest, 1.0), 0.0)
        left = np.where(rest > 1, np.maximum(scatter - weight * gap * (z - others), 0.0), 0.0)
        k, m, dim = z.shape
        found = self(z.reshape(-1, dim), rest.reshape(-1), others.reshape(-1, dim), left.reshape(-1, dim))
        return np.asarray(found - prior).reshape(k, m)

    def __call__(
        self,
        z: Float[np.ndarray, "n dim"],
        count: Float[np.ndarray, " n"],
        mean: Float[np.ndarray, "n dim"],
        scatter: Float[np.ndarray, "n dim"],
    ) -> Float[np.ndarray, " n"]:
        """log p(z | evidence) of the next element of each set."""
        offset, spread = self._location_and_spread(count, mean, scatter)
        return self._density(z - self._mean - offset, self._shape(count, spread))

    def _density(self, residual: Float[np.ndarray, "n dim"], shape: _Shape) -> Float[np.ndarray, " n"]:
        """The log-density of residuals z − location."""
        distance = residual * residual / shape.spread
        density = shape.log_scale + (distance if shape.power is None else shape.power * np.log1p(distance))
        return np.asarray(shape.constant - 0.5 * density.sum(1))

    def _shape(self, count: Float[np.ndarray, " n"], spread: Float[np.ndarray, "n dim"]) -> _Shape:
        if self._excess is None:
            constant = np.full(1, -0.5 * self.dim * math.log(2 * math.pi))
            return _Shape(spread, np.log(spread), None, constant)
        dof = 2 + self._excess + count[:, None]
        return _Shape(spread, np.log(spread / dof), dof + 1, self._constant(count))

    def location_and_scale(
        self,
        count: Float[np.ndarray, " n"],
        mean: Float[np.ndarray, "n dim"],
        scatter: Float[np.ndarray, "n dim"],
    ) -> tuple[Float[np.ndarray, "n dim"], Float[np.ndarray, "n dim"]]:
        """Location and scale of the predictive of each set."""
        offset, spread = self._location_and_spread(count, mean, scatter)
        dof = 1.0 if self._excess is None else 2 + self._excess + count[:, None]
        return self._mean + offset, np.sqrt(spread / dof)

    def _location_and_spread(
        self, count: Numbers, mean: Numbers, scatter: Numbers
    ) -> tuple[Numbers, Numbers]:
        """location − m0, and dof · scale²; of a Gaussian process, the variance."""
        n, r, e = count[:, None], self._r, self._e
        nr = n * r
        w = e + nr
        shift = mean - self._mean
        offset = nr / w * shift
        k = e * (w + r) / w
        if self._excess is None:
            return offset, k
        return offset, k * (self._excess + scatter / e + n / w * shift * shift)

    def _constant(self, count: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        """`_constants`, from a table or by a series, chosen for each row alone."""
        whole = count.astype(np.intp)
        if whole.max(initial=0) < _TABLE and (whole == count).all():
            return np.asarray(self._table[whole])
        found = self._table[np.minimum(whole, _TABLE - 1)]
        large = count >= _TABLE
        if large.any():
            found[large] = self._constants_by_series(count[large])
        weighted = (np.floor(count) != count) & ~large
        if weighted.any():
            found[weighted] = self._constants(count[weighted])
        return np.asarray(found)

    def _constants(self, count: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        """Σ_d log Γ((ν+n+1)/2) − log Γ((ν+n)/2) − ½ log(π·(ν+n)); 0 for a Gaussian process."""
        if self._excess is None:
            return np.zeros(len(count))
        dof = 2 + self._excess + count[:, None]
        half_step = log_gamma_half_step(torch.from_numpy(dof / 2)).numpy()
        return np.asarray((half_step - 0.5 * np.log(math.pi * dof)).sum(1))

    def _constants_by_series(self, count: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        """The same by the series of `log_gamma_half_step`, ½ log(u) + 1/(64 u²), for large counts."""
        assert self._excess is not None
        dof = 2 + self._excess + count[:, None]
        u = dof / 2 - 0.25
        return np.asarray((0.5 * np.log(u / (math.pi * dof)) + 1 / (64 * u * u)).sum(1))
