"""The evidence of streams without outliers, element by element, and the scores of sets as streams."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Real
from torch import Tensor

from bruno.model import Bruno, Encoded, Posterior
from bruno.process import Evidence
from bruno.tasks.evaluation import steps_and_prior
from bruno.tasks.robust_evidence import Cutoffs, evidence_within, scores_within, shortfall, typical_elements

START = 20  # elements at the beginning of a stream that are reconsidered together
RECONSIDERED = {2, 3, 4, 5, 6, 7, 8, 10, 12, 16, START}  # positions at which they are reconsidered


def may_count(complete: Any, count: Any, position: Any) -> Any:
    """Whether elements may count, given how many count already and how many came before; arrays or numbers.

    A missing number is imputed from the elements of the set that count. If none counts yet, the number is a
    guess at the level of the set: with it as evidence, later complete rows would look like outliers. So,
    among the first `START` elements, incomplete rows do not count before another element does.
    """
    return complete | (count > 0) | (position >= START)


class ElementDensities:
    """Latents of elements and their densities, computed by the model; a subclass may compute them faster."""

    def __init__(self, model: Bruno) -> None:
        self.model = model

    def encode(self, x: Real[Tensor, "..."]) -> Encoded:
        """The latents of an element (*shape), and the log-det on scales."""
        return self.model.encode(x.to(self.model.device), on_scales=True)

    def prior(self, z: Float[Tensor, " dim"]) -> Float[Tensor, ""]:
        """log p(z) without evidence."""
        return self.model.process.log_prob(z)

    def given(self, z: Float[Tensor, " dim"], evidence: Evidence) -> Float[Tensor, ""]:
        """log p(z | evidence)."""
        return self.model.process.log_prob(z, evidence)

    def scores_of(self, z: Float[Tensor, "n dim"]) -> Callable[[Tensor], Tensor]:
        """A function from the mask of elements that are inside to `scores_within`, for the set z."""
        return partial(scores_within, self.model, z, prior=self.model.process.log_prob(z))


@dataclass(frozen=True, eq=False)
class StreamEvidence:
    """The state of streams, one for each set of a batch: the evidence, and elements to reconsider.

    Attributes:
        evidence: evidence of the elements that count.
        position: number of elements so far, including those that do not count.
        first: latents of the first elements while they may be reconsidered, empty afterwards; or, in a
            window, of the latest elements.
        usable: which of the elements in `first` may count.
        less: subtracted from the scores of the elements in `first`: their `shortfall`.
        decided: which elements count, of those that the last step decided about: the latest one or, if the
            first elements or those of the window were reconsidered, all of these.
        incomplete: whether an element so far had missing numbers.
    """

    evidence: Evidence
    position: int
    first: Float[Tensor, "*batch first dim"]
    usable: Bool[Tensor, "*batch first"]
    less: Float[Tensor, "*batch first"]
    decided: Bool[Tensor, "*batch decided"]
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
        none = torch.zeros((*shape, 0), dtype=torch.bool, device=device)
        first, less = (torch.zeros((*shape, *size), device=device) for size in ((0, evidence.dim), (0,)))
        return cls(evidence, position, first, none, less, none)

    def including(self, z: Float[Tensor, "*batch dim"]) -> StreamEvidence:
        """The state after an earlier element, which was excluded, is added; the position stays the same."""
        return replace(self._settled(), evidence=self.evidence.add(z))

    def _settled(self) -> StreamEvidence:
        """The state whose elements are not reconsidered any more."""
        none = slice(0)
        return replace(
            self, first=self.first[..., none, :], usable=self.usable[..., none], less=self.less[..., none]
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
        less: Float[Tensor, "*batch"] | None = None,
        window: int | None = None,
        scores_of: Callable[[Tensor], Callable[[Tensor], Tensor]] | None = None,
    ) -> StreamEvidence:
        """The state after an element, which counts if it is usable and score − less is at least the cutoff.

        The first `START` elements are reconsidered together at the positions `RECONSIDERED`, as one of the
        very first may be an outlier itself. With a window, of at most `START` elements, the set consists of
        its latest elements, which are reconsidered unless all of them count. Without cutoffs, every usable
        element counts.

        `less` is the `shortfall` of the element, by default 0. `scores_of` maps latents to the argument
        `scores` of `typical_elements`, to compute them faster.
        """
        less = torch.zeros_like(score) if less is None else less
        in_evidence = usable
        if cutoffs is not None:
            in_evidence = usable & (score - less >= cutoffs.at(self.evidence.count))
        position, decided = self.position + 1, in_evidence.unsqueeze(-1)
        evidence = self.evidence + Evidence.single(z, in_evidence)
        after = replace(self, evidence=evidence, position=position, decided=decided)
        # Elements are not reconsidered after the first `START`, nor if the stream began with a posterior.
        if window is None and (cutoffs is None or self.first.shape[-2] < self.position):
            return after._settled()
        kept = after._keeping(z, usable, less, window)

        def typical() -> Bool[Tensor, "*batch first"]:
            assert cutoffs is not None
            scores = scores_of(kept.first) if scores_of else None
            return typical_elements(model, kept.first, cutoffs, kept.usable, scores, kept.less)

        if window is not None:
            if kept.first.shape[-2] < min(position, window):  # the stream began with a posterior
                return kept
            before = self.evidence.count == self.usable.sum(-1)
            all_count = cutoffs is None or bool((before & (in_evidence == usable)).all())
            return kept._deciding(kept.usable if all_count else typical())
        found = kept._deciding(typical()) if position in RECONSIDERED else kept
        return found._settled() if position >= START else found

    def _keeping(
        self,
        z: Float[Tensor, "*batch dim"],
        usable: Bool[Tensor, "*batch"],
        less: Float[Tensor, "*batch"],
        window: int | None,
    ) -> StreamEvidence:
        """The state with one more element to reconsider; at most `window`."""
        latest = slice(None if window is None else -window, None)
        return replace(
            self,
            first=torch.cat([self.first, z.unsqueeze(-2)], -2)[..., latest, :],
            usable=torch.cat([self.usable, usable.unsqueeze(-1)], -1)[..., latest],
            less=torch.cat([self.less, less.to(self.less).unsqueeze(-1)], -1)[..., latest],
        )

    def _deciding(self, decided: Bool[Tensor, "*batch first"]) -> StreamEvidence:
        """The state whose evidence is that of some of the elements that are reconsidered."""
        return replace(self, evidence=evidence_within(self.first, decided), decided=decided)


@torch.no_grad()
def stream_scores(
    model: Bruno,
    z: Float[Tensor, "*batch n dim"],
    cutoffs: Cutoffs | None,
    usable: Bool[Tensor, "*batch n"] | None = None,
    less: Float[Tensor, "*batch n"] | None = None,
) -> Float[Tensor, "*batch n"]:
    """Scores of encoded sets as streams: each element given those before it that count, the first 0.

    `less`, such as the `shortfall`, is subtracted from the scores.
    """
    usable = torch.ones(z.shape[:-1], dtype=torch.bool, device=z.device) if usable is None else usable
    less = torch.zeros_like(z[..., 0]) if less is None else less
    if cutoffs is None and bool(usable.all()):
        steps, prior = steps_and_prior(model.process, z)
        return steps - prior - less
    state = StreamEvidence.empty(z.shape[-1], z.shape[:-2], z.device)
    scores, prior = [], model.process.log_prob(z)
    for i in range(z.shape[-2]):
        scores.append(state.score(model, z[..., i, :], prior[..., i]))
        state = state.add(model, z[..., i, :], scores[-1], cutoffs, usable[..., i], less[..., i])
    return torch.stack(scores, -1) - less


@dataclass(frozen=True, eq=False)
class EncodedSets:
    """Encoded elements of sets, and everything else that their scores and their evidence depend on.

    Attributes:
        z: latents of the elements.
        usable: whether elements may count: their log p(x) is at least the floor.
        shortfall: of log p(x), see `shortfall`.
        rows: the elements with missing numbers as NaN, which a stream imputes from those before; None if all
            elements are complete.
        floor, reference: applied to log p(x) of rows that a stream imputes.
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
        z, usable, shortfalls = self.z[:, first:], self.usable[:, first:], self.shortfall[:, first:]
        if self.rows is None:
            return EncodedSets(z, usable, shortfalls)
        rows = self.rows[:, first:]
        places = rows.isnan().any(-1).nonzero(as_tuple=True)
        if len(places[0]):
            owners, own = places[0].unique(return_inverse=True)
            complete = Posterior(model, evidence[owners]).impute(rows[places], own)
            imputed, log_det = model.encode(complete, on_scales=True)
            log_prob = model.process.log_prob(imputed) + log_det
            z = z.index_put(places, imputed)
            usable = usable.index_put(places, log_prob >= self.floor)
            shortfalls = shortfalls.index_put(places, shortfall(log_prob, self.reference))
        return EncodedSets(z, usable, shortfalls, rows)


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
        state = state.add(model, rest.z[:, 0], scores[:, 0], cutoffs, usable, rest.shortfall[:, 0])
    return found
