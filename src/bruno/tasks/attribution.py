"""Which column of a row is unusual, given a set."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from bruno.arrays import Arrays
from bruno.model import Posterior


class UnusualColumn(NamedTuple):
    """The column whose replacement makes a row most likely.

    Attributes:
        column: position of the column, from 0.
        value: its number in the row.
        expected: its mean given the set and the other columns of the row.
        gain: increase of log p(x | set), on the scales of the columns, if the number is replaced by
            `expected`, in nats.
    """

    column: int
    value: float
    expected: float
    gain: float


@torch.no_grad()
def unusual_column(posterior: Posterior, x: Float[Tensor, " dim"] | Arrays) -> UnusualColumn | None:
    """The most unusual column of a row without missing numbers; None if the model does not impute.

    Each number is compared with its mean given the other columns of the row (`Posterior.impute`). A number
    that is common in its column is therefore unusual if it does not agree with the rest of its row.
    """
    model = posterior.model
    if model.imputer is None or not bool(model.imputer.fitted):
        return None
    row = model.as_elements(x)
    if row.ndim != 1:
        raise ValueError(f"`x` must be one row ({model.dim},); got shape {tuple(row.shape)}.")
    without = row.repeat(model.dim, 1)
    without.fill_diagonal_(torch.nan)
    replaced = posterior.impute(without)
    # Beside an extreme number, the mean of another column may be beyond all numbers.
    finite = replaced.isfinite().all(-1)
    rows = torch.cat([row.unsqueeze(0), torch.where(finite.unsqueeze(-1), replaced, row)])
    z, log_det = model.encode(rows, on_scales=True)
    log_prob = model.process.log_prob(z, posterior.evidence) + log_det
    gains = log_prob[1:] - log_prob[0]
    best = int(gains.masked_fill(~finite, -torch.inf).nan_to_num(-torch.inf).argmax())
    return UnusualColumn(best, row[best].item(), replaced[best, best].item(), gains[best].item())
