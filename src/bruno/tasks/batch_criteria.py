"""Criteria by which the images of a complete set are judged: standardised scores, or patch distances."""

from __future__ import annotations

import itertools
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

BatchCriterion = Literal["score", "patches"]
BATCH_CRITERIA: tuple[BatchCriterion, ...] = ("score", "patches")

_DEVIATIONS = 3  # factor of the median absolute deviation (MAD) in the unit of standardised scores
_PATCHES, _STEPS = 4, 16  # a patch has 1/4 of the side of an image; patches overlap at steps of 1/16
_NEAREST = 2  # a patch is compared with its second-nearest neighbour
_MAX_OTHERS = 500  # images of a large set that each is compared with
_NUMBERS_AT_A_TIME = 2**24


class SetScale(NamedTuple):
    """The median score of each set, and the unit in which scores are compared between sets.

    Standardised scores are (s − m)/u, with the median m of the set and u = max(|m|, 3·MAD, 1). The scores of
    unlikely classes are higher by thousands of nats; standardised scores are comparable between classes. In a
    class that differs much from other classes, |m| exceeds 3·MAD: a standardised score of −1 is then a score
    of 0, at which the set makes an element no more likely. The MAD alone would be a noisy unit, as it comes
    from a few elements.
    """

    median: Float[Tensor, "*batch 1"]
    unit: Float[Tensor, "*batch 1"]

    @classmethod
    def of(cls, scores: Float[Tensor, "*batch n"]) -> SetScale:
        """The scale of the scores of complete sets."""
        median = scores.quantile(0.5, dim=-1, keepdim=True)
        deviation = (scores - median).abs().quantile(0.5, dim=-1, keepdim=True)
        return cls(median, torch.maximum(median.abs(), _DEVIATIONS * deviation).clamp(min=1.0))

    def standardised(self, scores: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
        """Standardise scores in nats: (s − m)/u."""
        return (scores - self.median) / self.unit

    def in_nats(self, standardised: float) -> float:
        """Convert a standardised score of a single set to nats: m + u·score."""
        return (self.median + standardised * self.unit).item()


class PatchGrid(NamedTuple):
    """The overlapping patches of an image; all numbers are pairs, of the height and the width.

    Attributes:
        size: pixels of a patch, a quarter of the image.
        step: pixels from one patch to the next, a sixteenth of the image.
        places: number of patches.
    """

    size: tuple[int, int]
    step: tuple[int, int]
    places: tuple[int, int]

    @classmethod
    def of(cls, height: int, width: int) -> PatchGrid:
        """The patches of images of this size."""
        size = max(1, height // _PATCHES), max(1, width // _PATCHES)
        step = max(1, round(height / _STEPS)), max(1, round(width / _STEPS))
        return cls(size, step, ((height - size[0]) // step[0] + 1, (width - size[1]) // step[1] + 1))


def patch_scores(x: Float[Tensor, "*batch n c h w"] | Tensor) -> Float[Tensor, "*batch n"]:
    """−d_i / median_j d_j for the images of complete sets; d_i is the distance of the most unusual patch.

    It is the lowest score of a patch of the image; see `patch_maps`.
    """
    return patch_maps(x).flatten(-2).amin(-1)


@torch.no_grad()
def patch_maps(x: Float[Tensor, "*batch n c h w"] | Tensor) -> Float[Tensor, "*batch n down across"]:
    """The score −d / median_j d_j of each patch of the images of complete sets.

    A patch is compared with the patches of another image at the same place and one step away in any
    direction; its distance to that image is the smallest of their distances. d is the distance of the patch
    to its second-nearest image, so that two similar defects do not hide each other. d_j is the largest
    distance of a patch of image j.
    """
    if x.ndim < 4 or x.shape[-4] < 2:
        raise ValueError(f"`x` must be sets of at least 2 images (*batch, n, c, h, w); got {tuple(x.shape)}.")
    sets = x.reshape(-1, *x.shape[-4:])
    distances = torch.stack([_patch_distances(_patches(images.float())) for images in sets])
    distances = distances.view(*x.shape[:-3], *distances.shape[-2:])
    typical = distances.flatten(-2).amax(-1).quantile(0.5, dim=-1)
    return -distances / typical.clamp(min=1.0)[..., None, None, None]


def _patches(images: Float[Tensor, "n c h w"]) -> Float[Tensor, "down across n dim"]:
    """The patches of images, see `PatchGrid`."""
    grid = PatchGrid.of(*images.shape[-2:])
    patches = F.unfold(images, grid.size, stride=grid.step).permute(2, 0, 1)
    return patches.view(*grid.places, *patches.shape[1:])


def _patch_distances(patches: Float[Tensor, "down across n dim"]) -> Float[Tensor, "n down across"]:
    """The distance of each patch of each image to its second-nearest image."""
    down, across, n, _ = patches.shape
    others = torch.linspace(0, n - 1, min(n, _MAX_OTHERS), device=patches.device).round().long()
    rows, distances = max(1, _NUMBERS_AT_A_TIME // (across * len(others))), patches.new_zeros(n, down, across)
    for i in range(down):
        for some in torch.arange(n, device=patches.device).split(rows):
            nearest = patches.new_full((across, len(some), len(others)), torch.inf)
            for row, shift in itertools.product(range(max(0, i - 1), min(down, i + 2)), (-1, 0, 1)):
                here = slice(max(0, -shift), across - max(0, shift))
                there = slice(max(0, shift), across - max(0, -shift))
                pair = patches[i, here][:, some], patches[row, there][:, others]
                found = torch.cdist(*pair, compute_mode="use_mm_for_euclid_dist")  # several times faster
                nearest[here] = torch.minimum(nearest[here], found)
            nearest.masked_fill_(some.unsqueeze(1) == others, torch.inf)  # not to itself
            distances[some, i] = nearest.kthvalue(min(_NEAREST, len(others) - 1), -1).values.T
    return distances
