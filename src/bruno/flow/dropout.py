"""Dropout in the networks of couplings, with masks that are functions of a seed."""

from __future__ import annotations

import torch
from jaxtyping import Bool
from torch import Generator, Tensor, nn

_BITS = 32


class Dropout(nn.Module):
    """x -> x · keep/(1 − rate), where each number is kept with probability 1 − rate.

    It is the identity unless `set_dropout` turns it on, as a training step does. The mask is a hash of a seed
    and the position of each number. Therefore, activation checkpointing recomputes the same mask, a CUDA
    graph reads its seeds from memory, and all randomness comes from one generator.

    Attributes:
        rate: the probability that a number is set to 0.
        seed: an integer of 32 bits; a new one for each step.
        part: which part of a batch this process has, from 0; masks of different parts are different.
    """

    rate: float = 0.0
    seed: Tensor | None = None
    part: int = 0

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        if not self.rate:
            return x
        assert self.seed is not None
        keep = random_mask(x, self.seed, self.rate, self.part)
        return torch.where(keep, x / (1 - self.rate), torch.zeros((), dtype=x.dtype, device=x.device))


def random_mask(x: Tensor, seed: Tensor, rate: float, part: int = 0) -> Bool[Tensor, "..."]:
    """A mask of the shape of x, true with probability 1 − rate: hash(position XOR seed) ≥ rate · 2³²."""
    position = torch.arange(x.numel(), device=x.device).view(x.shape) + part * x.numel()
    keep: Tensor = _hash(position ^ seed) >= round(rate * 2**_BITS)
    return keep


def _hash(x: Tensor) -> Tensor:
    """Mix the lower 32 bits of integers, by xorshifts and multiplications (Wellons' `hash-prospector`).

    The multipliers have 31 bits, so that products fit into 64.
    """
    lower = 2**_BITS - 1
    x = x & lower
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & lower
    x = ((x ^ (x >> 15)) * 0x735A2D97) & lower
    return x ^ (x >> 15)


def set_dropout(module: nn.Module, rate: float, generator: Generator | None = None, part: int = 0) -> None:
    """Turn dropout on in all networks, with new seeds from the generator; a rate of 0 turns it off."""
    layers = [layer for layer in module.modules() if isinstance(layer, Dropout)]
    seeds: list[Tensor | None] = [None] * len(layers)
    if rate and layers:
        assert generator is not None
        drawn = torch.randint(2**_BITS, (len(layers),), generator=generator, device=generator.device)
        seeds = list(drawn.unbind())
    for layer, seed in zip(layers, seeds, strict=True):
        layer.rate, layer.seed, layer.part = rate, seed, part
