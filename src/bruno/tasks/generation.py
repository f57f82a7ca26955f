"""Generation: more elements like those of a set, given none of them, some of them, or the same one again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Generator, Tensor
from torch.nn import functional as F

from bruno.config import check_at_least
from bruno.model import Bruno, Posterior, Samples
from bruno.process import Evidence


@dataclass(frozen=True, eq=False)
class PrefixSamples:
    """Elements drawn after each of some prefixes of a set.

    Attributes:
        lengths: how many elements of the set were seen.
        samples: what was drawn then, (lengths, samples, *shape).
    """

    lengths: tuple[int, ...]
    samples: Samples


@dataclass(frozen=True, eq=False)
class SpreadByRepeats:
    """How much samples differ when a model has seen the same element again and again.

    Attributes:
        repeats: how often it has seen the element.
        variance: of a pixel, from 0 to 1, from sample to sample, the mean over pixels; of rows, that of a
            column in standard deviations of what the model learnt from.
        samples: the samples themselves, (repeats, samples, *shape).
    """

    repeats: tuple[int, ...]
    variance: tuple[float, ...]
    samples: Samples


@torch.no_grad()
def condition_on(
    model: Bruno, x: Tensor, *, generator: Generator | None = None, batch_size: int = 64
) -> Posterior:
    """What the model knows given sets (*batch, n, *shape) of any n, in the memory of a part of them.

    Takes `batch_size` elements of each set at a time. A generator draws the dequantisation noise.
    """
    batch = x.shape[: -len(model.shape) - 1]
    if x.ndim < len(model.shape) + 1 or x.shape[len(batch) + 1 :] != model.shape:
        raise ValueError(
            f"`x` must be sets (*batch, n, {', '.join(map(str, model.shape))}); got shape {tuple(x.shape)}."
        )
    posterior = Posterior(model, Evidence.empty(model.dim, batch, device=model.process.mean.device))
    if 0 in x.shape:
        return posterior
    for some in x.split(batch_size, len(batch)):
        posterior = posterior.update(some, generator)
    return posterior


def prior_samples(
    model: Bruno,
    samples: int,
    *,
    generator: Generator | None = None,
    temperature: float = 1.0,
    batch_size: int = 256,
) -> Samples:
    """Elements (samples, *shape), each the first of a set of its own."""
    return draw(model.prior(), samples, generator=generator, temperature=temperature, batch_size=batch_size)


@torch.no_grad()
def draw(
    posterior: Posterior,
    samples: int,
    *,
    generator: Generator | None = None,
    temperature: float = 1.0,
    batch_size: int = 256,
) -> Samples:
    """More elements of each set, (*batch, samples, *shape), of which `batch_size` are decoded at a time.

    A temperature below 1 draws closer to the mean of the latents, 0 nothing but the mean itself.
    """
    check_at_least("samples", samples, 1)
    model, batch = posterior.model, posterior.evidence.batch_shape
    sets = posterior.evidence.reshape(-1)
    copies = torch.arange(len(sets.count), device=sets.count.device).repeat_interleave(samples)
    parts = [
        Posterior(model, sets[some]).sample(generator=generator, temperature=temperature)
        for some in copies.split(batch_size)
    ]
    x = torch.cat([part.x.squeeze(0) for part in parts]).reshape(*batch, samples, *model.shape)
    return Samples(x, sum(part.clamped for part in parts), model.levels)


@torch.no_grad()
def samples_by_prefix(
    model: Bruno,
    x: Tensor,
    samples: int,
    *,
    lengths: Sequence[int] | None = None,
    generator: Generator | None = None,
    temperature: float = 1.0,
    batch_size: int = 256,
) -> PrefixSamples:
    """Samples given the first 0, 1, … n elements of a set (n, *shape), or the numbers in `lengths` of them.

    The set itself is dequantised with ½, so that only the draws depend on the generator.
    """
    if x.ndim != len(model.shape) + 1 or not len(x):
        raise ValueError(
            f"`x` must be one set (n, {', '.join(map(str, model.shape))}) with n from 1; got shape "
            f"{tuple(x.shape)}. Given nothing at all, use `prior_samples`."
        )
    n = len(x)
    wanted = tuple(range(n + 1)) if lengths is None else tuple(lengths)
    if not wanted or not all(0 <= length <= n for length in wanted):
        raise ValueError(f"`lengths` must be from 0 to the {n} elements of the set; got {wanted}.")
    z = model.latents(x, batch_size=batch_size)
    before = Evidence.prefixes(F.pad(z, (0, 0, 0, 1)))  # before one more, of no account, all are seen
    stacked = before[torch.tensor(wanted, device=z.device)]
    drawn = draw(
        Posterior(model, stacked),
        samples,
        generator=generator,
        temperature=temperature,
        batch_size=batch_size,
    )
    return PrefixSamples(wanted, drawn)


@torch.no_grad()
def spread_by_repeats(
    model: Bruno,
    x: Tensor,
    repeats: Sequence[int] = (1, 2, 5, 10, 20),
    *,
    samples: int = 100,
    generator: Generator | None = None,
    temperature: float = 1.0,
    batch_size: int = 256,
) -> SpreadByRepeats:
    """How much samples differ once the model has seen one element (*shape) n times, for each n.

    Every n gets the same random numbers, so that what differs is the evidence alone.
    """
    if tuple(x.shape) != model.shape:
        raise ValueError(f"`x` must have the model's shape, {model.shape}; got {tuple(x.shape)}.")
    if not repeats or min(repeats) < 1:
        raise ValueError(f"`repeats` must be numbers from 1; got {tuple(repeats)}.")
    if samples < 2:
        raise ValueError(f"`samples` must be at least 2, for a variance to be told; got {samples}.")
    device = model.process.mean.device
    seed = int(torch.randint(2**62, (), generator=generator, device=generator.device if generator else None))
    z = model.latents(x).double()
    drawn = []
    for n in repeats:  # the evidence of n equal elements: their mean is that element, and there is no scatter
        evidence = Evidence(torch.tensor(n, device=device), z, torch.zeros_like(z))
        drawn.append(
            draw(
                Posterior(model, evidence),
                samples,
                generator=Generator(device).manual_seed(seed),
                temperature=temperature,
                batch_size=batch_size,
            )
        )
    variance = [_on_one_scale(model, part.x).var(0).mean().item() for part in drawn]
    everything = Samples(
        torch.stack([part.x for part in drawn]), sum(part.clamped for part in drawn), model.levels
    )
    return SpreadByRepeats(tuple(repeats), tuple(variance), everything)


def _on_one_scale(model: Bruno, x: Tensor) -> Float[Tensor, "..."]:
    """Pixels from 0 to 1; rows in standard deviations of what the model learnt from."""
    return x.double() / model.levels if model.levels else model.preprocessing(x.double())[0]


def grid(
    images: UInt8[Tensor, "n channels height width"], columns: int, padding: int = 2, background: int = 255
) -> UInt8[np.ndarray, "rows columns channels"]:
    """Images side by side, row after row, with padding around each; what is left of the last row is empty."""
    n, channels, height, width = images.shape
    if n < 1 or channels not in (1, 3):
        raise ValueError(f"`images` must be at least one, with 1 or 3 channels; got {tuple(images.shape)}.")
    if columns < 1 or padding < 0:
        raise ValueError(f"`columns` must be at least 1 and `padding` 0; got {columns} and {padding}.")
    rows = -(-n // columns)
    cells = images.new_full((rows * columns, channels, height + padding, width + padding), background)
    cells[:n, :, :height, :width] = images
    joined = cells.view(rows, columns, *cells.shape[1:]).permute(0, 3, 1, 4, 2).flatten(2, 3).flatten(0, 1)
    # Each cell has its padding below and to the right; the picture also needs it above and to the left.
    picture = joined.new_full((joined.shape[0] + padding, joined.shape[1] + padding, channels), background)
    picture[padding:, padding:] = joined
    return picture.cpu().numpy()


def prefix_grid(
    inputs: UInt8[Tensor, "n channels height width"],
    samples: UInt8[Tensor, "columns samples channels height width"],
    padding: int = 2,
    background: int = 255,
) -> UInt8[np.ndarray, "picture_rows picture_columns channels"]:
    """The paper's picture: the inputs on top, and below each what was drawn once the model had seen it too.

    With one column more than there are inputs, the first has no input above it: it is drawn from the prior.
    """
    columns, channels = len(samples), samples.shape[2]
    if columns - len(inputs) not in (0, 1) or inputs.shape[1:] != samples.shape[2:]:
        raise ValueError(
            f"`samples` must have a column for each of the {len(inputs)} inputs and one for the prior, of "
            f"images of the same shape; got {tuple(samples.shape)} for inputs {tuple(inputs.shape)}."
        )
    nothing = inputs.new_full((columns - len(inputs), channels, *inputs.shape[2:]), background)
    top = grid(torch.cat([nothing, inputs]), columns, padding, background)
    below = grid(samples.transpose(0, 1).flatten(0, 1), columns, padding, background)
    between = np.full((padding, *top.shape[1:]), background, np.uint8)  # sets the inputs apart
    return np.concatenate([top, between, below])
