"""Which of one's own classes an element belongs to, with probabilities that can be made honest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor
from torch.nn import functional as F

from bruno.data import Examples
from bruno.model import Bruno
from bruno.process import Evidence
from bruno.tasks.few_shot import episode_scores
from bruno.tasks.scorers import dimensions_above, part_size

# Where a fit ends if the scores make no mistake at all, or nothing but mistakes.
_COLDEST, _HOTTEST = 1e-3, 1e6


@dataclass(frozen=True, eq=False)
class Classification:
    """Which class each query belongs to, and how sure that is.

    Attributes:
        probabilities: of each class for each query; every row sums to 1.
        log_scores: log p(query | support of the class) of the latents. The Jacobian of a query is the same
            under every class, so it is left out.
        labels: the most probable class of each query, its index in the support.
    """

    probabilities: Float[Tensor, "queries classes"]
    log_scores: Float[Tensor, "queries classes"]
    labels: Int[Tensor, " queries"]


@dataclass(frozen=True)
class Calibration:
    """A temperature that makes class probabilities honest, and what it changes where it was fitted.

    Attributes:
        temperature: what log p(query | support) is divided by.
        log_loss_before: mean −log probability of the right class at temperature 1, in nats.
        log_loss: the same at this temperature.
        error_before: expected calibration error at temperature 1.
        error: the same at this temperature.
        episodes: how many it was fitted to.
        mistakes: in how many of them another class was the likeliest.
    """

    temperature: float
    log_loss_before: float
    log_loss: float
    error_before: float
    error: float
    episodes: int
    mistakes: int


@torch.no_grad()
def classify(
    model: Bruno,
    support: Sequence[Tensor],
    queries: Tensor,
    *,
    prior: Sequence[float] | None = None,
    temperature: float = 1.0,
    threshold: float | None = None,
    generator: Generator | None = None,
    batch_size: int = 256,
) -> Classification:
    """The probability of each class for each query, softmax_c of log p(query | support_c)/T + log prior_c.

    Args:
        model: any.
        support: for each class its images (n_c, *shape), as many as there are.
        queries: what to classify, (queries, *shape).
        prior: how probable each class is before the query is seen, in any unit; all the same if left out.
        temperature: T, as `fit_temperature` gives it; without it a model of many pixels is far too sure.
        threshold: use only latent dimensions whose correlation exceeds this.
        generator: of the dequantisation noise; without one it is ½ and the answer always the same.
        batch_size: images to encode at a time.
    """
    _check_images(model, support, queries)
    if not temperature > 0:
        raise ValueError(f"`temperature` must be above 0; got {temperature}.")
    log_prior = _log_prior(prior, len(support))
    device, dimensions = model.process.mean.device, dimensions_above(model, threshold)

    parts = [images.to(device) for images in (*support, queries)]
    if len({part.dtype for part in parts}) == 1:
        latents = model.latents(torch.cat(parts), generator, batch_size=batch_size)
        *known, asked = latents.split([len(part) for part in parts])
    else:  # as one tensor, integers would be taken for pixels with noise
        *known, asked = (model.latents(part, generator, batch_size=batch_size) for part in parts)
    classes = Evidence.stack([Evidence.of(z) for z in known])
    log_scores = torch.cat(
        [
            model.process.log_prob(z.unsqueeze(1), classes, dimensions=dimensions)
            for z in asked.split(part_size(len(support) * model.dim, device))
        ]
    )
    probabilities = (log_scores.double() / temperature + log_prior.to(device)).softmax(1).to(log_scores.dtype)
    return Classification(probabilities, log_scores, probabilities.argmax(1))


@torch.no_grad()
def fit_temperature(
    model: Bruno,
    examples: Examples,
    *,
    way: int = 5,
    shot: int = 1,
    trials: int = 20,
    rotations: bool = False,
    generator: Generator,
    threshold: float | None = None,
    batch_size: int = 1024,
) -> Calibration:
    """The one temperature at which `classify` gives the right classes of episodes the most probability.

    The episodes are those of `measure_few_shot`, dequantised with ½. Take classes that the model was not
    trained on, and as many shots as there will be in use. If no answer is wrong, the surer the better, and
    episodes do not tell how sure to be: it stays 1.
    """
    log_scores = episode_scores(
        model,
        examples,
        way=way,
        shot=shot,
        trials=trials,
        rotations=rotations,
        generator=generator,
        threshold=threshold,
        noisy=False,  # as `classify` has it: noise makes scores less sure
        batch_size=batch_size,
    )
    labels = torch.zeros(len(log_scores), dtype=torch.long, device=log_scores.device)
    mistakes = int((log_scores.argmax(1) != labels).sum())
    best = best_temperature(log_scores, labels) if mistakes else 1.0
    return Calibration(
        temperature=best,
        log_loss_before=log_loss(log_scores, labels),
        log_loss=log_loss(log_scores, labels, best),
        error_before=calibration_error(log_scores, labels),
        error=calibration_error(log_scores, labels, best),
        episodes=len(labels),
        mistakes=mistakes,
    )


def best_temperature(log_scores: Float[Tensor, "queries classes"], labels: Int[Tensor, " queries"]) -> float:
    """The T > 0 at which softmax(log_scores/T) has the least `log_loss`.

    The loss is convex in 1/T, with the slope E_softmax[log_scores] − log_scores[label], so bisection finds
    where that changes its sign.
    """
    gaps = log_scores.double() - log_scores.double().gather(1, labels.unsqueeze(1))
    low, high = -math.log(_HOTTEST), -math.log(_COLDEST)  # of log 1/T
    for _ in range(60):
        middle = (low + high) / 2
        slope = ((gaps * math.exp(middle)).softmax(1) * gaps).sum(1).mean().item()
        low, high = (low, middle) if slope > 0 else (middle, high)
    return math.exp(-(low + high) / 2)


def log_loss(
    log_scores: Float[Tensor, "queries classes"], labels: Int[Tensor, " queries"], temperature: float = 1.0
) -> float:
    """Mean −log probability of the right classes, in nats; log k is what knowing nothing gives."""
    return F.cross_entropy(log_scores.double() / temperature, labels).item()


def calibration_error(
    log_scores: Float[Tensor, "queries classes"],
    labels: Int[Tensor, " queries"],
    temperature: float = 1.0,
    bins: int = 15,
) -> float:
    """How far apart the probability of the most probable class and the share of right answers are.

    Expected calibration error: queries are put into bins of equal width by their probability, and the gap of
    the two means in each bin is averaged, weighted by its number of queries.
    """
    sure, chosen = (log_scores.double() / temperature).softmax(1).max(1)
    place = (sure * bins).long().clamp(max=bins - 1)
    gaps = torch.zeros(bins, dtype=torch.double, device=sure.device)
    return (gaps.index_add(0, place, sure - (chosen == labels).double()).abs().sum() / len(labels)).item()


def _log_prior(prior: Sequence[float] | None, classes: int) -> Float[Tensor, " classes"]:
    weights = torch.as_tensor([1.0] * classes if prior is None else prior, dtype=torch.double)
    if weights.shape != (classes,) or not (weights > 0).all() or not weights.isfinite().all():
        raise ValueError(
            f"`prior` must be a positive number for each of the {classes} classes; got {weights.tolist()}."
        )
    return weights.log()


def _check_images(model: Bruno, support: Sequence[Tensor], queries: Tensor) -> None:
    if len(support) < 2:
        raise ValueError(
            f"`support` must have at least two classes to choose from; got {len(support)}. "
            "How well images fit a single set is what Posterior.score says."
        )
    for name, x in [*((f"support[{i}]", x) for i, x in enumerate(support)), ("queries", queries)]:
        if tuple(x.shape[1:]) != model.shape:
            raise ValueError(
                f"`{name}` must be images of the model's shape, (n, {', '.join(map(str, model.shape))}); got "
                f"{tuple(x.shape)}. Resize them."
            )
        if not len(x):
            raise ValueError(f"`{name}` must hold at least one image; got none. Leave it out or add some.")
