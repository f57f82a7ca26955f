"""Null distributions of scores, for p-values: of draws from the model, or of held-out groups."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from bruno.tasks.batch_criteria import SetScale
from bruno.tasks.calibration import GroupCalibration
from bruno.tasks.conformal import GroupScores

_TAIL, _TAIL_DIVISOR = 30, 50  # the tail is fitted to the lowest fiftieth of the draws, at least to 30
_KEPT = 1000  # draws that a null distribution keeps, approximately


@dataclass(frozen=True, eq=False)
class PredictiveNull:
    """Scores of elements drawn from the predictive of a set, for p-values under the model.

    p-values are those of the draws, with an exponential tail that is fitted to the lowest ones. They are then
    raised to a power, which corrects a model that is too narrow or too wide; see `SetScorer.fitted`.

    Attributes:
        scores: some of the scores of the draws above the tail, increasing.
        log_levels: log of the fraction of draws that are at most as high as each of them.
        slope: rate of the exponential tail.
        exponent: the power.
    """

    scores: NDArray[np.float64]
    log_levels: NDArray[np.float64]
    slope: float
    exponent: float = 1.0

    @classmethod
    def of(cls, draws: NDArray[np.float64], exponent: float = 1.0) -> PredictiveNull:
        """The distribution of draws in increasing order; the slope is the maximum-likelihood estimate."""
        kept = _kept(len(draws))
        gaps = draws[kept.start] - draws[: kept.start]
        slope = float(min(1e6, len(gaps) / max(gaps.sum(), 1e-300)))
        return cls(draws[kept], _log_levels(len(draws)), slope, exponent)

    def p_values(self, scores: NDArray[np.float64]) -> NDArray[np.float64]:
        """Probability under the model of scores at most this low."""
        p = np.exp(np.interp(scores, self.scores, self.log_levels))
        below = np.minimum(scores - self.scores[0], 0.0) * self.slope
        found: NDArray[np.float64] = (p * np.exp(np.maximum(below, -700.0))) ** self.exponent
        return found

    def threshold(self, rate: float) -> float:
        """The score below which p < rate."""
        wanted = math.log(rate) / self.exponent
        if wanted < self.log_levels[0]:
            return float(self.scores[0] - (self.log_levels[0] - wanted) / self.slope)
        return float(np.interp(wanted, self.log_levels, self.scores))


def _kept(draws: int) -> slice:
    """Which of so many draws are kept: from the highest of the tail on, at equal distances."""
    return slice(max(_TAIL, draws // _TAIL_DIVISOR) - 1, None, max(1, draws // _KEPT))


@cache
def _log_levels(draws: int) -> NDArray[np.float64]:
    """log(k/(n + 1)) for each draw that is kept, the k-th lowest of n: the same for all sets."""
    return np.log(np.arange(1, draws + 1)[_kept(draws)] / (draws + 1))


class CalibratedNull(NamedTuple):
    """Scores of the held-out groups of a calibration, at the position of an element."""

    calibration: GroupCalibration
    size: int
    batch: bool
    rate: float
    scale: SetScale | None = None  # of a batch of images

    def p_values(self, scores: NDArray[np.float64]) -> NDArray[np.float64]:
        """p-values from the groups: exact if they support the rate, otherwise estimated."""
        groups, position = self._groups
        if self.scale is not None:
            scores = self.scale.standardised(torch.from_numpy(scores)).numpy()
        return groups.p_values(scores, position, groups.basis(position, self.rate))

    def threshold(self, rate: float) -> float:
        """The score below which p ≤ rate."""
        groups, position = self._groups
        found = groups.threshold(position, rate)
        return found if self.scale is None else self.scale.in_nats(found)

    @property
    def _groups(self) -> tuple[GroupScores, int]:
        if self.batch:
            return self.calibration.batch(self.size), self.size - 1
        return self.calibration.stream(), self.size
