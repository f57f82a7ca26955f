"""Outlier detection in sets: scores, judgements, and the judgement of complete batches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Generator, Tensor

from bruno.arrays import ArrayLike, as_tensor
from bruno.checks import check_omitted
from bruno.data.sampling import SetSampler
from bruno.model import Bruno, Encoded, Posterior
from bruno.tasks.batch_criteria import SetScale, patch_maps
from bruno.tasks.calibration import GroupCalibration
from bruno.tasks.conformal import Basis, GroupScores, benjamini_hochberg
from bruno.tasks.evaluation import steps_and_prior
from bruno.tasks.robust_evidence import Cutoffs, batch_scores, evidence_within, shortfall

# --- scores ----------------------------------------------------------------------------------------------


@torch.no_grad()
def online_scores(model: Bruno, x: ArrayLike) -> Float[Tensor, "*batch n"]:
    """log p(x_i | x_1..x_{i−1}) − log p(x_i) for sets (*batch, n, *shape), all i at once.

    The lower the score of an element, the less it fits the elements before it. The first element scores 0.
    """
    return online_from_latents(model, _encoded(model, x, at_least=1).z)


@torch.no_grad()
def leave_one_out_scores(model: Bruno, x: ArrayLike) -> Float[Tensor, "*batch n"]:
    """log p(x_i | all others of the set) − log p(x_i) for complete sets (*batch, n, *shape), n ≥ 2.

    The score of an element does not depend on the order of the set.
    """
    return leave_one_out_from_latents(model, _encoded(model, x, at_least=2).z)


def online_from_latents(model: Bruno, z: Float[Tensor, "*batch n dim"]) -> Float[Tensor, "*batch n"]:
    """`online_scores` of encoded sets: the Jacobians cancel."""
    steps, prior = steps_and_prior(model.process, z)
    return steps - prior


def leave_one_out_from_latents(model: Bruno, z: Float[Tensor, "*batch n dim"]) -> Float[Tensor, "*batch n"]:
    """`leave_one_out_scores` of encoded sets."""
    return model.process.leave_one_out_log_prob(z) - model.process.log_prob(z)


def _encoded(model: Bruno, x: ArrayLike, at_least: int) -> Encoded:
    """Encoded sets (*batch, n, *shape); raises unless n is large enough."""
    x, axes = as_tensor(x, kind=model.kind), len(model.shape)
    if x.ndim <= axes or x.shape[-axes - 1] < at_least:
        raise ValueError(
            f"`x` must be sets (*batch, n, *{model.shape}) with n of at least {at_least}; "
            f"got shape {tuple(x.shape)}."
        )
    return model.encode_in_batches(x, on_scales=True)


# --- out-of-distribution elements ------------------------------------------------------------------------


@torch.no_grad()
def density_floor(
    model: Bruno,
    sampler: SetSampler,
    *,
    generator: Generator,
    clean: SetSampler | None = None,
) -> float:
    """The log p(x) below which an element is out-of-distribution, such as the output of a broken sensor.

    It is twice as far below the median as the lowest of 1000 training elements is. A model fits its training
    elements better than new ones, and far better if there were few sets. So the floor is lowered to that of
    the `clean` elements, unless most of these are below it, for example because they are in other units.
    """
    log_prob = _random_log_probs(model, sampler, generator)
    floor = 2 * log_prob.min() - log_prob.median()
    if clean is not None:
        log_prob = _random_log_probs(model, clean, generator)
        if log_prob.median() >= floor:
            floor = torch.minimum(floor, 2 * log_prob.min() - log_prob.median())
    return floor.item()


@torch.no_grad()
def reference_density(model: Bruno, sampler: SetSampler, *, generator: Generator) -> float:
    """The median log p(x) of clean elements: the reference of `shortfall`."""
    return _random_log_probs(model, sampler, generator).median().item()


def _random_log_probs(model: Bruno, sampler: SetSampler, generator: Generator) -> Float[Tensor, " n"]:
    """log p(x) of at most 1000 random elements."""
    places = torch.randperm(len(sampler.elements), generator=generator, device=generator.device)[:1000]
    z, log_det = model.encode_in_batches(sampler.at(places), on_scales=True)
    return model.process.log_prob(z) + log_det


# --- judgement -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Judgement:
    """The score of an element, its p-value, and whether it is an outlier.

    Attributes:
        score: log p(x | evidence) − log p(x), minus the `shortfall`; without evidence, the score is minus the
            shortfall alone. For a batch of images that is judged by patches, the score from `patch_scores`.
        seen: number of other elements in the evidence.
        threshold: the score below which it is an outlier, at a false-discovery rate q the score with
            p = k·q/n if k of n elements are flagged; None without evidence, during warm-up, or if it is
            judged by its rank within the set.
        outlier: whether it is flagged: by the threshold, by its p-value, or as out-of-distribution.
        out_of_distribution: whether log p(x) is below the floor, which does not depend on the evidence.
        p: probability of a score at most this low for an element of a clean set; None if not calibrated.
        basis: basis of the p-value, "exact" or "estimated"; None without a p-value.
        p_within: p-value within the set (`WithinSet`), for streams in which every element counts.
        contributions: contribution of each column, or patch of an image, to the score, if requested; see
            `explain`. For a batch that is judged by patches, the score of each patch, see `patch_maps`.
    """

    score: float
    seen: int
    threshold: float | None
    outlier: bool
    out_of_distribution: bool
    p: float | None = None
    basis: Basis | None = None
    p_within: float | None = None
    contributions: dict[str, float] | None = None

    @property
    def sort_key(self) -> tuple[bool, float, float]:
        """Sorts judgements, the most unusual first: out-of-distribution, then by p-value, then by score."""
        return not self.out_of_distribution, 1.0 if self.p is None else self.p, self.score


class JudgedSet(tuple[Judgement, ...]):
    """The judgements of a complete set, in its order, and the evidence that they were given.

    Attributes:
        z: latents of the elements.
        in_evidence: whether each element counts as evidence for the others.
        patches: the score of each patch, for images that were judged by patches; otherwise None.
    """

    z: Float[Tensor, "n dim"]
    in_evidence: Bool[Tensor, " n"]
    patches: Float[Tensor, "n down across"] | None

    @classmethod
    def of(
        cls,
        judgements: Iterable[Judgement],
        z: Float[Tensor, "n dim"],
        in_evidence: Bool[Tensor, " n"],
        patches: Float[Tensor, "n down across"] | None = None,
    ) -> JudgedSet:
        """The judgements with what they were based on."""
        found = cls(judgements)
        found.z, found.in_evidence, found.patches = z, in_evidence, patches
        return found

    @classmethod
    def unjudged(cls, model: Bruno) -> JudgedSet:
        """The set of a single element, which has no others to be judged by."""
        z = torch.zeros((1, model.dim), device=model.device)
        return cls.of([Judgement(0.0, 0, None, False, False)], z, z.new_zeros(1, dtype=torch.bool))

    def given(self, model: Bruno, i: int) -> Posterior:
        """The posterior by which element i was judged: given all others in the evidence."""
        others = self.in_evidence.clone()
        others[i] = False
        return Posterior(model, evidence_within(self.z, others))


@torch.no_grad()
def judge_batch(
    model: Bruno,
    x: ArrayLike,
    threshold: float | None = None,
    *,
    calibration: GroupCalibration | None = None,
    rate: float = 0.01,
    false_discovery_rate: float | None = None,
    cutoffs: Cutoffs | None = None,
    count_all: bool = False,
    floor: float = -math.inf,
    reference: float = -math.inf,
    imputed: bool = False,
) -> JudgedSet:
    """Judge each element of a complete set (n, *shape), n ≥ 2, given all others that count.

    Args:
        model: a model of such sets.
        x: the set.
        threshold: an element with a lower score is an outlier.
        calibration: instead of a threshold, p-values from the scores of clean groups. Cutoffs, floor and
            reference are then those of the calibration. Scores of images are standardised (`SetScale`) or, if
            its criterion is "patches", replaced by distances between patches (`patch_scores`).
        rate: false-alarm rate: with a calibration, an element with p ≤ rate is an outlier.
        false_discovery_rate: with a calibration, flag by Benjamini–Hochberg at this rate instead of `rate`.
        cutoffs: an element with a lower score is excluded from the evidence; by default, the threshold.
        count_all: every element is in the evidence for the others, whatever its score.
        floor: an element with a lower log p(x) is out-of-distribution, and always excluded from the evidence;
            see `density_floor`.
        reference: log p(x) of a typical element; the `shortfall` below it is subtracted from the score.
        imputed: whether elements had missing numbers: p-values are estimated if the groups have none.
    """
    if calibration is not None:
        _check_calibration(model, calibration, threshold)
        cutoffs, floor, reference = calibration.cutoffs, calibration.floor, calibration.reference
    elif threshold is None:
        raise ValueError("`threshold` or `calibration` must be given; got neither.")
    else:
        threshold, cutoffs = float(threshold), cutoffs or default_cutoffs(threshold)
    x = as_tensor(x, kind=model.kind)
    z, log_det = _encoded(model, x, at_least=2)
    log_prob = model.process.log_prob(z) + log_det
    ood = log_prob < floor
    less = shortfall(log_prob, reference)
    scores, in_evidence = batch_scores(model, z, None if count_all else cutoffs, ~ood, less)
    seen = (in_evidence.sum() - in_evidence.long()).tolist()
    if calibration is None:
        assert threshold is not None
        judged = zip(scores.tolist(), seen, ood.tolist(), strict=True)
        found = [Judgement(score, n, threshold, score < threshold or out, out) for score, n, out in judged]
        return JudgedSet.of(found, z, in_evidence)
    patches = patch_maps(x.to(z.device)) if calibration.criterion == "patches" else None
    scores = scores if patches is None else patches.flatten(1).amin(1)
    scale = SetScale.of(scores.double().cpu()) if model.kind.is_images and patches is None else None
    given = scores.masked_fill(ood, -math.inf).double().cpu()
    given = given if scale is None else scale.standardised(given)
    groups = calibration.batch(len(x), count_all=count_all)
    decided = _decide(given.numpy(), groups, rate, false_discovery_rate, imputed)
    limit = decided.limit if scale is None else scale.in_nats(decided.limit)
    return JudgedSet.of(decided.judgements(scores, seen, ood, limit), z, in_evidence, patches)


def _check_calibration(model: Bruno, calibration: GroupCalibration, threshold: float | None) -> None:
    """Raise unless a batch can be judged by a calibration."""
    check_omitted("`calibration` decides what is flagged;", threshold=threshold)
    if not model.is_same(calibration.model):
        raise ValueError("`calibration` must be of `model`; got one of a model with other weights.")


class _Decisions(NamedTuple):
    """The p-values of a batch and their basis, which elements are flagged, and the threshold of the score."""

    p: Float[np.ndarray, " n"]
    basis: Basis
    flagged: Bool[np.ndarray, " n"]
    limit: float

    def judgements(
        self, scores: Float[Tensor, " n"], seen: list[int], ood: Bool[Tensor, " n"], limit: float
    ) -> Iterator[Judgement]:
        """The judgements of scores, with the threshold in their unit."""
        values = zip(scores.tolist(), seen, self.flagged, ood.tolist(), self.p.tolist(), strict=True)
        for score, others, outlier, out, p in values:
            yield Judgement(score, others, limit, bool(outlier) or out, out, p, self.basis)


def _decide(
    scores: Float[np.ndarray, " n"],
    groups: GroupScores,
    rate: float,
    false_discovery_rate: float | None,
    imputed: bool,
) -> _Decisions:
    """Decide by the p-values of the scores of a batch, at a false-alarm or a false-discovery rate."""
    position = len(scores) - 1
    asked = rate if false_discovery_rate is None else false_discovery_rate / len(scores)
    basis = of_p = groups.basis(position, asked)
    p = groups.p_values(scores, position, of_p)
    if imputed and not groups.incomplete:  # the groups were never imputed
        basis = "estimated"
    if false_discovery_rate is None:
        return _Decisions(p, basis, p <= rate, groups.threshold(position, asked))
    flagged = benjamini_hochberg(p, false_discovery_rate)
    limit = groups.threshold(position, asked * max(1, int(flagged.sum())), of_p)
    return _Decisions(p, basis, flagged, limit)


def default_cutoffs(threshold: float | GroupScores) -> Cutoffs:
    """A fixed threshold as the cutoff for every count; raises if scores of clean groups are given instead."""
    if isinstance(threshold, GroupScores):
        raise ValueError("`cutoffs` must be given with calibrated scores; got none. Or set `count_all`.")
    return Cutoffs((float(threshold),))
