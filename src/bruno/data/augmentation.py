"""More images than there are: sets random_mirror or slanted as a whole, images moved or slightly warped.

Strokes that are warped and then downsample look like any other; those that are downsample and then warped do not.
So images may come larger than a model takes them, and are downsample last.
"""

from __future__ import annotations

import functools

import torch
from jaxtyping import Float, Real
from torch import Generator, Tensor
from torch.nn import functional as F


def random_mirror(x: Real[Tensor, "sets n channels height width"], generator: Generator) -> Tensor:
    """Every other set at random with left and right changed: a random_mirror class is one more class."""
    flip = torch.rand((len(x), 1, 1, 1, 1), generator=generator, device=x.device) < 0.5
    return torch.where(flip, x.flip(-1), x)


def random_shift(x: Real[Tensor, "*batch channels height width"], most: int, generator: Generator) -> Tensor:
    """Each image moved by up to `most` pixels both ways; what comes in from outside is 0, as paper is."""
    height, width = x.shape[-2:]
    images = F.pad(x.flatten(0, -4), (most,) * 4)
    by = torch.randint(2 * most + 1, (2, len(images), 1), generator=generator, device=x.device)
    rows = (torch.arange(height, device=x.device) + by[0])[:, None, :, None]
    columns = (torch.arange(width, device=x.device) + by[1])[:, None, None, :]
    image = torch.arange(len(images), device=x.device)[:, None, None, None]
    channel = torch.arange(images.shape[1], device=x.device)[:, None, None]
    return images[image, channel, rows, columns].view(x.shape)


def random_shears(sets: int, strength: float | Tensor, generator: Generator) -> Float[Tensor, "sets 2 2"]:
    """Linear maps that keep areas, one for each set: a slanted class is one more class.

    A slant along each axis and a stretch of one at the other's cost, all by strength · N(0, 1).
    """
    across, down, stretch = strength * torch.randn((3, sets), generator=generator, device=generator.device)
    one, none = torch.ones_like(across), torch.zeros_like(across)
    factors = (
        (one, across, none, one),
        (one, none, down, one),
        (stretch.exp(), none, none, (-stretch).exp()),
    )
    first, second, third = (torch.stack(factor, 1).view(sets, 2, 2) for factor in factors)
    return first @ second @ third


def random_affines(
    images: int, strength: float | Tensor, generator: Generator
) -> Float[Tensor, "images 2 2"]:
    """Linear maps I + strength · N(0, 1), one for each image: slant, turn, size and proportion."""
    by = torch.randn((images, 2, 2), generator=generator, device=generator.device)
    return torch.eye(2, device=by.device) + strength * by


def apply_affine(
    x: Real[Tensor, "images channels height width"], maps: Float[Tensor, "images 2 2"], *, sharp: bool = False
) -> Tensor:
    """Each image through a linear map around its middle; what comes in from outside is 0, as paper is.

    Cubic interpolation keeps strokes as sharp, and paper as empty, as they were: a linear one would teach the
    density images that are blurred. What overshoots goes back to the ends of the image's own range and 0.
    Images that are to be downsample stay `sharp`: every pixel is one of the image's own.
    """
    images = x.float()
    places = F.affine_grid(F.pad(maps, (0, 1)), list(images.shape), align_corners=False)
    mode = "nearest" if sharp else "bicubic"
    moved = F.grid_sample(images, places, mode=mode, padding_mode="zeros", align_corners=False)
    if not sharp:
        lowest, highest = (end((1, 2, 3), keepdim=True) for end in (images.amin, images.amax))
        moved = moved.clamp(lowest.clamp(max=0), highest.clamp(min=0))
    return moved if x.is_floating_point() else moved.round().to(x.dtype)


def downsample(x: Real[Tensor, "*batch height width"], size: tuple[int, int]) -> Tensor:
    """Images in a smaller size, as the readers of files make them (Pillow's bilinear filter).

    A pixel is the mean of those it covers and of their neighbours, weighted by a tent: first along rows, then
    along columns, rounded after each where pixels are integers.
    """
    for axis, length in ((-1, size[1]), (-2, size[0])):
        scale = x.shape[axis] / length
        middles = (torch.arange(length, device=x.device) + 0.5) * scale
        places = torch.arange(x.shape[axis], device=x.device) + 0.5
        tents = (1 - (places - middles[:, None]).abs() / scale).clamp(min=0)
        tents = tents / tents.sum(1, keepdim=True)
        y = (tents @ x.float().transpose(axis, -2)).transpose(axis, -2)
        x = y if x.is_floating_point() else y.round().to(x.dtype)
    return x


def augment_sets(
    x: Real[Tensor, "sets n channels height width"],
    size: tuple[int, int],
    generator: Generator,
    *,
    mirror: bool = False,
    shift: int = 0,
    slant: Tensor | None = None,
    warp: Tensor | None = None,
) -> Tensor:
    """Sets (sets, n, channels, *size) of a training step.

    `shift` is in pixels of that size, whatever the size images come in: larger ones move by fractions of it.
    The strengths of random_shears and random_affines are tensors, which may change in a step that is captured.
    """
    x = random_mirror(x, generator) if mirror else x
    smaller = x.shape[-2:] != size
    larger_by = min(x.shape[-2] / size[0], x.shape[-1] / size[1])
    x = random_shift(x, round(shift * larger_by), generator) if shift else x
    maps = [] if slant is None else [random_shears(len(x), slant, generator).repeat_interleave(x.shape[1], 0)]
    maps += [] if warp is None else [random_affines(x.shape[0] * x.shape[1], warp, generator)]
    if maps:
        x = apply_affine(x.flatten(0, 1), functools.reduce(torch.matmul, maps), sharp=smaller).view(x.shape)
    return downsample(x, size) if smaller else x
