"""Augmentation of training sets: whole sets are mirrored or sheared, single images moved, warped or restyled.

Images may be larger than the images of the model. They are warped first and downsampled last, as strokes that
are downsampled and then warped look unlike real ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int, Real
from torch import Generator, Tensor
from torch.nn import functional as F

_PENS = 4  # pens of restyled images: strokes wider by 0 to 3 pixels on each side
_MIN_GAIN = 0.6  # the brightness of restyled images, as a factor, is between this and 1
_GAMMA_SPREAD = 0.3  # standard deviation of the logarithm of their gamma


def _cubic(d: Tensor) -> Tensor:
    """Keys' cubic convolution kernel with a = −0.5, as in Pillow."""
    d = d.abs()
    near = (1.5 * d - 2.5) * d * d + 1
    far = ((-0.5 * d + 2.5) * d - 4) * d + 2
    return torch.where(d < 1, near, torch.where(d < 2, far, 0.0))


def _gaussian(sigma: float) -> Callable[[Tensor], Tensor]:
    return lambda d: torch.exp(-0.5 * (d / sigma) ** 2)


# Reduction filters: the weight of a pixel by its signed distance from the centre, in pixels of the result.
FILTERS: dict[str, Callable[[Tensor], Tensor]] = {
    "bilinear": lambda d: (1 - d.abs()).clamp(min=0),
    "box": lambda d: ((d > -0.5) & (d <= 0.5)).float(),
    "bicubic": _cubic,
    "lanczos": lambda d: torch.where(d.abs() < 3, torch.sinc(d) * torch.sinc(d / 3), 0.0),
    "sharp": _gaussian(0.3),
    "soft": _gaussian(0.6),
    "blurred": _gaussian(0.9),
}


def random_mirror(x: Real[Tensor, "sets n channels height width"], generator: Generator) -> Tensor:
    """Mirror each set left to right with probability ½. A mirrored class is treated as another class."""
    flip = torch.rand((len(x), 1, 1, 1, 1), generator=generator, device=x.device) < 0.5
    return torch.where(flip, x.flip(-1), x)


def random_shift(
    x: Real[Tensor, "*batch channels height width"],
    max_shift: int,
    generator: Generator,
    fraction: float | Tensor = 1.0,
) -> Tensor:
    """Move a random fraction of the images by up to `max_shift` pixels along both axes.

    Pixels from outside are 0.
    """
    height, width = x.shape[-2:]
    images = F.pad(x.flatten(0, -4), (max_shift,) * 4)
    shift = torch.randint(
        -max_shift, max_shift + 1, (2, len(images), 1), generator=generator, device=x.device
    )
    moved = torch.rand((len(images), 1), generator=generator, device=x.device) < fraction
    down, right = max_shift + shift * moved
    rows = (torch.arange(height, device=x.device) + down)[:, None, :, None]
    columns = (torch.arange(width, device=x.device) + right)[:, None, None, :]
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


def downsample(
    x: Real[Tensor, "*batch height width"],
    size: tuple[int, int],
    filters: Int[Tensor, "*batch"] | None = None,
) -> Tensor:
    """Resize images to (height, width): first along rows, then along columns.

    The default is Pillow's bilinear filter, which the file readers also use: a pixel is the mean of the
    pixels around its centre with triangular weights. Integers are rounded after each axis and clamped to the
    range of their dtype.

    Args:
        x: the images.
        size: (height, width) of the result.
        filters: the index in `FILTERS` of each image's filter.
    """
    for axis, length in ((-1, size[1]), (-2, size[0])):
        kernels = [FILTERS["bilinear"]] if filters is None else FILTERS.values()
        weights = [_filter_weights(kernel, x.shape[axis], length, x.device) for kernel in kernels]
        chosen = weights[0] if filters is None else torch.stack(weights)[filters]
        y = (chosen @ x.float().transpose(axis, -2)).transpose(axis, -2)
        if not x.is_floating_point():
            y = y.round().clamp(0, torch.iinfo(x.dtype).max).to(x.dtype)
        x = y
    return x


def _filter_weights(
    kernel: Callable[[Tensor], Tensor], inputs: int, outputs: int, device: torch.device
) -> Float[Tensor, "outputs inputs"]:
    """The weights of the pixels of a line in each pixel of the reduced line; the weights of each sum to 1."""
    scale = inputs / outputs
    centres = (torch.arange(outputs, device=device) + 0.5) * scale
    pixels = torch.arange(inputs, device=device) + 0.5
    weights = kernel((pixels - centres[:, None]) / max(scale, 1.0))  # enlarging interpolates, as in Pillow
    return weights / weights.sum(1, keepdim=True)


