"""Scores of queries given small support sets, in two steps: features of images, then scores."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int, Real
from torch import Generator, Tensor
from torch.nn import functional as F

from bruno.model import Bruno
from bruno.process import Evidence

Matching = Literal["nearest", "attention"]

# Feature values scored at a time: enough to keep the cores or the GPU busy, in little memory.
_NUMBERS_AT_A_TIME = 2**20
_NUMBERS_AT_A_TIME_ON_A_GPU = 2**25


class ModelScorer:
    """log p(query | support) from latents, with fresh dequantisation noise or, without `noise`, with ½."""

    def __init__(self, model: Bruno, threshold: float | None, *, noise: bool = True) -> None:
        self.model, self.device = model, model.device
        self.noise = noise and model.kind.is_images  # rows are not dequantised
        self.dimensions = dimensions_above(model, threshold)

    def features(self, images: Tensor, generator: Generator) -> Float[Tensor, "images dim"]:
        """Latents."""
        return self.model.encode(images, generator if self.noise else None).z

    def scores(
        self, support: Float[Tensor, "episodes way shot dim"], query: Float[Tensor, "episodes dim"]
    ) -> Float[Tensor, "episodes way"]:
        """log p(query | support) without the Jacobian, which is the same for all supports of a query."""
        classes = Evidence.of(support, validate=False)
        return self.model.process.log_prob(query.unsqueeze(1), classes, dimensions=self.dimensions)


class ViewScorer(ModelScorer):
    """Mean of log p(g query | g support) over the eight rotations and reflections g of a square image.

    In each view, the query and its supports are transformed in the same way. The errors of a model that was
    trained on rotated and mirrored classes partly cancel in the mean. Encoding takes eight times as long.
    """

    def __init__(self, model: Bruno, threshold: float | None, *, noise: bool = True) -> None:
        check_views(model)
        super().__init__(model, threshold, noise=noise)

    def features(self, images: Tensor, generator: Generator) -> Float[Tensor, "images views dim"]:
        """Latents of all views."""
        encode = super().features
        return torch.stack([encode(x, generator) for x in square_views(images)], 1)

    def scores(
        self,
        support: Float[Tensor, "episodes way shot views dim"],
        query: Float[Tensor, "episodes views dim"],
    ) -> Float[Tensor, "episodes way"]:
        """The mean over views of log p(query | support) without the Jacobian."""
        by_view = super().scores(support.movedim(3, 1).flatten(0, 1), query.flatten(0, 1))
        return by_view.view(*query.shape[:2], -1).mean(1)


class PixelScorer:
    """Cosine similarity of pixels, in the same two steps."""

    noise = False

    def __init__(self, matching: Matching, levels: int, device: torch.device) -> None:
        known = ("nearest", "attention") if levels else ("nearest",)
        if matching not in known:
            raise ValueError(f"`matching` must be {' or '.join(map(repr, known))}; got {matching!r}.")
        self.matching, self.half, self.device = matching, levels / 2, device

    def features(self, images: Tensor, generator: Generator) -> Float[Tensor, "images dim"]:
        """Pixels as vectors of length 1, binarised first for "attention"."""
        pixels = images.flatten(1).float()
        if self.matching == "attention":
            pixels = (pixels >= self.half).float()
        return F.normalize(pixels, dim=1)

    def scores(
        self, support: Float[Tensor, "episodes way shot dim"], query: Float[Tensor, "episodes dim"]
    ) -> Float[Tensor, "episodes way"]:
        """The largest cosine or, for "attention", log Σ exp(cosine)."""
        cosine = (support @ query[:, None, :, None]).squeeze(-1)
        return cosine.amax(-1) if self.matching == "nearest" else cosine.logsumexp(-1)


Scorer = ModelScorer | PixelScorer


def square_views(images: Real[Tensor, "images channels size size"]) -> Iterator[Tensor]:
    """The images rotated by multiples of 90 degrees, then the same of the mirrored images."""
    for start in (images, images.flip(-1)):
        yield from (start.rot90(turns, (-2, -1)) for turns in range(4))


def check_views(model: Bruno) -> None:
    """Raise ValueError unless the model is of square images."""
    if not model.kind.is_images or model.shape[-1] != model.shape[-2]:
        raise ValueError(f"`views` is for square images; got elements {model.shape}. Leave it at False.")


def scores_in_parts(
    scorer: Scorer,
    features: Float[Tensor, "images *dim"],
    support: Int[Tensor, "episodes way shot"],
    query: Int[Tensor, " episodes"],
) -> Float[Tensor, "episodes way"]:
    """Scores of the episodes in parts: the gathered features of all would take too much memory."""
    size = part_size(support[0].numel() * features[0].numel(), features.device)
    parts = zip(support.split(size), query.split(size), strict=True)
    return torch.cat([scorer.scores(features[supports], features[queries]) for supports, queries in parts])


def part_size(numbers: int, device: torch.device) -> int:
    """Number of items to score at a time on this device, each with this many values."""
    room = _NUMBERS_AT_A_TIME if device.type == "cpu" else _NUMBERS_AT_A_TIME_ON_A_GPU
    return max(1, room // numbers)


def dimensions_above(model: Bruno, threshold: float | None) -> Bool[Tensor, " dim"] | None:
    """Mask of the latent dimensions whose correlation exceeds a threshold; None for all."""
    if threshold is None:
        return None
    dimensions = model.process.correlated(threshold)
    if not dimensions.any():
        most = model.process.correlation.max().item()
        raise ValueError(
            f"`threshold` must be below {most:.4g}, the largest correlation of the model; got {threshold}."
        )
    return dimensions
