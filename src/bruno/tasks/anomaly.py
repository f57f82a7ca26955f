"""Which elements of a set do not belong: along a stream, in a finished batch, and how well that works."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor
from torch.nn.functional import pad

from bruno.data import Examples
from bruno.model import Bruno, Posterior
from bruno.sequences import SetSampler

_SETS_AT_A_TIME = 16  # scored together, to bound memory
_RESAMPLES = 200  # of the sets, for a standard error
_NEAREST = 5  # whose distance is the k-NN score; measured better than 1, 10 and half of the set
_NEIGHBOURS = 10  # of LocalOutlierFactor, whose own default of 20 is all of a small set

# --- scores ----------------------------------------------------------------------------------------------


@torch.no_grad()
def online_scores(model: Bruno, x: Tensor) -> Float[Tensor, "*batch n"]:
    """log p(x_i | x_1..x_{i−1}) − log p(x_i) for sets (*batch, n, *shape), all i at once.

    The lower, the less an element fits those before it; the first has none before it and scores 0.
    """
    return _online(model, _latents(model, x, at_least=1))


@torch.no_grad()
def leave_one_out_scores(model: Bruno, x: Tensor) -> Float[Tensor, "*batch n"]:
    """log p(x_i | all others of the set) − log p(x_i) for finished sets (*batch, n, *shape), n ≥ 2.

    What order the elements came in makes no difference, and the first is judged as well as the last.
    """
    return _leave_one_out(model, _latents(model, x, at_least=2))


def _online(model: Bruno, z: Float[Tensor, "*batch n dim"]) -> Float[Tensor, "*batch n"]:
    return model.process.step_log_prob(z, validate=False) - _prior(model, z)


def _leave_one_out(model: Bruno, z: Float[Tensor, "*batch n dim"]) -> Float[Tensor, "*batch n"]:
    return model.process.leave_one_out_log_prob(z, validate=False) - _prior(model, z)


def _prior(model: Bruno, z: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch"]:
    """log p(z) of each element by itself: every one is the first step of a set of its own."""
    return model.process.step_log_prob(z.unsqueeze(-2), validate=False).squeeze(-1)


def _latents(model: Bruno, x: Tensor, at_least: int) -> Float[Tensor, "*batch n dim"]:
    z = model.encode(x).z
    if z.ndim < 2 or z.shape[-2] < at_least:
        raise ValueError(
            f"`x` must be sets (*batch, n, *{model.shape}) with n of at least {at_least}; "
            f"got shape {tuple(x.shape)}."
        )
    return z


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


@torch.no_grad()
def calibrate(
    model: Bruno,
    sampler: SetSampler,
    *,
    rate: float,
    length: int,
    sets: int,
    generator: Generator,
) -> Thresholds:
    """Thresholds with a chosen false-alarm rate, from the online scores of clean sets.

    The threshold after n elements is the k-th smallest score of that position, k = ⌊rate·(sets + 1)⌋: one
    more clean set falls below it with probability k/(sets + 1) ≤ rate, whatever the scores' distribution.
    That is the mean over calibrations; one is off by some sqrt(rate/sets): a rate of 0.01 wants 1,000 sets.
    Elements of a stream beyond `length` are judged like the last.
    """
    if not 0 < rate < 1:
        raise ValueError(
            f"`rate` must be between 0 and 1, as 0.01 for one false alarm in a hundred; got {rate}."
        )
    if length < 2:
        raise ValueError(f"`length` must be at least 2, for an element to have one before it; got {length}.")
    rank = math.floor(rate * (sets + 1) + 1e-9)
    if rank < 1:
        needed = math.ceil(1 / rate - 1 - 1e-9)
        raise ValueError(f"`sets` must be at least {needed} for a `rate` of {rate}; got {sets}.")
    parts = [
        online_scores(model, sampler.sets(min(_SETS_AT_A_TIME, sets - begin), length, generator)).cpu()
        for begin in range(0, sets, _SETS_AT_A_TIME)
    ]
    ordered = torch.cat(parts)[:, 1:].sort(0).values
    return Thresholds(tuple(ordered[rank - 1].tolist()), rate, sets)


# --- a stream --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scored:
    """What a detector says of one element.

    Attributes:
        score: log p(x | those in the evidence) − log p(x); 0 where there are none.
        seen: how many elements the evidence held before this one.
        threshold: what the score is held against; None where nothing is judged yet.
        outlier: whether the score is below the threshold.
    """

    score: float
    seen: int
    threshold: float | None
    outlier: bool


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
    """

    model: Bruno
    threshold: float | Thresholds = 0.0
    keep_out: bool = False
    warm_up: int = 1

    def __post_init__(self) -> None:
        if self.warm_up < 1:
            raise ValueError(
                f"`warm_up` must be at least 1, as the first has nothing before it; got {self.warm_up}."
            )

    def watch(self, stream: Iterable[Tensor], posterior: Posterior | None = None) -> Iterator[Scored]:
        """Take elements (*shape) as they come: each is judged before the next is asked for.

        `posterior` is what is known before the first one: nothing, or a set of typical elements.
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
        evidence = posterior.evidence
        if evidence.batch_shape:
            raise ValueError(
                f"`posterior` must know one set; this one knows a batch of {tuple(evidence.batch_shape)}."
            )
        seen = int(evidence.count)
        z = self.model.encode(x).z.unsqueeze(0)
        given_set = self.model.process.step_log_prob(z, evidence)
        given_nothing = self.model.process.step_log_prob(z, self.model.prior().evidence)
        score = (given_set - given_nothing).item()
        threshold = self._threshold_at(seen) if seen >= self.warm_up else None
        outlier = threshold is not None and score < threshold
        if not (outlier and self.keep_out):
            posterior = Posterior(self.model, evidence.add(z))
        return Step(Scored(score, seen, threshold, outlier), posterior)

    def _threshold_at(self, seen: int) -> float:
        return self.threshold.at(seen) if isinstance(self.threshold, Thresholds) else self.threshold


# --- quality ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Quality:
    """How well a score tells outliers from the rest; errors are standard errors, over resamples of the sets.

    Attributes:
        area: under the ROC, all elements of all sets together: one threshold for all, as an alarm has.
        area_error: of that.
        area_within: the share of (outlier, other) pairs of one set that are in the right order.
        average_precision: the mean precision over the outliers found, all sets together.
        average_precision_error: of that.
    """

    area: float
    area_error: float
    area_within: float
    average_precision: float
    average_precision_error: float


@dataclass(frozen=True)
class Contamination:
    """All methods on the same sets, each element of which had a chance of `rate` to be of another class.

    `outliers` of the `elements` that were judged were; `qualities` go by the method's name.
    """

    rate: float
    sets: int
    length: int
    elements: int
    outliers: int
    qualities: dict[str, Quality]


@torch.no_grad()
def measure_anomaly(
    model: Bruno,
    examples: Examples,
    *,
    rates: Sequence[float] = (0.01, 0.05, 0.2),
    length: int,
    sets: int,
    generator: Generator,
    warm_up: int = 1,
) -> tuple[Contamination, ...]:
    """How well outliers are found in sets of one class with elements of others among them.

    The online and the leave-one-out score stand beside methods fitted to the set they judge, on its pixels
    and on its latents: IsolationForest, LocalOutlierFactor and the distance to the 5th nearest neighbour. All
    judge the same elements, those from position `warm_up` on: the online score knows nothing of the first.

    Scores of all sets are pooled as they are: at few outliers most sets have none, and so no area of their
    own, and whoever raises an alarm has one threshold. That favours scores that mean the same in every set,
    as a ratio of densities does and a distance does not; `area_within` is free of it.
    """
    for rate in rates:
        if not 0 < rate < 1:
            raise ValueError(f"`rates` must be between 0 and 1, as 0.05 for one in twenty; got {rate}.")
    if not 1 <= warm_up < length:
        raise ValueError(f"`warm_up` must be from 1 to below the `length` of {length}; got {warm_up}.")
    if sets < 2:
        raise ValueError(f"`sets` must be at least 2, for an error to be told; got {sets}.")
    if examples.shape != model.shape:
        raise ValueError(
            f"`examples` must be of shape {model.shape}, as the model's elements; got {examples.shape}."
        )
    sampler = SetSampler(examples, device=model.process.mean.device)
    results = []
    for rate in rates:
        x, outlier = sampler.contaminated(sets, length, rate, generator)
        judged = outlier.cpu()[:, warm_up:]
        picks = torch.randint(sets, (_RESAMPLES, sets), generator=generator, device=generator.device).cpu()
        qualities = {
            method: _quality(suspicion.cpu()[:, warm_up:], judged, picks)
            for method, suspicion in _suspicions(model, x, generator).items()
        }
        results.append(Contamination(rate, sets, length, judged.numel(), int(judged.sum()), qualities))
    return tuple(results)


def _suspicions(model: Bruno, x: Tensor, generator: Generator) -> dict[str, Float[Tensor, "sets n"]]:
    """By method, a number for each element of sets (sets, n, *shape): the larger, the odder."""
    parts = [model.encode(part).z for part in x.split(_SETS_AT_A_TIME)]
    found = {
        "BRUNO, online": -torch.cat([_online(model, z) for z in parts]),
        "BRUNO, leave one out": -torch.cat([_leave_one_out(model, z) for z in parts]),
    }
    # Columns of a table are brought to one scale, which pixels have.
    values = x.float() / model.levels if model.levels else model.preprocessing(x.flatten(0, 1))[0]
    raw = "pixels" if model.levels else "columns"
    spaces = {raw: values.reshape(*x.shape[:2], -1), "latents": torch.cat(parts)}
    seed = int(torch.randint(2**31 - 1, (1,), generator=generator, device=generator.device))
    for space, points in spaces.items():
        for method, suspicion in _baselines(points.double().cpu(), seed).items():
            found[f"{method}, {space}"] = suspicion
    return found


def _baselines(points: Float[Tensor, "sets n dim"], seed: int) -> dict[str, Float[Tensor, "sets n"]]:
    """What does without a model of sets: each method is fitted to one set and judges its elements."""
    from sklearn.ensemble import IsolationForest  # type: ignore[import-untyped]  # a second's import
    from sklearn.neighbors import LocalOutlierFactor  # type: ignore[import-untyped]

    n = points.shape[1]
    forests, factors = [], []
    for values in points.numpy():
        forests.append(-IsolationForest(random_state=seed).fit(values).score_samples(values))
        local = LocalOutlierFactor(n_neighbors=min(_NEIGHBOURS, n - 1)).fit(values)
        factors.append(-local.negative_outlier_factor_)
    return {
        "IsolationForest": torch.from_numpy(np.stack(forests)),
        "LocalOutlierFactor": torch.from_numpy(np.stack(factors)),
        "k-NN distance": torch.cdist(points, points).sort(-1).values[..., min(_NEAREST, n - 1)],
    }


def _quality(
    suspicion: Float[Tensor, "sets n"], outlier: Bool[Tensor, "sets n"], picks: Int[Tensor, "resamples sets"]
) -> Quality:
    """`picks` are the sets of each resample."""
    pairs = outlier.unsqueeze(2) & ~outlier.unsqueeze(1)
    gap = (suspicion.unsqueeze(2) - suspicion.unsqueeze(1))[pairs]
    if not len(gap):
        raise ValueError(
            f"`sets` must be so many that one has both outliers and others; none of {len(outlier)} has."
        )
    times = torch.stack([torch.bincount(pick, minlength=len(outlier)) for pick in picks])
    weight = torch.cat([torch.ones_like(times[:1]), times]).double().repeat_interleave(outlier.shape[1], 1)
    area, precision = area_and_precision(suspicion.flatten(), outlier.flatten(), weight)
    told = area.isfinite()  # a resample may happen to have no outlier
    return Quality(
        area[0].item(),
        area[1:][told[1:]].std().item(),
        ((gap > 0).double() + (gap >= 0).double()).mean().item() / 2,
        precision[0].item(),
        precision[1:][told[1:]].std().item(),
    )


class AreaAndPrecision(NamedTuple):
    """Of a ranking: the area under its ROC and its average precision."""

    area: Float[Tensor, "*batch"]
    precision: Float[Tensor, "*batch"]


def area_and_precision(
    suspicion: Float[Tensor, " n"], outlier: Bool[Tensor, " n"], weight: Float[Tensor, "*batch n"]
) -> AreaAndPrecision:
    """Area under the ROC and average precision, for many weightings of the elements at once.

    With TP_k outliers and FP_k others at or above the k-th of the distinct values, from the top::

        area = Σ (FP_k − FP_{k−1})·(TP_k + TP_{k−1})/2 / (TP·FP)
        precision = Σ (TP_k − TP_{k−1})·TP_k/(TP_k + FP_k) / TP
    """
    suspicion, order = suspicion.sort(descending=True)
    weight, outlier = weight[..., order], outlier[order]
    ends = torch.cat([suspicion[1:] != suspicion[:-1], outlier.new_ones(1)])
    hits = pad((weight * outlier).cumsum(-1)[..., ends], (1, 0))
    alarms = pad((weight * ~outlier).cumsum(-1)[..., ends], (1, 0))
    area = torch.trapezoid(hits, alarms) / (hits[..., -1] * alarms[..., -1])
    share = hits / (hits + alarms).clamp(min=1e-12)
    return AreaAndPrecision(area, (hits.diff() * share[..., 1:]).sum(-1) / hits[..., -1])
