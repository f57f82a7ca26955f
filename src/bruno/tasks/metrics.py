"""Metrics of rankings and of class probabilities, and standard errors; the first argument is the target."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor
from torch.nn import functional as F

from bruno.arrays import Arrays, as_tensor

RESAMPLES = 200  # of a bootstrap

# --- rankings --------------------------------------------------------------------------------------------


def roc_auc(
    target: Bool[Tensor, " n"] | Arrays,
    score: Float[Tensor, " n"] | Arrays,
    weight: Float[Tensor, "*batch n"] | Arrays | None = None,
) -> Float[Tensor, "*batch"]:
    """Area under the ROC curve; NaN if all or no elements are positive.

    With TP_k positives and FP_k negatives at or above the k-th distinct score, from the top::

        Σ (FP_k − FP_{k−1})·(TP_k + TP_{k−1})/2 / (TP·FP)

    Args:
        target: whether an element is positive.
        score: higher for elements that are more likely positive; ties count half.
        weight: weight of each element, 1 by default; a batch of weightings gives a batch of areas.
    """
    hits, alarms = _cumulative_counts(target, score, weight)
    return torch.trapezoid(hits, alarms) / (hits[..., -1] * alarms[..., -1])


def average_precision(
    target: Bool[Tensor, " n"] | Arrays,
    score: Float[Tensor, " n"] | Arrays,
    weight: Float[Tensor, "*batch n"] | Arrays | None = None,
) -> Float[Tensor, "*batch"]:
    """Mean over the positives of the precision at their score; NaN if there is no positive.

    With the counts of `roc_auc`, Σ (TP_k − TP_{k−1})·TP_k/(TP_k + FP_k) / TP. The arguments are the same.
    """
    hits, alarms = _cumulative_counts(target, score, weight)
    precision = hits / (hits + alarms).clamp(min=1e-12)
    return (hits.diff() * precision[..., 1:]).sum(-1) / hits[..., -1]


def precision_at_k(target: Bool[Tensor, " n"] | Arrays, score: Float[Tensor, " n"] | Arrays, k: int) -> float:
    """Fraction of positives among the k elements with the highest scores; ties go to the first."""
    target, score = as_tensor(target, "target"), as_tensor(score, "score")
    if not 1 <= k <= len(score):
        raise ValueError(f"`k` must be from 1 to {len(score)}, the number of elements; got {k}.")
    best = score.argsort(descending=True, stable=True)[:k]
    return target[best].double().mean().item()


def bootstrap_weights(number: int, generator: Generator) -> Float[Tensor, "resamples_and_one number"]:
    """Weights of this many things: 1 in the first row, then how often each is in a bootstrap resample."""
    picks = torch.randint(number, (RESAMPLES, number), generator=generator, device=generator.device).cpu()
    times = torch.stack([torch.bincount(pick, minlength=number) for pick in picks])
    return torch.cat([torch.ones_like(times[:1]), times]).double()


def area_gain(
    target: Bool[Tensor, "sets n"],
    score: Float[Tensor, "sets n"],
    baseline: Float[Tensor, "sets n"],
    classes: Int[Tensor, " sets"],
    generator: Generator,
) -> tuple[float, float | None]:
    """The area under ROC of a score minus that of a baseline, and its standard error.

    The error is from a bootstrap over the classes of the sets; None for a single class.
    """
    number = int(classes.max()) + 1
    weight = bootstrap_weights(number, generator)[:, classes].repeat_interleave(target.shape[1], 1)
    gain = torch.sub(*(roc_auc(target.flatten(), some.flatten(), weight) for some in (score, baseline)))
    return gain[0].item(), gain[1:].std().item() if number > 1 else None


class _Counts(NamedTuple):
    """Weight of the positives and of the negatives at or above each distinct score, 0 first."""

    hits: Float[Tensor, "*batch thresholds"]
    alarms: Float[Tensor, "*batch thresholds"]


def _cumulative_counts(
    target: Tensor | Arrays, score: Tensor | Arrays, weight: Tensor | Arrays | None
) -> _Counts:
    target, score = as_tensor(target, "target"), as_tensor(score, "score")
    if target.dtype != torch.bool or target.shape != score.shape:
        raise ValueError(
            f"`target` must be true or false for each score; got {target.dtype} of shape "
            f"{tuple(target.shape)} for scores of shape {tuple(score.shape)}."
        )
    score, order = score.sort(descending=True)
    target = target[order]
    given = torch.ones_like(score, dtype=torch.double) if weight is None else as_tensor(weight, "weight")
    weight = given if weight is None else given[..., order].double()
    ends = torch.cat([score[1:] != score[:-1], target.new_ones(1)])  # a tie is one threshold
    hits, alarms = (F.pad((weight * part).cumsum(-1)[..., ends], (1, 0)) for part in (target, ~target))
    return _Counts(hits, alarms)


# --- class probabilities ---------------------------------------------------------------------------------


def log_loss(
    labels: Int[Tensor, " queries"] | Arrays,
    log_scores: Float[Tensor, "queries classes"] | Arrays,
    temperature: float = 1.0,
) -> float:
    """Mean −log of the probability that softmax(log_scores/T) gives the true class, in nats.

    Uniform probabilities over k classes give log k.
    """
    labels, log_scores = as_tensor(labels, "labels"), as_tensor(log_scores, "log_scores")
    return F.cross_entropy(log_scores.double() / temperature, labels).item()


def calibration_error(
    labels: Int[Tensor, " queries"] | Arrays,
    log_scores: Float[Tensor, "queries classes"] | Arrays,
    temperature: float = 1.0,
    bins: int = 15,
) -> float:
    """Expected calibration error of softmax(log_scores/T).

    Queries are binned by the probability of their most probable class, in bins of equal width. The error is
    the gap between mean probability and accuracy, averaged over bins weighted by their number of queries.
    """
    labels, log_scores = as_tensor(labels, "labels"), as_tensor(log_scores, "log_scores")
    confidence, predicted = (log_scores.double() / temperature).softmax(1).max(1)
    place = (confidence * bins).long().clamp(max=bins - 1)
    gaps = torch.zeros(bins, dtype=torch.double, device=confidence.device)
    gaps = gaps.index_add(0, place, confidence - (predicted == labels).double())
    return (gaps.abs().sum() / len(labels)).item()


# --- standard errors -------------------------------------------------------------------------------------


class MeanAndError(NamedTuple):
    """Mean over the first axis and its standard error."""

    mean: Float[Tensor, "*rest"]
    error: Float[Tensor, "*rest"]


def mean_and_error(values: Float[Tensor, "n *rest"] | Arrays) -> MeanAndError:
    """Mean over the first axis and its standard error, s/√n; n must be at least 2."""
    values = as_tensor(values, "values")
    if len(values) < 2:
        raise ValueError(
            f"`values` must have at least 2 entries, to estimate a standard error; got {len(values)}."
        )
    deviation, mean = torch.std_mean(values, 0)
    return MeanAndError(mean, deviation / math.sqrt(len(values)))
