"""Monotone rational-quadratic splines (Durkan et al. 2019), one for each number, with an exact inverse.

A spline has K bins on [−B, B] and is the identity outside. In bin k, of width w and height h, with slopes d_k
and d_{k+1} at its ends, s = h/w and t = (x − x_k)/w:

    y = y_k + h·(s·t² + d_k·t(1 − t)) / (s + (d_{k+1} + d_k − 2s)·t(1 − t))
    dy/dx = s²·(d_{k+1}·t² + 2s·t(1 − t) + d_k·(1 − t)²) / (s + (d_{k+1} + d_k − 2s)·t(1 − t))²

The bin of a number is found in one of two ways. Compiled code selects it by elementwise operations in a loop
over bins: without indexing, the compiler fuses a whole spline into one kernel. Otherwise each operation has a
cost of its own, and gathering the bin from all bins takes half the time on a CPU.
"""

from __future__ import annotations

import math
from functools import reduce
from itertools import accumulate
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

MIN_LENGTH = 1e-3  # width and height of a bin, as a fraction of the interval
MIN_SLOPE = 1e-3
SLOPE_OFFSET = math.log(math.expm1(1 - MIN_SLOPE))  # maps a parameter of 0 to a slope of 1


class Bins(NamedTuple):
    """One bin for each number: x_k, y_k, w, h, d_k and d_{k+1}, each with the shape of the numbers."""

    left: Tensor
    bottom: Tensor
    width: Tensor
    height: Tensor
    slope: Tensor
    next_slope: Tensor


def parameter_count(bins: int) -> int:
    """Parameters of a spline: K widths, K heights and K − 1 inner slopes."""
    return 3 * bins - 1


def spline(
    x: Float[Tensor, "batch *shape"], parameters: Float[Tensor, "batch count *shape"], interval: float
) -> tuple[Tensor, Tensor]:
    """(y, log dy/dx) for each number of x, by its own spline on [−interval, interval].

    The 3K − 1 parameters of a spline are any real numbers; if all are 0, it is the identity.
    """
    inside, x_inside = _inside(x, interval)
    selected = _find_bin(x_inside, parameters, interval, by="left")
    t = ((x_inside - selected.left) / selected.width).clamp(0, 1)
    s, denominator = _denominator(selected, t)
    y = selected.bottom + selected.height * (s * t**2 + selected.slope * t * (1 - t)) / denominator
    return torch.where(inside, y, x), torch.where(inside, _log_slope(selected, t), 0.0)


def inverse_spline(
    y: Float[Tensor, "batch *shape"], parameters: Float[Tensor, "batch count *shape"], interval: float
) -> tuple[Tensor, Tensor]:
    """(x, log dx/dy): the inverse of `spline`.

    With u = (y − y_k)/h and q = d_{k+1} + d_k − 2s, t is the root of a·t² + b·t + c with a = s − d_k + q·u,
    b = d_k − q·u and c = −s·u. The form t = 2c/(−b − sqrt(b² − 4ac)) avoids cancellation.
    """
    inside, y_inside = _inside(y, interval)
    selected = _find_bin(y_inside, parameters, interval, by="bottom")
    u = ((y_inside - selected.bottom) / selected.height).clamp(0, 1)
    s = selected.height / selected.width
    bend = (selected.next_slope + selected.slope - 2 * s) * u
    a, b, c = s - selected.slope + bend, selected.slope - bend, -s * u
    t = (2 * c / (-b - (b**2 - 4 * a * c).clamp(min=0).sqrt())).clamp(0, 1)
    x = selected.left + selected.width * t
    return torch.where(inside, x, y), torch.where(inside, -_log_slope(selected, t), 0.0)


def _inside(x: Tensor, interval: float) -> tuple[Tensor, Tensor]:
    """Which numbers are in the interval, and all numbers clamped to it, so that the spline stays finite."""
    return x.abs() < interval, x.clamp(-interval, interval)


