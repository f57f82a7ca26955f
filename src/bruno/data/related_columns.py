"""Columns of a table that are almost functions of others: linear combinations, and pairs on a circle."""

from __future__ import annotations

from itertools import islice
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray

Numbers = NDArray[np.float64]

_LIMIT = 1e-4  # residual variance of a linear combination, as a fraction of the variance of the column
_ON_CIRCLE = 1e-3  # the same for a² of a circle, which may be rounded to two decimals
_SCREEN = 0.05  # columns with a larger residual variance, outliers included, are not fitted robustly
_BULK = 0.4  # of the residual variance, in all but a few rows, if it is due to these; 0.76 if it is normal
_TRIMMED, _FITS = 0.05, 4  # fraction of the rows that the robust fit ignores; number of fits
_RIDGE = 1e-9
_PART = 0.01  # of the largest standardised coefficient: smaller ones are not named
_ROWS, _ROWS_OF_PAIRS = 5_000, 2_000  # at most
_MAX_COMBINATIONS = 10  # each takes up to a second to find, and a warning
_ALL_PAIRS = 100  # with more columns, only columns side by side are tested for a circle


class Related(NamedTuple):
    """A column that is almost a function of others.

    Attributes:
        column: its index.
        others: the indices of the others.
        circle: whether it forms a circle with the only other column; else it is a linear combination.
    """

    column: int
    others: tuple[int, ...]
    circle: bool


def related_columns(x: Float[np.ndarray, "rows columns"]) -> list[Related]:
    """The columns that could be left out, as the remaining columns determine them almost exactly.

    A column is a linear combination if the residual variance of a robust fit on all other columns is below
    10⁻⁴ of its variance. Two columns a and b are on a circle, such as the sine and cosine of the time of day,
    if a² is determined in the same way by a, b and b², but not by a alone. Rows with missing numbers are
    ignored; there must be enough others. At most ten linear combinations are found.
    """
    complete = np.flatnonzero(np.isfinite(x).all(1))
    x = x[complete[:: -(-len(complete) // _ROWS) or 1]].astype(np.float64)
    if len(x) < 5 * max(4, x.shape[1]):
        return []
    varying = [i for i in range(x.shape[1]) if _spread(x[:, i]) > 0]
    found: list[Related] = []
    while len(found) < _MAX_COMBINATIONS and (one := _combination(x, varying)) is not None:
        found.append(one)
        varying.remove(one.column)
    some = x[:: -(-len(x) // _ROWS_OF_PAIRS)]
    for place, i in enumerate(varying):
        after = varying[place + 1 :] if len(varying) <= _ALL_PAIRS else varying[place + 1 : place + 2]
        found += [Related(j, (i,), True) for j in after if _on_circle(some[:, i], some[:, j])]
    return found


def _combination(x: Numbers, columns: list[int]) -> Related | None:
    """The last column that is a linear combination of the others; None if there is none."""
    if len(columns) < 2:
        return None
    y = x[:, columns]
    y = (y - y.mean(0)) / y.std(0)
    inverse = np.linalg.inv(y.T @ y / len(y) + _RIDGE * np.eye(len(columns)))
    fractions = 1 / inverse.diagonal()
    residuals = y @ inverse * fractions  # of the least-squares fit of each column on all others
    for place in reversed(range(len(columns))):
        if fractions[place] > _SCREEN:
            continue
        if fractions[place] > _LIMIT and not _is_by_few_rows(residuals[:, place]):
            continue
        others = [i for i in range(len(columns)) if i != place]
        fraction, weights = _robust_fit(y[:, others], y[:, place])
        if fraction < _LIMIT:
            alone = (i for i in others if _robust_fit(y[:, [i]], y[:, place])[0] < _LIMIT)
            share = np.abs(weights) / np.abs(weights).max()
            named = [*islice(alone, 1)] or [i for i, part in zip(others, share, strict=True) if part > _PART]
            return Related(columns[place], tuple(columns[i] for i in named), False)
    return None


def _is_by_few_rows(residual: Numbers) -> bool:
    """Whether most of the variance of residuals is of a few rows, which a robust fit would ignore."""
    squares = np.sort(np.square(residual))
    return bool(squares[: int((1 - _TRIMMED) * len(squares))].sum() < _BULK * squares.sum())


def _robust_fit(x: Numbers, y: Numbers, fits: int = _FITS) -> tuple[float, Numbers]:
    """The residual variance of a linear fit as a fraction of the variance, and its weights.

    Every fit but the first, and both variances, ignore the rows with the largest residuals of the fit before.
    """
    keep = np.ones(len(y), dtype=bool)
    for _ in range(fits):
        design = np.column_stack([x, np.ones(len(x))])
        some = design[keep]
        gram = some.T @ some + _RIDGE * len(some) * np.eye(some.shape[1])
        weights: Numbers = np.asarray(np.linalg.solve(gram, some.T @ y[keep]), dtype=np.float64)
        residual = y - design @ weights
        used, size = keep, np.abs(residual)
        keep = size <= np.quantile(size, 1 - _TRIMMED)
    variance = float(y[used].var())
    if variance <= _RIDGE * float(y.var()):
        return 1.0, weights[:-1]
    freedom = max(1, int(used.sum()) - design.shape[1])
    return float(np.square(residual[used]).sum()) / freedom / variance, weights[:-1]


def _on_circle(a: Numbers, b: Numbers) -> bool:
    """Whether a² + k·b² is a linear function of a and b, for a k > 0, while a² is not one of a alone."""
    a, b = (a - a.mean()) / a.std(), (b - b.mean()) / b.std()
    square, terms = a * a, np.column_stack([a, b, b * b])
    if _robust_fit(terms, square, fits=1)[0] > _SCREEN:
        return False
    alone, _ = _robust_fit(a[:, None], square)
    together, weights = _robust_fit(terms, square)
    return together < _ON_CIRCLE * alone and float(weights[2]) < -_PART


def _spread(column: Numbers) -> float:
    """The range of the central 90 % of a column, or 0 if most of its numbers are equal."""
    low, high = np.quantile(column, [0.05, 0.95])
    return float(high - low)
