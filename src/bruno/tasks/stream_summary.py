"""The judgements of a stream in bounded memory: counts by set, and the latest and most unusual elements."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bruno.arrays import NumpyResult
from bruno.model import Posterior
from bruno.tasks.anomaly import Judgement

EXTREMES = 24  # of the most unusual outliers, and of the most typical inliers, are kept
_FAR_MORE = (5, 0.15)  # times the requested rate, and fraction of elements; true faults are rarely so many
_ENOUGH = 10  # fewer outliers do not show that a model does not fit

# The fields of a judgement that have an array, and its type.
_JUDGED: dict[str, type] = {
    "score": float,
    "seen": int,
    "threshold": float,
    "outlier": bool,
    "out_of_distribution": bool,
    "p": float,
    "p_within": float,
}


class JudgedElement(NamedTuple):
    """An element of a stream or batch with its judgement.

    Attributes:
        position: position in the stream or batch, from 1.
        name: its name.
        x: the element.
        judgement: its judgement.
        group: the set it belongs to.
        given: the posterior of its set without it, if known.
    """

    position: int
    name: str
    x: Tensor
    judgement: Judgement
    group: str = ""
    given: Posterior | None = None


class NamedJudgement(NamedTuple):
    """The name of an element, the set it belongs to, and its judgement."""

    name: str
    group: str
    judgement: Judgement


class GroupSummary(NamedTuple):
    """Number of elements, outliers and out-of-distribution elements of a set, and its lowest p-value."""

    elements: int = 0
    outliers: int = 0
    out_of_distribution: int = 0
    lowest_p: float | None = None

    def including(self, judgement: Judgement) -> GroupSummary:
        """The numbers with another element."""
        known = [p for p in (self.lowest_p, judgement.p) if p is not None]
        return GroupSummary(
            self.elements + 1,
            self.outliers + judgement.outlier,
            self.out_of_distribution + judgement.out_of_distribution,
            min(known, default=None),
        )


class StreamSummary(NumpyResult):
    """The judgements of a stream of any length, or of a batch, collected in bounded memory.

    Attributes:
        count: elements added.
        outliers: number of outliers, including out-of-distribution elements.
        out_of_distribution: number of out-of-distribution elements.
        groups: the same numbers for each set, by its name.
        latest: the latest judgements, with names and sets.

    Args:
        latest: number of judgements to keep; None for all.
        extremes: number of the most unusual outliers, and of inliers with the highest scores, to keep.
    """

    def __init__(self, *, latest: int | None = 100_000, extremes: int = EXTREMES) -> None:
        self.count = self.outliers = self.out_of_distribution = 0
        self.groups: dict[str, GroupSummary] = {}
        self.latest: deque[NamedJudgement] = deque(maxlen=latest)
        self._extremes = extremes
        self._outliers: list[JudgedElement] = []  # the most unusual first
        self._inliers: list[JudgedElement] = []  # the highest score first

    def __repr__(self) -> str:
        return f"StreamSummary({self.outliers} outliers of {self.count} elements)"

    def add(
        self, name: str, x: Tensor, judgement: Judgement, group: str = "", given: Posterior | None = None
    ) -> None:
        """Add the next element (*shape), of the set `group`, judged given a posterior."""
        self.groups[group] = self.groups.get(group, GroupSummary()).including(judgement)
        self.count += 1
        self.outliers += judgement.outlier
        self.out_of_distribution += judgement.out_of_distribution
        self.latest.append(NamedJudgement(name, group, judgement))
        element = JudgedElement(self.count, name, x, judgement, group, given)
        if judgement.outlier:
            found = sorted([*self._outliers, element], key=lambda one: one.judgement.sort_key)
            self._outliers = found[: self._extremes]
        else:
            self._inliers.append(element)
            self._inliers.sort(key=lambda one: -one.judgement.score)
            del self._inliers[self._extremes :]

    def numpy(self) -> dict[str, Any]:
        """An array for each field of the judgements in `latest`, NaN where it is not known.

        Also the names and sets of these elements, and the count of all elements.
        """
        arrays: dict[str, NDArray[Any]] = {
            field: np.array([getattr(one.judgement, field) for one in self.latest], dtype)
            for field, dtype in _JUDGED.items()
        }
        names, groups = tuple(one.name for one in self.latest), tuple(one.group for one in self.latest)
        return {"count": self.count, "names": names, "groups": groups, **arrays}

    @property
    def latest_positions(self) -> list[int]:
        """Position in its set, from 1, of each of `latest`."""
        kept = Counter(one.group for one in self.latest)
        position = {group: self.groups[group].elements - count for group, count in kept.items()}
        positions = []
        for one in self.latest:
            position[one.group] += 1
            positions.append(position[one.group])
        return positions

    @property
    def most_unusual(self) -> tuple[JudgedElement, ...]:
        """Outliers, the most unusual first: out-of-distribution, then by p-value, then by score."""
        return tuple(self._outliers)

    @property
    def most_typical(self) -> tuple[JudgedElement, ...]:
        """Inliers, those with the highest scores first."""
        return tuple(self._inliers)


def far_more_flagged(outliers: int, count: int, rate: float) -> str:
    """A clause if far more of `count` elements are flagged than requested by a rate, otherwise ""."""
    times, fraction = _FAR_MORE
    flagged = outliers / max(1, count)
    if outliers < _ENOUGH or flagged <= max(times * rate, fraction):
        return ""
    return f"{100 * flagged:.0f} % are flagged, but {100 * rate:g} % was requested"
