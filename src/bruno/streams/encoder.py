"""Encoding for streams: dense flows of rows in numpy, fast for a single row; other models in torch.

A row of a dense flow has the same latents in any batch, bit for bit. A stream therefore has the same scores
however it is split into batches, for example after a restart. Matrix products are computed in tiles of a
fixed number of rows, as the rounding of a product depends on its shape.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray

from bruno.flow import AffineCoupling, SplineCoupling
from bruno.flow.coupling import OddEven
from bruno.flow.networks import Dense, DenseNetwork
from bruno.flow.preprocessing import ASINH, FURTHEST, LOG, ColumnScales, Standardise
from bruno.flow.realnvp import DenseRealNVP
from bruno.flow.spline import MIN_LENGTH, MIN_SLOPE, SLOPE_OFFSET
from bruno.model import Bruno

Numbers = NDArray[np.float64]

_TILE, _LARGE_TILE = 8, 64  # rows of a matrix product, for narrow and for wide networks
_WIDE = 256  # units of a wide network, at least
_AT_A_TIME = 256  # elements that torch encodes together


class Latents(NamedTuple):
    """Latents of a batch of elements, and the log-det of the map to them, in float64."""

    z: Float[np.ndarray, "n dim"]
    log_det: Float[np.ndarray, " n"]


Encoder = Callable[[Any], Latents]  # elements (n, *shape) -> latents


def encoder_of(model: Bruno, *, on_scales: bool = False) -> Encoder:
    """The fastest encoder of a model for elements in small batches: `RowEncoder` if possible, else torch.

    With `on_scales`, log-dets are those of `Bruno.encode` on scales.
    """
    return (RowEncoder if RowEncoder.supports(model) else TorchEncoder)(model, on_scales=on_scales)


class TorchEncoder:
    """Encodes elements with the model in torch."""

    def __init__(self, model: Bruno, *, on_scales: bool = False) -> None:
        self.model, self._on_scales = model, on_scales

    def __call__(self, x: Any) -> Latents:
        """The latents of elements (n, *shape)."""
        encoded = self.model.encode_in_batches(x, on_scales=self._on_scales, batch_size=_AT_A_TIME)
        z, log_det = (part.double().cpu().numpy() for part in encoded)
        return Latents(z, log_det)


class RowEncoder:
    """Encodes rows with a dense flow in numpy, in float64, from a copy of the weights.

    The result equals that of `Bruno.encode` up to the rounding of float32.
    """

    def __init__(self, model: Bruno, *, on_scales: bool = False) -> None:
        preprocessing = model.preprocessing
        assert isinstance(preprocessing, Standardise)
        self._scales = _Scales.of(preprocessing, on_scales)
        self._couplings = [_coupling_of(part) for part in model.flow.bijections]  # type: ignore[union-attr]

    @staticmethod
    def supports(model: Bruno) -> bool:
        """Whether a model is a dense flow of rows, on the CPU."""
        return (
            type(model.flow) is DenseRealNVP
            and type(model.preprocessing) in (Standardise, ColumnScales)
            and len(model.shape) == 1
            and model.device.type == "cpu"
            and all(_is_exportable(part) for part in model.flow.bijections)
        )

    def __call__(self, x: Any) -> Latents:
        """The latents of complete rows (n, dim)."""
        x = np.asarray(x, dtype=np.float64)
        # A single row is a vector: numpy is faster with fewer axes.
        y, log_slopes = self._scales(x[0] if len(x) == 1 else x)
        for coupling in self._couplings:
            coupling(y, log_slopes)
        log_det = np.add.reduce(log_slopes, -1) + self._scales.log_det
        return Latents(y.reshape(x.shape), np.asarray(log_det).reshape(len(x)))


# --- preprocessing ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Scales:
    """`Standardise` or `ColumnScales` in numpy."""

    mean: Numbers
    deviation: Numbers
    log_det: float  # of the linear parts
    centre: Numbers
    width: Numbers
    log: NDArray[np.bool_] | None  # the columns on a log scale, if there are any
    asinh: NDArray[np.bool_] | None
    on_scales: bool  # slopes of the log and asinh scales are those at the middle of the columns

    @classmethod
    def of(cls, module: Standardise, on_scales: bool) -> _Scales:
        mean, deviation = _copied(module.mean), _copied(module.deviation)
        centre, width = np.zeros_like(mean), np.ones_like(mean)
        log, asinh = None, None
        if isinstance(module, ColumnScales):
            centre, width = _copied(module.centre), _copied(module.width)
            log, asinh = (module.kind.numpy() == kind for kind in (LOG, ASINH))
            log, asinh = (mask if mask.any() else None for mask in (log, asinh))
        log_det = float(-np.log(deviation).sum() - np.log(width).sum())
        if isinstance(module, ColumnScales) and on_scales:
            middle = module.inverse(torch.zeros((1, len(mean)), dtype=torch.double))[0]
            log_det = module(middle)[1].item()
        return cls(mean, deviation, log_det, centre, width, log, asinh, on_scales)

    def __call__(self, x: Float[np.ndarray, "*n dim"]) -> tuple[Numbers, Numbers]:
        """The scaled columns, and the log-slopes of the log and asinh scales, both new arrays."""
        log_slopes = np.zeros(x.shape)
        if self.log is not None or self.asinh is not None:  # otherwise the centre is 0 and the width 1
            x = self._rescaled((x - self.centre) / self.width, log_slopes)
        y = x - self.mean
        y /= self.deviation
        np.maximum(y, -FURTHEST, out=y)
        return np.minimum(y, FURTHEST, out=y), np.zeros(y.shape) if self.on_scales else log_slopes

    def _rescaled(self, u: Numbers, log_slopes: Numbers) -> Numbers:
        """The log or asinh scale g(u) of each column; changes `log_slopes` in place."""
        rescaled = u
        if self.log is not None:
            large = np.log(np.maximum(u, 1.0))
            rescaled = np.where(self.log, np.where(u > 1, large, u - 1), rescaled)
            log_slopes -= np.where(self.log, large, 0.0)
        if self.asinh is not None:
            rescaled = np.where(self.asinh, np.arcsinh(u), rescaled)
            log_slopes -= np.where(self.asinh, np.log(np.hypot(u, 1.0)), 0.0)
        return rescaled


# --- couplings -------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Network:
    """`DenseNetwork` in numpy: x W + b of each layer, and ELU between them."""

    layers: list[tuple[Numbers, Numbers]]  # weights (inputs, outputs) and biases
    tile: int  # rows of a matrix product

    @classmethod
    def of(cls, network: DenseNetwork) -> _Network:
        dense = [layer for layer in network.layers if isinstance(layer, Dense)]
        widest = max(len(layer.bias) for layer in dense)
        layers = [(_copied(layer.weight.T), _copied(layer.bias)) for layer in dense]
        return cls(layers, _TILE if widest <= _WIDE else _LARGE_TILE)

    def __call__(self, x: Float[np.ndarray, "*n inputs"]) -> Float[np.ndarray, "*n outputs"]:
        one = x.ndim == 1
        n = 1 if one else len(x)
        padded = np.zeros((-(-n // self.tile) * self.tile, x.shape[-1]))
        rows = padded[0] if one else padded[:n]
        rows[:] = x
        for i, (weight, bias) in enumerate(self.layers):
            if i:
                _apply_elu(rows)
            padded = self._product(padded, weight)
            rows = padded[0] if one else padded[:n]
            rows += bias
        return rows

    def _product(self, padded: Numbers, weight: Numbers) -> Numbers:
        """padded · weight, in tiles."""
        if len(padded) == self.tile:  # the same product of one tile, in less time
            return np.asarray(padded.dot(weight))
        tiles = padded.reshape(len(padded) // self.tile, self.tile, len(weight))
        return np.asarray(np.matmul(tiles, weight)).reshape(len(padded), weight.shape[1])


def _copied(values: torch.Tensor) -> Numbers:
    return values.detach().double().numpy().copy()


def _apply_elu(x: Numbers) -> None:
    """x above 0, exp(x) − 1 below, which is at least x; in place."""
    negative = np.minimum(x, 0.0)
    np.expm1(negative, out=negative)
    np.maximum(x, negative, out=x)


@dataclass(frozen=True, eq=False)
class _Coupling:
    """`AffineCoupling` or, with bins, `SplineCoupling` in numpy, for masks of odd and even columns."""

    fixed: slice
    moved: slice
    network: _Network
    bound: float
    bins: int = 0
    interval: float = 0.0

    def __call__(self, x: Float[np.ndarray, "*n dim"], log_slopes: Float[np.ndarray, "*n dim"]) -> None:
        """Transform rows in place, and add to the log-slopes of the columns that change."""
        output = self.network(x[..., self.fixed])
        moved, slopes = x[..., self.moved], log_slopes[..., self.moved]
        size = moved.shape[-1]
        s, t = np.tanh(output[..., :size]), output[..., size : 2 * size]
        s *= self.bound
        slopes += s
        if self.bins:
            raw = output[..., 2 * size :].reshape(*output.shape[:-1], 3 * self.bins - 1, size)
            moved[...], log_slope = _spline(moved, raw, self.bins, self.interval)
            slopes += log_slope
        moved *= np.exp(s, out=s)
        moved += t


def _is_exportable(part: Any) -> bool:
    return (
        type(part) in (AffineCoupling, SplineCoupling)
        and isinstance(part.partition, OddEven)
        and isinstance(part.network, DenseNetwork)
    )


def _coupling_of(part: Any) -> _Coupling:
    parity, spline = part.partition.parity, isinstance(part, SplineCoupling)
    return _Coupling(
        slice(parity, None, 2),
        slice(1 - parity, None, 2),
        _Network.of(part.network),
        part.bound.item(),
        part.bins if spline else 0,
        part.interval if spline else 0.0,
    )


def _spline(
    x: Float[np.ndarray, "*n m"],
    raw: Float[np.ndarray, "*n count m"],
    bins: int,
    interval: float,
) -> tuple[Numbers, Numbers]:
    """(y, log dy/dx) of `bruno.flow.spline.spline`."""
    widths, heights = (
        _lengths(part, interval) for part in (raw[..., :bins, :], raw[..., bins : 2 * bins, :])
    )
    inner = MIN_SLOPE + np.logaddexp(0.0, raw[..., 2 * bins :, :] + SLOPE_OFFSET)
    ends = np.ones((*inner.shape[:-2], 1, inner.shape[-1]))
    slopes = np.concatenate([ends, inner, ends], -2)
    lefts, bottoms = (np.cumsum(part, -2) - part - interval for part in (widths, heights))
    inside = x.clip(-interval, interval)
    index = ((inside[..., None, :] >= lefts).sum(-2, keepdims=True) - 1).clip(0, bins - 1)

    def at(values: Numbers) -> Numbers:
        return np.take_along_axis(values, index, -2)[..., 0, :]

    width, height, d = at(widths), at(heights), at(slopes)
    after = np.take_along_axis(slopes, index + 1, -2)[..., 0, :]
    t = ((inside - at(lefts)) / width).clip(0, 1)
    s, u = height / width, t * (1 - t)
    denominator = s + (after + d - 2 * s) * u
    y = at(bottoms) + height * (s * t**2 + d * u) / denominator
    log_slope = 2 * (np.log(s) - np.log(denominator)) + np.log(after * t**2 + 2 * s * u + d * (1 - t) ** 2)
    within = np.abs(x) < interval
    return np.where(within, y, x), np.where(within, log_slope, 0.0)


def _lengths(raw: Numbers, interval: float) -> Numbers:
    powers = np.exp(raw - raw.max(-2, keepdims=True))
    free = 2 * interval * (1 - raw.shape[-2] * MIN_LENGTH)
    return np.asarray(2 * interval * MIN_LENGTH + powers * (free / powers.sum(-2, keepdims=True)))
