"""Imputation of missing numbers from the set of a row: a normal model with two levels.

A row of set g is y = m + b_g + w, with b_g ~ N(0, B) for the set and w ~ N(0, W) for the row. A missing
number is replaced by its mean given the other numbers of the row and the set, or by a draw from its
distribution. The set matters: machines differ far more than the rows of one machine, so that the mean over
all machines would look like a fault. A row that is far from the other rows of its set is not used to impute
them, as one spike would shift all their missing numbers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor, nn

_ITERATIONS = 10  # of expectation maximisation
_MAX_SETS, _MAX_ROWS = 200, 50  # sets, and rows of each, to estimate covariances from if numbers are missing
_FAR = 3.1  # standard normal quantile of the distance beyond which a row is not used: 1 in 1000
_RIDGE = 1e-4  # fraction of a column's variance that is added to it, as constant columns have no variance


class _Conditioned(NamedTuple):
    """The posterior of one set: mean and covariance of its offset b, and the expected w of each row."""

    mean: Float[Tensor, " dim"]
    covariance: Float[Tensor, "dim dim"]
    rows: Float[Tensor, "n dim"]
    scatter: Float[Tensor, "dim dim"]  # Σ E w wᵀ over the rows


class Imputer(nn.Module):
    """Replaces missing numbers, NaN, of standardised rows; `fit` learns m, B and W.

    Args:
        dim: number of columns.

    >>> rows = torch.tensor([[0.0, 0.0], [1.0, 1.1], [5.0, 5.1], [6.0, 6.0]])
    >>> imputer = Imputer(2).fit(rows, torch.tensor([0, 0, 1, 1]))
    >>> missing = torch.tensor([[5.0, 5.0], [5.4, torch.nan]])
    >>> [round(number, 1) for number in imputer(missing, torch.tensor([0, 0]))[1].tolist()]
    [5.4, 5.4]
    """

    mean: Tensor
    between: Tensor
    within: Tensor
    fitted: Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(dim, dtype=torch.double))
        self.register_buffer("between", torch.eye(dim, dtype=torch.double))
        self.register_buffer("within", torch.eye(dim, dtype=torch.double))
        self.register_buffer("fitted", torch.tensor(False))

    def fit(self, y: Float[Tensor, "n dim"], labels: Int[Tensor, " n"]) -> Imputer:
        """Estimate m, B and W from rows and their sets, once; rows may have missing numbers."""
        if self.fitted:
            return self
        self.fitted.fill_(True)
        sets = [y[labels == label].double()[:_MAX_ROWS] for label in labels.unique()[:_MAX_SETS]]
        self._start_from(sets)
        if any(bool(one.isnan().any()) for one in sets):
            for _ in range(_ITERATIONS):
                self._improve_on(sets)
        return self

    def forward(
        self,
        y: Float[Tensor, "n dim"],
        labels: Int[Tensor, " n"],
        generator: Generator | None = None,
    ) -> Float[Tensor, "n dim"]:
        """Rows without missing numbers: each replaced by its mean, or by a draw if a generator is given.

        A row is conditioned on itself and on all rows with its label that are near their median.
        """
        filled = y.clone()
        for label in labels[y.isnan().any(1)].unique():
            chosen = labels == label
            one = y[chosen].double()
            precisions = _Precisions(self.within)  # of this set alone, to limit memory
            given = self._conditioned(one, precisions, self._is_near(one, precisions))
            means = self.mean + given.mean + given.rows
            if generator is not None:
                means = means + self._deviations(~one.isnan(), generator)
            filled[chosen] = torch.where(one.isnan(), means, one).to(y.dtype)
        return filled

    def impute_next(
        self, y: Float[Tensor, "*rows dim"], centre: Float[Tensor, "*sets dim"], seen: Int[Tensor, "*sets"]
    ) -> Float[Tensor, "*any dim"]:
        """Rows without missing numbers, given the centres of their sets, estimated from `seen` rows each.

        Rows and sets broadcast.

        With V = (B⁻¹ + n W⁻¹)⁻¹, the covariance of the centre, the row has covariance W + V. With P its
        inverse, the mean of missing numbers given the others is c_m − P_mm⁻¹ P_mo (y_o − c_o): systems of the
        size of the missing numbers, of which most rows have a few.
        """
        counts, place = seen.unique(return_inverse=True)
        eye = torch.eye(len(self.mean), dtype=torch.double, device=y.device)
        ratio = torch.linalg.solve(self.within, self.between)
        spread = self.between @ torch.linalg.inv(eye + counts.double()[:, None, None] * ratio)
        precision = torch.linalg.inv(self.within + spread)
        shape = torch.broadcast_shapes(y.shape, centre.shape)
        missing = y.isnan().expand(shape)
        residual = torch.where(missing, 0.0, y.double() - centre)
        # Of each row, the columns of its missing numbers, followed by others if it has fewer than some row.
        columns = (~missing).long().argsort(dim=-1, stable=True)[..., : int(missing.sum(-1).max())]
        wanted, most = missing.gather(-1, columns), columns.shape[-1]
        own = precision[place.expand(shape[:-1]).unsqueeze(-1), columns]
        among = own.gather(-1, columns.unsqueeze(-2).expand(*columns.shape, most))
        among = torch.where(wanted.unsqueeze(-1) & wanted.unsqueeze(-2), among, eye[:most, :most])
        known = torch.where(wanted.unsqueeze(-1), own @ residual.unsqueeze(-1), 0.0)
        shift = torch.zeros_like(residual).scatter(-1, columns, torch.linalg.solve(among, known).squeeze(-1))
        return torch.where(missing, (centre - shift).to(y.dtype), y)

    def _start_from(self, sets: list[Tensor]) -> None:
        """Start from the moments of the rows, with missing numbers at the mean of their set."""
        self.mean.copy_(torch.cat(sets).nanmean(0).nan_to_num(0.0))
        centres = torch.stack([one.nanmean(0) for one in sets]) - self.mean
        rows = torch.cat([(one - one.nanmean(0)).nan_to_num(0.0) for one in sets])
        free = max(1, len(rows) - len(sets))
        self._set(centres.nan_to_num(0.0).T @ centres.nan_to_num(0.0) / len(sets), rows.T @ rows / free)

    def _improve_on(self, sets: list[Tensor]) -> None:
        """One iteration of expectation maximisation."""
        precisions = _Precisions(self.within)
        given = [self._conditioned(one, precisions) for one in sets]
        shift = torch.stack([one.mean for one in given]).mean(0)
        between = torch.stack([torch.outer(one.mean, one.mean) + one.covariance for one in given]).mean(0)
        within = torch.stack([one.scatter for one in given]).sum(0) / sum(map(len, sets))
        self.mean.add_(shift)
        self._set(between - torch.outer(shift, shift), within)

    def _set(self, between: Tensor, within: Tensor) -> None:
        variance = (between + within).diagonal()
        self.between.copy_(between)
        self.within.copy_(within + torch.diag(_RIDGE * variance + 1e-12))

    @staticmethod
    def _is_near(y: Float[Tensor, "n dim"], precisions: _Precisions) -> Bool[Tensor, " n"]:
        """Whether each row is as near to the median of its set as is usual, or as most rows of the set are.

        With c the median of each column, (y − c)ᵀ A (y − c) is about χ² with as many degrees of freedom as a
        row has numbers; its cube root is about normal (Wilson and Hilferty).
        """
        present, centre = ~y.isnan(), (y.nanmedian(0).values - (-y).nanmedian(0).values) / 2
        residual = (y - centre).nan_to_num(0.0)
        distance = residual.new_zeros(len(y))
        patterns, place = present.unique(dim=0, return_inverse=True)
        for i, pattern in enumerate(patterns):
            some = residual[place == i]
            distance[place == i] = (some @ precisions[pattern] * some).sum(1)
        count = present.sum(1).clamp(min=1)
        spread = 2 / (9 * count)
        cubic = (distance / count).pow(1 / 3) - (1 - spread)  # about normal, with this variance
        return cubic <= torch.maximum(_FAR * spread.sqrt(), -(-cubic).median())  # more than half

    def _conditioned(
        self, y: Tensor, precisions: _Precisions, near: Bool[Tensor, " n"] | None = None
    ) -> _Conditioned:
        """The moments of b and w given the numbers of one set.

        A is the inverse of W over the numbers that a row has, 0 elsewhere: one of the `precisions`.
        J = Σ A_i, V = B (I + J B)⁻¹ and E b = V Σ A_i (y_i − m), over the rows that are `near`,
        by default all.
        """
        present = ~y.isnan()
        patterns, place = present.unique(dim=0, return_inverse=True)
        inverses = [precisions[pattern] for pattern in patterns]
        residual = torch.where(present, y - self.mean, 0.0)
        scaled = torch.empty_like(residual)
        information = torch.zeros_like(self.within)
        counts = torch.ones_like(place, dtype=torch.bool) if near is None else near
        for i, inverse in enumerate(inverses):
            scaled[place == i] = residual[place == i] @ inverse
            information += int(counts[place == i].sum()) * inverse
        eye = torch.eye(len(self.mean), dtype=torch.double, device=y.device)
        covariance = torch.linalg.solve((eye + information @ self.between).T, self.between.T).T
        mean = covariance @ scaled[counts].sum(0)
        rows, scatter = torch.empty_like(residual), torch.zeros_like(self.within)
        for i, inverse in enumerate(inverses):
            gain = self.within @ inverse  # the identity where nothing is missing
            some = place == i
            rows[some] = (residual[some] - torch.where(present[some], mean, 0.0)) @ gain.T
            unknown = self.within - gain @ self.within + gain @ covariance @ gain.T
            scatter += rows[some].T @ rows[some] + int(some.sum()) * unknown
        return _Conditioned(mean, covariance, rows, scatter)

    def _deviations(self, present: Tensor, generator: Generator) -> Tensor:
        """Draws of the deviation of missing numbers from their means, 0 for those that are given.

        For w ~ N(0, W), w − W A w has the covariance of w given the numbers of the row (Matheron's rule).
        """
        noise = torch.randn(present.shape, generator=generator, dtype=torch.double, device=generator.device)
        w = noise.to(present.device) @ torch.linalg.cholesky(self.within).T
        precisions, scaled = _Precisions(self.within), torch.empty_like(w)
        patterns, place = present.unique(dim=0, return_inverse=True)
        for i, pattern in enumerate(patterns):
            scaled[place == i] = w[place == i] @ precisions[pattern]  # 0 where numbers are missing
        return torch.where(present, 0.0, w - scaled @ self.within)


class _Precisions:
    """The inverses of a covariance over some of its dimensions, 0 for the others; each is computed once."""

    def __init__(self, covariance: Float[Tensor, "dim dim"]) -> None:
        self._covariance = covariance
        self._known: dict[bytes, Tensor] = {}

    def __getitem__(self, present: Bool[Tensor, " dim"]) -> Float[Tensor, "dim dim"]:
        key = present.cpu().numpy().tobytes()
        if key not in self._known:
            both = present.unsqueeze(-1) & present.unsqueeze(-2)
            eye = torch.eye(len(present), dtype=torch.bool, device=present.device)
            inverse = torch.linalg.inv(torch.where(both, self._covariance, 0.0) + (eye & ~both))
            self._known[key] = torch.where(both, inverse, 0.0)
        return self._known[key]
