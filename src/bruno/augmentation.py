"""More images than there are: sets mirrored as a whole, images moved by whole pixels or slightly warped."""

from __future__ import annotations

import torch
from jaxtyping import Real
from torch import Generator, Tensor
from torch.nn import functional as F


def mirrored(x: Real[Tensor, "sets n channels height width"], generator: Generator) -> Tensor:
    """Every other set at random with left and right changed: a mirrored class is one more class."""
    flip = torch.rand((len(x), 1, 1, 1, 1), generator=generator, device=x.device) < 0.5
    return torch.where(flip, x.flip(-1), x)


def shifted(x: Real[Tensor, "*batch channels height width"], most: int, generator: Generator) -> Tensor:
    """Each image moved by up to `most` pixels both ways; what comes in from outside is 0, as paper is."""
    height, width = x.shape[-2:]
    images = F.pad(x.flatten(0, -4), (most,) * 4)
    by = torch.randint(2 * most + 1, (2, len(images), 1), generator=generator, device=x.device)
    rows = (torch.arange(height, device=x.device) + by[0])[:, None, :, None]
    columns = (torch.arange(width, device=x.device) + by[1])[:, None, None, :]
    image = torch.arange(len(images), device=x.device)[:, None, None, None]
    channel = torch.arange(images.shape[1], device=x.device)[:, None, None]
    return images[image, channel, rows, columns].view(x.shape)


def warped(
    x: Real[Tensor, "*batch channels height width"], strength: float | Tensor, generator: Generator
) -> Tensor:
    """Each image through a linear map of its own, I + strength · N(0, 1): slant, turn, size and proportion.

    Cubic interpolation keeps strokes as sharp, and paper as empty, as they were: a linear one would teach the
    density images that are blurred. What overshoots goes back to the ends of the image's own range.
    """
    images = x.flatten(0, -4).float()
    by = torch.randn((len(images), 2, 2), generator=generator, device=x.device)
    maps = F.pad(torch.eye(2, device=x.device) + strength * by, (0, 1))
    places = F.affine_grid(maps, list(images.shape), align_corners=False)
    moved = F.grid_sample(images, places, mode="bicubic", padding_mode="zeros", align_corners=False)
    moved = moved.clamp(images.amin((1, 2, 3), keepdim=True), images.amax((1, 2, 3), keepdim=True))
    return (moved if x.is_floating_point() else moved.round().to(x.dtype)).view(x.shape)


def augmented_sets(
    x: Tensor, *, mirror: bool, shift: int, warp: Tensor | None, generator: Generator
) -> Tensor:
    """Sets (sets, n, channels, height, width) of a training step.

    The strength of a warp is a tensor, which may change in a step that is captured; None for no warp.
    """
    x = mirrored(x, generator) if mirror else x
    x = shifted(x, shift, generator) if shift else x
    return x if warp is None else warped(x, warp, generator)
