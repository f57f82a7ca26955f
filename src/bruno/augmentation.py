"""More images than there are: sets mirrored as a whole, images moved by whole pixels; grey values stay."""

from __future__ import annotations

import torch
from jaxtyping import UInt8
from torch import Generator, Tensor
from torch.nn import functional as F


def mirrored(x: UInt8[Tensor, "sets n channels height width"], generator: Generator) -> Tensor:
    """Every other set at random with left and right changed: a mirrored class is one more class."""
    flip = torch.rand((len(x), 1, 1, 1, 1), generator=generator, device=x.device) < 0.5
    return torch.where(flip, x.flip(-1), x)


def shifted(x: UInt8[Tensor, "*batch channels height width"], most: int, generator: Generator) -> Tensor:
    """Each image moved by up to `most` pixels both ways; what comes in from outside is 0, as paper is."""
    height, width = x.shape[-2:]
    images = F.pad(x.flatten(0, -4), (most,) * 4)
    by = torch.randint(2 * most + 1, (2, len(images), 1), generator=generator, device=x.device)
    rows = (torch.arange(height, device=x.device) + by[0])[:, None, :, None]
    columns = (torch.arange(width, device=x.device) + by[1])[:, None, None, :]
    image = torch.arange(len(images), device=x.device)[:, None, None, None]
    channel = torch.arange(images.shape[1], device=x.device)[:, None, None]
    return images[image, channel, rows, columns].view(x.shape)


def augmented_sets(x: Tensor, *, mirror: bool, shift: int, generator: Generator) -> Tensor:
    """Sets (sets, n, channels, height, width) of a training step."""
    x = mirrored(x, generator) if mirror else x
    return shifted(x, shift, generator) if shift else x
