"""Predictive densities for streams: the process in numpy, from the evidence of many sets at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from bruno.process import ExchangeableProcess
from bruno.process.distributions import log_gamma_half_step
from bruno.streams.evidence import SetEvidence, evidence_inside, without_element

Numbers = NDArray[np.float64]
_TABLE = 2048  # counts whose constants are tabulated; for larger counts, Stirling's series is exact
_BLOCK, _BLOCKS_BYTES = 32, 2**24  # coefficients are computed for blocks of counts, cached in this memory


class _Coefficients(NamedTuple):
    """The part of the predictive of sets that depends on their counts alone.

    With the mean and the scatter of a set, and m0 the mean of the process::

        location = m0 + gain·(mean − m0)
        spread = base + within·scatter + between·(mean − m0)²         dof · scale²; Gaussian: the variance
        log p = constant − ½ Σ (log(spread) + power·log(1 + d))       d = (z − location)²/spread
        log p = constant − ½ Σ (log(spread) + d)                      Gaussian, whose spread is the base
    """

    gain: Float[np.ndarray, "*n dim"]
    base: Float[np.ndarray, "*n dim"]
    within: Float[np.ndarray, "*n dim"] | None
    between: Float[np.ndarray, "*n dim"] | None
    power: Float[np.ndarray, "*n dim"] | None
    constant: Any  # (*n,), a number for one set

    def at(self, place: int) -> _Coefficients:
        """The coefficients of one set."""
        parts: list[Any] = [None if part is None else part[place] for part in self]
        return _Coefficients(*parts)

    def take(self, places: Int[np.ndarray, "*n"]) -> _Coefficients:
        """The coefficients of several sets."""
        parts: list[Any] = [None if part is None else part.take(places, 0) for part in self]
        return _Coefficients(*parts)


class RowDensities:
    """log p(z | evidence) of `StudentTProcess` or `GaussianProcess` in float64, from copied parameters.

    The formulas are those of the process. All operations are elementwise, so that a row has the same density
    in any batch, bit for bit. Counts may be fractions: in a set with a half-life, weights are below 1.
    """

    def __init__(self, process: ExchangeableProcess) -> None:
        with torch.no_grad():
            mean, r, e, excess = process.parameters_in_double()
        self.dim = process.dim
        self._mean, self._r, self._e = (part.cpu().numpy() for part in (mean, r, e))
        self._excess = None if excess is None else excess.cpu().numpy()
        self._table = self._constants(np.arange(_TABLE, dtype=np.float64))
        self._blocks: dict[int, _Coefficients] = {}
        self._most_blocks = max(1, _BLOCKS_BYTES // (5 * 8 * _BLOCK * self.dim))
        self._none = self._coefficients(np.zeros(1)).at(0)

    def prior(self, z: Float[np.ndarray, "*n dim"]) -> Float[np.ndarray, "*n"]:
        """log p(z) without evidence."""
        return self._density(z - self._mean, self._none.base, self._none)

    def scores_within(
        self,
        z: Float[np.ndarray, "k m dim"],
        inside: Bool[np.ndarray, "k m"],
        prior: Float[np.ndarray, " km"],
    ) -> Float[np.ndarray, "k m"]:
        """log p(z_i | all others of the set that are inside) − log p(z_i); `prior` is log p(z_i)."""
        n, mean, scatter = evidence_inside(z, inside)
        given = SetEvidence(n[:, None, None], mean[:, None], scatter[:, None])
        # An element that is not inside is not in the evidence, so nothing is removed for it.
        others = without_element(given, z, inside[:, :, None].astype(np.float64))
        count = others.n[..., 0]
        found = self._log_prob(z, self._up_to(z.shape[1], count), others.mean, others.scatter)
        return np.asarray(found - prior.reshape(found.shape))

    def scores_of(self, z: Float[np.ndarray, "k m dim"]) -> Callable[[Tensor], Tensor]:
        """A function from the mask of elements inside to `scores_within` of z, for `typical_elements`."""
        prior = self.prior(z.reshape(-1, z.shape[-1]))
        return lambda inside: torch.from_numpy(self.scores_within(z, inside.numpy(), prior))

    def __call__(
        self,
        z: Float[np.ndarray, "*n dim"],
        count: Float[np.ndarray, "*n"] | float,
        mean: Float[np.ndarray, "*n dim"],
        scatter: Float[np.ndarray, "*n dim"],
    ) -> Float[np.ndarray, "*n"]:
        """log p(z | evidence) of the next element of each set, or of one set, whose count is a number."""
        given = self._coefficients(count) if isinstance(count, np.ndarray) else self._coefficients_of(count)
        return self._log_prob(z, given, mean, scatter)

    def _log_prob(self, z: Numbers, given: _Coefficients, mean: Numbers, scatter: Numbers) -> Numbers:
        """log p(z | evidence), with the coefficients of the counts of the evidence."""
        shift = mean - self._mean
        return self._density(z - self._mean - given.gain * shift, _spread(given, shift, scatter), given)

    def _density(self, residual: Numbers, spread: Numbers, given: _Coefficients) -> Numbers:
        """The log-density of residuals z − location."""
        distance = residual * residual
        distance /= spread
        if given.power is not None:
            np.log1p(distance, out=distance)
            distance *= given.power
        distance += np.log(spread)
        return np.asarray(given.constant - 0.5 * np.add.reduce(distance, -1))

    def location_and_scale(
        self,
        count: Float[np.ndarray, " n"],
        mean: Float[np.ndarray, "n dim"],
        scatter: Float[np.ndarray, "n dim"],
    ) -> tuple[Float[np.ndarray, "n dim"], Float[np.ndarray, "n dim"]]:
        """Location and scale of the predictive of each set."""
        given, shift = self._coefficients(count), mean - self._mean
        dof = 1.0 if self._excess is None else 2 + self._excess + count[:, None]
        return self._mean + given.gain * shift, np.sqrt(_spread(given, shift, scatter) / dof)

    # --- coefficients ------------------------------------------------------------------------------------

    def _coefficients_of(self, count: float) -> _Coefficients:
        """`_coefficients` of one set, from a cached block of counts, as the next count is one more."""
        if not count.is_integer():
            return self._coefficients(np.array([count])).at(0)
        block, place = divmod(int(count), _BLOCK)
        return self._block(block).at(place)

    def _up_to(self, most: int, count: Float[np.ndarray, "*n"]) -> _Coefficients:
        """`_coefficients` of whole counts up to `most`; from a cached block if the counts are small."""
        return self._block(0).take(count.astype(np.intp)) if most < _BLOCK else self._coefficients(count)

    def _block(self, block: int) -> _Coefficients:
        """The coefficients of a block of `_BLOCK` counts, which are cached."""
        if block not in self._blocks:
            if len(self._blocks) >= self._most_blocks:
                self._blocks.clear()
            first = block * _BLOCK
            self._blocks[block] = self._coefficients(np.arange(first, first + _BLOCK, dtype=np.float64))
        return self._blocks[block]

    def _coefficients(self, count: Float[np.ndarray, "*n"]) -> _Coefficients:
        """The coefficients of counts n, with w = e + n·r and k = e·(w + r)/w as in the process."""
        n, r, e = count[..., None], self._r, self._e
        w = e + n * r
        gain, k = n * r / w, e * (w + r) / w
        if self._excess is None:
            return _Coefficients(gain, k, None, None, None, self._constant(count))
        power = 3 + self._excess + n
        return _Coefficients(gain, k * self._excess, k / e, k * n / w, power, self._constant(count))

    def _constant(self, count: Float[np.ndarray, "*n"]) -> Float[np.ndarray, "*n"]:
        """`_constants` from a table or by a series; each row is treated separately."""
        if self._excess is None:
            return np.full(count.shape, -0.5 * self.dim * math.log(2 * math.pi))
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
        """Σ_d log Γ((ν+n+1)/2) − log Γ((ν+n)/2) − ½ log π."""
        if self._excess is None:
            return np.zeros(len(count))
        half_step = log_gamma_half_step(torch.from_numpy((2 + self._excess + count[:, None]) / 2)).numpy()
        return np.asarray((half_step - 0.5 * math.log(math.pi)).sum(1))

    def _constants_by_series(self, count: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        """`_constants` of large counts, by the series of `log_gamma_half_step`, ½ log(u) + 1/(64 u²)."""
        assert self._excess is not None
        u = (2 + self._excess + count[:, None]) / 2 - 0.25
        return np.asarray((0.5 * np.log(u / math.pi) + 1 / (64 * u * u)).sum(1))


def _spread(given: _Coefficients, shift: Numbers, scatter: Numbers) -> Numbers:
    """base + within·scatter + between·(mean − m0)²; of a Gaussian process, the base."""
    if given.within is None or given.between is None:
        return given.base
    spread = given.within * scatter
    spread += given.base
    spread += given.between * (shift * shift)
    return np.asarray(spread)
