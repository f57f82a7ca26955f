"""Specks: the fraction of samples with an isolated dot, which drawings almost never have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Integer
from torch import Generator, Tensor
from torch.nn import functional as F

from bruno.arrays import ArrayLike, NumpyResult, as_tensor, image_as_tensor, is_pil_image
from bruno.checks import check_count
from bruno.data import Examples
from bruno.data.sampling import SetSampler
from bruno.model import Bruno, Posterior
from bruno.process import Evidence
from bruno.tasks.generation import draw_samples
from bruno.tasks.metrics import mean_and_error
from bruno.tasks.progress import Progress

_BRIGHT = 64  # of 255: brighter pixels are ink


@dataclass(frozen=True, eq=False)
class SpeckResult(NumpyResult):
    """The fraction of images with a speck, among samples and in the data.

    Attributes:
        share: fraction of the samples with a speck.
        error: standard error of `share`.
        samples: number of samples, each given a different random set.
        given: number of images of a class that each sample was conditioned on.
        temperature: temperature of the samples.
        data_share: fraction of the images of the data with a speck.
        data_images: number of these images.
        images: the samples, (samples, *shape), as integers.
        with_speck: which of the samples have a speck, (samples,).
        levels: number of values that a pixel can take.
    """

    share: float
    error: float
    samples: int
    given: int
    temperature: float
    data_share: float
    data_images: int
    images: Tensor
    with_speck: Tensor
    levels: int


@torch.no_grad()
def measure_specks(
    model: Bruno,
    examples: Examples,
    *,
    samples: int = 1000,
    given: int = 5,
    temperature: float = 1.0,
    generator: Generator,
    progress: Progress | None = None,
    batch_size: int = 64,
) -> SpeckResult:
    """Fractions of samples and of data images with a speck; each sample is given images of a random class.

    The given images are dequantised with noise, as in training and in `samples_by_prefix`.

    Args:
        model: a model of images with bright ink on a dark background; on the device to compute on.
        examples: classes of images, preferably unseen in training.
        samples: number of samples; at least 2, to estimate a standard error.
        given: number of images to condition a sample on.
        temperature: below 1, samples are closer to the mean of the latents.
        generator: source of the sets and the samples; on the device of the model.
        progress: called as progress(done, total), in samples.
        batch_size: samples to draw at a time.
    """
    if not model.kind.is_images:
        raise ValueError(f"`model` must be a model of images; got one of {model.kind.plural}.")
    check_count("samples", samples, 2)
    check_count("batch_size", batch_size)
    sampler = SetSampler(examples, device=model.device)
    sampler.check_set_size(given, "given")
    parts: list[Tensor] = []
    for begin in range(0, samples, batch_size):
        count = min(batch_size, samples - begin)
        z = model.latents(sampler.sets(count, given, generator), generator)
        posterior = Posterior(model, Evidence.of(z))
        drawn = draw_samples(posterior, 1, generator=generator, temperature=temperature)
        parts.append(drawn.images.squeeze(1))
        if progress:
            progress(begin + count, samples)
    images = torch.cat(parts)
    with_speck = has_speck(images, model.levels)
    share, error = mean_and_error(with_speck.double())
    in_data = has_speck(examples.elements, examples.levels)
    return SpeckResult(
        share.item(),
        error.item(),
        samples,
        given,
        temperature,
        in_data.double().mean().item(),
        len(in_data),
        images,
        with_speck,
        model.levels,
    )


def has_speck(
    images: Integer[Tensor, "*batch channels height width"] | ArrayLike, levels: int = 256
) -> Bool[Tensor, "*batch"]:
    """Whether an image has a connected component of one or two bright pixels, 8-connected.

    A pixel is bright if a channel exceeds 64 of 255, a quarter of the range. A bright pixel is a component of
    one if no other pixel of its 3 × 3 patch is bright. Two bright pixels are a component if the patch of each
    contains only these two.
    """
    images = as_tensor(_with_pixels(images, levels), "images")
    bright = (images > _BRIGHT * (levels - 1) // 255).any(-3, keepdim=True)
    bright = bright.reshape(-1, *bright.shape[-3:]).float()
    around = _patch_sum(bright)
    one_neighbour = bright * (around == 2)
    specks = bright * (around == 1) + one_neighbour * (_patch_sum(one_neighbour) == 2)
    return (specks > 0).flatten(1).any(1).reshape(images.shape[:-3])


def _with_pixels(images: Any, levels: int) -> Any:
    """The images, with PIL images as tensors of their own size and three channels, equal in grey ones."""
    if isinstance(images, list | tuple):
        return [_with_pixels(part, levels) for part in images]
    return image_as_tensor(images, None, False, levels, "images") if is_pil_image(images) else images


def _patch_sum(x: Tensor) -> Tensor:
    """Sum over the 3 × 3 patch of each pixel."""
    return F.conv2d(x, torch.ones(1, 1, 3, 3, device=x.device), padding=1).round()
