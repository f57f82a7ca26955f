"""What the images of a complete set are judged by: standardised scores, or distances between patches."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

BatchCriterion = Literal["score", "patches"]
BATCH_CRITERIA: tuple[BatchCriterion, ...] = ("score", "patches")

_DEVIATIONS = 3  # median absolute deviations that are as wide as the median score
_PATCHES = 4  # along each side of an image; as many again between them
_NEAREST = 2  # neighbour of a patch: two defects that are alike do not hide each other
_NUMBERS_AT_A_TIME = 2**24


class SetScale(NamedTuple):
    """The median score of each set, and the unit in which scores are compared between sets.

    Standardised scores are (s − m)/u, with the median m of the set and u = max(|m|, 3·MAD, 1). The scores of
    unlikely classes are higher by thousands of nats; standardised ones are comparable between classes. Of a
    class that differs much from others, |m| is the larger one: then −1 is a score of 0, at which the set
    makes an element no more likely. The MAD of a few elements would be a noisy unit.
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
        """Scores in this scale."""
        return (scores - self.median) / self.unit

    def in_nats(self, standardised: float) -> float:
        """A standardised score of a single set in nats."""
        return (self.median + standardised * self.unit).item()


@torch.no_grad()
def patch_scores(x: Float[Tensor, "*batch n c h w"] | Tensor) -> Float[Tensor, "*batch n"]:
    """−d_i / median_j d_j for the images of complete sets, with d the distance of the most unusual patch.

    d_i is the largest over all patches of image i of the distance to its second-nearest patch, among those of
    the other images at the same place. Patches overlap; they are a quarter of the image high and wide.
    """
    height, width = x.shape[-2:]
    down, across = (max(1, side // _PATCHES) for side in (height, width))
    sets = x.reshape(-1, *x.shape[-4:])
    found = []
    for images in sets:
        patches = F.unfold(images.float(), (down, across), stride=(max(1, down // 2), max(1, across // 2)))
        found.append(_furthest(patches.permute(2, 0, 1)))
    distance = torch.stack(found).view(*x.shape[:-3])
    return -distance / distance.quantile(0.5, dim=-1, keepdim=True).clamp(min=1.0)


def _furthest(patches: Float[Tensor, "places n dim"]) -> Float[Tensor, " n"]:
    """The largest distance, over places, of each patch to its neighbour."""
    n = patches.shape[1]
    neighbour, rows = min(_NEAREST, n - 1) + 1, max(1, _NUMBERS_AT_A_TIME // n)  # the first is itself
    furthest = patches.new_zeros(n)
    for here in patches:
        near = [torch.cdist(some, here).kthvalue(neighbour, -1).values for some in here.split(rows)]
        furthest = torch.maximum(furthest, torch.cat(near))
    return furthest
