"""Augmentation of training sets: whole sets are mirrored or sheared, single images moved or warped.

Images may be larger than those of the model. They are warped first and downsampled last: strokes that are
downsampled first and then warped look unlike real ones.
"""

from __future__ import annotations

import functools

import torch
from jaxtyping import Float, Real
from torch import Generator, Tensor
from torch.nn import functional as F


def random_mirror(x: Real[Tensor, "sets n channels height width"], generator: Generator) -> Tensor:
    """Mirror each set left to right with probability ½. A mirrored class is treated as another class."""
    flip = torch.rand((len(x), 1, 1, 1, 1), generator=generator, device=x.device) < 0.5
    return torch.where(flip, x.flip(-1), x)


def random_shift(
    x: Real[Tensor, "*batch channels height width"], max_shift: int, generator: Generator
) -> Tensor:
    """Move each image by up to `max_shift` pixels along both axes; pixels from outside are 0."""
    height, width = x.shape[-2:]
    images = F.pad(x.flatten(0, -4), (max_shift,) * 4)
    shift = torch.randint(2 * max_shift + 1, (2, len(images), 1), generator=generator, device=x.device)
    rows = (torch.arange(height, device=x.device) + shift[0])[:, None, :, None]
    columns = (torch.arange(width, device=x.device) + shift[1])[:, None, None, :]
    image = torch.arange(len(images), device=x.device)[:, None, None, None]
    channel = torch.arange(images.shape[1], device=x.device)[:, None, None]
    return images[image, channel, rows, columns].view(x.shape)


def random_shears(sets: int, strength: float | Tensor, generator: Generator) -> Float[Tensor, "sets 2 2"]:
    """Return area-preserving linear maps, one for each set. A sheared class is treated as another class.

    Each map shears along both axes and stretches one axis at the expense of the other, all by
    strength · N(0, 1).
    """
    across, down, stretch = strength * torch.randn((3, sets), generator=generator, device=generator.device)
    one, zero = torch.ones_like(across), torch.zeros_like(across)
    factors = (
        (one, across, zero, one),
        (one, zero, down, one),
        (stretch.exp(), zero, zero, (-stretch).exp()),
    )
    first, second, third = (torch.stack(factor, 1).view(sets, 2, 2) for factor in factors)
    return first @ second @ third


def random_affines(
    images: int, strength: float | Tensor, generator: Generator
) -> Float[Tensor, "images 2 2"]:
    """Return linear maps I + strength · N(0, 1), one for each image: shear, rotate, scale, stretch."""
    noise = torch.randn((images, 2, 2), generator=generator, device=generator.device)
    return torch.eye(2, device=noise.device) + strength * noise


def apply_affine(
    x: Real[Tensor, "images channels height width"], maps: Float[Tensor, "images 2 2"], *, sharp: bool = False
) -> Tensor:
    """Apply a linear map around its centre to each image; pixels from outside are 0.

    Bicubic interpolation keeps strokes sharp and the background empty; a model would learn the blur of
    bilinear interpolation. Overshoot is clamped to the range of the image and 0. `sharp` takes the nearest
    pixel instead, for images that will be downsampled.
    """
    images = x.float()
    grid = F.affine_grid(F.pad(maps, (0, 1)), list(images.shape), align_corners=False)
    mode = "nearest" if sharp else "bicubic"
    moved = F.grid_sample(images, grid, mode=mode, padding_mode="zeros", align_corners=False)
    if not sharp:
        lowest, highest = (end((1, 2, 3), keepdim=True) for end in (images.amin, images.amax))
        moved = moved.clamp(lowest.clamp(max=0), highest.clamp(min=0))
    return moved if x.is_floating_point() else moved.round().to(x.dtype)


def downsample(x: Real[Tensor, "*batch height width"], size: tuple[int, int]) -> Tensor:
    """Reduce images to (height, width) with Pillow's bilinear filter, which the file readers use.

    A pixel is the mean of the pixels around its centre with triangular weights: first along rows, then along
    columns, rounded after each if pixels are integers.
    """
    for axis, length in ((-1, size[1]), (-2, size[0])):
        scale = x.shape[axis] / length
        centres = (torch.arange(length, device=x.device) + 0.5) * scale
        pixels = torch.arange(x.shape[axis], device=x.device) + 0.5
        weights = (1 - (pixels - centres[:, None]).abs() / scale).clamp(min=0)
        weights = weights / weights.sum(1, keepdim=True)
        y = (weights @ x.float().transpose(axis, -2)).transpose(axis, -2)
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
    """Augment the sets of a training step and downsample them: (sets, n, channels, *size).

    Args:
        x: images of `size` or larger.
        size: (height, width) of the result.
        generator: source of randomness.
        mirror: mirror whole sets at random.
        shift: move images by up to this many pixels of the result; larger images move by fractions of that.
        slant: strength of `random_shears`; a tensor, so that a captured CUDA graph can change it.
        warp: strength of `random_affines`; a tensor for the same reason.
    """
    x = random_mirror(x, generator) if mirror else x
    reduce = x.shape[-2:] != size
    ratio = min(x.shape[-2] / size[0], x.shape[-1] / size[1])
    x = random_shift(x, round(shift * ratio), generator) if shift else x
    maps = [] if slant is None else [random_shears(len(x), slant, generator).repeat_interleave(x.shape[1], 0)]
    maps += [] if warp is None else [random_affines(x.shape[0] * x.shape[1], warp, generator)]
    if maps:
        x = apply_affine(x.flatten(0, 1), functools.reduce(torch.matmul, maps), sharp=reduce).view(x.shape)
    return downsample(x, size) if reduce else x
