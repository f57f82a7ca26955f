"""Encoding for streams: dense flows of rows in numpy, fast for a single row; other models in torch.

A row of a dense flow has the same latents in any batch, bit for bit. So a stream that is cut into other
batches, as after a restart, has the same scores. Matrix products are computed in tiles of a fixed number of
rows, since the rounding of a product depends on its shape.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray

from bruno.arrays import as_tensor
from bruno.flow import AffineCoupling, SplineCoupling
from bruno.flow.coupling import OddEven
from bruno.flow.networks import Dense, DenseNetwork
from bruno.flow.preprocessing import ColumnScales, Standardise
from bruno.flow.realnvp import DenseRealNVP
from bruno.flow.spline import MIN_LENGTH, MIN_SLOPE, SLOPE_OFFSET
from bruno.model import Bruno

Numbers = NDArray[np.float64]

_TILE, _LARGE_TILE = 8, 64  # rows of a matrix product, for narrow and for wide networks
_WIDE = 256  # units
_FURTHEST = 1e9  # standard deviations, as in `Standardise`
_AT_A_TIME = 256  # elements encoded together in torch


class Latents(NamedTuple):
    """Latents of a batch of elements, and the log-det of the map to them, in float64."""

    z: Float[np.ndarray, "n dim"]
    log_det: Float[np.ndarray, " n"]


Encoder = Callable[[Any], Latents]  # elements (n, *shape) -> latents


def encoder_of(model: Bruno) -> Encoder:
    """The fastest encoder of a model for elements in small batches: `RowEncoder` if possible, else torch."""
    return RowEncoder(model) if RowEncoder.supports(model) else TorchEncoder(model)


class TorchEncoder:
    """Encodes elements by the model itself."""

    def __init__(self, model: Bruno) -> None:
        self.model = model

    @torch.no_grad()
    def __call__(self, x: Any) -> Latents:
        """The latents of elements (n, *shape)."""
        parts = [
            self.model.encode(part.to(self.model.device))
            for part in as_tensor(x, kind=self.model.kind).split(_AT_A_TIME)
        ]
        z, log_det = (torch.cat(some).double().cpu().numpy() for some in zip(*parts, strict=True))
        return Latents(z, log_det)


class RowEncoder:
    """Encodes rows by a dense flow in numpy, in float64, from a copy of the weights.

    The result equals that of `Bruno.encode`, in float32, up to its rounding.
    """

    def __init__(self, model: Bruno) -> None:
        preprocessing = model.preprocessing
        assert isinstance(preprocessing, Standardise)
        self._scales = _Scales.of(preprocessing)
        self._couplings = [_coupling_of(part) for part in model.flow.bijections]  # type: ignore[union-attr]
        widest = max((len(bias) for one in self._couplings for _, bias in one.layers), default=0)
        self._tile = _TILE if widest <= _WIDE else _LARGE_TILE

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
        y, log_det = self._scales(x)
        if not self._couplings:
            return Latents(y, log_det)
        n, dim = y.shape
        tiles = -(-n // self._tile)
        padded = np.zeros((tiles, self._tile, dim))
        padded.reshape(-1, dim)[:n] = y
        total = np.zeros((tiles, self._tile))
        for coupling in self._couplings:
            total += coupling(padded)
        return Latents(padded.reshape(-1, dim)[:n], log_det + total.reshape(-1)[:n])


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

    @classmethod
    def of(cls, module: Standardise) -> _Scales:
        mean, deviation = module.mean.numpy().copy(), module.deviation.numpy().copy()
        centre, width = np.zeros_like(mean), np.ones_like(mean)
        log, asinh = None, None
        if isinstance(module, ColumnScales):
            centre, width = module.centre.numpy().copy(), module.width.numpy().copy()
            log, asinh = (module.kind.numpy() == kind for kind in (1, 2))
            log, asinh = (mask if mask.any() else None for mask in (log, asinh))
        log_det = float(-np.log(deviation).sum() - np.log(width).sum())
        return cls(mean, deviation, log_det, centre, width, log, asinh)

    def __call__(self, x: Numbers) -> tuple[Numbers, Numbers]:
        u = (x - self.centre) / self.width
        bent, log_det = u, np.full(len(x), self.log_det)
        if self.log is not None:
            large = np.log(np.maximum(u, 1.0))
            bent = np.where(self.log, np.where(u > 1, large, u - 1), bent)
            log_det = log_det - np.where(self.log, large, 0.0).sum(1)
        if self.asinh is not None:
            bent = np.where(self.asinh, np.arcsinh(u), bent)
            log_det = log_det - np.where(self.asinh, np.log(np.hypot(u, 1.0)), 0.0).sum(1)
        scaled = (bent - self.mean) / self.deviation
        return np.minimum(np.maximum(scaled, -_FURTHEST), _FURTHEST), log_det


# --- couplings -------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Coupling:
    """`AffineCoupling` or, with bins, `SplineCoupling` of odd and even numbers in numpy."""

    fixed: slice
    moved: slice
    layers: list[tuple[Numbers, Numbers]]  # weights (inputs, outputs) and biases
    bound: float
    bins: int = 0
    interval: float = 0.0

    def __call__(self, x: Float[np.ndarray, "tiles rows dim"]) -> Float[np.ndarray, "tiles rows"]:
        """Map tiles of rows in place; returns the log-det of each row."""
        output = x[..., self.fixed]
        for i, (weight, bias) in enumerate(self.layers):
            if i:
                output = np.maximum(output, np.expm1(np.minimum(output, 0.0)))  # ELU, as exp(x) − 1 ≥ x
            output = np.matmul(output, weight)
            output += bias
        size = x[..., self.moved].shape[-1]
        s, t = self.bound * np.tanh(output[..., :size]), output[..., size : 2 * size]
        moved, log_slope = x[..., self.moved], s
        if self.bins:
            raw = output[..., 2 * size :].reshape(*output.shape[:-1], -1, size)
            moved, bent = _spline(moved, raw, self.bins, self.interval)
            log_slope = s + bent
        x[..., self.moved] = moved * np.exp(s) + t
        return np.asarray(log_slope.sum(-1))


def _is_exportable(part: Any) -> bool:
    return (
        type(part) in (AffineCoupling, SplineCoupling)
        and isinstance(part.partition, OddEven)
        and isinstance(part.network, DenseNetwork)
    )


def _coupling_of(part: Any) -> _Coupling:
    layers = [
        (layer.weight.detach().double().numpy().T.copy(), layer.bias.detach().double().numpy().copy())
        for layer in part.network.layers
        if isinstance(layer, Dense)
    ]
    parity, spline = part.partition.parity, isinstance(part, SplineCoupling)
    return _Coupling(
        slice(parity, None, 2),
        slice(1 - parity, None, 2),
        layers,
        part.bound.item(),
        part.bins if spline else 0,
        part.interval if spline else 0.0,
    )


def _spline(
    x: Float[np.ndarray, "tiles rows m"],
    raw: Float[np.ndarray, "tiles rows count m"],
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
