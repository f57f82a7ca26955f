"""Scores of the elements of labelled sets, robust to outliers, and their p-values under the model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from bruno.arrays import ArrayLike
from bruno.checks import check_choice
from bruno.data.sampling import seeded_generator
from bruno.flow.preprocessing import ColumnScales
from bruno.model import Bruno, Encoded
from bruno.process import Evidence
from bruno.tasks.batch_criteria import SetScale
from bruno.tasks.calibration import GroupCalibration
from bruno.tasks.null_distributions import CalibratedNull, PredictiveNull
from bruno.tasks.robust_evidence import (
    evidence_within,
    majority,
    scores_within,
    shortfall,
    typical_elements,
    with_typical,
)

Criterion = Literal["score", "density"]
CRITERIA: tuple[Criterion, ...] = ("score", "density")

_DRAWS = 999  # samples of the predictive that set the cutoffs
_NULL_DRAWS = 4999  # samples of the predictive for p-values: all sets share their errors
_CENSORED_DIVISOR = 10  # the lowest tenth of the p-values is censored, as it may be of outliers
_SHRINKAGE = 2  # number of p-values that an exponent of 1 counts as
_WIDEST = 3.0  # largest exponent, for a model that is too wide
_CUTOFF = 0.01  # an element with a lower p-value is excluded from the evidence
_FURTHEST = 1e4  # larger latents never count: the squares of the others would be lost to rounding
_ENCODED_AT_A_TIME = 4096
_SETS_AT_A_TIME = 512  # whose draws take 20 MB
_NUMBERS_AT_A_TIME = 2**19  # a few megabytes, which stay in the cache of a CPU


class ScoredSets(NamedTuple):
    """Scores of the elements of complete sets, each given all others that count.

    Attributes:
        scores: one for each element.
        in_evidence: whether each element is in the evidence of its set.
        evidence: the evidence of each set.
    """

    scores: Float[Tensor, " n"]
    in_evidence: Bool[Tensor, " n"]
    evidence: Evidence


@dataclass(frozen=True, eq=False)
class SetScorer:
    """Scores elements given their sets.

    The score is log p(x | set) − log p(x), minus the `shortfall` of log p(x) below a reference, so that an
    element that is unlikely under every set is an outlier of each. The other criterion is the density,
    log p(x | set), for a model that was trained on a single set.

    Attributes:
        model: a model of such sets.
        criterion: "score" or "density".
        floor: log p(x) below which an element is out-of-distribution, and never counts.
        reference: log p(x) of a typical element, for the score; −∞ for none.
        calibration: calibration of the model on held-out groups; if None, p-values are those under the model.
        exponent: power of the p-values under the model; see `fitted`.
        seed: seed of the draws.
    """

    model: Bruno
    criterion: Criterion = "score"
    floor: float = -math.inf
    reference: float = -math.inf
    calibration: GroupCalibration | None = None
    exponent: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice("criterion", self.criterion, CRITERIA)

    @classmethod
    def of(
        cls,
        model: Bruno,
        criterion: Criterion,
        calibration: GroupCalibration | None = None,
        seed: int = 0,
    ) -> SetScorer:
        """A scorer with the floor and the reference of the calibration, or of samples of the model.

        The reference is the median log p(x) of the samples; the floor is twice as far below it as the lowest
        sample, as in `density_floor`. Both are −∞ for images.
        """
        if criterion == "density" or model.kind.is_images:
            usable = None if criterion == "density" or calibration is None else calibration.by_score()
            return cls(model, criterion, calibration=usable, seed=seed)
        if calibration is not None:
            floor, reference = calibration.floor, calibration.reference
            return cls(model, criterion, floor, reference, calibration, seed=seed)
        with torch.no_grad():
            prior = Evidence.empty(model.dim, device=model.device)
            z = model.process.predictive(prior).sample(
                (_DRAWS,), generator=seeded_generator(seed, model.device)
            )
            log_prob = model.process.log_prob(z) + _log_det(model, z)
        lowest, median = log_prob.min().item(), log_prob.median().item()
        return cls(model, criterion, 2 * lowest - median, median, seed=seed)

    # --- scores ------------------------------------------------------------------------------------------

    def encode(self, x: ArrayLike) -> Encoded:
        """Latents and log-dets, on scales, of elements (n, *shape), in batches."""
        return self.model.encode_in_batches(x, on_scales=True, batch_size=_ENCODED_AT_A_TIME)

    @torch.no_grad()
    def scores(self, encoded: Encoded, evidence: Evidence) -> Float[Tensor, "*batch"]:
        """Scores of encoded elements given evidence; the batches broadcast."""
        return self.model.process.log_prob(encoded.z, evidence) - self._subtracted(encoded)

    def _subtracted(self, encoded: Encoded) -> Float[Tensor, "*batch"]:
        """The term that is subtracted from log p(z | set): −log |det| for the density, else log p(z)."""
        if self.criterion == "density":
            return -encoded.log_det
        prior = self.model.process.log_prob(encoded.z)
        return prior + shortfall(prior + encoded.log_det, self.reference)

    @torch.no_grad()
    def score_sets(
        self, encoded: Encoded, labels: Int[Tensor, " n"], sets: int, *, count_all: bool = False
    ) -> ScoredSets:
        """Scores of all elements, each given all others of its set that count.

        Elements with the lowest scores are removed from a set until half of it is left. Then, every element
        whose p-value under the model given the remaining others is above 1 % is put back, until nothing
        changes.
        """
        subtracted = self._subtracted(encoded)
        scores = torch.zeros_like(subtracted)
        in_evidence = torch.zeros(len(labels), dtype=torch.bool, device=subtracted.device)
        usable = self.usable(encoded)
        for index in _padded(labels, sets, self.model.dim):
            exists, place = index >= 0, index.clamp(min=0)
            z, less, may = encoded.z[place], subtracted[place], usable[place] & exists
            inside = may if count_all else self._typical(z, less, encoded.log_det[place], may)
            scores[index[exists]] = scores_within(self.model, z, inside, less)[exists]
            in_evidence[index[exists]] = inside[exists]
        return ScoredSets(scores, in_evidence, grouped_evidence(encoded.z, labels, sets, in_evidence))

    @torch.no_grad()
    def leave_one_out(
        self, encoded: Encoded, labels: Int[Tensor, " n"], in_evidence: Bool[Tensor, " n"], evidence: Evidence
    ) -> Float[Tensor, " n"]:
        """Scores of some elements of sets, each given all others that count."""
        return self.scores(encoded, evidence[labels].without_each(encoded.z, in_evidence))

    def usable(self, encoded: Encoded) -> Bool[Tensor, "*batch"]:
        """Which elements may count: neither out-of-distribution, nor so far away that precision is lost."""
        near = (encoded.z.abs() < _FURTHEST).all(-1)
        if self.criterion == "density" or self.floor == -math.inf:
            return near
        return near & (self.model.process.log_prob(encoded.z) + encoded.log_det >= self.floor)

    def _typical(
        self,
        z: Float[Tensor, "sets n dim"],
        subtracted: Float[Tensor, "sets n"],
        log_det: Float[Tensor, "sets n"],
        usable: Bool[Tensor, "sets n"],
    ) -> Bool[Tensor, "sets n"]:
        """Which elements of complete sets count; see `typical_elements`, which has fixed cutoffs.

        The majority of a set of rows is found by density: the score would prefer a few rows that agree with
        each other and are far from all other sets. The majority of images is found by score, as the density
        of an image depends more on its content than on its set.
        """
        if self.calibration is not None:
            scores = partial(scores_within, self.model, z, prior=subtracted)
            return typical_elements(self.model, z, self.calibration.cutoffs, usable, scores)
        ranked_by = subtracted if self.model.levels else -log_det
        most = majority(usable, partial(scores_within, self.model, z, prior=ranked_by))

        def typical(inside: Tensor, changed: Tensor) -> Tensor:
            found, z_changed, given = inside.clone(), z[changed], inside[changed]
            cutoffs = self.cutoffs(evidence_within(z_changed, given)).unsqueeze(-1)
            scores = scores_within(self.model, z_changed, given, subtracted[changed])
            found[changed] = scores >= cutoffs
            return found

        return with_typical(most, usable, typical)

    # --- p-values ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def draws(self, evidence: Evidence, count: int = _DRAWS) -> Float[Tensor, "*batch draws"]:
        """Scores of `count` elements drawn from the predictive of each set, increasing.

        All sets share the same random numbers, so the draws of a set do not depend on the other sets.
        """
        model, sets, parts = self.model, evidence.reshape(-1), []
        for some in torch.arange(len(sets.count)).split(max(1, _NUMBERS_AT_A_TIME // (count * model.dim))):
            generator = seeded_generator(self.seed, model.device)
            z = model.process.predictive(sets[some]).sample((count,), generator=generator, common=True)
            needed = self.criterion == "density" or self.reference > -math.inf
            log_det = _log_det(model, z) if needed else z.new_zeros(z.shape[:-1])
            parts.append(self.scores(Encoded(z, log_det), sets[some]).T.sort(-1).values)
        return torch.cat(parts).view(*evidence.batch_shape, count)

    def fitted(
        self,
        scores: Float[Tensor, " n"],
        labels: Int[Tensor, " n"],
        evidence: Evidence,
        *,
        least: float = 0.5,
    ) -> SetScorer:
        """The scorer with the exponent that makes p-values uniform for elements outside the training data.

        A model that overfits is too narrow: p-values of clean elements under it are too low. If −log p is
        exponential with mean 1/g, p^g is uniform. The exponent is the maximum-likelihood estimate of g, minus
        its standard error. The lowest tenth of the p-values is censored, as it may be of outliers.

        Args:
            scores: scores of elements that the model was not trained on, each given all others of its set.
            labels: the set of each element.
            evidence: the evidence of each set.
            least: lower limit of g. Many outliers look like a model that is too narrow; only a small model
                that was trained on few rows is likely to be so.
        """
        if self.calibration is not None:
            return self
        known = evidence[labels.unique()]
        nulls = self.null_distributions(known, batch=True, rate=_CUTOFF) if len(labels) else []
        found, by_set = scores.double().cpu().numpy(), positions_by_label(labels.cpu().numpy())
        surprise = [np.ones(_SHRINKAGE)]
        for null, (_, own) in zip(nulls, by_set, strict=True):
            surprise.append(-np.log(null.p_values(found[own])) / self.exponent)
        values = np.sort(np.concatenate(surprise))
        kept = len(values) - len(values) // _CENSORED_DIVISOR
        values = np.minimum(values, values[kept - 1])  # censored, not dropped
        exponent = kept / float(values.sum()) * (1 - 1 / math.sqrt(len(values)))
        return replace(self, exponent=min(_WIDEST, max(least, exponent)))

    def cutoffs(self, evidence: Evidence) -> Float[Tensor, "*batch"]:
        """The score below which an element is excluded from the evidence: a p-value of 1 %."""
        rows = self.draws(evidence)
        flat = rows.reshape(-1, _DRAWS).double().cpu().numpy()
        found = [PredictiveNull.of(row, self.exponent).threshold(_CUTOFF) for row in flat]
        return torch.tensor(found, dtype=rows.dtype, device=rows.device).view(evidence.batch_shape)

    def null_distributions(
        self, evidence: Evidence, *, batch: bool, rate: float, by_set: Sequence[Tensor] = ()
    ) -> list[PredictiveNull | CalibratedNull]:
        """The null distribution of the scores of each set, for p-values.

        Args:
            evidence: the evidence of each set.
            batch: whether elements of the sets themselves are judged, each given all others.
            rate: the false-alarm rate of the decision.
            by_set: the scores of each set, to standardise batches of images (`SetScale`).
        """
        if self.calibration is None:
            found: list[PredictiveNull | CalibratedNull] = []
            for some in torch.arange(len(evidence.count)).split(_SETS_AT_A_TIME):
                rows = self.draws(evidence[some], _NULL_DRAWS).double().cpu().numpy()
                found += [PredictiveNull.of(row, self.exponent) for row in rows]
            return found
        scales: Sequence[SetScale | None] = [None] * len(evidence.count)
        if batch and self.model.kind.is_images:
            scales = [SetScale.of(scores.double().cpu()) for scores in by_set]
        return [
            CalibratedNull(self.calibration, max(count, 2 if batch else 1), batch, rate, scale)
            for count, scale in zip(evidence.count.tolist(), scales, strict=True)
        ]


def grouped_evidence(
    z: Float[Tensor, "n dim"], labels: Int[Tensor, " n"], sets: int, in_evidence: Bool[Tensor, " n"]
) -> Evidence:
    """The evidence of each set from the latents of the elements that count."""
    z, labels = z[in_evidence].double(), labels[in_evidence]
    zero = torch.zeros(sets, z.shape[1], dtype=z.dtype, device=z.device)
    count = torch.bincount(labels, minlength=sets)
    mean = zero.index_add(0, labels, z) / count.clamp(min=1).unsqueeze(1)
    return Evidence(count, mean, zero.index_add(0, labels, (z - mean[labels]).square()))


def positions_by_label(labels: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Each label that occurs, in increasing order, and the positions of the elements that have it."""
    order = labels.argsort(kind="stable")
    found, starts = np.unique(labels[order], return_index=True)
    return zip(found.tolist(), np.split(order, starts)[1:], strict=True)


