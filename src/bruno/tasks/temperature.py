"""The temperature of class probabilities, fitted to the mistakes in few-shot episodes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor

from bruno.arrays import Arrays, as_tensor
from bruno.data import Examples
from bruno.model import Bruno
from bruno.tasks.episodes import FewShotProtocol
from bruno.tasks.few_shot import episode_scores
from bruno.tasks.groups import Groups
from bruno.tasks.metrics import calibration_error, log_loss
from bruno.tasks.progress import Progress
from bruno.tasks.scorers import ModelScorer, part_size

# Limits of a fitted temperature, which would be 0 if all queries are right, and ∞ if all are wrong.
_COLDEST, _HOTTEST = 1e-3, 1e6


@dataclass(frozen=True)
class FittedTemperature:
    """A temperature that calibrates class probabilities, and its effect on the episodes it was fitted to.

    Attributes:
        temperature: divisor of log p(query | support).
        log_loss_before: mean −log probability of the true class at temperature 1, in nats.
        log_loss: the same at this temperature.
        error_before: expected calibration error at temperature 1.
        error: the same at this temperature.
        episodes: number of episodes.
        mistakes: number of episodes in which another class was the most probable.
    """

    temperature: float
    log_loss_before: float
    log_loss: float
    error_before: float
    error: float
    episodes: int
    mistakes: int


@torch.no_grad()
def fit_temperature(
    model: Bruno,
    examples: Examples,
    protocol: FewShotProtocol,
    *,
    generator: Generator,
    progress: Progress | None = None,
) -> FittedTemperature:
    """The temperature that calibrates `classify` on the episodes of `measure_few_shot`.

    It minimises their log loss, with log T ~ N(0, ¼²) a priori: a few mistakes hardly move it away from 1,
    and without a mistake it is 1. Use classes that the model was not trained on, and as many shots as
    `classify` will have. The protocol must have one way and one shot; its noise is ignored, since `classify`
    dequantises with ½ by default.
    """
    log_scores = episode_scores(
        model, examples, replace(protocol, noise=False), generator=generator, progress=progress
    )
    return _fitted(log_scores)


@torch.no_grad()
def fit_temperature_to_groups(
    model: Bruno, groups: Groups, *, way: int, shot: int, generator: Generator, episodes: int = 600
) -> FittedTemperature | None:
    """`fit_temperature` on encoded groups, such as those of a calibration; None with fewer than two groups.

    Groups of at most `shot` elements are left out. The way is at most the number of groups.
    """
    members = [some for some in groups.members if len(some) > shot]
    if len(members) < 2 or not len(groups.latents):
        return None
    way = min(way, len(members))
    queries, supports = [], []
    for _ in range(episodes):
        chosen = torch.randperm(len(members), generator=generator)[:way].tolist()
        drawn = [
            members[group][torch.randperm(len(members[group]), generator=generator)[: shot + 1]]
            for group in chosen
        ]
        queries.append(drawn[0][shot])
        supports.append(torch.stack([some[:shot] for some in drawn]))
    query, support = torch.stack(queries), torch.stack(supports)
    scorer = ModelScorer(model, None, noise=False)
    size = max(1, part_size(way * shot * model.dim, model.device))
    log_scores = [
        scorer.scores(groups.latents[some].to(model.device), groups.latents[one].to(model.device))
        for some, one in zip(support.split(size), query.split(size), strict=True)
    ]
    return _fitted(torch.cat(log_scores))


def _fitted(log_scores: Float[Tensor, "episodes way"]) -> FittedTemperature:
    """The best temperature of episodes whose first class is the true one."""
    labels = torch.zeros(len(log_scores), dtype=torch.long, device=log_scores.device)
    mistakes = int((log_scores.argmax(1) != labels).sum())
    best = best_temperature(labels, log_scores) if mistakes else 1.0
    return FittedTemperature(
        temperature=best,
        log_loss_before=log_loss(labels, log_scores),
        log_loss=log_loss(labels, log_scores, best),
        error_before=calibration_error(labels, log_scores),
        error=calibration_error(labels, log_scores, best),
        episodes=len(labels),
        mistakes=mistakes,
    )


def best_temperature(
    labels: Int[Tensor, " queries"] | Arrays,
    log_scores: Float[Tensor, "queries classes"] | Arrays,
    *,
    spread: float = 0.25,
) -> float:
    """The T > 0 that maximises the posterior of softmax(log_scores/T), with log T ~ N(0, spread²) a priori.

    The prior keeps T close to 1 after a few mistakes; with infinite spread, T minimises the `log_loss`. The
    loss of a query is convex in 1/T with slope E_softmax[log_scores] − log_scores[label]; bisection over
    log 1/T finds where the derivative of the posterior is zero.
    """
    labels, log_scores = as_tensor(labels, "labels"), as_tensor(log_scores, "log_scores")
    gaps = log_scores.double() - log_scores.double().gather(1, labels.unsqueeze(1))
    low, high = -math.log(_HOTTEST), -math.log(_COLDEST)  # of log 1/T
    for _ in range(60):
        middle = (low + high) / 2
        inverse = math.exp(middle)
        slope = inverse * ((gaps * inverse).softmax(1) * gaps).sum().item() + middle / spread**2
        low, high = (low, middle) if slope > 0 else (middle, high)
    return math.exp(-(low + high) / 2)