def widen_strokes(
    x: Real[Tensor, "images channels height width"], radii: Int[Tensor, "images"]
) -> Real[Tensor, "images channels height width"]:
    """Widen the bright strokes of each image by up to `_PENS` − 1 pixels on each side.

    Dilates by a cross and by a square in turn, which makes a pen an octagon.
    """
    for radius in range(1, _PENS):
        taller = _dilated(x, -2)
        wider = torch.maximum(taller, _dilated(x, -1)) if radius % 2 else _dilated(taller, -1)
        x = torch.where((radii >= radius).view(-1, 1, 1, 1), wider, x)
    return x


def _dilated(x: Tensor, axis: int) -> Tensor:
    """The maximum of each pixel and its two neighbours along an axis, in the dtype of the pixels.

    `max_pool2d` would need floating-point numbers, which take four times as much memory traffic as bytes.
    """
    length = x.shape[axis]
    ends = x.narrow(axis, 0, 1), x.narrow(axis, length - 1, 1)
    padded = torch.cat([ends[0], x, ends[1]], axis)
    return torch.maximum(torch.maximum(padded.narrow(axis, 0, length), x), padded.narrow(axis, 2, length))


def random_contrast(
    x: Real[Tensor, "images channels height width"], chosen: Bool[Tensor, "images"], generator: Generator
) -> Tensor:
    """Change brightness and gamma of the chosen images: x -> gain · x^gamma for x in [0, 1]."""
    uniform = torch.rand((len(x), 1, 1, 1), generator=generator, device=x.device)
    normal = torch.randn((len(x), 1, 1, 1), generator=generator, device=x.device)
    gain, gamma = _MIN_GAIN + (1 - _MIN_GAIN) * uniform, (_GAMMA_SPREAD * normal).exp()
    top = 1.0 if x.is_floating_point() else float(torch.iinfo(x.dtype).max)
    changed = top * gain * (x.float() / top) ** gamma
    changed = changed if x.is_floating_point() else changed.round()
    return torch.where(chosen.view(-1, 1, 1, 1), changed, x.float()).to(x.dtype)


def restyle_and_downsample(
    x: Real[Tensor, "images channels height width"],
    size: tuple[int, int],
    fraction: float | Tensor,
    generator: Generator,
) -> Tensor:
    """Downsample images; a random fraction gets a different pen, filter and contrast.

    A model that has only seen images made in one way takes those made in another way for other classes.
    """
    chosen = torch.rand(len(x), generator=generator, device=x.device) < fraction
    pens = torch.randint(_PENS, (len(x),), generator=generator, device=x.device)
    filters = torch.randint(len(FILTERS), (len(x),), generator=generator, device=x.device)
    x = widen_strokes(x, pens * chosen)
    per_channel = (filters * chosen).unsqueeze(1).expand(-1, x.shape[1])
    return random_contrast(downsample(x, size, per_channel), chosen, generator)


def augment_sets(
    x: Real[Tensor, "sets n channels height width"],
    size: tuple[int, int],
    generator: Generator,
    *,
    mirror: bool = False,
    shift: int = 0,
    shifted: float | Tensor = 1.0,
    slant: Tensor | None = None,
    warp: Tensor | None = None,
    restyle: Tensor | None = None,
) -> Tensor:
    """Augment the sets of a training step and downsample them: (sets, n, channels, *size).

    Args:
        x: images of `size` or larger.
        size: (height, width) of the result.
        generator: source of randomness.
        mirror: mirror whole sets at random.
        shift: move images by up to this many pixels of the result; larger images move by fractions of that.
        shifted: fraction of the images that move. This and the three strengths below may be tensors, whose
            values can change in a captured CUDA graph.
        slant: strength of `random_shears`.
        warp: strength of `random_affines`.
        restyle: fraction of the images with another pen, filter and contrast; needs images larger than
            `size`.
    """
    x = random_mirror(x, generator) if mirror else x
    reduce = x.shape[-2:] != size
    ratio = min(x.shape[-2] / size[0], x.shape[-1] / size[1])
    x = random_shift(x, round(shift * ratio), generator, shifted) if shift else x
    maps = [] if slant is None else [random_shears(len(x), slant, generator).repeat_interleave(x.shape[1], 0)]
    maps += [] if warp is None else [random_affines(x.shape[0] * x.shape[1], warp, generator)]
    if maps:
        x = apply_affine(x.flatten(0, 1), functools.reduce(torch.matmul, maps), sharp=reduce).view(x.shape)
    if restyle is not None:
        small = restyle_and_downsample(x.flatten(0, 1), size, restyle, generator)
        return small.view(*x.shape[:3], *size)
    return downsample(x, size) if reduce else x
