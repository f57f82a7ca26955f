"""p-values of scores from the scores of clean groups: exact by exchangeability, or estimated by pooling.

A new set is one more group, exchangeable with G held-out groups that are judged in the same way. Let f_g be
the fraction of the scores of group g at the same position, over random orders, that are at most the new
score. Then p = (1 + Σ f_g)/(G + 1) satisfies P(p ≤ a) ≤ a for an element of a clean set, whatever the model.
The guarantee is marginal: it holds for each element on average over calibrations and new sets.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from bruno.checkpoint import require

Basis = Literal["exact", "estimated"]

LEVELS = 128  # scores that are kept for each group at each position
_GRID = 128  # levels of the estimated distribution
_LOWEST_LEVEL = 1e-6
_BANDWIDTH = 0.25  # of the smoothing over the logarithm of the position
_NEAR = 0.5  # difference of the logarithm of near positions, for groups in the order of time
_ENOUGH = 400  # scores of near positions that are pooled, if there are so many groups
_SHIFTS = 33  # number of shifts that spread the scores of a group, at most
_LOCATION = 0.1  # the spread of this quantile between groups estimates the spread between new groups
_TAIL = 0.1  # the excess of this fraction of lowest scores is the scale of the tail below the lowest score
_TAIL_SHAPE = 0.5  # of the generalised Pareto tail below the lowest score: as heavy as Student-t with ν = 2
_GROUPS_NEEDED = 2  # see `smallest_exact`

Numbers = NDArray[np.float64]


class PValue(NamedTuple):
    """A p-value and its basis: "exact" by exchangeability of groups, or "estimated" by pooling."""

    p: float
    basis: Basis


@dataclass(frozen=True, eq=False)
class GroupScores:
    """Scores of clean groups by position, and the p-values that they support.

    Attributes:
        positions: numbers of elements before the one that is scored, increasing.
        scores: lowest score of each of `LEVELS` blocks of the sorted scores of each group at each position;
            NaN for a group that is too small. Block j has the relative ranks from (j/`LEVELS`)² to
            ((j + 1)/`LEVELS`)², so that the lower tail keeps its resolution. A block counts in full as soon
            as its lowest score does, so that p-values are never too low.
        elements: number of different elements behind the scores.
        unseen: whether groups and cutoffs support exact p-values: the groups were not trained on, and the
            cutoffs were set on other data.
        incomplete: whether some elements had missing numbers, which were imputed as in a new set.
    """

    positions: Int[Tensor, " positions"]
    scores: Float[Tensor, "positions groups levels"]
    elements: int
    unseen: bool = True
    incomplete: bool = False

    @classmethod
    def of(
        cls,
        positions: Int[Tensor, " positions"],
        scores: Float[Tensor, "positions groups draws"],
        elements: int,
        *,
        unseen: bool = True,
        incomplete: bool = False,
    ) -> GroupScores:
        """Reduce the scores of groups over random orders to blocks; NaN marks draws that do not exist."""
        ordered, count = scores.double().sort(-1).values, (~scores.isnan()).sum(-1, keepdim=True)  # NaN last
        starts = torch.arange(LEVELS, dtype=torch.double, device=scores.device).div(LEVELS).square()
        ranks = (starts * count).long()
        kept = torch.where(count > 0, ordered.gather(-1, ranks.clamp(max=scores.shape[-1] - 1)), math.nan)
        return cls(positions.cpu(), kept.float().cpu(), elements, unseen, incomplete)

    @classmethod
    def checked(
        cls,
        positions: Tensor,
        scores: Tensor,
        elements: int,
        *,
        groups: int,
        unseen: bool = True,
        incomplete: bool = False,
    ) -> GroupScores:
        """Scores that were read from a file; raises ValueError if they are not those of so many groups."""
        require(positions.dtype == torch.long and positions.ndim == 1, "positions", "whole numbers")
        require(len(positions) > 0 and int(positions[0]) > 0, "positions", "at least 1")
        require(bool((positions.diff() > 0).all()), "positions", "increasing")
        require(scores.is_floating_point() and scores.ndim == 3, "scores", "(positions, groups, levels)")
        wanted = (len(positions), groups, LEVELS)
        require(tuple(scores.shape) == wanted, "scores", f"of shape {wanted}")
        missing = scores.isnan()
        whole = torch.equal(missing.any(-1), missing.all(-1))
        require(whole, "scores", "NaN for all levels of a group, or none")
        require(not bool(missing.all(-1).all(-1).any()), "scores", "of at least one group at each position")
        require(not bool((scores == math.inf).any()), "scores", "below infinity")
        return cls(positions, scores.float(), elements, unseen, incomplete)

    # --- p-values ----------------------------------------------------------------------------------------

    def groups_at(self, position: int) -> int:
        """Number of groups that support exact p-values at a position; 0 if there are none."""
        place = self._places.get(position)
        return len(self._tails[place].values) // LEVELS if place is not None and self.unseen else 0

    def smallest_exact(self, position: int) -> float:
        """The smallest false-alarm rate that is supported exactly at a position, 2/(G + 1).

        p-values are exact down to 1/(G + 1), but conservative: p counts the unknown fraction of the new set
        as 1, so only about a − 1/G of the clean elements have p ≤ a. For a rate a below 2/(G + 1), that would
        be less than half of the rate.
        """
        return min(1.0, _GROUPS_NEEDED / (self.groups_at(position) + 1))

    def basis(self, position: int, rate: float) -> Basis:
        """The basis of p-values at a position that are compared with this false-alarm rate."""
        return "exact" if rate >= self.smallest_exact(position) - 1e-12 and rate < 1 else "estimated"

    def p_values(
        self, scores: Float[Tensor, " n"] | Numbers, position: int, basis: Basis
    ) -> Float[np.ndarray, " n"]:
        """p-values of scores at a position, with this basis."""
        scores = np.asarray(scores, dtype=np.float64)
        if basis == "exact":
            tail = self._tails[self._places[position]]
            below = tail.values.searchsorted(_rounded(scores), side="right")
            return np.minimum((1 + tail.weight[below]) / (self.groups_at(position) + 1), 1.0)
        found: Numbers = np.interp(scores, self._curve(position), self._levels)
        lost = scores == -math.inf
        if np.count_nonzero(lost):
            found[lost] = np.maximum(found[lost], self._infinite_fraction(position))
        return found

    def p_value(self, score: float, position: int, rate: float) -> PValue:
        """The p-value of one score at a position, to be compared with this false-alarm rate."""
        basis = self.basis(position, rate)
        return PValue(float(self.p_values(np.array([score]), position, basis)[0]), basis)

    def threshold(self, position: int, rate: float, basis: Basis | None = None) -> float:
        """The score below which p ≤ rate, for p-values with the basis of this rate or with another one."""
        if (basis or self.basis(position, rate)) == "estimated":
            return float(np.interp(rate, self._levels, self._curve(position)))
        tail = self._tails[self._places[position]]
        most = rate * (self.groups_at(position) + 1) - 1 + 1e-9
        place = int(np.searchsorted(tail.weight[1:], most, side="right"))
        return float(tail.values[place]) if place < len(tail.values) else math.inf

    # --- exact -------------------------------------------------------------------------------------------

    @cached_property
    def _known(self) -> list[int]:
        return [int(position) for position in self.positions]

    @cached_property
    def _places(self) -> dict[int, int]:
        return {position: place for place, position in enumerate(self._known)}

    @cached_property
    def _tails(self) -> list[_Tail]:
        """Per position: the scores of all groups, sorted, and Σ f_g at each."""
        steps = np.diff((np.arange(LEVELS + 1) / LEVELS) ** 2)
        tails = []
        for scores in self.scores.numpy():
            scores = scores[~np.isnan(scores[:, 0])]
            order = np.argsort(scores, axis=None, kind="stable")
            weight = np.tile(steps, len(scores))[order]
            tails.append(_Tail(scores.flatten()[order].astype(np.float64), np.cumsum([0.0, *weight])))
        return tails

    # --- estimated ---------------------------------------------------------------------------------------

    @cached_property
    def _levels(self) -> Numbers:
        """Levels of the estimated distribution."""
        return np.geomspace(_LOWEST_LEVEL, 1.0, _GRID)

    def _infinite_fraction(self, position: int) -> float:
        """The fraction of the scores at a position that are −∞, those of out-of-distribution elements."""
        place = int(np.abs(self.positions.numpy() - position).argmin())
        tail = self._tails[place]
        lost = np.searchsorted(tail.values, -math.inf, side="right")
        return float(tail.weight[lost] / tail.weight[-1])

    def _curve(self, position: int) -> Numbers:
        """Quantiles at `_levels` at a position, interpolated between positions."""
        known = self._known
        position = min(max(position, known[0]), known[-1])
        if (kept := self._kept_curves.get(position)) is not None:
            return kept
        after = bisect.bisect_left(known, position)
        before = max(0, after - 1)
        first, last, now = np.log1p([known[before], known[after], position])
        share = (now - first) / (last - first) if last > first else 1.0
        curve: Numbers = (1 - share) * self._curves[before] + share * self._curves[after]
        self._kept_curves[position] = curve
        return curve

    @cached_property
    def _kept_curves(self) -> dict[int, Numbers]:
        """A cache of curves by position: a long stream needs the curve of the last position for every row."""
        return {}

    @cached_property
    def _curves(self) -> Float[np.ndarray, "positions levels"]:
        """Quantiles of the pooled scores, smoothed over positions."""
        raw = np.stack([self._pooled_quantiles(*drawn) for drawn in self._drawn_scores()])
        if self._is_ordered:  # near positions are pooled
            return np.maximum.accumulate(raw, axis=1)
        places = np.log1p(self.positions.numpy())
        weight = np.exp(-0.5 * ((places[:, None] - places) / _BANDWIDTH) ** 2)
        weight *= self._group_counts.numpy()
        smooth = weight @ raw / weight.sum(1, keepdims=True)
        return np.maximum.accumulate(smooth, axis=1)

    @cached_property
    def _group_counts(self) -> Int[Tensor, " positions"]:
        """Number of groups with scores, by position."""
        return (~self.scores[:, :, 0].isnan()).sum(1)

    @cached_property
    def _is_ordered(self) -> bool:
        """Whether each group has one score at each position, as in the order of time."""
        first = self.scores[:, :, 0]
        return bool(((first == self.scores[:, :, -1]) | first.isnan()).all())

    def _drawn_scores(self) -> Iterator[tuple[Float[np.ndarray, "groups levels"], int]]:
        """The scores at each position, and the number of elements behind them.

        A group in the order of time has one score at each position. Then its scores at near positions are
        further draws: the mean of the quantiles of so few scores would hide their tail. Scores change from
        position to position, so no more positions are pooled than are needed.
        """
        scores = self.scores
        if not self._is_ordered:
            yield from ((one.numpy(), self.elements) for one in scores)
            return
        places = self.positions.double().log1p()
        for place in places:
            distance = (places - place).abs()
            nearest = distance.argsort(stable=True)
            enough = int((self._group_counts[nearest].cumsum(0) < _ENOUGH).sum()) + 1
            near = scores[nearest[:enough][distance[nearest[:enough]] <= _NEAR], :, 0].T
            drawn = self.of(self.positions[:1], near.unsqueeze(0), self.elements).scores[0]
            yield drawn.numpy(), int((~near.isnan()).sum())

    def _pooled_quantiles(self, scores: Float[np.ndarray, "groups levels"], elements: int) -> Numbers:
        """Quantiles at `_levels` of an element of a new group, from scores of so many different elements.

        The scores of each group are spread by Student-t shifts, because the mean of G groups varies, and a
        new group varies around it. With s the standard deviation of a low quantile between groups, the groups
        alone have variance s²·(G − 1)/G; a new group has s²·(G + 1)/G, with G − 1 degrees of freedom. A
        single group does not show how groups differ: s is then the standard deviation of its scores, with one
        degree of freedom.
        """
        scores = scores[~np.isnan(scores[:, 0])].astype(np.float64)
        scores = np.maximum(scores, scores[np.isfinite(scores)].min(initial=0.0) - 1.0)  # not −∞
        groups = len(scores)
        between = scores[:, int(LEVELS * math.sqrt(_LOCATION))] if groups > 1 else scores.flatten()
        shifts, share = _student_t(max(3, min(_SHIFTS, 512 // groups)), max(1, groups - 1))
        weight = np.diff((np.arange(LEVELS + 1) / LEVELS) ** 2) / groups
        spread = scores[:, :, None] + between.std(ddof=1) * math.sqrt(2 / groups) * shifts
        order = np.argsort(spread, axis=None, kind="stable")
        share = np.broadcast_to(weight[:, None] * share, spread.shape).reshape(-1)[order]
        quantiles: Numbers = np.interp(self._levels, np.cumsum(share), spread.reshape(-1)[order])
        return self._with_tail(quantiles, elements)

    def _with_tail(self, quantiles: Numbers, elements: int) -> Numbers:
        """The quantiles, with a heavy tail as an upper limit below the level of one element, 1/(N + 1).

        N elements say nothing about rarer scores. The tail is a generalised Pareto distribution that starts
        at the quantile of this level, with the mean excess of the lowest scores as its scale.
        """
        lowest = 1 / (elements + 1)
        start, edge = np.interp([lowest, max(_TAIL, 2 * lowest)], self._levels, quantiles)
        inside = np.interp(np.linspace(lowest, max(_TAIL, 2 * lowest), 64), self._levels, quantiles)
        excess = (self._levels / lowest) ** -_TAIL_SHAPE - 1
        tail = start - (edge - inside.mean()) / _TAIL_SHAPE * excess
        return np.where(self._levels < lowest, np.minimum(quantiles, tail), quantiles)


class _Tail(NamedTuple):
    """Sorted scores, and the sum of weights of those before each place."""

    values: Numbers
    weight: Numbers


def _rounded(scores: Numbers) -> Numbers:
    """Scores rounded like those that are kept."""
    return scores.astype(np.float32).astype(np.float64)


def _student_t(parts: int, dof: int) -> tuple[Numbers, Numbers]:
    """Quantiles of Student's t at the midpoints of parts of its mass, finer in the lower tail; the parts."""
    edges = (np.arange(parts + 1) / parts) ** 3
    grid = np.sinh(np.linspace(-25, 25, 20001))  # dense near 0, far into the tails
    density = (1 + grid**2 / dof) ** (-(dof + 1) / 2)
    mass = np.cumsum(np.concatenate([[0.0], (density[1:] + density[:-1]) / 2 * np.diff(grid)]))
    return np.interp((edges[1:] + edges[:-1]) / 2, mass / mass[-1], grid), np.diff(edges)


def benjamini_hochberg(p: Float[Tensor, " n"] | Numbers, rate: float) -> Bool[np.ndarray, " n"]:
    """Which of n p-values to flag so that the false-discovery rate is at most `rate`.

    With the p-values sorted, p_(1) ≤ … ≤ p_(n), flags those up to the largest k with p_(k) ≤ rate·k/n.
    """
    p = np.asarray(p, dtype=np.float64)
    order = np.argsort(p, kind="stable")
    passed = p[order] <= rate * np.arange(1, len(p) + 1) / len(p)
    most = np.flatnonzero(passed)[-1] + 1 if passed.any() else 0
    flagged = np.zeros(len(p), dtype=bool)
    flagged[order[:most]] = True
    return flagged
