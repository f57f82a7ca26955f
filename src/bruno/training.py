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


class Trainer:
    """Trains a model in place, a step at a time; all that the next step depends on can be saved and restored.

    Every random number comes from the config's seed. A step whose loss or gradient is not finite changes no
    weight and says so. On a CPU, a restored trainer goes on to the bit.
    """

    def __init__(self, model: Bruno, sampler: SetSampler, config: TrainConfig) -> None:
        self.model, self.sampler, self.config = model, sampler, config
        self.index = 0
        self.generator = Generator(model.process.mean.device).manual_seed(config.seed)
        self.optimiser = make_optimiser(model, config)
        self.average = Average(model, config.ema) if config.ema else None

    def step(self) -> Step:
        """One step; the first one initialises the model from data, unless that was done before."""
        config, model = self.config, self.model
        if self.index == 0:
            model.initialise(self.sampler.sets(config.batch, config.length, self.generator), self.generator)
        self.index += 1
        factor = rate_factor(config, min(1.0, (self.index - 0.5) / config.steps))  # never 0
        for group in self.optimiser.param_groups:
            group["lr"] = group["rate"] * factor
        self.optimiser.zero_grad(set_to_none=True)
        loss, bits, accuracy = self._loss()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), config.clip or math.inf)
        finite = bool(torch.isfinite(loss) & torch.isfinite(norm))
        if finite:
            self.optimiser.step()
            if self.average is not None:
                self.average.update(model, self.index)
        rate = self.optimiser.param_groups[0]["lr"]
        return Step(self.index, loss.item(), bits, accuracy, rate, norm.item(), not finite)

    def state(self) -> dict[str, Tensor]:
        """Weights, optimiser, average, random numbers and step count, as named tensors."""
        tensors = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        for i, values in self.optimiser.state_dict()["state"].items():
            tensors |= {f"optimiser.{i}.{name}": torch.as_tensor(value) for name, value in values.items()}
        if self.average is not None:
            tensors |= {f"average.{name}": tensor for name, tensor in self.average.weights.items()}
        return {**tensors, "generator": self.generator.get_state(), "index": torch.tensor(self.index)}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Go back to a saved state, of a trainer of the same model and config."""
        parts: dict[str, dict[str, Tensor]] = {"model": {}, "optimiser": {}, "average": {}}
        for name, tensor in tensors.items():
            part, _, rest = name.partition(".")
            if rest:
                parts[part][rest] = tensor
        self.model.load_state_dict(parts["model"])
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in parts["optimiser"].items():
            i, _, key = name.partition(".")
            state.setdefault(int(i), {})[key] = tensor
        groups = self.optimiser.state_dict()["param_groups"]
        self.optimiser.load_state_dict({"state": state, "param_groups": groups})
        if self.average is not None:
            for name, tensor in parts["average"].items():
                self.average.weights[name].copy_(tensor)
        self.generator.set_state(tensors["generator"].cpu())
        self.index = int(tensors["index"])

    def _loss(self) -> tuple[Tensor, float, float]:
        """The weighted sum of both objectives, bits/dim and accuracy."""
        config, model, sampler = self.config, self.model, self.sampler
        loss, bits, accuracy = model.process.mean.new_zeros(()), math.nan, math.nan
        if config.generative:
            x = sampler.sets(config.batch, config.length, self.generator)
            mean_bits = model.bits_per_dim(model.log_prob(x, self.generator, validate=False)).mean()
            loss, bits = loss + config.generative * mean_bits, mean_bits.item()
        if config.discriminative:
            episodes = sampler.episodes(config.episodes, config.way, config.shot, self.generator)
            scores = episode_log_probs(model, episodes, self.generator).flatten(0, 1)
            target = torch.arange(config.way, device=scores.device).repeat(config.episodes)
            loss = loss + config.discriminative * F.cross_entropy(scores, target)
            accuracy = (scores.argmax(1) == target).float().mean().item()
        return loss, bits, accuracy


def train(model: Bruno, sampler: SetSampler, config: TrainConfig) -> Iterator[Step]:
    """All steps of a training run, one after the other: the caller decides what to do after each."""
    trainer = Trainer(model, sampler, config)
    while trainer.index < config.steps:
        yield trainer.step()
