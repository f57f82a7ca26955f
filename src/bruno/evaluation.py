"""How well a model predicts: bits for each number of an element, by how much was seen before it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Generator

from bruno.model import Bruno
from bruno.sequences import SetSampler


@dataclass(frozen=True)
class BitsPerDim:
    """Bits/dim on sets drawn from some classes.

    Attributes:
        mean: over all positions of a set.
        first: at the first position, where nothing has been seen: the prior.
        by_position: for each position.
        error: standard error of the mean, from one set to another.
        sets: how many were drawn.
    """

    mean: float
    first: float
    by_position: tuple[float, ...]
    error: float
    sets: int


@torch.no_grad()
def measure_bits_per_dim(
    model: Bruno,
    sampler: SetSampler,
    *,
    sets: int | None,
    length: int,
    generator: Generator,
    rounds: int = 1,
    at_a_time: int = 16,
) -> BitsPerDim:
    """Bits/dim of sets of this length, with fresh noise.

    Args:
        model: on the device of the sampler.
        sampler: of the classes to measure on.
        sets: how many to draw, each of a class drawn uniformly; None for every class equally often. Classes
            differ far more than sets of one class do, so that is the way to compare models.
        length: elements in a set.
        generator: of the sets and of the noise, on the same device.
        rounds: sets of every class, if it is to be equally often.
        at_a_time: sets to encode at a time.
    """
    number = rounds * sampler.classes if sets is None else sets
    if number < 2:
        raise ValueError(
            "`sets` must be at least 2, or None with at least 2 classes or rounds, for an error to be told; "
            f"got {number}."
        )
    parts = []
    for begin in range(0, number, at_a_time):
        end = min(begin + at_a_time, number)
        if sets is None:
            classes = torch.arange(begin, end, device=sampler.counts.device) % sampler.classes
            x = sampler.sets_of(classes, length, generator)
        else:
            x = sampler.sets(end - begin, length, generator)
        parts.append(model.bits_per_dim(model.log_prob(x, generator)).double().cpu())
    bits = torch.cat(parts)
    by_position = bits.mean(0)
    error = bits.mean(1).std().item() / math.sqrt(number)
    return BitsPerDim(bits.mean().item(), by_position[0].item(), tuple(by_position.tolist()), error, number)
