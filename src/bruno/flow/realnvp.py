"""Real NVP (Dinh et al. 2017) as in the paper, and a variant that works at half resolution."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from bruno.flow.bijection import Bijection, Chain, FactorOut, Flatten, Shape, Squeeze
from bruno.flow.coupling import (
    AffineCoupling,
    Channels,
    Checkerboard,
    Coupling,
    OddEven,
    Partition,
    SplineCoupling,
)
from bruno.flow.mixing import ChannelMixing
from bruno.flow.networks import ConvNetwork, DenseNetwork
from bruno.flow.spline import parameter_count


@dataclass(frozen=True)
class Splines:
    """Which couplings of a Real NVP have a spline before their affine map, and its settings.

    Attributes:
        bins: bins of a spline.
        interval: a spline is defined on [−interval, interval].
        scales: number of scales of a convolutional model with splines, from the first; 0: all.
        dense: also use splines in the dense couplings of a convolutional model.
    """

    bins: int = 8
    interval: float = 5.0
    scales: int = 0
    dense: bool = False

    def at_scale(self, scale: int) -> bool:
        """Whether the convolutional couplings of a scale, counted from 0, have splines."""
        return not self.scales or scale < self.scales


class DenseRealNVP(Chain):
    """Fully connected couplings that alternate between odd and even numbers, for vectors and small images.

    Args:
        shape: shape of a sample; anything but a vector is flattened.
        couplings: number of couplings; a sample of a single number gets none.
        units: hidden units of each of the two layers in a coupling.
        weight_norm: normalise the weights of the networks.
        splines: settings of the splines in all couplings; None: affine couplings.

    >>> flow = DenseRealNVP((3,), couplings=2, units=4)
    >>> z, log_det = flow(torch.ones(5, 3))
    >>> z.shape, log_det.shape
    (torch.Size([5, 3]), torch.Size([5]))
    >>> bool(torch.allclose(flow.inverse(z)[0], torch.ones(5, 3)))
    True
    """

    def __init__(
        self,
        shape: Sequence[int],
        *,
        couplings: int = 6,
        units: int = 1024,
        weight_norm: bool = True,
        splines: Splines | None = None,
    ) -> None:
        dim = math.prod(shape)
        flatten = [Flatten(shape)] if len(shape) > 1 else []
        super().__init__([*flatten, *_dense(dim, couplings if dim > 1 else 0, units, weight_norm, splines)])


class ConvRealNVP(Chain):
    """The multi-scale convolutional model, with dense couplings on all of its latents.

    A scale is three (`depth`) checkerboard couplings, a squeeze, three channel couplings, and half of the
    channels factored out; the last scale is four checkerboard couplings. `squeeze_first` does the same work
    at half the resolution: it squeezes before the first coupling, and a checkerboard becomes a choice of
    channels.

    Args:
        shape: (channels, height, width); each scale but the last halves height and width.
        scales: number of scales; the paper uses 2.
        depth: checkerboard couplings of a scale, and channel couplings; the last scale has one more.
        mixing: a learnt 1 × 1 convolution before each coupling that divides channels.
        filters: filters of a convolution.
        blocks: residual blocks of a convolutional network.
        dense_couplings: number of dense couplings on top.
        dense_units: hidden units of each of their two layers.
        squeeze_first: use the faster variant.
        weight_norm: normalise the weights of the networks.
        splines: which couplings have splines; None: affine couplings.
    """

    def __init__(
        self,
        shape: Sequence[int],
        *,
        scales: int = 2,
        depth: int = 3,
        mixing: bool = False,
        filters: int = 64,
        blocks: int = 8,
        dense_couplings: int = 6,
        dense_units: int = 1024,
        squeeze_first: bool = False,
        weight_norm: bool = True,
        splines: Splines | None = None,
    ) -> None:
        if len(shape) != 3:
            raise ValueError(f"`shape` must be (channels, height, width); got {tuple(shape)}.")
        if scales < 1:
            raise ValueError(f"`scales` must be at least 1; got {scales}.")
        here, first = tuple(shape), Squeeze()
        steps: list[Bijection] = []
        if squeeze_first:
            steps.append(first)
            here = first.output_shape(here)

        def coupling(partition: Partition, inside: Shape, scales_left: int) -> Bijection:
            fixed, moved = (part.shape[1] for part in partition.split(torch.zeros(1, *inside)))
            here = splines if splines and splines.at_scale(scales - scales_left) else None
            network = ConvNetwork(
                fixed, moved, filters, blocks, weight_norm=weight_norm, per_output=_per_output(here)
            )
            step = _coupling(partition, network, here)
            return (
                Chain([ChannelMixing(inside[0]), step])
                if mixing and isinstance(partition, Channels)
                else step
            )

        steps.append(_scale(here, scales, depth, coupling, squeeze_first))
        flat = steps[-1].output_shape(here)
        if len(flat) > 1:
            steps.append(Flatten(flat))
        on_top = splines if splines and splines.dense else None
        dense = _dense(math.prod(shape), dense_couplings, dense_units, weight_norm, on_top)
        super().__init__([*steps, *dense])


def _scale(
    shape: Shape,
    scales: int,
    depth: int,
    coupling: Callable[[Partition, Shape, int], Bijection],
    by_channels: bool,
) -> Bijection:
    """One scale of the convolutional model, with the later scales in the half that is kept."""

    def board(parity: int) -> Bijection:
        channels, height, width = shape
        if by_channels:
            return coupling(Channels(channels, parity, diagonal=True), shape, scales)
        return coupling(Checkerboard(height, width, parity), shape, scales)

    if scales == 1:
        return Chain(board(i % 2) for i in range(depth + 1))
    squeeze = Squeeze()
    below = squeeze.output_shape(shape)
    across = [coupling(Channels(below[0], i % 2), below, scales) for i in range(depth)]
    inner = _scale((below[0] // 2, *below[1:]), scales - 1, depth, coupling, by_channels)
    return Chain([*(board(i % 2) for i in range(depth)), squeeze, *across, FactorOut(inner, below)])


def _dense(
    dim: int, couplings: int, units: int, weight_norm: bool, splines: Splines | None
) -> Iterator[Bijection]:
    """Fully connected couplings that alternately move odd and even numbers."""
    for i in range(couplings):
        partition, fixed = OddEven(dim, i % 2), (dim + 1 - i % 2) // 2
        network = DenseNetwork(
            fixed, dim - fixed, units, weight_norm=weight_norm, per_output=_per_output(splines)
        )
        yield _coupling(partition, network, splines)


def _per_output(splines: Splines | None) -> int:
    """Parameters for each number that moves: a log-scale, a shift, and those of its spline."""
    return 2 + (parameter_count(splines.bins) if splines else 0)


def _coupling(partition: Partition, network: nn.Module, splines: Splines | None) -> Coupling:
    if splines is None:
        return AffineCoupling(partition, network)
    return SplineCoupling(partition, network, bins=splines.bins, interval=splines.interval)
