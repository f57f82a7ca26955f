"""Which elements of a set do not belong: along a stream and in a finished batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Generator, Tensor

from bruno.config import check_at_least
from bruno.data.sampling import SetSampler
from bruno.model import Bruno, Posterior
from bruno.process import Evidence
from bruno.tasks import Progress

SETS_AT_A_TIME = 16  # scored together, to bound memory
_ELEMENTS_AT_A_TIME = 256  # encoded together, likewise

# --- scores ----------------------------------------------------------------------------------------------


@torch.no_grad()
def online_scores(model: Bruno, x: Tensor) -> Float[Tensor, "*batch n"]:
    """log p(x_i | x_1..x_{i−1}) − log p(x_i) for sets (*batch, n, *shape), all i at once.

    The lower, the less an element fits those before it; the first has none before it and scores 0.
    """
    return online_from_latents(model, _latents(model, x, at_least=1))


@torch.no_grad()
def leave_one_out_scores(model: Bruno, x: Tensor) -> Float[Tensor, "*batch n"]:
    """log p(x_i | all others of the set) − log p(x_i) for finished sets (*batch, n, *shape), n ≥ 2.

    What order the elements came in makes no difference, and the first is judged as well as the last.
    """
    return leave_one_out_from_latents(model, _latents(model, x, at_least=2))


class BatchScores(NamedTuple):
    """Of one finished set: the score of each element, and which of them were of no account to the others."""

    scores: Float[Tensor, " n"]
    out_of_distribution: Bool[Tensor, " n"]


@torch.no_grad()
def batch_scores(model: Bruno, x: Tensor, floor: float = -math.inf) -> BatchScores:
    """`leave_one_out_scores` of one set (n, *shape), in which what is less likely than `floor` is not seen.

    Two equal glitches would explain each other, and neither explains what else there is.
    """
    z = _latents(model, x, at_least=2)
    out_of_distribution = _absurd(model, x, floor)
    if (~out_of_distribution).sum() < 2:
        out_of_distribution = torch.zeros_like(out_of_distribution)
    seen, unseen, scores = z[~out_of_distribution], z[out_of_distribution], z.new_empty(len(z))
    scores[~out_of_distribution] = leave_one_out_from_latents(model, seen)
    if len(unseen):
        given = Evidence.of(seen)
        scores[out_of_distribution] = model.process.log_prob(unseen, given) - model.process.log_prob(unseen)
    return BatchScores(scores, out_of_distribution)


def _absurd(model: Bruno, x: Tensor, floor: float) -> Bool[Tensor, " n"]:
    """Which of some elements (n, *shape) are less likely than `floor`, whatever was seen."""
    if floor == -math.inf:
        return torch.zeros(len(x), dtype=torch.bool, device=model.process.mean.device)
    return model.prior().log_prob(x) < floor


def online_from_latents(model: Bruno, z: Float[Tensor, "*batch n dim"]) -> Float[Tensor, "*batch n"]:
    """The scores of `online_scores` for sets that are encoded already: the Jacobians cancel."""
    return model.process.step_log_prob(z) - model.process.log_prob(z)


def leave_one_out_from_latents(model: Bruno, z: Float[Tensor, "*batch n dim"]) -> Float[Tensor, "*batch n"]:
    """The scores of `leave_one_out_scores` for sets that are encoded already."""
    return model.process.leave_one_out_log_prob(z) - model.process.log_prob(z)


def _latents(model: Bruno, x: Tensor, at_least: int) -> Float[Tensor, "*batch n dim"]:
    axes = len(model.shape)
    if x.ndim <= axes or x.shape[-axes - 1] < at_least:
        raise ValueError(
            f"`x` must be sets (*batch, n, *{model.shape}) with n of at least {at_least}; "
            f"got shape {tuple(x.shape)}."
        )
    return model.latents(x)


# --- a threshold -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Thresholds:
    """The score below which an element counts as an outlier, by how much was seen before it.

    Attributes:
        by_count: for n = 1, 2, … elements seen before; the last one holds for all larger n.
        rate: the share of clean elements that falls below by chance: the false-alarm rate.
        sets: how many clean sets tell.
    """

    by_count: tuple[float, ...]
    rate: float
    sets: int

    def at(self, seen: int) -> float:
        """The threshold for an element after so many (at least one)."""
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

    The threshold after n elements is the k-th smallest score of that position, k = ⌊rate·(sets + 1)⌋: one
    more clean set falls below it with probability k/(sets + 1) ≤ rate, whatever the scores' distribution.
    That is the mean over calibrations; one is off by some sqrt(rate/sets): a rate of 0.01 wants 1,000 sets.
    Elements of a stream beyond `set_size` are judged like the last.
    """
    _check_rate_and_set_size(rate, set_size)
    rank = math.floor(rate * (sets + 1) + 1e-9)
    if rank < 1:
        needed = math.ceil(1 / rate - 1 - 1e-9)
        raise ValueError(f"`sets` must be at least {needed} for a `rate` of {rate}; got {sets}.")
    scores = _of_clean_sets(online_from_latents, model, sampler, set_size, sets, generator, progress)
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
    """The threshold for leave-one-out scores of a batch of this size: of clean ones, `rate` are below."""
    _check_rate_and_set_size(rate, set_size)
    check_at_least("sets", sets, 1)
    scores = _of_clean_sets(leave_one_out_from_latents, model, sampler, set_size, sets, generator, progress)
    return float(np.quantile(scores.numpy(), rate))  # that of torch takes so many and no more


