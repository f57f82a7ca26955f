"""Generation: new elements of a set, given no elements, some elements, or copies of one element."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from bruno import limits
from bruno.arrays import ArrayLike, NumpyResult, as_tensor
from bruno.checks import check_count, check_whole, check_whole_numbers
from bruno.model import Bruno, Posterior, Samples
from bruno.process import Evidence

REPEATS = (1, 2, 5, 10, 20)  # numbers of copies of an element to condition on


@dataclass(frozen=True, eq=False)
class SetSamples(NumpyResult):
    """Samples given prefixes of sets.

    Attributes:
        inputs: the sets, (*sets, n, *shape).
        lengths: lengths of the prefixes: numbers of elements seen.
        samples: samples after each prefix, (*sets, lengths, samples, *shape).
    """

    inputs: Tensor
    lengths: tuple[int, ...]
    samples: Samples


@dataclass(frozen=True, eq=False)
class SpreadByRepeats(NumpyResult):
    """The variance between samples given copies of one element, by the number of copies.

    Attributes:
        inputs: the elements, (n, *shape); each is repeated alone.
        repeats: numbers of times that an element was seen.
        variance: for each number of repeats, the variance between samples, a mean over pixels (from 0 to 1)
            or columns (in standard deviations of the training data) and over the elements.
        by_element: the same for each element.
        samples: the samples themselves, (n, repeats, samples, *shape).
    """

    inputs: Tensor
    repeats: tuple[int, ...]
    variance: tuple[float, ...]
    by_element: tuple[tuple[float, ...], ...]
    samples: Samples


def prior_samples(
    model: Bruno,
    samples: int,
    *,
    generator: Generator | None = None,
    temperature: float = 1.0,
    batch_size: int = 256,
) -> Samples:
    """Samples (samples, *shape) of the prior, each the first element of its own set."""
    return draw_samples(
        model.prior(), samples, generator=generator, temperature=temperature, batch_size=batch_size
    )


@torch.no_grad()
def draw_samples(
    posterior: Posterior,
    samples: int,
    *,
    generator: Generator | None = None,
    temperature: float = 1.0,
    batch_size: int = 256,
) -> Samples:
    """Draw new elements of each set, (*sets, samples, *shape), decoding `batch_size` at a time.

    A temperature below 1 draws latents closer to their mean; 0 draws the mean itself.
    """
    check_count("samples", samples)
    model, batch = posterior.model, posterior.evidence.batch_shape
    drawn = math.prod(batch) * samples
    limits.MEMORY.check_argument("samples", samples, drawn * model.dim * model.process.mean.element_size())
    parts = list(
        draw_in_parts(posterior, samples, generator=generator, temperature=temperature, batch_size=batch_size)
    )
    x = torch.cat([part.x for part in parts]).reshape(*batch, samples, *model.shape)
    return Samples(x, sum(part.clamped for part in parts), model.levels)


def draw_in_parts(
    posterior: Posterior,
    samples: int,
    *,
    generator: Generator | None = None,
    temperature: float = 1.0,
    batch_size: int = 256,
) -> Iterator[Samples]:
    """The samples of `draw_samples` in parts of at most `batch_size`, (part, *shape), set after set.

    The memory does not depend on the number of samples.
    """
    check_whole("samples", samples)
    check_count("batch_size", batch_size)
    sets = posterior.evidence.reshape(-1)
    total = len(sets.count) * samples
    for begin in range(0, total, batch_size):
        with torch.no_grad():
            places = torch.arange(begin, min(begin + batch_size, total), device=sets.count.device) // samples
            part = Posterior(posterior.model, sets[places]).sample(
                generator=generator, temperature=temperature
            )
        yield replace(part, x=part.x.squeeze(0))


@torch.no_grad()
def samples_by_prefix(
    model: Bruno,
    x: ArrayLike,
    samples: int,
    *,
    lengths: Sequence[int] | None = None,
    generator: Generator | None = None,
    temperature: float = 1.0,
    batch_size: int = 256,
) -> SetSamples:
    """Samples given the first 0, 1, … n elements of sets (*sets, n, *shape), or the prefixes in `lengths`.

    The sets are dequantised with noise from the generator, as in training, or with ½ without one. If the
    model learnt to classify without noise, samples given sets without noise have more specks.
    """
    x = as_tensor(x, kind=model.kind)
    wanted, posterior = posterior_by_prefix(model, x, lengths, generator=generator, batch_size=batch_size)
    drawn = draw_samples(
        posterior, samples, generator=generator, temperature=temperature, batch_size=batch_size
    )
    return SetSamples(x, wanted, drawn)


@torch.no_grad()
def posterior_by_prefix(
    model: Bruno,
    x: Tensor,
    lengths: Sequence[int] | None = None,
    *,
    generator: Generator | None = None,
    batch_size: int = 256,
) -> tuple[tuple[int, ...], Posterior]:
    """The lengths of prefixes of sets (*sets, n, *shape), and the posterior (*sets, lengths) given each."""
    axes = len(model.shape)
    if x.ndim <= axes or 0 in x.shape:
        raise ValueError(
            f"`x` must be sets (*sets, n, {', '.join(map(str, model.shape))}) with n of at least 1; "
            f"got shape {tuple(x.shape)}. Without elements, use `prior_samples`."
        )
    n = x.shape[-axes - 1]
    wanted = tuple(range(n + 1)) if lengths is None else tuple(lengths)
    if not wanted or not all(0 <= length <= n for length in wanted):
        raise ValueError(f"`lengths` must be from 0 to {n}, the set size; got {wanted}.")
    z = model.latents(x, generator, batch_size=batch_size)
    before = Evidence.prefixes(F.pad(z, (0, 0, 0, 1)))  # before an added last element, all are seen
    return wanted, Posterior(model, before[..., torch.tensor(wanted, device=z.device)])


@torch.no_grad()
def spread_by_repeats(
    model: Bruno,
    x: ArrayLike,
    repeats: Sequence[int] = REPEATS,
    *,
    samples: int = 100,
    generator: Generator | None = None,
    temperature: float = 1.0,
    batch_size: int = 256,
) -> SpreadByRepeats:
    """Variance between samples given copies of each of the elements x (n, *shape) alone.

    The elements are dequantised with ½, so that the copies are equal.
    Every number of repeats uses the same random numbers, so that only the evidence differs.
    """
    x = as_tensor(x, kind=model.kind)
    if tuple(x.shape[1:]) != model.shape or not len(x):
        raise ValueError(
            f"`x` must be elements (n, {', '.join(map(str, model.shape))}) with n of at least 1; got shape "
            f"{tuple(x.shape)}. A single element is x.unsqueeze(0)."
        )
    check_whole_numbers("repeats", repeats)
    if not repeats or min(repeats) < 1:
        raise ValueError(f"`repeats` must be numbers of at least 1; got {tuple(repeats)}.")
    check_count("samples", samples, 2)  # to estimate a variance
    limits.MEMORY.check_argument("samples", samples, len(x) * len(repeats) * samples * model.dim * 4)
    seeds = torch.randint(
        2**62, (len(x),), generator=generator, device=generator.device if generator else None
    )
    drawn = []
    for z, seed in zip(model.latents(x, batch_size=batch_size).double(), seeds.tolist(), strict=True):
        for n in repeats:
            drawn.append(
                draw_samples(
                    Posterior(model, Evidence.single(z, n)),
                    samples,
                    generator=Generator(model.device).manual_seed(seed),
                    temperature=temperature,
                    batch_size=batch_size,
                )
            )
    found = torch.stack([part.x for part in drawn]).unflatten(0, (len(x), len(repeats)))
    variance = model.normalised(found.double()).var(2).flatten(2).mean(2)
    return SpreadByRepeats(
        x,
        tuple(repeats),
        tuple(variance.mean(0).tolist()),
        tuple(map(tuple, variance.tolist())),
        Samples(found, sum(part.clamped for part in drawn), model.levels),
    )
