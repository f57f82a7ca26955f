"""Checks of whether images resemble the training data of a model, which its predictions do not reveal."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Generator, Tensor

from bruno.arrays import ArrayLike, as_tensor
from bruno.data.augmentation import downsample
from bruno.flow.preprocessing import Gaussianise
from bruno.model import Bruno

_FACTOR = 3  # images this many times brighter or darker than in training are unfamiliar
_MARGIN = 0.5  # beyond the least likely image, as a fraction of its distance from the median
_IMAGES = 64  # number of images, and of samples, to estimate bits/dim from
_SPREAD = ("median", "most")  # of bits/dim


class UnfamiliarDataWarning(UserWarning):
    """Images differ from the training images of the model; its predictions are confident nevertheless."""


class Familiarity:
    """Compares images with the statistics of the training data that a model records.

    All checks return the reason why images are unfamiliar, or "" if they are not. Rows are always familiar.
    The bits/dim of images are compared with those of samples of the model, which are drawn when first needed.

    A model finds its own samples more likely than images of new classes, especially if it has memorised its
    training images. So images as likely as held-out images, if their bits/dim are known, are familiar, too.

    Args:
        model: the model.
        held_out: what `measure` returned for images of held-out classes; ignored unless it is that.
    """

    def __init__(self, model: Bruno, held_out: object = None) -> None:
        self.model = model
        self._held_out = _spread(held_out)

    def measure(self, images: ArrayLike) -> dict[str, float]:
        """Median and maximum of the bits/dim of at most 64 of the images."""
        bits = self._bits_of_some(self._batch(images))
        return dict(zip(_SPREAD, (bits.median().item(), bits.max().item()), strict=True))

    def check(self, images: ArrayLike) -> str:
        """Why images (*batch, channels, height, width) of any size are unfamiliar, or "".

        Images are unfamiliar if their mean brightness is far from that of the training images, if they are on
        average less likely than samples of the model and held-out images, or if one of them is `too_bright`.
        """
        if not self.model.kind.is_images:
            return ""
        images = self._batch(images)
        return self._other_brightness(images) or self._unlikely(images) or self.too_bright(images)

    def may_be_inverted(self, images: ArrayLike) -> bool:
        """Whether unfamiliar images have an unusual brightness, or would be familiar if inverted."""
        images = self._batch(images)
        unusual = self._other_brightness(images) or self.too_bright(images)
        return bool(unusual) or not self.check(self.model.levels - 1 - images)

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
        which = f"{len(places)} of {len(images)} images, such as number {places[0] + 1}, whose"
        which = which if len(images) > 1 else "the"
        return f"{which} mean brightness is {means[places[0]]:.0%}; that of training images is {learnt:.0%}"

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
        return f"mean brightness {mean:.0%}; that of training images is {learnt:.0%}"

    def _unlikely(self, images: Tensor) -> str:
        known = {"samples of the model": self._bits_of_samples}
        if self._held_out is not None:
            known["held-out images"] = self._held_out
        # With a margin: a set of characters of many strokes is less likely than any of a few samples.
        limits = {name: most + _MARGIN * (most - median) for name, (median, most) in known.items()}
        name = max(limits, key=lambda name: limits[name])
        mean = self._bits_of_some(images).mean().item()
        return f"{mean:.1f} bits/dim, {name} at most {known[name][1]:.1f}" if mean > limits[name] else ""

    def _bits_of_some(self, images: Tensor) -> Tensor:
        """The bits/dim of at most `_IMAGES` of the images."""
        some = images[:: math.ceil(len(images) / _IMAGES)].to(self.model.device)
        size = (self.model.shape[-2], self.model.shape[-1])
        some = some if some.shape[-2:] == size else downsample(some, size)
        return self._bits(some, self._generator())

    @torch.no_grad()
    def _bits(self, images: Tensor, generator: Generator) -> Tensor:
        return self.model.bits_per_dim(self.model.prior().log_prob(images, generator))

    def _generator(self) -> Generator:
        return Generator(self.model.device).manual_seed(0)


def _spread(found: object) -> tuple[float, float] | None:
    """Median and maximum from metadata, which may hold anything; None if they are not there."""
    values = [found.get(name) for name in _SPREAD] if isinstance(found, Mapping) else []
    finite = [value for value in values if isinstance(value, float) and math.isfinite(value)]
    return (finite[0], finite[1]) if len(finite) == len(_SPREAD) else None
