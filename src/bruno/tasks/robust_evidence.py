"""Evidence without outliers: which elements of a set count, in a complete batch and along a stream."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Real
from torch import Tensor

from bruno.arrays import Arrays, as_real_tensor, as_tensor
from bruno.model import Bruno, Encoded, Posterior
from bruno.process import Evidence
from bruno.tasks.evaluation import steps_and_prior

START = 20  # elements at the beginning of a stream that are reconsidered together
RECONSIDERED = {2, 3, 4, 5, 6, 7, 8, 10, 12, 16, START}  # positions at which they are reconsidered
_REMOVED_DIVISOR = 16  # from a large set, 1/16 of the elements is removed at a time
_ROUNDS = 10  # elements are put back in at most this many rounds


def may_count(complete: Any, count: Any, position: Any) -> Any:
    """Whether elements may count, given how many count already and how many came before; arrays or numbers.

    A missing number is imputed from the elements of the set that count. If none counts yet, the number is a
    guess at the level of the set: as evidence, it would make outliers of the complete rows that follow. So,
    among the first `START` elements, incomplete rows do not count before another element does.
    """
    return complete | (count > 0) | (position >= START)


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

    An element that is inside is removed from the evidence by `Evidence.remove`, which is exact. `prior` is
    log p(z_i), if it is known.
    """
    all_inside = evidence_within(z, inside).unsqueeze()
    own = torch.where(inside.unsqueeze(-1), z.double(), all_inside.mean)  # nothing to remove outside
    others = all_inside - Evidence(inside.long(), own, torch.zeros_like(own))
    given = model.process.log_prob(z, others)
    return given - (model.process.log_prob(z) if prior is None else prior)


class ElementDensities:
    """Latents of elements and their densities, computed by the model; a subclass may compute them faster."""

    def __init__(self, model: Bruno) -> None:
        self.model = model

    def encode(self, x: Real[Tensor, "..."]) -> Encoded:
        """The latents of an element (*shape)."""
        return self.model.encode(x.to(self.model.device))

    def prior(self, z: Float[Tensor, " dim"]) -> Float[Tensor, ""]:
        """log p(z) without evidence."""
        return self.model.process.log_prob(z)

    def given(self, z: Float[Tensor, " dim"], evidence: Evidence) -> Float[Tensor, ""]:
        """log p(z | evidence)."""
        return self.model.process.log_prob(z, evidence)

    def scores_of(self, z: Float[Tensor, "n dim"]) -> Callable[[Tensor], Tensor]:
        """A function from the mask of elements that are inside to `scores_within`, for the set z."""
        return partial(scores_within, self.model, z, prior=self.model.process.log_prob(z))


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
) -> Bool[Tensor, "*batch n"]:
    """Which elements of complete sets are typical of their set, even if outliers resemble each other.

    First, the element with the lowest score given the others is removed repeatedly, until half of the set is
    left. Then, every element whose score given the remaining others is at least the cutoff is put back, until
    nothing changes (`with_typical`). Sets of fewer than three elements have no majority, so all of their
    elements count.

    Args:
        model: a model of such sets.
        z: latents of the sets.
        cutoffs: by the number of others inside.
        usable: elements that may count; all by default.
        scores: a faster function from the elements inside to `scores_within`.
    """
    z = as_real_tensor(z, "z", device=model.device)
    if usable is None:
        usable = torch.ones(z.shape[:-1], dtype=torch.bool, device=z.device)
    usable = as_tensor(usable, "usable", device=z.device)
    if scores is None:
        scores = partial(scores_within, model, z, prior=model.process.log_prob(z))

    def typical(inside: Tensor, _: Tensor) -> Tensor:
        others = inside.sum(-1, keepdim=True) - inside.long()
        return scores(inside) >= cutoffs.at(others)

    return with_typical(majority(usable, scores), usable, typical)


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


