"""The evidence of many sets in numpy: elements are added, down-weighted or removed, one per set at a time.

All operations are elementwise, so that a set has the same evidence in any batch, bit for bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float
from numpy.typing import NDArray

Numbers = NDArray[np.float64]


class SetEvidence(NamedTuple):
    """Count, mean and scatter of sets; counts are fractions if elements have weights."""

    n: Any  # (*sets,), a number for one set
    mean: Float[np.ndarray, "*sets dim"]
    scatter: Float[np.ndarray, "*sets dim"]


def evidence_inside(z: Float[np.ndarray, "k m dim"], inside: Bool[np.ndarray, "k m"]) -> SetEvidence:
    """The evidence of the elements of sets that are inside."""
    weight = inside[:, :, None].astype(np.float64)
    n = np.add.reduce(weight, 1)
    mean = np.add.reduce(weight * z, 1) / np.maximum(n, 1.0)
    gap = z - mean[:, None]
    return SetEvidence(n[:, 0], mean, np.add.reduce(weight * gap * gap, 1))


def with_element(
    given: SetEvidence, z: Float[np.ndarray, "*sets dim"], keeps: Numbers | float = 1.0
) -> SetEvidence:
    """The evidence after one more element of each set (Welford); `keeps` scales earlier weights first.

    With b = keeps·n, the count is b + 1, the mean moves by (z − mean)/(b + 1), and the scatter becomes
    keeps·scatter + (z − mean)²·b/(b + 1). `given.n` and `keeps` are columns, (*sets, 1), or numbers.
    """
    before = keeps * given.n
    after = before + 1
    gap = z - given.mean
    return SetEvidence(after, given.mean + gap / after, keeps * given.scatter + gap * gap * (before / after))


def without_element(
    given: SetEvidence, z: Float[np.ndarray, "*sets dim"], weight: Numbers | float = 1.0
) -> SetEvidence:
    """The evidence without an element of each set: the inverse of `with_element`.

    `given.n` and `weight` are columns, (*sets, 1), or numbers; a weight of 0 removes nothing.
    """
    rest, gap = given.n - weight, z - given.mean
    removed = weight * gap
    mean = (rest > 0) * (given.mean - removed / np.maximum(rest, 1.0))
    scatter = (rest > 1) * np.maximum(given.scatter - removed * (z - mean), 0.0)
    return SetEvidence(rest, mean, scatter)
