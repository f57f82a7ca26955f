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
    model: Bruno, sampler: SetSampler, *, sets: int, length: int, generator: Generator, at_a_time: int = 16
) -> BitsPerDim:
    """Bits/dim of sets of this length, drawn uniformly from the sampler's classes, with fresh noise."""
    if sets < 2:
        raise ValueError(f"`sets` must be at least 2, for an error to be told; got {sets}.")
    parts = []
    for begin in range(0, sets, at_a_time):
        x = sampler.sets(min(at_a_time, sets - begin), length, generator)
        parts.append(model.bits_per_dim(model.log_prob(x, generator)).double().cpu())
    bits = torch.cat(parts)
    by_position = bits.mean(0)
    error = bits.mean(1).std().item() / math.sqrt(sets)
    return BitsPerDim(bits.mean().item(), by_position[0].item(), tuple(by_position.tolist()), error, sets)