@dataclass(frozen=True, eq=False)
class StreamEvidence:
    """The state of streams, one for each set of a batch: the evidence, and elements to reconsider.

    Attributes:
        evidence: evidence of the elements that count.
        position: number of elements so far, including those that do not count.
        first: latents of the first elements while they may be reconsidered, empty afterwards; or, in a
            window, of the latest elements.
        usable: which of the elements in `first` may count.
        incomplete: whether an element so far had missing numbers.
    """

    evidence: Evidence
    position: int
    first: Float[Tensor, "*batch first dim"]
    usable: Bool[Tensor, "*batch first"]
    incomplete: bool = False

    @classmethod
    def empty(
        cls, dim: int, batch_shape: Sequence[int] = (), device: torch.device | str = "cpu"
    ) -> StreamEvidence:
        """The state before the first element."""
        return cls.of(Evidence.empty(dim, batch_shape, device=device))

    @classmethod
    def of(cls, evidence: Evidence) -> StreamEvidence:
        """The state with this evidence, whose elements all count.

        Later elements are only reconsidered if the evidence is empty.
        """
        shape, device = evidence.batch_shape, evidence.mean.device
        position = int(evidence.count.max()) if evidence.count.numel() else 0
        return cls(
            evidence,
            position,
            torch.zeros((*shape, 0, evidence.dim), device=device),
            torch.zeros((*shape, 0), dtype=torch.bool, device=device),
        )

    def including(self, z: Float[Tensor, "*batch dim"]) -> StreamEvidence:
        """The state after an earlier element, which was excluded, is added; the position stays the same."""
        return replace(
            self, evidence=self.evidence.add(z), first=self.first[..., :0, :], usable=self.usable[..., :0]
        )

    def score(
        self, model: Bruno, z: Float[Tensor, "*batch dim"], prior: Float[Tensor, "*batch"]
    ) -> Float[Tensor, "*batch"]:
        """log p(z | evidence) − log p(z) of the next element of each stream; `prior` is log p(z)."""
        return model.process.log_prob(z, self.evidence) - prior

    def add(
        self,
        model: Bruno,
        z: Float[Tensor, "*batch dim"],
        score: Float[Tensor, "*batch"],
        cutoffs: Cutoffs | None,
        usable: Bool[Tensor, "*batch"],
        window: int | None = None,
        scores_of: Callable[[Tensor], Callable[[Tensor], Tensor]] | None = None,
    ) -> StreamEvidence:
        """The state after an element, which counts if it is usable and its score is at least the cutoff.

        The first `START` elements are reconsidered together at the positions `RECONSIDERED`, as one of the
        very first may be an outlier itself. With a window, of at most `START` elements, the set consists of
        its latest elements, which are reconsidered unless all of them count. Without cutoffs, every usable
        element counts. `scores_of` maps latents to the argument `scores` of `typical_elements`, to compute
        them faster.
        """
        counts = usable if cutoffs is None else usable & (score >= cutoffs.at(self.evidence.count))
        position = self.position + 1
        first, known = self.first, self.usable

        def typical() -> Bool[Tensor, "*batch first"]:
            assert cutoffs is not None
            return typical_elements(model, first, cutoffs, known, scores_of(first) if scores_of else None)

        if window is not None:
            first = torch.cat([first, z.unsqueeze(-2)], -2)[..., -window:, :]
            known = torch.cat([known, usable.unsqueeze(-1)], -1)[..., -window:]
            if first.shape[-2] == min(position, window):  # else the stream began with a posterior
                before = self.evidence.count == self.usable.sum(-1)
                all_count = cutoffs is None or bool((before & (counts == usable)).all())
                return StreamEvidence(
                    evidence_within(first, known if all_count else typical()), position, first, known
                )
        own = Evidence(counts.long(), z.double(), torch.zeros_like(z, dtype=torch.double))
        evidence = self.evidence + own
        if window is not None:
            return StreamEvidence(evidence, position, first, known)
        # Elements are not reconsidered after the first `START`, nor if the stream began with a posterior.
        if cutoffs is None or first.shape[-2] < self.position:
            return StreamEvidence(evidence, position, first[..., :0, :], known[..., :0])
        first = torch.cat([first, z.unsqueeze(-2)], -2)
        known = torch.cat([known, usable.unsqueeze(-1)], -1)
        if position in RECONSIDERED:
            evidence = evidence_within(first, typical())
        if position >= START:
            first, known = first[..., :0, :], known[..., :0]
        return StreamEvidence(evidence, position, first, known)


@torch.no_grad()
def stream_scores(
    model: Bruno,
    z: Float[Tensor, "*batch n dim"],
    cutoffs: Cutoffs | None,
    usable: Bool[Tensor, "*batch n"] | None = None,
) -> Float[Tensor, "*batch n"]:
    """Scores of encoded sets as streams: each element given those before it that count, the first 0."""
    usable = torch.ones(z.shape[:-1], dtype=torch.bool, device=z.device) if usable is None else usable
    if cutoffs is None and bool(usable.all()):
        steps, prior = steps_and_prior(model.process, z)
        return steps - prior
    state = StreamEvidence.empty(z.shape[-1], z.shape[:-2], z.device)
    scores, prior = [], model.process.log_prob(z)
    for i in range(z.shape[-2]):
        scores.append(state.score(model, z[..., i, :], prior[..., i]))
        state = state.add(model, z[..., i, :], scores[-1], cutoffs, usable[..., i])
    return torch.stack(scores, -1)


