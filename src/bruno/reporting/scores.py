"""Scores of sets prepared for pictures: rows, bins, clipping and cells."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

_FLAT = 2  # scores that are more than this many widths outside the range of most scores are clipped
_BULK = (0.005, 0.995)  # quantiles of the scores of inliers that must be visible
OUTLIER, CLIPPED, OUT_OF_DISTRIBUTION = 1, 2, 3  # marks of cells


class ScoreRow(NamedTuple):
    """The scores of one set, in the order of its elements.

    Attributes:
        name: name of the set.
        position: position of each element in its set.
        score: score of each element.
        threshold: threshold of each element; NaN without one.
        outlier: whether each element is an outlier.
        out_of_distribution: whether each element is out-of-distribution.
    """

    name: str
    position: Int[np.ndarray, " n"]
    score: Float[np.ndarray, " n"]
    threshold: Float[np.ndarray, " n"]
    outlier: Bool[np.ndarray, " n"]
    out_of_distribution: Bool[np.ndarray, " n"]

    @property
    def shown(self) -> Float[np.ndarray, " n"]:
        """The scores, with NaN for out-of-distribution elements, whose scores are meaningless."""
        return np.where(self.out_of_distribution, math.nan, self.score)

    @property
    def margin(self) -> Float[np.ndarray, " n"]:
        """`shown` − threshold; NaN without a threshold."""
        return self.shown - np.where(np.isfinite(self.threshold), self.threshold, math.nan)


def score_rows(groups: Sequence[str], *columns: Sequence[Any] | np.ndarray) -> list[ScoreRow]:
    """The scores by set; sets with the most outliers come first, otherwise in order of appearance.

    Args:
        groups: name of the set of each element.
        columns: the other fields of `ScoreRow`, one value for each element.
    """
    number = {name: i for i, name in enumerate(dict.fromkeys(groups))}
    label = np.array([number[group] for group in groups], dtype=int)
    order = np.argsort(label, kind="stable")
    cuts = np.cumsum(np.bincount(label))[:-1]
    parts = [np.split(np.asarray(column)[order], cuts) for column in columns]
    rows = [ScoreRow(name, *some) for name, *some in zip(number, *parts, strict=True)]
    return sorted(rows, key=lambda row: -int(row.outlier.sum()))


def positions_in_sets(groups: Sequence[str]) -> list[int]:
    """Position of each element in its set, from 1.

    >>> positions_in_sets(["a", "b", "a"])
    [1, 1, 2]
    """
    count: Counter[str] = Counter()
    positions = []
    for group in groups:
        count[group] += 1
        positions.append(count[group])
    return positions


def visible_range(
    scores: Float[np.ndarray, " n"], thresholds: Float[np.ndarray, " limits"], outlier: Bool[np.ndarray, " n"]
) -> tuple[float, float]:
    """The range of scores to draw: all scores, unless extreme ones would flatten the others.

    Thresholds and nearly all inliers are always visible. If scores lie more than twice the width of this
    range outside it, the plot ends one width outside, and they are clipped.
    """
    limits, finite = thresholds[np.isfinite(thresholds)], np.isfinite(scores)
    if not finite.any():
        return (float(limits.min()) - 1, float(limits.max()) + 1) if len(limits) else (-1.0, 1.0)
    inliers = scores[finite & ~outlier]
    bulk = np.quantile(inliers, _BULK) if len(inliers) else np.quantile(scores[finite], (0.5, 1))
    low, high = np.concatenate([bulk, limits]).min().item(), np.concatenate([bulk, limits]).max().item()
    lowest, highest, width = scores[finite].min().item(), scores[finite].max().item(), max(high - low, 1.0)
    low = low - width if lowest < low - _FLAT * width else min(low, lowest)
    high = high + width if highest > high + _FLAT * width else max(high, highest)
    return (low, high) if low < high else (low - 0.5, high + 0.5)


class Bins(NamedTuple):
    """Mean position, and lowest, median and highest value, of the elements in each bin."""

    position: Float[np.ndarray, " bins"]
    low: Float[np.ndarray, " bins"]
    median: Float[np.ndarray, " bins"]
    high: Float[np.ndarray, " bins"]


def binned(position: Int[np.ndarray, " n"], values: Float[np.ndarray, " n"], most: int) -> Bins:
    """Values in at most `most` bins of equal width, without non-finite values and empty bins."""
    position, values = position[np.isfinite(values)], values[np.isfinite(values)]
    if not len(position):
        return Bins(*np.empty((4, 0)))
    number = (position - position.min()) // _bin_width(position, most)
    order = np.lexsort((values, number))
    values = values[order]
    starts = np.flatnonzero(np.diff(number[order], prepend=-1))
    ends = np.append(starts[1:], len(order))
    median = (values[(starts + ends - 1) // 2] + values[(starts + ends) // 2]) / 2
    means = np.add.reduceat(position[order], starts) / (ends - starts)
    return Bins(means, values[starts], median, values[ends - 1])


def _bin_width(position: Int[np.ndarray, " n"], most: int) -> int:
    return math.ceil((int(position.max()) - int(position.min()) + 1) / most)


class Cells(NamedTuple):
    """A heat map of sets by position.

    Attributes:
        first: position of the first column.
        width: number of positions in a column.
        lowest: lowest margin to the threshold of the elements in each cell; NaN without a threshold. If no
            element has a threshold, the lowest score.
        mark: the strongest mark of the elements in each cell, 0 for none.
        elements: number of elements in each cell.
        has_thresholds: whether `lowest` is a margin.
    """

    first: int
    width: int
    lowest: Float[np.ndarray, "sets columns"]
    mark: Int[np.ndarray, "sets columns"]
    elements: Int[np.ndarray, "sets columns"]
    has_thresholds: bool


def score_cells(rows: Sequence[ScoreRow], most: int) -> Cells:
    """The sets as rows of cells, at most `most` in a row; an outlier marks its cell."""
    position = np.concatenate([row.position for row in rows])
    margin = np.concatenate([row.margin for row in rows])
    has_thresholds = bool(np.isfinite(margin).any())
    value = margin if has_thresholds else np.concatenate([row.shown for row in rows])
    outlier = np.concatenate([row.outlier for row in rows])
    ood = np.concatenate([row.out_of_distribution for row in rows])
    zero = np.zeros(1 if has_thresholds else 0)
    mark = np.where(outlier, OUTLIER, 0)
    mark[outlier & (value < visible_range(value, zero, outlier)[0])] = CLIPPED
    mark[ood] = OUT_OF_DISTRIBUTION
    first, width = int(position.min()), _bin_width(position, most)
    place = (
        np.repeat(np.arange(len(rows)), [len(row.position) for row in rows]),
        (position - first) // width,
    )
    shape = (len(rows), int(place[1].max()) + 1)
    lowest, marks, elements = np.full(shape, math.inf), np.zeros(shape, int), np.zeros(shape, int)
    np.fmin.at(lowest, place, value)
    np.maximum.at(marks, place, mark)
    np.add.at(elements, place, 1)
    return Cells(first, width, np.where(np.isinf(lowest), math.nan, lowest), marks, elements, has_thresholds)