def _find_bin(
    x: Float[Tensor, "batch *shape"],
    parameters: Float[Tensor, "batch count *shape"],
    interval: float,
    by: str,
) -> Bins:
    """For each number, the last bin whose edge (`by`: left or bottom) is at or below the number."""
    if torch.compiler.is_compiling():
        return _select(x, _bins(parameters, interval), by)
    return _gather(x, parameters, interval, by)


def _gather(
    x: Float[Tensor, "batch *shape"],
    parameters: Float[Tensor, "batch count *shape"],
    interval: float,
    by: str,
) -> Bins:
    """`_find_bin` by indexing."""
    count = (parameters.shape[1] + 1) // 3
    before_bins = [0, 0] * (x.ndim - 1)  # the arguments of F.pad begin at the last axis
    lengths = parameters[:, : 2 * count].unflatten(1, (2, count)).softmax(2)  # widths, heights
    lengths = 2 * interval * (MIN_LENGTH + (1 - count * MIN_LENGTH) * lengths)
    inner = lengths[:, :, :-1].cumsum(2) - interval
    index = (x.unsqueeze(1) >= inner[:, 0 if by == "left" else 1]).sum(1, keepdim=True)
    edges = F.pad(inner, [*before_bins, 1, 0], value=-interval)
    slopes = MIN_SLOPE + F.softplus(parameters[:, 2 * count :] + SLOPE_OFFSET)
    slopes = F.pad(slopes, [*before_bins, 1, 1], value=1.0)
    both = index.unsqueeze(1).expand(-1, 2, *index.shape[1:])
    left, bottom = edges.gather(2, both).squeeze(2).unbind(1)
    width, height = lengths.gather(2, both).squeeze(2).unbind(1)
    slope, next_slope = (slopes.gather(1, index + i).squeeze(1) for i in (0, 1))
    return Bins(left, bottom, width, height, slope, next_slope)


def _bins(parameters: Float[Tensor, "batch count *shape"], interval: float) -> list[Bins]:
    """All bins of every spline, from left to right."""
    raw = parameters.unbind(1)
    count = (len(raw) + 1) // 3
    widths, heights = _lengths(raw[:count], interval), _lengths(raw[count : 2 * count], interval)
    inner = [MIN_SLOPE + F.softplus(value + SLOPE_OFFSET) for value in raw[2 * count :]]
    slopes = [torch.ones_like(raw[0]), *inner, torch.ones_like(raw[0])]
    first = torch.full_like(raw[0], -interval)
    lefts, bottoms = accumulate(widths, initial=first), accumulate(heights, initial=first)
    # Not strict: the right end of the last bin and the last slope begin no bin.
    return [Bins(*edges) for edges in zip(lefts, bottoms, widths, heights, slopes, slopes[1:], strict=False)]


def _lengths(raw: tuple[Tensor, ...], interval: float) -> list[Tensor]:
    """Widths or heights of the bins: a softmax over bins, with a lower limit."""
    largest = reduce(torch.maximum, raw)
    powers = [(value - largest).exp() for value in raw]
    free = 2 * interval * (1 - len(raw) * MIN_LENGTH)
    scale = free / sum(powers[1:], start=powers[0])
    return [2 * interval * MIN_LENGTH + power * scale for power in powers]


def _select(x: Tensor, bins: list[Bins], by: str) -> Bins:
    """`_find_bin` without indexing."""
    selected = bins[0]
    for later in bins[1:]:
        begun = x >= getattr(later, by)
        selected = Bins(*(torch.where(begun, new, old) for new, old in zip(later, selected, strict=True)))
    return selected


def _denominator(bins: Bins, t: Tensor) -> tuple[Tensor, Tensor]:
    """s, and s + (d_{k+1} + d_k − 2s)·t(1 − t)."""
    s = bins.height / bins.width
    return s, s + (bins.next_slope + bins.slope - 2 * s) * t * (1 - t)


def _log_slope(bins: Bins, t: Tensor) -> Tensor:
    """log dy/dx at position t, from 0 to 1, within a bin."""
    s, denominator = _denominator(bins, t)
    slope = bins.next_slope * t**2 + 2 * s * t * (1 - t) + bins.slope * (1 - t) ** 2
    return 2 * (s.log() - denominator.log()) + slope.log()
