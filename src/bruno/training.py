"""Training: what is minimised, by which steps, at which rate."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from bruno.config import TrainConfig
from bruno.model import Bruno
from bruno.process import Evidence
from bruno.sequences import Episodes, SetSampler


@dataclass(frozen=True)
class Step:
    """What one training step saw.

    Attributes:
        index: counted from 1.
        loss: the weighted sum that was minimised.
        bits_per_dim: of the sets, at the mean over positions; NaN if the step had no sets.
        accuracy: share of episode queries given to their own class; NaN if the step had no episodes.
        rate: of the flow's parameters.
        gradient_norm: before clipping.
        skipped: whether the step was left out because loss or gradient were not finite.
    """

    index: int
    loss: float
    bits_per_dim: float
    accuracy: float
    rate: float
    gradient_norm: float
    skipped: bool


def episode_log_probs(
    model: Bruno, episodes: Episodes, generator: Generator | None = None
) -> Float[Tensor, "batch way way"]:
    """log p(query i | support k) of latents, for every query i and class k of each task.

    The Jacobian of a query is the same under every class, so it is left out.
    """
    batch, way, shot = episodes.support.shape[:3]
    x = torch.cat([episodes.support, episodes.query.unsqueeze(2)], 2)
    z = model.encode(x, generator, validate=False).z
    support, query = z[:, :, :shot], z[:, :, shot]
    evidence = Evidence.of(support, validate=False)
    classes = Evidence(*(t.unsqueeze(1) for t in (evidence.count, evidence.mean, evidence.scatter)))
    one_each = query.view(batch, way, 1, 1, model.dim)
    return model.process.step_log_prob(one_each, classes, validate=False).squeeze(-1)


def make_optimiser(model: Bruno, config: TrainConfig) -> torch.optim.Optimizer:
    """Two groups of parameters, the flow's first and the process's second, each with its own rate."""
    groups = [
        {"params": list(model.flow.parameters()), "rate": config.rate, "weight_decay": config.weight_decay},
        {
            "params": list(model.process.parameters()),
            "rate": config.rate * config.process_rate,
            "weight_decay": 0.0,
        },
    ]
    if config.optimiser == "rmsprop":
        return torch.optim.RMSprop(groups, lr=config.rate, alpha=0.95)
    kind = torch.optim.AdamW if config.optimiser == "adamw" else torch.optim.Adam
    return kind(groups, lr=config.rate)


def rate_factor(config: TrainConfig, progress: float) -> float:
    """The share of the full rate at a progress from 0 to 1: warm-up, then decay to `final_rate`."""
    if progress < config.warmup:
        return progress / config.warmup
    left = 1 - (progress - config.warmup) / (1 - config.warmup)
    final = config.final_rate
    if config.decay == "linear":
        return final + (1 - final) * left
    if config.decay == "cosine":
        return final + (1 - final) * (0.5 - 0.5 * math.cos(math.pi * left))
    return float(final ** (1 - left)) if config.decay == "exponential" else 1.0


class Average:
    """Exponentially averaged weights: a second model, nudged towards the trained one after each step."""

    def __init__(self, model: nn.Module, keep: float) -> None:
        self.keep = keep
        self.weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}

    @torch.no_grad()
    def update(self, model: nn.Module, steps: int) -> None:
        """Early on the average keeps less: it has nothing worth keeping yet."""
        keep = min(self.keep, steps / (steps + 9))
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                self.weights[name].lerp_(tensor, 1 - keep)
            else:
                self.weights[name].copy_(tensor)


def train(
    model: Bruno, sampler: SetSampler, config: TrainConfig, average: Average | None = None
) -> Iterator[Step]:
    """Train a model in place, a step at a time: the caller decides what to do after each.

    Every random number comes from the config's seed. A step whose loss or gradient is not finite changes
    nothing and says so.
    """
    generator = Generator(model.process.mean.device).manual_seed(config.seed)
    model.initialise(sampler.sets(config.batch, config.length, generator), generator)
    optimiser = make_optimiser(model, config)
    for index in range(1, config.steps + 1):
        factor = rate_factor(config, index / config.steps)
        for group in optimiser.param_groups:
            group["lr"] = group["rate"] * factor
        yield _step(model, sampler, config, optimiser, generator, index)
        if average is not None:
            average.update(model, index)


def _step(
    model: Bruno,
    sampler: SetSampler,
    config: TrainConfig,
    optimiser: torch.optim.Optimizer,
    generator: Generator,
    index: int,
) -> Step:
    optimiser.zero_grad(set_to_none=True)
    loss, bits, accuracy = model.process.mean.new_zeros(()), math.nan, math.nan
    if config.generative:
        x = sampler.sets(config.batch, config.length, generator)
        mean_bits = model.bits_per_dim(model.log_prob(x, generator, validate=False)).mean()
        loss, bits = loss + config.generative * mean_bits, mean_bits.item()
    if config.discriminative:
        episodes = sampler.episodes(config.episodes, config.way, config.shot, generator)
        scores = episode_log_probs(model, episodes, generator).flatten(0, 1)
        target = torch.arange(config.way, device=scores.device).repeat(config.episodes)
        loss = loss + config.discriminative * F.cross_entropy(scores, target)
        accuracy = (scores.argmax(1) == target).float().mean().item()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), config.clip or math.inf)
    finite = bool(torch.isfinite(loss) & torch.isfinite(norm))
    if finite:
        optimiser.step()
    return Step(index, loss.item(), bits, accuracy, optimiser.param_groups[0]["lr"], norm.item(), not finite)