@dataclass(frozen=True, eq=False)
class EncodedSets:
    """Encoded elements of sets, and everything else that their scores and their evidence depend on.

    Attributes:
        z: latents of the elements.
        usable: whether elements may count: their log p(x) is at least the floor.
        shortfall: of log p(x), see `shortfall`.
        rows: the elements with missing numbers as NaN, which a stream imputes from those before; None if all
            elements are complete.
        floor, reference: of log p(x), for imputed rows.
    """

    z: Float[Tensor, "sets n dim"]
    usable: Bool[Tensor, "sets n"]
    shortfall: Float[Tensor, "sets n"]
    rows: Float[Tensor, "sets n dim"] | None = None
    floor: float = -math.inf
    reference: float = -math.inf

    def adjusted(self, scores: Float[Tensor, "sets n"]) -> Float[Tensor, "sets n"]:
        """Scores minus the shortfall; −∞ for elements that are not usable."""
        return (scores - self.shortfall).masked_fill(~self.usable, -math.inf)

    def arriving(self, model: Bruno, first: int, evidence: Evidence) -> EncodedSets:
        """The elements from `first` on, each with its missing numbers imputed as if it came next."""
        z, usable, lacking = self.z[:, first:], self.usable[:, first:], self.shortfall[:, first:]
        if self.rows is None:
            return EncodedSets(z, usable, lacking)
        rows = self.rows[:, first:]
        places = rows.isnan().any(-1).nonzero(as_tuple=True)
        if len(places[0]):
            owners, own = places[0].unique(return_inverse=True)
            imputed, log_det = model.encode(Posterior(model, evidence[owners]).impute(rows[places], own))
            log_prob = model.process.log_prob(imputed) + log_det
            z = z.index_put(places, imputed)
            usable = usable.index_put(places, log_prob >= self.floor)
            lacking = lacking.index_put(places, shortfall(log_prob, self.reference))
        return EncodedSets(z, usable, lacking, rows)


@torch.no_grad()
def scores_of_the_rest(model: Bruno, sets: EncodedSets, cutoffs: Cutoffs | None) -> Float[Tensor, "sets n n"]:
    """Adjusted scores of all elements that are still to come, at each position of streams.

    Entry (i, j) is the score of element j if it came directly after the first i elements; NaN for j < i, and
    if none of the first i elements counts, as an element is then not judged.
    """
    n = sets.z.shape[1]
    found = sets.z.new_full((*sets.z.shape[:2], n), math.nan)
    state = StreamEvidence.empty(sets.z.shape[-1], sets.z.shape[:1], sets.z.device)
    for i in range(n):
        rest, count = sets.arriving(model, i, state.evidence), state.evidence.count
        given = model.process.log_prob(rest.z, state.evidence.unsqueeze())
        scores = given - model.process.log_prob(rest.z)
        found[:, i, i:] = rest.adjusted(scores).masked_fill((count == 0).unsqueeze(-1), math.nan)
        usable = rest.usable[:, 0]
        if rest.rows is not None:
            usable = usable & may_count(~rest.rows[:, 0].isnan().any(-1), count, i)
        state = state.add(model, rest.z[:, 0], scores[:, 0], cutoffs, usable)
    return found


@torch.no_grad()
def batch_scores(
    model: Bruno,
    z: Float[Tensor, "*batch n dim"],
    cutoffs: Cutoffs | None,
    usable: Bool[Tensor, "*batch n"] | None = None,
) -> tuple[Float[Tensor, "*batch n"], Bool[Tensor, "*batch n"]]:
    """Scores of complete encoded sets, each element given all others that count, and which elements count.

    Without cutoffs, every usable element counts.
    """
    usable = torch.ones(z.shape[:-1], dtype=torch.bool, device=z.device) if usable is None else usable
    counts = usable if cutoffs is None else typical_elements(model, z, cutoffs, usable)
    if bool(counts.all()):
        return model.process.leave_one_out_log_prob(z) - model.process.log_prob(z), counts
    return scores_within(model, z, counts), counts
