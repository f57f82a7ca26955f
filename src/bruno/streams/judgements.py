"""Judgements of many elements at once, as arrays."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from bruno.process import Evidence
from bruno.tasks.anomaly import Judgement
from bruno.tasks.conformal import GroupScores
from bruno.tasks.detector import Detector


@dataclass(eq=False)
class Judgements:
    """The judgements of a batch of rows, in order; row i alone is ``judgements[i]``, a `Judgement`.

    Attributes:
        score: log p(x | set) − log p(x), minus the `shortfall`; without evidence, the score is minus the
            shortfall alone.
        seen: number of elements in the evidence; a fraction if the set forgets by a half-life.
        position: number of elements of the set before this one.
        threshold: the score below which a row is an outlier; NaN without evidence, during warm-up, or if
            the row is judged by its rank within the set.
        outlier: whether the row is flagged: by the threshold, by its p-value, or as out-of-distribution.
        out_of_distribution: whether log p(x) is below the floor.
        p: the p-value; NaN if not calibrated, or during warm-up.
        exact: whether the p-value is exact; otherwise it is estimated.
        p_within: the p-value within the set; NaN unless requested.
        in_evidence: whether the row is in the evidence.
        skipped: whether the row was skipped, as its offset shows that it was judged before. Its other values
            are NaN or 0.
        incomplete: whether this row or an earlier one of its set had missing numbers.
        evidence: evidence of the set of each row before the row, if requested; counts are rounded.
    """

    score: Float[np.ndarray, " n"]
    seen: Float[np.ndarray, " n"]
    position: Int[np.ndarray, " n"]
    threshold: Float[np.ndarray, " n"]
    outlier: Bool[np.ndarray, " n"]
    out_of_distribution: Bool[np.ndarray, " n"]
    p: Float[np.ndarray, " n"]
    exact: Bool[np.ndarray, " n"]
    p_within: Float[np.ndarray, " n"]
    in_evidence: Bool[np.ndarray, " n"]
    skipped: Bool[np.ndarray, " n"]
    incomplete: Bool[np.ndarray, " n"]
    evidence: Evidence | None = None

    @classmethod
    def empty(cls, n: int) -> Judgements:
        """Arrays for n judgements, all marked as skipped."""
        numbers, flags = np.empty((4, n)), np.zeros((6, n), np.bool_)
        numbers.fill(math.nan)
        score, threshold, p, p_within = numbers
        outlier, ood, exact, in_evidence, skipped, incomplete = flags
        skipped[:] = True
        seen, position = np.zeros(n), np.zeros(n, np.int64)
        return cls(
            score,
            seen,
            position,
            threshold,
            outlier,
            ood,
            p,
            exact,
            p_within,
            in_evidence,
            skipped,
            incomplete,
        )

    def __len__(self) -> int:
        return len(self.score)

    def __iter__(self) -> Iterator[Judgement]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, i: int) -> Judgement:
        p, seen = _number(self.p[i]), float(self.seen[i])
        return Judgement(
            float(self.score[i]),
            round(seen),
            _number(self.threshold[i]),
            bool(self.outlier[i]),
            bool(self.out_of_distribution[i]),
            p,
            None if p is None else "exact" if self.exact[i] else "estimated",
            _number(self.p_within[i]),
        )


def _number(value: float) -> float | None:
    """A number as a Python float; None for NaN."""
    return None if math.isnan(value) else float(value)


class Rule:
    """Decides which elements are outliers, like `Detector`, but for arrays.

    Args:
        detector: threshold, rate and warm-up.
        window: number of elements of a window; None without one.
        forgets: whether sets forget by a half-life.
    """

    def __init__(self, detector: Detector, window: int | None, forgets: bool) -> None:
        self.detector, self._window, self._forgets = detector, window, forgets
        self._limits: dict[int, tuple[float, bool]] = {}
        scores = detector.threshold
        self._last = int(scores.positions[-1]) + 1 if isinstance(scores, GroupScores) else 0
        self._incomplete_too = isinstance(scores, GroupScores) and scores.incomplete

    def judge(self, found: Judgements) -> None:
        """Set threshold, p-value and outlier from score, evidence and position."""
        if len(found) == 1:  # a stream of one row at a time
            self._judge_one(found)
            return
        ood, detector = found.out_of_distribution, self.detector
        judged = (found.position >= detector.warm_up) & (found.seen > 0) & ~found.skipped
        found.outlier |= ood
        if not isinstance(detector.threshold, GroupScores):
            found.threshold[judged] = detector.threshold
            found.outlier |= judged & (found.score < detector.threshold)
            return
        rows = np.flatnonzero(judged)
        place = np.asarray(self._place(found.position[rows], found.seen[rows]), np.int64)
        self._judge_by_place(found, rows, place, detector.threshold)
        found.exact &= self._is_as_calibrated(found.position, found.incomplete)

    def _judge_one(self, found: Judgements) -> None:
        """Like `judge`, for one row: branches in Python are faster than numpy for a single number."""
        position, seen, detector = found.position.item(), found.seen.item(), self.detector
        found.outlier[0] = ood = found.out_of_distribution.item()
        if position < detector.warm_up or seen <= 0 or found.skipped.item():
            return
        if not isinstance(detector.threshold, GroupScores):
            found.threshold[0] = detector.threshold
            found.outlier[0] = ood or found.score.item() < detector.threshold
            return
        place = int(self._place(position, seen))
        threshold, exact = self._limit(place, detector.threshold)
        given = np.array([-math.inf if ood else found.score.item()])
        p = detector.threshold.p_values(given, place, "exact" if exact else "estimated").item()
        found.p[0], found.threshold[0], found.outlier[0] = p, threshold, ood or p <= detector.rate
        found.exact[0] = exact and self._is_as_calibrated(position, found.incomplete.item())

    def _judge_by_place(
        self,
        found: Judgements,
        rows: Int[np.ndarray, " n"],
        place: Int[np.ndarray, " n"],
        scores: GroupScores,
    ) -> None:
        order = np.argsort(place, kind="stable")
        starts = np.flatnonzero(np.diff(place[order], prepend=-1))
        for some in np.split(order, starts[1:]) if len(rows) else []:
            self._judge_at(found, rows[some], int(place[some[0]]), scores)

    def _judge_at(
        self, found: Judgements, rows: Int[np.ndarray, " n"], position: int, scores: GroupScores
    ) -> None:
        """Judge the rows at one position."""
        threshold, exact = self._limit(position, scores)
        given = np.where(found.out_of_distribution[rows], -math.inf, found.score[rows])
        p = scores.p_values(given, position, "exact" if exact else "estimated")
        found.p[rows], found.threshold[rows], found.exact[rows] = p, threshold, exact
        found.outlier[rows] |= p <= self.detector.rate

    def _limit(self, position: int, scores: GroupScores) -> tuple[float, bool]:
        """The threshold at a position, and whether p-values are exact there."""
        if position not in self._limits:
            exact = scores.basis(position, self.detector.rate) == "exact"
            self._limits[position] = scores.threshold(position, self.detector.rate), exact
        return self._limits[position]

    def _place(self, position: Any, seen: Any) -> Any:
        """The position in the calibration with as much evidence as these rows; scores are compared there.

        The arguments are arrays, or numbers for one row.
        """
        smaller: Any = min if isinstance(position, int) else np.minimum
        if self._window is not None:
            position = smaller(position, self._window)
        if self._forgets:
            position = smaller(position, np.maximum(np.rint(seen), 1))
        return smaller(position, self._last)

    def _is_as_calibrated(self, position: Any, incomplete: Any) -> Any:
        """Whether the evidence of a set so far was formed as in the groups of the calibration.

        Missing numbers are imputed there if the groups have any, too. A full window of exchangeable elements
        also counts as such, if no element was excluded by its score.
        """
        if self._forgets:
            return False
        fine = self._incomplete_too | (incomplete ^ True)
        if self._window is None:
            return fine
        return fine & ((position <= self._window) | self.detector.count_all)
