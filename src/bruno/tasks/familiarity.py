"""Checks of whether images resemble the training data of a model, which its predictions do not reveal."""

from __future__ import annotations

import math
from functools import cached_property

import torch
from torch import Generator, Tensor

from bruno.arrays import ArrayLike, as_tensor
from bruno.data.augmentation import downsample
from bruno.flow.preprocessing import Gaussianise
from bruno.model import Bruno

_FACTOR = 3  # images this many times brighter or darker than in training are unfamiliar
_MARGIN = 0.5  # beyond the least likely sample, as a fraction of its distance from the median
_IMAGES = 64  # number of images, and of samples, to estimate bits/dim from


class UnfamiliarDataWarning(UserWarning):
    """Images differ from the training images of the model; its predictions are confident nevertheless."""


class Familiarity:
    """Compares images with the statistics of the training data that a model records.

    Both checks return the reason why images are unfamiliar, or "" if they are not. Rows are always familiar.
    The bits/dim of images are compared with those of samples of the model, which are drawn when first needed.
    """

    def __init__(self, model: Bruno) -> None:
        self.model = model

    def check(self, images: ArrayLike) -> str:
        """Why images (*batch, channels, height, width) of any size are unfamiliar, or "".

        Images are unfamiliar if their mean brightness is far from that of the training images, if they are on
        average less likely than samples of the model, or if one of them is `too_bright`.
        """
        if not self.model.kind.is_images:
            return ""
        images = self._batch(images)
        return self._other_brightness(images) or self._unlikely(images) or self.too_bright(images)

    def too_bright(self, images: ArrayLike) -> str:
        """Why an image, or one of several, is far too bright, or "". Most likely it shows white paper.

        A single image that is dark or unlikely is not reported.
        """
        if (learnt := self._training_brightness) is None:
            return ""
        images = self._batch(images)
        means = images.mean((1, 2, 3), dtype=torch.double) / self.model.levels
        places = (means > learnt * _FACTOR).nonzero().flatten().tolist()
        if not places:
            return ""
        which = f"{len(places)} of {len(images)}, such as number {places[0] + 1}, " * (len(images) > 1)
        return f"{which}with a brightness of {means[places[0]]:.0%}, in training {learnt:.0%} on average"

    def _batch(self, images: ArrayLike) -> Tensor:
        """Images as a tensor with one axis for the batch."""
        x = as_tensor(images, "images", device=self.model.device, kind=self.model.kind)
        if x.ndim < 3 or not x.numel():
            raise ValueError(
                f"`images` must have shape (*batch, channels, height, width); got {tuple(x.shape)}."
            )
        return x.reshape(-1, *x.shape[-3:])

    @cached_property
    def _training_brightness(self) -> float | None:
        """Mean brightness of the training images, from 0 to 1; None if the model does not record it."""
        if not isinstance(self.model.preprocessing, Gaussianise):
            return None
        shares = self.model.preprocessing.shares
        return (shares * torch.arange(len(shares), device=shares.device)).sum().item() / len(shares)

    @cached_property
    def _bits_of_samples(self) -> tuple[float, float]:
        """Median and maximum of the bits/dim of samples of the model."""
        generator = self._generator()
        images = self.model.prior().sample(_IMAGES, generator=generator).images
        bits = self._bits(images, generator)
        return bits.median().item(), bits.max().item()

    def _other_brightness(self, images: Tensor) -> str:
        learnt, mean = self._training_brightness, images.mean(dtype=torch.double).item() / self.model.levels
        if learnt is None or learnt / _FACTOR < mean < learnt * _FACTOR:
            return ""
        return f"mean brightness {mean:.0%}, in training {learnt:.0%}"

    def _unlikely(self, images: Tensor) -> str:
        some = images[:: math.ceil(len(images) / _IMAGES)].to(self.model.device)
        size = (self.model.shape[-2], self.model.shape[-1])
        some = some if some.shape[-2:] == size else downsample(some, size)
        mean = self._bits(some, self._generator()).mean().item()
        median, most = self._bits_of_samples
        # With a margin: a set of characters of many strokes is less likely than any of a few samples.
        unlikely = mean > most + _MARGIN * (most - median)
        return f"{mean:.1f} bits/dim, samples of the model at most {most:.1f}" if unlikely else ""

    @torch.no_grad()
    def _bits(self, images: Tensor, generator: Generator) -> Tensor:
        return self.model.bits_per_dim(self.model.prior().log_prob(images, generator))

    def _generator(self) -> Generator:
        return Generator(self.model.device).manual_seed(0)
