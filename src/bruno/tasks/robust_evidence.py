"""Evidence without outliers: which elements of complete sets count."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from bruno.arrays import Arrays, as_real_tensor, as_tensor
from bruno.model import Bruno
from bruno.process import Evidence

_REMOVED_DIVISOR = 16  # from a large set, 1/16 of the elements is removed at a time
_ROUNDS = 10  # elements are put back in at most this many rounds


@dataclass(frozen=True)
class Cutoffs:
    """The score below which an element is excluded from the evidence, by the number of others in it.

    Attributes:
        by_count: cutoff given n = 1, 2, … elements; the last holds for all larger n.
        rate: fraction of clean elements below the cutoff, in the data that set it.
    """

    by_count: tuple[float, ...]
    rate: float = 0.0

    def __post_init__(self) -> None:
        if not self.by_count or any(map(math.isnan, self.by_count)):
            raise ValueError(f"`by_count` must have at least one number, and no NaN; got {self.by_count}.")

    def at(self, count: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        """The cutoff given this many elements; −∞ given none."""
        return self._table.to(count.device)[count.clamp(max=len(self.by_count))]

    @cached_property
    def _table(self) -> Float[Tensor, " counts"]:
        return torch.tensor((-math.inf, *self.by_count), dtype=torch.double)


def evidence_within(z: Float[Tensor, "*batch n dim"], inside: Bool[Tensor, "*batch n"]) -> Evidence:
    """The evidence of the elements that are `inside`."""
    weight, z = inside.double().unsqueeze(-1), z.double()
    count = inside.sum(-1)
    mean = (weight * z).sum(-2) / count.clamp(min=1).unsqueeze(-1)
    return Evidence(count, mean, (weight * (z - mean.unsqueeze(-2)).square()).sum(-2))


def scores_within(
    model: Bruno,
    z: Float[Tensor, "*batch n dim"],
    inside: Bool[Tensor, "*batch n"],
    prior: Float[Tensor, "*batch n"] | None = None,
) -> Float[Tensor, "*batch n"]:
    """log p(z_i | all others that are inside) − log p(z_i): leave-one-out scores of a part of a set.

    Elements that are inside are removed by `Evidence.without_each`, which is exact. `prior` is log p(z_i), if
    it is known.
    """
    others = evidence_within(z, inside).unsqueeze().without_each(z, inside)
    given = model.process.log_prob(z, others)
    return given - (model.process.log_prob(z) if prior is None else prior)


def shortfall(log_prob: Float[Tensor, "*batch"], reference: float) -> Float[Tensor, "*batch"]:
    """max(0, reference − log p(x)): how much less likely elements are than typical ones, in any set.

    An element that is unlikely in every set may have a high score, as log p(x) is as low as log p(x | set).
    Minus the shortfall, the score is log p(x | set) − max(log p(x), reference): the log-likelihood ratio
    against an element of another set or, if that is more likely, against anything with the reference density.
    It finds rows that belong to no set, such as rows with a broken correlation. Images have no reference, as
    their log p(x) mostly measures how complex they are.
    """
    return (reference - log_prob).clamp(min=0)


def typical_elements(
    model: Bruno,
    z: Float[Tensor, "*batch n dim"] | Arrays,
    cutoffs: Cutoffs,
    usable: Bool[Tensor, "*batch n"] | Arrays | None = None,
    scores: Callable[[Tensor], Tensor] | None = None,
    less: Float[Tensor, "*batch n"] | Arrays | None = None,
) -> Bool[Tensor, "*batch n"]:
    """Which elements of complete sets are typical of their set, even if outliers resemble each other.

    First, the element with the lowest score given the others is removed repeatedly, until half of the set is
    left. Then, every element whose score given the remaining others is at least the cutoff is put back, until
    nothing changes (`with_typical`). Sets of fewer than three elements have no majority, so all of their
    elements count.

    Args:
        model: a model of such sets.
        z: latents of the sets.
        cutoffs: by the number of others in the evidence.
        usable: elements that may count; all by default.
        scores: a faster function from the elements in the evidence to `scores_within`.
        less: subtracted from the scores, such as the `shortfall`; nothing by default.
    """
    z = as_real_tensor(z, "z", device=model.device)
    if usable is None:
        usable = torch.ones(z.shape[:-1], dtype=torch.bool, device=z.device)
    usable = as_tensor(usable, "usable", device=z.device)
    if scores is None:
        scores = partial(scores_within, model, z, prior=model.process.log_prob(z))
    if less is not None:
        less = as_real_tensor(less, "less", device=z.device)

    def judged(inside: Tensor) -> Tensor:
        return scores(inside) if less is None else scores(inside) - less

    def typical(inside: Tensor, _: Tensor) -> Tensor:
        others = inside.sum(-1, keepdim=True) - inside.long()
        return judged(inside) >= cutoffs.at(others)

    return with_typical(majority(usable, judged), usable, typical)


def with_typical(
    inside: Bool[Tensor, "*batch n"],
    usable: Bool[Tensor, "*batch n"],
    typical: Callable[[Tensor, Tensor], Tensor],
) -> Bool[Tensor, "*batch n"]:
    """The usable elements that are typical given the elements inside, updated until nothing changes.

    At least half of each set stays inside, and all elements of a set of fewer than three.

    Args:
        inside: the first elements, such as the `majority`.
        usable: elements that may count.
        typical: a function of the elements inside, and of whether each set (*batch) changed in the last
            round. It returns which elements are typical given the others inside; for a set that did not
            change, it may return the elements inside.
    """
    size = usable.sum(-1, keepdim=True)
    changed = torch.ones(inside.shape[:-1], dtype=torch.bool, device=inside.device)
    for _ in range(_ROUNDS):
        back = usable & (typical(inside, changed) | (size < 3))
        back = torch.where(back.sum(-1, keepdim=True) >= _half(size), back, inside)
        changed = (back != inside).any(-1)
        if not bool(changed.any()):
            break
        inside = back
    return inside


def majority(
    usable: Bool[Tensor, "*batch n"], scores: Callable[[Tensor], Tensor]
) -> Bool[Tensor, "*batch n"]:
    """The half of each set that is left after the element with the lowest score is removed repeatedly.

    `scores` maps the elements inside to the scores of all elements, each given the others inside.
    """
    inside, left = usable, usable.sum(-1, keepdim=True)
    half = _half(left)
    while bool((left > half).any()):
        removed = (left // _REMOVED_DIVISOR).clamp(min=1).minimum(left - half)
        ranks = scores(inside).masked_fill(~inside, math.inf).argsort(-1).argsort(-1)
        inside, left = inside & (ranks >= removed), left - removed
    return inside


def _half(size: Int[Tensor, "*batch"]) -> Int[Tensor, "*batch"]:
    """Half of a set, rounded up; sets of fewer than three elements have no majority."""
    return torch.where(size > 2, (size + 1) // 2, size)


@torch.no_grad()
def batch_scores(
    model: Bruno,
    z: Float[Tensor, "*batch n dim"],
    cutoffs: Cutoffs | None,
    usable: Bool[Tensor, "*batch n"] | None = None,
    less: Float[Tensor, "*batch n"] | None = None,
) -> tuple[Float[Tensor, "*batch n"], Bool[Tensor, "*batch n"]]:
    """Scores of complete encoded sets, each element given all others that count, and which elements count.

    `less`, such as the `shortfall`, is subtracted from the scores. Without cutoffs, every usable element
    counts.
    """
    usable = torch.ones(z.shape[:-1], dtype=torch.bool, device=z.device) if usable is None else usable
    in_evidence = usable if cutoffs is None else typical_elements(model, z, cutoffs, usable, less=less)
    if bool(in_evidence.all()):
        scores = model.process.leave_one_out_log_prob(z) - model.process.log_prob(z)
    else:
        scores = scores_within(model, z, in_evidence)
    return scores if less is None else scores - less, in_evidence
