"""The log-density of single elements, each the next one of its set, in one pass over their numbers.

With the scale s of a predictive, s² = k for a Gaussian process and k·(ν − 2 + β) for a Student-t process::

    t = (z − location)/s
    Gaussian:   log p = −½ log 2πs² − ½ t²
    Student-t:  log p = g((ν+N)/2) − ½ log πs² − ½ (ν+N+1) log1p(t²),     g(x) = log Γ(x+½) − log Γ(x)

Location and s are computed in float64, once for all elements of a set; what follows has the type of the data.
Where c is close to 1, z − location is the small difference of two large numbers. In float32 the location is
therefore high + low, two numbers with 48 bits of it together: z − high is exact where the numbers are close
(Sterbenz's lemma), so that (z − high) − low is as good as a difference in float64, at a third of the time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from bruno.process.checks import is_traced
from bruno.process.evidence import Evidence

# Elements are scored in blocks that fit in the cache: touching new memory costs more than the arithmetic.
_NUMBERS_IN_A_BLOCK = 2**18
_NUMBERS_IN_A_BLOCK_ON_A_GPU = 2**26  # there the number of kernels matters


class Prediction(NamedTuple):
    """What the densities of the next element of each set have in common."""

    location: Float[Tensor, "*sets dim"]  # float64
    inv_scale: Float[Tensor, "*sets dim"]  # 1/s
    constant: Float[Tensor, "*sets"]  # the terms without t, summed over dimensions
    power: Float[Tensor, "*sets dim"]  # ν + N + 1, or 1 for a Gaussian process; times the weight in the sum
    is_student: bool

    def log_prob(self, z: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*any"]:
        """log p(z), summed over dimensions; the batch broadcasts with the sets.

        Equal elements have equal densities in any batch, which a matrix product would not ensure.
        """
        square = (self._residual(z) * self.inv_scale).square()
        growth = square.log1p() if self.is_student else square
        return self.constant - 0.5 * (growth * self.power).sum(-1)

    def _residual(self, z: Tensor) -> Tensor:
        """z − location in the type of z, with an error of 1e-7 of itself, or 4e-15 of the location."""
        if z.dtype == torch.double or is_traced():  # a compiler may undo the split, and fuses float64
            return (z.double() - self.location).to(z.dtype)
        high = self.location.to(z.dtype)
        low = (self.location - high).detach().to(z.dtype)  # the gradient goes through `high`
        return (z - high) - low


def element_log_prob(
    z: Float[Tensor, "*batch dim"],
    evidence: Evidence,
    predict: Callable[[Evidence], Prediction],
    *,
    differentiated: bool,
) -> Float[Tensor, "*any"]:
    """log p(z | evidence), summed over dimensions; batches broadcast, to a batch that is never in memory.

    The longest axis of the batch is processed in blocks. `predict` is called for the sets of each block, or
    once if all blocks have the same sets. Autograd keeps every number anyway, and a compiler fuses the
    formulas: both get the batch as one block.
    """
    batch = torch.broadcast_shapes(z.shape[:-1], evidence.batch_shape)
    numbers = math.prod(batch) * z.shape[-1]
    most = _NUMBERS_IN_A_BLOCK if z.device.type == "cpu" else _NUMBERS_IN_A_BLOCK_ON_A_GPU
    if numbers <= most or not batch or differentiated or is_traced():
        return predict(evidence).log_prob(z)
    length = max(batch)
    axis = batch.index(length) - len(batch)
    step = max(1, most * length // numbers)
    shared = _part(evidence.mean, axis - 1, 0, 1) is evidence.mean
    prediction, parts = predict(evidence) if shared else None, []
    for begin in range(0, length, step):
        end = min(begin + step, length)
        count = _part(evidence.count, axis, begin, end)
        mean, scatter = (_part(x, axis - 1, begin, end) for x in (evidence.mean, evidence.scatter))
        given = prediction or predict(Evidence(count, mean, scatter))
        parts.append(given.log_prob(_part(z, axis - 1, begin, end)))
    return torch.cat(parts, axis)


def _part(x: Tensor, axis: int, begin: int, end: int) -> Tensor:
    """A slice of an axis, counted from the last; x itself if it broadcasts along this axis."""
    if x.ndim < -axis or x.shape[axis] == 1:
        return x
    return x.narrow(axis, begin, end - begin)
