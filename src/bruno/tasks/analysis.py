"""The paper's analyses: what a process learnt, how Student-t and Gaussian differ, what a set gains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from bruno.data.sampling import SetSampler
from bruno.model import Bruno
from bruno.process import Evidence, ExchangeableProcess, GaussianProcess, StudentTProcess
from bruno.tasks import Progress
from bruno.tasks.evaluation import conditional_and_prior

_THRESHOLDS = tuple(10 ** (i / 20 - 4) for i in range(80))  # 1e-4 … 0.89, evenly on a logarithmic axis

# --- what a process has learnt ---------------------------------------------------------------------------


@dataclass(frozen=True)
class DimensionsByCorrelation:
    """How many latent dimensions say something about a set.

    Attributes:
        thresholds: correlations.
        dimensions: for each threshold, how many dimensions have a correlation above it.
        total: how many dimensions there are.
    """

    thresholds: tuple[float, ...]
    dimensions: tuple[int, ...]
    total: int


def dimensions_by_correlation(
    model: Bruno, thresholds: Sequence[float] = _THRESHOLDS
) -> DimensionsByCorrelation:
    """#{d : c_d > threshold} for each threshold, c = r/v: a double logarithmic plot of appendix F."""
    counts = tuple(int(model.process.correlated(threshold).sum()) for threshold in thresholds)
    return DimensionsByCorrelation(tuple(thresholds), counts, model.dim)


@dataclass(frozen=True)
class CorrelationAndDof:
    """The parameters of a process, one entry for each latent dimension, the most correlated first.

    Attributes:
        dimension: its index.
        correlation: c = r/v of two elements of a set.
        dof: ν, the degrees of freedom; None for a Gaussian process, which has none.
    """

    dimension: tuple[int, ...]
    correlation: tuple[float, ...]
    dof: tuple[float, ...] | None


@torch.no_grad()
def correlation_and_dof(model: Bruno) -> CorrelationAndDof:
    """Correlation and degrees of freedom of every dimension: the scatter plot of appendix F."""
    process = model.process
    correlation, order = process.correlation.sort(descending=True, stable=True)
    dof = tuple(process.dof[order].tolist()) if isinstance(process, StudentTProcess) else None
    return CorrelationAndDof(tuple(order.tolist()), tuple(correlation.tolist()), dof)


# --- Student-t and Gaussian on toy data ------------------------------------------------------------------


@dataclass(frozen=True)
class Predictions:
    """What a process says of each observation of a sequence, having seen those before it.

    Entry i, from 0, is said after i observations, of the one that comes next.

    Attributes:
        dof: ν, the degrees of freedom before the first observation; None for a Gaussian process.
        mean: of the next observation.
        variance: of the next observation.
        log_prob: of the next observation, log p(z_{i+1} | z_1..z_i).
    """

    dof: float | None
    mean: tuple[float, ...]
    variance: tuple[float, ...]
    log_prob: tuple[float, ...]


@dataclass(frozen=True)
class ToyComparison:
    """A Gaussian process and Student-t processes that differ from it in nothing but ν, on the same data."""

    observations: tuple[float, ...]
    gaussian: Predictions
    student_t: tuple[Predictions, ...]


def toy_observations(
    count: int = 100, *, variance: float = 0.1, covariance: float = 0.05, generator: Generator
) -> Float[Tensor, " count"]:
    """z_i = √r·a + √(v − r)·b_i with a, b_i standard normal: variance v, and covariance r of any two.

    The defaults are those of appendix F: one sequence of 100 with v = 0.1 and r = 0.05.
    """
    if not 0 <= covariance <= variance:
        raise ValueError(f"`covariance` must be from 0 to the variance of {variance}; got {covariance}.")
    noise = torch.randn(count + 1, generator=generator, dtype=torch.double, device=generator.device).cpu()
    return math.sqrt(covariance) * noise[0] + math.sqrt(variance - covariance) * noise[1:]


@torch.no_grad()
def toy_comparison(
    observations: Float[Tensor, " n"],
    *,
    dofs: Sequence[float] = (10.0, 1000.0),
    variance: float = 1.0,
    covariance: float = 0.01,
) -> ToyComparison:
    """What processes of mean 0 and the same v and r predict along a sequence: the figure of appendix F.

    v = 1 and r = 0.01 are the paper's, ten times the variance of its data (`toy_observations`): the Student-t
    process finds that out, the Gaussian one cannot. The paper does not say which two ν its plots have; ours
    are the 1000 that its models start from, for "high degrees of freedom", and a low one.
    """
    z = observations.double().cpu().unsqueeze(1)
    c = covariance / variance
    student_t = (
        StudentTProcess(1, dof=dof, variance=variance, correlation=c, dtype=torch.double) for dof in dofs
    )
    gaussian = GaussianProcess(1, variance=variance, correlation=c, dtype=torch.double)
    return ToyComparison(
        tuple(z[:, 0].tolist()),
        _predictions(gaussian, z, None),
        tuple(_predictions(process, z, dof) for process, dof in zip(student_t, dofs, strict=True)),
    )


def _predictions(process: ExchangeableProcess, z: Float[Tensor, "n 1"], dof: float | None) -> Predictions:
    predictive = process.predictive(Evidence.prefixes(z))
    columns = (predictive.mean, predictive.variance, predictive.log_prob(z))
    return Predictions(dof, *(tuple(column[:, 0].tolist()) for column in columns))


# --- prediction by position ------------------------------------------------------------------------------


@dataclass(frozen=True)
class LogProbByPosition:
    """How well a model predicts the elements of a set, by how many it has seen: entry i has seen i.

    Attributes:
        log_prob: log p(x_{i+1} | x_1..x_i) in nats for a whole element, the mean over sets.
        error: its standard error, most of which is that some elements are harder than others.
        gain: log p(x_{i+1} | x_1..x_i) − log p(x_{i+1}), the mean over sets: free of that, and 0 at first.
        gain_error: its standard error.
        sets: how many were drawn.
    """

    log_prob: tuple[float, ...]
    error: tuple[float, ...]
    gain: tuple[float, ...]
    gain_error: tuple[float, ...]
    sets: int


@torch.no_grad()
def log_prob_by_position(
    model: Bruno,
    sampler: SetSampler,
    *,
    sets: int,
    set_size: int,
    generator: Generator,
    batch_size: int = 16,
    progress: Progress | None = None,
) -> LogProbByPosition:
    """Predictive log-probability against position, for sets of the sampler's classes with fresh noise.

    Draws what `measure_bits_per_dim` draws from the same generator; the errors need each set by itself.
    """
    if sets < 2:
        raise ValueError(f"`sets` must be at least 2, for an error to be told; got {sets}.")
    log_probs, gains = [], []
    for begin in range(0, sets, batch_size):
        count = min(batch_size, sets - begin)
        steps, alone = conditional_and_prior(model, sampler.sets(count, set_size, generator), generator)
        log_probs.append(steps.double().cpu())
        gains.append((steps - alone).double().cpu())
        if progress is not None:
            progress(begin + count, sets)
    return LogProbByPosition(*_mean_and_error(torch.cat(log_probs)), *_mean_and_error(torch.cat(gains)), sets)


def _mean_and_error(values: Float[Tensor, "sets n"]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    deviation, mean = torch.std_mean(values, 0)
    return tuple(mean.tolist()), tuple((deviation / math.sqrt(len(values))).tolist())
