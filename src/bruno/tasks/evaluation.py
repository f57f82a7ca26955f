"""Bits/dim of a model on sets, by position in the set."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor

from bruno.arrays import NumpyResult
from bruno.checks import check_count
from bruno.data.sampling import SetSampler
from bruno.model import Bruno
from bruno.process import ExchangeableProcess
from bruno.tasks.progress import Progress

_SETS = 200  # minimum number of sets, over all classes


@dataclass(frozen=True)
class BitsPerDim(NumpyResult):
    """Bits/dim on sets drawn from some classes.

    Attributes:
        mean: mean over all positions of a set.
        first: value at the first position, given no elements: the prior.
        by_position: bits/dim at each position: the prior mean over all elements, as each could have come
            first, plus the mean gain from conditioning. This has the same mean as the plain average at a
            position, but a lower variance.
        error: standard error of the mean, between classes; None for a single class.
        sets: number of sets drawn.
    """

    mean: float
    first: float
    by_position: tuple[float, ...]
    error: float | None
    sets: int


def conditional_and_prior(
    model: Bruno, x: Tensor, generator: Generator
) -> tuple[Float[Tensor, "*batch n"], Float[Tensor, "*batch n"]]:
    """log p(x_i | x_1..x_{i−1}) and log p(x_i) for sets (*batch, n, *shape), for all i at once."""
    z, log_det = model.encode(x, generator)
    # Not validated: a flow that overflows during training gets non-finite bits/dim, not an error.
    steps, alone = steps_and_prior(model.process, z, validate=False)
    return steps + log_det, alone + log_det


def steps_and_prior(
    process: ExchangeableProcess, z: Float[Tensor, "*batch n dim"], *, validate: bool = True
) -> tuple[Float[Tensor, "*batch n"], Float[Tensor, "*batch n"]]:
    """log p(z_i | z_1..z_{i−1}) and log p(z_i) of encoded sets; for the first element they are the same."""
    steps, alone = (density(z, validate=validate) for density in (process.step_log_prob, process.log_prob))
    return torch.cat([alone[..., :1], steps[..., 1:]], -1), alone


@torch.no_grad()
def measure_bits_per_dim(
    model: Bruno,
    sampler: SetSampler,
    *,
    sets: int | None,
    set_size: int,
    generator: Generator,
    sets_per_class: int = 1,
    batch_size: int = 16,
    progress: Progress | None = None,
) -> BitsPerDim:
    """Bits/dim of sets of this size, with fresh dequantisation noise.

    Args:
        model: a model on the device of the sampler.
        sampler: draws sets of the classes to measure on.
        sets: number of sets, each of a class drawn uniformly; None for `sets_per_class` of every class. None
            compares models more precisely, as classes differ far more than sets of one class.
        set_size: elements in a set.
        generator: source of the sets and the noise, on the same device.
        sets_per_class: used only if `sets` is None.
        batch_size: sets to encode at a time.
        progress: called as progress(done, total), in sets.
    """
    if sets is not None:
        check_count("sets", sets, 2)  # to estimate a standard error
    check_count("sets_per_class", sets_per_class)
    check_count("batch_size", batch_size)
    number = sets_per_class * sampler.classes if sets is None else sets
    device, parts, chosen = sampler.counts.device, [], []
    for begin in range(0, number, batch_size):
        end = min(begin + batch_size, number)
        if sets is None:
            classes = torch.arange(begin, end, device=device) % sampler.classes
        else:
            classes = torch.randint(sampler.classes, (end - begin,), generator=generator, device=device)
        chosen.append(classes.cpu())
        x = sampler.sets_of(classes, set_size, generator)
        both = torch.stack(conditional_and_prior(model, x, generator))
        parts.append(model.bits_per_dim(both).double().cpu())
        if progress is not None:
            progress(end, number)
    bits, alone = torch.cat(parts, 1)
    by_position = alone.mean() + (bits - alone).mean(0)
    error = _error_between_classes(bits.mean(1), torch.cat(chosen))
    return BitsPerDim(bits.mean().item(), by_position[0].item(), tuple(by_position.tolist()), error, number)


def _error_between_classes(by_set: Float[Tensor, " sets"], classes: Int[Tensor, " sets"]) -> float | None:
    """Standard error of the mean over sets; None for a single class.

    Sets of one class share elements, so only classes are independent: with r_c the sum of the deviations of
    the sets of class c from the mean, √(C/(C − 1) · Σ r_c²)/n.
    """
    own = classes.unique(return_inverse=True)[1]
    number = int(own.max()) + 1
    if number < 2:
        return None
    sums = torch.zeros(number, dtype=by_set.dtype).index_add(0, own, by_set - by_set.mean())
    return math.sqrt(number / (number - 1) * sums.square().sum().item()) / len(by_set)


def default_sets_per_class(classes: int) -> int:
    """Number of sets per class to measure bits/dim on: one for many classes, more for few."""
    return math.ceil(_SETS / classes)
