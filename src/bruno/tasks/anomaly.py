"""Outlier detection in sets: along a stream and in a complete batch."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Generator, Tensor

from bruno.arrays import ArrayLike, as_tensor
from bruno.config import check_at_least, check_count
from bruno.data.sampling import SetSampler
from bruno.model import Bruno, Posterior
from bruno.process import Evidence
from bruno.tasks.progress import Progress

SETS_AT_A_TIME = 16  # scored together, to bound memory
_ELEMENTS_AT_A_TIME = 256  # encoded together, to bound memory

# --- scores ----------------------------------------------------------------------------------------------


@torch.no_grad()
def online_scores(model: Bruno, x: ArrayLike) -> Float[Tensor, "*batch n"]:
    """log p(x_i | x_1..x_{i−1}) − log p(x_i) for sets (*batch, n, *shape), all i at once.

    The lower the score, the less an element fits those before it. The first element scores 0.
    """
    return online_from_latents(model, _latents(model, x, at_least=1))


@torch.no_grad()
def leave_one_out_scores(model: Bruno, x: ArrayLike) -> Float[Tensor, "*batch n"]:
    """log p(x_i | all others of the set) − log p(x_i) for complete sets (*batch, n, *shape), n ≥ 2.

    The order of the elements makes no difference.
    """
    return leave_one_out_from_latents(model, _latents(model, x, at_least=2))


class BatchScores(NamedTuple):
    """Scores of the elements of one set, and which of them are out-of-distribution."""

    scores: Float[Tensor, " n"]
    out_of_distribution: Bool[Tensor, " n"]


@torch.no_grad()
def batch_scores(model: Bruno, x: ArrayLike, floor: float = -math.inf) -> BatchScores:
    """`leave_one_out_scores` of one set (n, *shape), without its out-of-distribution elements as evidence.

    An element is out-of-distribution if its log p(x) is below `floor`, see `density_floor`. It is scored
    given all others, but excluded from their evidence: two equal glitches would make each other
    likely. If fewer than two elements remain, none is excluded.
    """
    x = as_tensor(x, kind=model.kind)
    z = _latents(model, x, at_least=2)
    beyond = _below_floor(model, x, floor)
    if (~beyond).sum() < 2:
        beyond = torch.zeros_like(beyond)
    kept, excluded, scores = z[~beyond], z[beyond], z.new_empty(len(z))
    scores[~beyond] = leave_one_out_from_latents(model, kept)
    if len(excluded):
        given = Evidence.of(kept)
        scores[beyond] = model.process.log_prob(excluded, given) - model.process.log_prob(excluded)
    return BatchScores(scores, beyond)


def _below_floor(model: Bruno, x: Tensor, floor: float) -> Bool[Tensor, " n"]:
    """Whether each element (n, *shape) has a log p(x) below `floor`."""
    if floor == -math.inf:
        return torch.zeros(len(x), dtype=torch.bool, device=model.device)
    parts = x.split(_ELEMENTS_AT_A_TIME)
    return torch.cat([model.prior().log_prob(part.to(model.device)) < floor for part in parts])


def online_from_latents(model: Bruno, z: Float[Tensor, "*batch n dim"]) -> Float[Tensor, "*batch n"]:
    """`online_scores` of encoded sets: the Jacobians cancel."""
    return model.process.step_log_prob(z) - model.process.log_prob(z)


def leave_one_out_from_latents(model: Bruno, z: Float[Tensor, "*batch n dim"]) -> Float[Tensor, "*batch n"]:
    """`leave_one_out_scores` of encoded sets."""
    return model.process.leave_one_out_log_prob(z) - model.process.log_prob(z)


def _latents(model: Bruno, x: ArrayLike, at_least: int) -> Float[Tensor, "*batch n dim"]:
    x, axes = as_tensor(x, kind=model.kind), len(model.shape)
    if x.ndim <= axes or x.shape[-axes - 1] < at_least:
        raise ValueError(
            f"`x` must be sets (*batch, n, *{model.shape}) with n of at least {at_least}; "
            f"got shape {tuple(x.shape)}."
        )
    return model.latents(x)


# --- calibration -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Thresholds:
    """The score below which an element is an outlier, by the number of elements seen before it.

    Attributes:
        by_count: threshold after n = 1, 2, … elements; the last holds for all larger n.
        rate: the false-alarm rate: fraction of clean elements with a score below the threshold.
        sets: number of clean sets used for calibration.
    """

    by_count: tuple[float, ...]
    rate: float
    sets: int

    def at(self, seen: int) -> float:
        """The threshold for an element after this many others (at least one)."""
        return self.by_count[min(seen, len(self.by_count)) - 1]


def calibrate(
    model: Bruno,
    sampler: SetSampler,
    *,
    rate: float,
    set_size: int,
    sets: int,
    generator: Generator,
    progress: Progress | None = None,
) -> Thresholds:
    """Thresholds with a chosen false-alarm rate, from the online scores of clean sets.

    The threshold after n elements is the k-th smallest score at that position, k = ⌊rate·(sets + 1)⌋: a
    new clean set falls below it with probability k/(sets + 1) ≤ rate, for any distribution of scores. That
    is the mean over calibrations; the rate of one calibration deviates by about sqrt(rate/sets), so a rate
    of 0.01 needs about 1,000 sets. Elements of a stream beyond `set_size` use the last threshold.
    """
    _check_rate_and_set_size(rate, set_size)
    rank = math.floor(rate * (sets + 1) + 1e-9)
    if rank < 1:
        needed = math.ceil(1 / rate - 1 - 1e-9)
        raise ValueError(f"`sets` must be at least {needed} for a `rate` of {rate}; got {sets}.")
    scores = _scores_of_clean_sets(online_from_latents, model, sampler, set_size, sets, generator, progress)
    ordered = scores[:, 1:].sort(0).values
    return Thresholds(tuple(ordered[rank - 1].tolist()), rate, sets)


def calibrate_batch(
    model: Bruno,
    sampler: SetSampler,
    *,
    rate: float,
    set_size: int,
    sets: int,
    generator: Generator,
    progress: Progress | None = None,
) -> float:
    """The threshold for leave-one-out scores of a batch of this size, with a chosen false-alarm rate."""
    _check_rate_and_set_size(rate, set_size)
    scores = _scores_of_clean_sets(
        leave_one_out_from_latents, model, sampler, set_size, sets, generator, progress
    )
    return float(np.quantile(scores.numpy(), rate))  # torch.quantile limits the number of elements


@torch.no_grad()
def density_floor(model: Bruno, sampler: SetSampler, *, generator: Generator, elements: int = 1000) -> float:
    """The log p(x) below which an element is out-of-distribution, such as the output of a broken sensor.

    It is twice as far below the median as the lowest of `elements` clean elements.
    """
    check_at_least("elements", elements, 1)
    places = torch.randperm(len(sampler.elements), generator=generator, device=generator.device)[:elements]
    parts = (sampler.at(some) for some in places.split(_ELEMENTS_AT_A_TIME))
    log_prob = torch.cat([model.prior().log_prob(x) for x in parts])
    return (2 * log_prob.min() - log_prob.median()).item()


def _check_rate_and_set_size(rate: float, set_size: int) -> None:
    if not 0 < rate < 1:
        raise ValueError(
            f"`rate` must be between 0 and 1, such as 0.01 for one false alarm in 100; got {rate}."
        )
    if set_size < 2:
        raise ValueError(f"`set_size` must be at least 2, as scores need other elements; got {set_size}.")


@torch.no_grad()
def _scores_of_clean_sets(
    scores: Callable[[Bruno, Tensor], Tensor],
    model: Bruno,
    sampler: SetSampler,
    set_size: int,
    sets: int,
    generator: Generator,
    progress: Progress | None,
) -> Float[Tensor, "sets set_size"]:
    """Scores of the elements of clean sets; each element is encoded once, even if several sets share it."""
    check_count("sets", sets)
    sampler.check_draw("sets", sets, set_size)
    classes = torch.randint(sampler.classes, (sets,), generator=generator, device=generator.device)
    used, which = sampler.indices_of(classes, set_size, generator).unique(return_inverse=True)
    latents = []
    for some in used.split(_ELEMENTS_AT_A_TIME):
        latents.append(model.encode(sampler.at(some)).z)
        if progress is not None:
            progress(sum(map(len, latents)), len(used))
    z = torch.cat(latents)
    return torch.cat([scores(model, z[some]).cpu() for some in which.split(SETS_AT_A_TIME)])


# --- judgement -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Judgement:
    """The score of an element, and whether it is an outlier.

    Attributes:
        score: log p(x | evidence) − log p(x); 0 without evidence.
        seen: number of other elements in the evidence.
        threshold: the score below which it is an outlier; None during warm-up.
        outlier: whether the score is below the threshold or the element is out-of-distribution.
        out_of_distribution: whether log p(x) is below the floor, which does not depend on the evidence.
    """

    score: float
    seen: int
    threshold: float | None
    outlier: bool
    out_of_distribution: bool


def judge_batch(
    model: Bruno, x: ArrayLike, threshold: float, floor: float = -math.inf
) -> tuple[Judgement, ...]:
    """Judge each element of a complete set (n, *shape), n ≥ 2, given all others.

    Args:
        model: a model of such sets.
        x: the set.
        threshold: an element with a lower score is an outlier; see `calibrate_batch`.
        floor: an element with a lower log p(x) is out-of-distribution, and excluded from the evidence of the
            others; see `density_floor` and `batch_scores`.
    """
    scores, out_of_distribution = batch_scores(model, x, floor)
    kept = int((~out_of_distribution).sum())
    return tuple(
        Judgement(score, kept if beyond else kept - 1, threshold, beyond or score < threshold, beyond)
        for score, beyond in zip(scores.tolist(), out_of_distribution.tolist(), strict=True)
    )


class Step(NamedTuple):
    """The judgement of an element, and the posterior after it."""

    judgement: Judgement
    posterior: Posterior


@dataclass(frozen=True, eq=False)
class Detector:
    """Judges the elements of a stream one at a time; its state is a posterior of constant size.

    Attributes:
        model: a model of such sets.
        threshold: the result of `calibrate`, or one number for all counts; at a score of 0, the evidence
            makes an element neither more nor less likely.
        keep_out: exclude outliers from the evidence. They then do not blur it, but the detector never adapts
            to a permanent change of the stream, and never recovers from atypical first elements.
        warm_up: number of first elements that enter the evidence without being judged, at least 1.
        floor: an element with a log p(x) below this, see `density_floor`, is out-of-distribution. It is an
            outlier, even as the first element, and is always excluded from the evidence: otherwise all later
            inliers would look like outliers.
    """

    model: Bruno
    threshold: float | Thresholds = 0.0
    keep_out: bool = False
    warm_up: int = 1
    floor: float = -math.inf

    def __post_init__(self) -> None:
        rule = f"`threshold` must be a number, or the result of `calibrate`; got {self.threshold!r}."
        try:
            if not isinstance(self.threshold, Thresholds) and math.isnan(self.threshold):
                raise ValueError(rule)
        except TypeError:
            raise TypeError(rule) from None
        check_at_least("warm_up", self.warm_up, 1)  # the first element has no evidence
        if math.isnan(self.floor) or self.floor == math.inf:
            raise ValueError(f"`floor` must be a number, or -inf for none; got {self.floor}.")

    @torch.no_grad()
    def condition_on_typical(self, typical: ArrayLike) -> Posterior:
        """The posterior after typical elements (n, *shape), without those that are out-of-distribution."""
        known = self.model.prior()
        x = as_tensor(typical, "typical", kind=self.model.kind)
        for some in x.to(self.model.device).split(_ELEMENTS_AT_A_TIME):
            likely = some[~_below_floor(self.model, some, self.floor)]
            known = known.update(likely) if len(likely) else known
        return known

    def watch(self, stream: Iterable[ArrayLike], posterior: Posterior | None = None) -> Iterator[Judgement]:
        """Judge elements (*shape) as they arrive, each before the next is requested.

        `posterior` is the state before the first, by default the prior; see `condition_on_typical`.
        """
        known = self.model.prior() if posterior is None else posterior
        for x in stream:
            judgement, known = self.step(known, x)
            yield judgement

    @torch.no_grad()
    def step(self, posterior: Posterior, x: ArrayLike) -> Step:
        """Judge one element (*shape) given a posterior; for callers who save or merge posteriors."""
        x = as_tensor(x, kind=self.model.kind)
        if x.shape != self.model.shape:
            raise ValueError(
                f"`x` must be one element of shape {self.model.shape}; got {tuple(x.shape)}. "
                "For a complete batch use judge_batch."
            )
        if not self.model.is_same(posterior.model):
            raise ValueError("`posterior` must be of the detector's model; got one with other weights.")
        evidence = posterior.evidence
        if evidence.batch_shape:
            raise ValueError(
                f"`posterior` must be of one set; got a batch of shape {tuple(evidence.batch_shape)}."
            )
        seen = int(evidence.count)
        z, log_det = self.model.encode(x.to(self.model.device))
        unseen = self.model.process.log_prob(z)
        score = (self.model.process.log_prob(z, evidence) - unseen).item()
        threshold = self._threshold_at(seen) if seen >= self.warm_up else None
        beyond = (unseen + log_det).item() < self.floor
        outlier = beyond or (threshold is not None and score < threshold)
        if not (beyond or (outlier and self.keep_out)):
            posterior = Posterior(self.model, evidence.add(z))
        return Step(Judgement(score, seen, threshold, outlier, beyond), posterior)

    def _threshold_at(self, seen: int) -> float:
        return self.threshold.at(seen) if isinstance(self.threshold, Thresholds) else self.threshold


# --- summary ---------------------------------------------------------------------------------------------


class JudgedElement(NamedTuple):
    """An element of a stream with its judgement; positions count from 1."""

    position: int
    name: str
    x: Tensor
    judgement: Judgement


class StreamSummary:
    """The judgements of a stream of any length, or of a batch, collected in bounded memory.

    Attributes:
        count: elements added.
        outliers: number of outliers, including out-of-distribution elements.
        out_of_distribution: number of out-of-distribution elements.
        latest: names and judgements of the latest elements.

    Args:
        latest: number of judgements to keep; None for all.
        extremes: number of outliers with the lowest scores, and of inliers with the highest, to keep.
    """

    def __init__(self, *, latest: int | None = 10_000, extremes: int = 12) -> None:
        self.count = self.outliers = self.out_of_distribution = 0
        self.latest: deque[tuple[str, Judgement]] = deque(maxlen=latest)
        self._extremes = extremes
        self._outliers: list[JudgedElement] = []  # the lowest score first
        self._inliers: list[JudgedElement] = []  # the highest score first

    def __repr__(self) -> str:
        return f"StreamSummary({self.outliers} outliers of {self.count} elements)"

    def add(self, name: str, x: Tensor, judgement: Judgement) -> None:
        """Add the next element (*shape)."""
        self.count += 1
        self.outliers += judgement.outlier
        self.out_of_distribution += judgement.out_of_distribution
        self.latest.append((name, judgement))
        kept, sign = (self._outliers, 1) if judgement.outlier else (self._inliers, -1)
        kept.append(JudgedElement(self.count, name, x, judgement))
        kept.sort(key=lambda element: sign * element.judgement.score)
        del kept[self._extremes :]

    @property
    def first_position(self) -> int:
        """Position in the stream, from 1, of the first of `latest`."""
        return self.count - len(self.latest) + 1

    @property
    def lowest_outliers(self) -> tuple[JudgedElement, ...]:
        """The outliers with the lowest scores, in the order of the stream."""
        return tuple(sorted(self._outliers, key=lambda element: element.position))

    @property
    def highest_inliers(self) -> tuple[JudgedElement, ...]:
        """The inliers with the highest scores, in the order of the stream."""
        return tuple(sorted(self._inliers, key=lambda element: element.position))
