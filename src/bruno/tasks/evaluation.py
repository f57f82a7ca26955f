"""How well a model predicts: bits for each number of an element, by how much was seen before it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from bruno.data.sampling import SetSampler
from bruno.model import Bruno


@dataclass(frozen=True)
class BitsPerDim:
    """Bits/dim on sets drawn from some classes.

    Attributes:
        mean: over all positions of a set.
        first: at the first position, where nothing has been seen: the prior.
        by_position: for each position. Every element of a set might be the first, so there all of them are
            averaged, and at later positions what those before an element change is added: the mean is the
            same, but not left to chance is which elements came first.
        error: standard error of the mean, from one set to another or, where every class is measured equally
            often, from one class to another; None of a single class, which says nothing of others.
        sets: how many were drawn.
    """

    mean: float
    first: float
    by_position: tuple[float, ...]
    error: float | None
    sets: int


def conditional_and_prior(
    model: Bruno, x: Tensor, generator: Generator
) -> tuple[Float[Tensor, "*batch n"], Float[Tensor, "*batch n"]]:
    """log p(x_i | x_1..x_{i−1}) and log p(x_i) for sets (*batch, n, *shape), for every i at once."""
    z, log_det = model.encode(x, generator)
    # Unvalidated: a flow that overflows while it is trained has bits/dim that are not finite, and goes on.
    steps, alone = (p(z, validate=False) for p in (model.process.step_log_prob, model.process.log_prob))
    return steps + log_det, alone + log_det


@torch.no_grad()
def measure_bits_per_dim(
    model: Bruno,
    sampler: SetSampler,
    *,
    sets: int | None,
    set_size: int,
    generator: Generator,
    rounds: int = 1,
    batch_size: int = 16,
) -> BitsPerDim:
    """Bits/dim of sets of this size, with fresh noise.

    Args:
        model: on the device of the sampler.
        sampler: of the classes to measure on.
        sets: how many to draw, each of a class drawn uniformly; None for every class equally often. Classes
            differ far more than sets of one class do, so that is the way to compare models.
        set_size: elements in a set.
        generator: of the sets and of the noise, on the same device.
        rounds: sets of every class, if it is to be equally often.
        batch_size: sets to encode at a time.
    """
    if sets is not None and sets < 2:
        raise ValueError(f"`sets` must be at least 2, for an error to be told, or None; got {sets}.")
    number = rounds * sampler.classes if sets is None else sets
    parts = []
    for begin in range(0, number, batch_size):
        end = min(begin + batch_size, number)
        if sets is None:
            classes = torch.arange(begin, end, device=sampler.counts.device) % sampler.classes
            x = sampler.sets_of(classes, set_size, generator)
        else:
            x = sampler.sets(end - begin, set_size, generator)
        both = torch.stack(conditional_and_prior(model, x, generator))
        parts.append(model.bits_per_dim(both).double().cpu())
    bits, alone = torch.cat(parts, 1)
    by_position = alone.mean() + (bits - alone).mean(0)
    by_set = bits.mean(1)
    if sets is None:  # sets of one class share their elements, and are no witnesses of their own
        by_set = by_set.view(rounds, sampler.classes).mean(0)
    error = by_set.std().item() / math.sqrt(len(by_set)) if len(by_set) > 1 else None
    return BitsPerDim(bits.mean().item(), by_position[0].item(), tuple(by_position.tolist()), error, number)
