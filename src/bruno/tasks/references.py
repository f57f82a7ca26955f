"""Reference scores for p-values: of draws from the model, or of held-out groups."""

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

_TAIL = 30  # the tail is fitted to this many lowest draws


@dataclass(frozen=True, eq=False)
class Reference:
    """Scores of elements drawn from the predictive of a set, for p-values under the model.

    p-values are those of the draws, with an exponential tail that is fitted to the lowest ones. They are then
    raised to a power, which corrects a model that is too narrow or too wide; see `SetScorer.fitted`.

    Attributes:
        ordered: scores of the draws, increasing.
        exponent: the power.
    """

    ordered: NDArray[np.float64]
    exponent: float = 1.0

    def p_values(self, scores: NDArray[np.float64]) -> NDArray[np.float64]:
        """Probability under the model of scores at most this low."""
        p = np.exp(np.interp(scores, self._scores, self._log_levels))
        below = np.minimum(scores - self._scores[0], 0.0) * self._slope
        found: NDArray[np.float64] = (p * np.exp(np.maximum(below, -700.0))) ** self.exponent
        return found

    def threshold(self, rate: float) -> float:
        """The score below which p < rate."""
        wanted = math.log(rate) / self.exponent
        if wanted < self._log_levels[0]:
            return float(self._scores[0] - (self._log_levels[0] - wanted) / self._slope)
        return float(np.interp(wanted, self._log_levels, self._scores))

    @property
    def _scores(self) -> NDArray[np.float64]:
        return self.ordered[_TAIL - 1 :]

    @property
    def _log_levels(self) -> NDArray[np.float64]:
        return _log_levels(len(self.ordered))

    @property
    def _slope(self) -> float:
        """The rate of the exponential tail, by maximum likelihood from the lowest draws."""
        gaps = self.ordered[_TAIL - 1] - self.ordered[: _TAIL - 1]
        return float(min(1e6, (_TAIL - 1) / max(gaps.sum(), 1e-300)))


@cache
def _log_levels(draws: int) -> NDArray[np.float64]:
    """log(k/(n + 1)) for k = `_TAIL`, …, n of n draws: the same for all references."""
    return np.log(np.arange(_TAIL, draws + 1) / (draws + 1))


class CalibratedReference(NamedTuple):
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