@torch.no_grad()
def density_floor(model: Bruno, sampler: SetSampler, *, generator: Generator, elements: int = 1000) -> float:
    """The log p(x) below which an element is like none of any set, as what a broken sensor says.

    That is twice as far below the middle of clean elements as the lowest of so many of them is.
    """
    check_at_least("elements", elements, 1)
    places = torch.randperm(len(sampler.elements), generator=generator, device=generator.device)[:elements]
    parts = (sampler.at(some) for some in places.split(_ELEMENTS_AT_A_TIME))
    log_prob = torch.cat([model.prior().log_prob(x) for x in parts])
    return (2 * log_prob.min() - log_prob.median()).item()


def _check_rate_and_set_size(rate: float, set_size: int) -> None:
    if not 0 < rate < 1:
        raise ValueError(
            f"`rate` must be between 0 and 1, as 0.01 for one false alarm in a hundred; got {rate}."
        )
    if set_size < 2:
        raise ValueError(f"`set_size` must be at least 2, for an element to have another; got {set_size}.")


@torch.no_grad()
def _of_clean_sets(
    scores: Callable[[Bruno, Tensor], Tensor],
    model: Bruno,
    sampler: SetSampler,
    set_size: int,
    sets: int,
    generator: Generator,
    progress: Progress | None,
) -> Float[Tensor, "sets set_size"]:
    """Each element is encoded once, however many of the sets it is in."""
    classes = torch.randint(sampler.classes, (sets,), generator=generator, device=generator.device)
    used, which = sampler.indices_of(classes, set_size, generator).unique(return_inverse=True)
    latents = []
    for some in used.split(_ELEMENTS_AT_A_TIME):
        latents.append(model.encode(sampler.at(some)).z)
        if progress is not None:
            progress(sum(map(len, latents)), len(used))
    z = torch.cat(latents)
    return torch.cat([scores(model, z[some]).cpu() for some in which.split(SETS_AT_A_TIME)])


# --- a stream --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scored:
    """What a detector says of one element.

    Attributes:
        score: log p(x | those in the evidence) − log p(x); 0 where there are none.
        seen: how many elements the evidence held before this one.
        threshold: what the score is held against; None where nothing is judged yet.
        outlier: whether the score is below the threshold, or the element out_of_distribution.
        out_of_distribution: whether it is less likely than anything in any set, whatever was seen.
    """

    score: float
    seen: int
    threshold: float | None
    outlier: bool
    out_of_distribution: bool