def _padded(labels: Int[Tensor, " n"], sets: int, dim: int) -> Iterator[Int[Tensor, "some n"]]:
    """Positions of the elements of sets of similar size, −1 after the last of each set."""
    counts = torch.bincount(labels, minlength=sets)
    starts, order = counts.cumsum(0) - counts, labels.argsort(stable=True)
    by_size = counts.argsort()
    first = int((counts == 0).sum())  # empty sets have nothing to score
    while first < sets:
        last = first + 1
        while last < sets and (last + 1 - first) * int(counts[by_size[last]]) * dim <= _NUMBERS_AT_A_TIME:
            last += 1
        some = by_size[first:last]
        steps = torch.arange(int(counts[some].max()), device=labels.device)
        inside = steps < counts[some].unsqueeze(1)
        place = (starts[some].unsqueeze(1) + steps).clamp(max=len(labels) - 1)
        yield torch.where(inside, order[place], -1)
        first = last


def _log_det(model: Bruno, z: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch"]:
    """The log-det of `encode` on scales, of the elements with these latents."""
    y, first = model.flow.inverse(z.reshape(-1, model.dim).to(model.process.mean.dtype))
    x, second = model.preprocessing.inverse(y)
    if isinstance(model.preprocessing, ColumnScales):
        second = second + model.preprocessing.scale_log_det(x)
    return -(first + second.to(first.dtype)).view(z.shape[:-1])
