"""The parts of a model from its config: preprocessing, flow and process."""

from __future__ import annotations

import math

import torch

from bruno import limits
from bruno.config import FlowConfig, ModelConfig
from bruno.flow import Bijection, ConvRealNVP, DenseRealNVP, Splines
from bruno.flow.preprocessing import ColumnScales, Gaussianise, GaussianMixture, Logit, Pixels, Standardise
from bruno.process import ExchangeableProcess, GaussianProcess, StudentTProcess


def check_size(config: ModelConfig) -> None:
    """Raise if the weights are too large for the limit of memory; estimated within a factor of about two."""
    flow, dim = config.flow, math.prod(config.shape)
    outputs = 2 + (3 * flow.bins if flow.coupling == "spline" else 0)
    dense = flow.couplings * flow.units * (flow.units + dim * (1 + outputs) // 2)
    networks = 2 * flow.depth * flow.scales if flow.kind == "conv" else 0
    convolutions = networks * (2 * flow.blocks + 1) * 9 * flow.filters**2
    limits.MEMORY.check_argument("flow", f"{flow.kind} couplings", 4 * (dense + convolutions))


def check_takes_rows(flow: FlowConfig) -> None:
    """Raise unless a flow takes rows."""
    if flow.kind != "dense":
        raise ValueError(f"`flow.kind` must be dense for rows, as in the preset table; got {flow.kind}.")


def build_preprocessing(config: ModelConfig) -> Pixels | Standardise:
    """The preprocessing: of pixels if the config has levels, of columns otherwise."""
    if not config.levels:
        return ColumnScales(config.shape) if config.scales == "auto" else Standardise(config.shape)
    kind = {"logit": Logit, "gaussianise": Gaussianise, "mixture": GaussianMixture}[config.pixels]
    return kind(config.levels, config.alpha)


def build_flow(config: ModelConfig) -> Bijection:
    """The flow, with fresh weights."""
    flow, splines = config.flow, None
    if flow.coupling == "spline":
        splines = Splines(flow.bins, flow.interval, flow.spline_scales, flow.spline_dense)
    if flow.kind == "dense":
        return DenseRealNVP(
            config.shape,
            couplings=flow.couplings,
            units=flow.units,
            weight_norm=flow.weight_norm,
            splines=splines,
        )
    if len(config.shape) == 1:
        check_takes_rows(config.flow)
    return ConvRealNVP(
        config.shape,
        scales=flow.scales,
        depth=flow.depth,
        mixing=flow.mixing,
        filters=flow.filters,
        blocks=flow.blocks,
        squeeze_first=flow.squeeze_first,
        dense_couplings=flow.couplings,
        dense_units=flow.units,
        weight_norm=flow.weight_norm,
        splines=splines,
    )


def build_process(config: ModelConfig) -> ExchangeableProcess:
    """The process, at the start of training."""
    start, dim = config.process, math.prod(config.shape)
    if start.leading > dim:
        raise ValueError(
            f"`process.leading` must be at most {dim}, the number of dimensions; got {start.leading}."
        )
    correlation = torch.full((dim,), start.correlation)
    correlation[: start.leading] = start.leading_correlation
    if start.kind == "gaussian":
        return GaussianProcess(dim, variance=start.variance, correlation=correlation)
    return StudentTProcess(dim, dof=start.dof, variance=start.variance, correlation=correlation)