class Step(NamedTuple):
    """What is said of an element, and what is known after it."""

    scored: Scored
    posterior: Posterior


@dataclass(frozen=True, eq=False)
class Detector:
    """Judges the elements of a stream one at a time; its state is a posterior, a few vectors at any length.

    Attributes:
        model: of the sets.
        threshold: from `calibrate`, or one number for all; 0 is where the others begin to speak against it.
        keep_out: detected outliers stay out of the evidence. They do no harm there then, but if what comes in
            changes for good, or what came in first was not typical, the detector never gets used to the rest.
        warm_up: so many elements enter the evidence unjudged. The first tells nothing: its score is always 0.
        floor: what has a log p(x) below this, as from `density_floor`, is out_of_distribution: an outlier, even as the
            first, that never enters the evidence. After it, all that is ordinary would look odd.
    """

    model: Bruno
    threshold: float | Thresholds = 0.0
    keep_out: bool = False
    warm_up: int = 1
    floor: float = -math.inf

    def __post_init__(self) -> None:
        rule = f"`threshold` must be a number, or what `calibrate` returns; got {self.threshold!r}."
        try:
            if not isinstance(self.threshold, Thresholds) and math.isnan(self.threshold):
                raise ValueError(rule)
        except TypeError:
            raise TypeError(rule) from None
        if self.warm_up < 1:
            raise ValueError(
                f"`warm_up` must be at least 1, as the first has nothing before it; got {self.warm_up}."
            )

    @torch.no_grad()
    def condition_on_typical(self, typical: Tensor) -> Posterior:
        """What is known after typical elements (n, *shape): all count as seen but those that are out_of_distribution."""
        known = self.model.prior()
        for some in typical.to(self.model.process.mean.device).split(_ELEMENTS_AT_A_TIME):
            likely = some[~_absurd(self.model, some, self.floor)]
            known = known.update(likely) if len(likely) else known
        return known

    def watch(self, stream: Iterable[Tensor], posterior: Posterior | None = None) -> Iterator[Scored]:
        """Take elements (*shape) as they come: each is judged before the next is asked for.

        `posterior` is what is known before the first one: nothing, or typical elements (see `condition_on_typical`).
        """
        known = self.model.prior() if posterior is None else posterior
        for x in stream:
            scored, known = self.step(known, x)
            yield scored

    @torch.no_grad()
    def step(self, posterior: Posterior, x: Tensor) -> Step:
        """Judge one element (*shape), given what is known; for callers who keep, save or merge that."""
        if x.shape != self.model.shape:
            raise ValueError(
                f"`x` must be one element of shape {self.model.shape}; got {tuple(x.shape)}. "
                "A finished batch is for leave_one_out_scores."
            )
        if not self.model.is_same(posterior.model):
            raise ValueError("`posterior` must be one of the detector's model; got one of other weights.")
        evidence = posterior.evidence
        if evidence.batch_shape:
            raise ValueError(
                f"`posterior` must know one set; this one knows a batch of {tuple(evidence.batch_shape)}."
            )
        seen = int(evidence.count)
        z, log_det = self.model.encode(x.to(self.model.process.mean.device))
        unseen = self.model.process.log_prob(z)
        score = (self.model.process.log_prob(z, evidence) - unseen).item()
        threshold = self._threshold_at(seen) if seen >= self.warm_up else None
        out_of_distribution = (unseen + log_det).item() < self.floor
        outlier = out_of_distribution or (threshold is not None and score < threshold)
        if not (out_of_distribution or (outlier and self.keep_out)):
            posterior = Posterior(self.model, evidence.add(z))
        return Step(Scored(score, seen, threshold, outlier, out_of_distribution), posterior)

    def _threshold_at(self, seen: int) -> float:
        return self.threshold.at(seen) if isinstance(self.threshold, Thresholds) else self.threshold
