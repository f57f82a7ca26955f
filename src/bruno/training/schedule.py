"""The optimiser, the schedules of a run, and the moving average of the weights."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from bruno.config import TrainConfig
from bruno.flow.networks import hidden_matrices
from bruno.model import Bruno
from bruno.training.muon import Muon


def make_optimiser(model: Bruno, config: TrainConfig) -> torch.optim.Optimizer:
    """An optimiser with two parameter groups, flow and process, each with its own learning rate.

    Muon has a third group, the hidden matrices of the flow. The "rate" of a group is its peak learning rate;
    "lr", the current learning rate, is a tensor, whose value can change in a captured CUDA graph.
    """
    device = model.process.mean.device

    def group(parameters: Iterable[nn.Parameter], rate: float, decay: float) -> dict[str, Any]:
        lr = torch.zeros((), device=device)
        return {"params": list(parameters), "rate": rate, "lr": lr, "weight_decay": decay}

    process = group(model.process.parameters(), config.learning_rate * config.process_learning_rate, 0.0)
    capturable = device.type == "cuda"
    if config.optimiser == "muon":
        matrices = list(hidden_matrices(model.flow))
        known = {*matrices}
        others = [parameter for parameter in model.flow.parameters() if parameter not in known]
        hidden, rest = (group(part, config.learning_rate, config.weight_decay) for part in (matrices, others))
        return Muon([hidden | {"orthogonal": True}, rest, process], fused=True, capturable=capturable)
    groups = [group(model.flow.parameters(), config.learning_rate, config.weight_decay), process]
    if config.optimiser == "rmsprop":
        return torch.optim.RMSprop(groups, alpha=0.95, capturable=capturable)
    kind = torch.optim.AdamW if config.optimiser == "adamw" else torch.optim.Adam
    return kind(groups, fused=True, capturable=capturable)


def learning_rate_factor(config: TrainConfig, progress: float) -> float:
    """Factor on the learning rate at a progress from 0 to 1: warm-up, then decay to `final_learning_rate`."""
    if progress < config.warmup:
        return progress / config.warmup
    left = 1 - (progress - config.warmup) / (1 - config.warmup)
    final = config.final_learning_rate
    if config.decay == "linear":
        return final + (1 - final) * left
    if config.decay == "cosine":
        return final + (1 - final) * (0.5 - 0.5 * math.cos(math.pi * left))
    return float(final ** (1 - left)) if config.decay == "exponential" else 1.0


def augmentation_factor(config: TrainConfig, progress: float) -> float:
    """Factor on the strength of augmentation at a progress from 0 to 1: 1, then linearly to 0 over `fade`."""
    return min(1.0, (1 - progress) / config.fade) if config.fade else 1.0


def cross_entropy_weight(config: TrainConfig, progress: float) -> float:
    """Weight of the episodes' cross-entropy at a progress from 0 to 1: 0 before `onset`."""
    return config.discriminative if progress >= config.onset else 0.0


class MovingAverage:
    """Exponential moving average of a model's weights.

    Buffers, such as the means of a table's columns, are copied once, as no step changes them.
    """

    def __init__(self, model: nn.Module) -> None:
        self.weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        trained = dict(model.named_parameters())
        self._mean = [self.weights[name] for name in trained]
        self._now = [parameter.detach() for parameter in trained.values()]

    @torch.no_grad()
    def update(self, keep: Float[Tensor, ""]) -> None:
        """mean <- keep · mean + (1 − keep) · now."""
        torch._foreach_mul_(self._mean, keep)
        torch._foreach_add_(self._mean, torch._foreach_mul(self._now, 1 - keep))
