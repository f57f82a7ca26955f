"""Analyses from the paper: process parameters, Student-t versus Gaussian, and prediction by position."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from bruno.arrays import Arrays, NumpyResult, as_tensor
from bruno.checks import check_count
from bruno.data.sampling import SetSampler
from bruno.model import Bruno
from bruno.process import Evidence, ExchangeableProcess, GaussianProcess, StudentTProcess
from bruno.tasks.evaluation import conditional_and_prior
from bruno.tasks.metrics import mean_and_error
from bruno.tasks.progress import Progress

_THRESHOLDS = tuple(10 ** (i / 20 - 4) for i in range(80))  # 1e-4 … 0.89, evenly spaced on a logarithmic axis

# --- parameters of a process -----------------------------------------------------------------------------


@dataclass(frozen=True)
class DimensionsByCorrelation(NumpyResult):
    """How many latent dimensions carry information about a set.

    Attributes:
        thresholds: correlations.
        dimensions: for each threshold, the number of dimensions with a correlation above it.
        total: number of dimensions.
    """

    thresholds: tuple[float, ...]
    dimensions: tuple[int, ...]
    total: int


def dimensions_by_correlation(
    model: Bruno, thresholds: Sequence[float] = _THRESHOLDS
) -> DimensionsByCorrelation:
    """Number of dimensions d with c_d = r_d/v_d > threshold, for each threshold: a plot of appendix F."""
    counts = tuple(int(model.process.correlated(threshold).sum()) for threshold in thresholds)
    return DimensionsByCorrelation(tuple(thresholds), counts, model.dim)


@dataclass(frozen=True)
class CorrelationAndDof(NumpyResult):
    """Parameters of a process, one entry for each latent dimension, the most correlated first.

    Attributes:
        dimension: index of the dimension.
        correlation: c = r/v, the correlation of two elements of a set.
        dof: ν, the degrees of freedom; None for a Gaussian process.
    """

    dimension: tuple[int, ...]
    correlation: tuple[float, ...]
    dof: tuple[float, ...] | None

    def above(self, threshold: float) -> int:
        """Number of dimensions whose correlation exceeds a threshold."""
        return sum(c > threshold for c in self.correlation)


@torch.no_grad()
def correlation_and_dof(model: Bruno) -> CorrelationAndDof:
    """Correlation and degrees of freedom of every dimension: a scatter plot of appendix F."""
    process = model.process
    correlation, order = process.correlation.sort(descending=True, stable=True)
    dof = tuple(process.dof[order].tolist()) if isinstance(process, StudentTProcess) else None
    return CorrelationAndDof(tuple(order.tolist()), tuple(correlation.tolist()), dof)


# --- Student-t and Gaussian on toy data ------------------------------------------------------------------


@dataclass(frozen=True)
class Predictions(NumpyResult):
    """Predictions of a process along a sequence; entry i, from 0, is made after i observations.

    Attributes:
        dof: ν, the degrees of freedom before the first observation; None for a Gaussian process.
        mean: predictive mean of the next observation.
        variance: predictive variance of the next observation.
        log_prob: log-density of the next observation, log p(z_{i+1} | z_1..z_i).
    """

    dof: float | None
    mean: tuple[float, ...]
    variance: tuple[float, ...]
    log_prob: tuple[float, ...]


@dataclass(frozen=True)
class ToyComparison(NumpyResult):
    """A Gaussian process and Student-t processes with the same mean, v and r, on the same observations."""

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
        raise ValueError(f"`covariance` must be from 0 to {variance}, the variance; got {covariance}.")
    noise = torch.randn(count + 1, generator=generator, dtype=torch.double, device=generator.device).cpu()
    return math.sqrt(covariance) * noise[0] + math.sqrt(variance - covariance) * noise[1:]


@torch.no_grad()
def toy_comparison(
    observations: Float[Tensor, " n"] | Arrays,
    *,
    dofs: Sequence[float] = (10.0, 1000.0),
    variance: float = 1.0,
    covariance: float = 0.01,
) -> ToyComparison:
    """Predictions of processes with mean 0 and the same v and r along a sequence: a figure of appendix F.

    v = 1 and r = 0.01 are the values of the paper; v is ten times the variance of its data
    (`toy_observations`). A Student-t process adapts to the smaller variance, a Gaussian process cannot. The
    paper does not state the ν of its two Student-t plots. The defaults are 1000 for "high degrees of
    freedom", the initial value of the paper's models, and a low value.
    """
    z = as_tensor(observations, "observations").double().cpu().unsqueeze(1)
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
class LogProbByPosition(NumpyResult):
    """How well a model predicts the elements of a set; entry i is after i elements.

    Attributes:
        log_prob: log p(x_{i+1} | x_1..x_i) in nats for a whole element, a mean over sets.
        error: its standard error, mostly because elements differ in difficulty.
        gain: log p(x_{i+1} | x_1..x_i) − log p(x_{i+1}), a mean over sets; the difficulty mostly cancels.
        gain_error: its standard error.
        sets: number of sets drawn.
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
    """Predictive log-probability by position, for sets of the sampler's classes with fresh noise.

    Draws the same sets as `measure_bits_per_dim` from the same generator. `progress` counts sets.
    """
    check_count("sets", sets, 2)  # to estimate a standard error
    check_count("batch_size", batch_size)
    log_probs, gains = [], []
    for begin in range(0, sets, batch_size):
        count = min(batch_size, sets - begin)
        steps, alone = conditional_and_prior(model, sampler.sets(count, set_size, generator), generator)
        log_probs.append(steps.double().cpu())
        gains.append((steps - alone).double().cpu())
        if progress is not None:
            progress(begin + count, sets)
    mean, error = (tuple(part.tolist()) for part in mean_and_error(torch.cat(log_probs)))
    gain, gain_error = (tuple(part.tolist()) for part in mean_and_error(torch.cat(gains)))
    return LogProbByPosition(mean, error, gain, gain_error, sets)


# --- all together ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inspection(NumpyResult):
    """All analyses of one model.

    Attributes:
        correlations: number of latent dimensions by correlation.
        dof: correlation and degrees of freedom of every dimension.
        toy: Student-t and Gaussian processes on toy data; independent of the model.
        positions: log-probability of an element by its position in a set.
    """

    correlations: DimensionsByCorrelation
    dof: CorrelationAndDof
    toy: ToyComparison
    positions: LogProbByPosition


def inspect_model(
    model: Bruno,
    sampler: SetSampler,
    *,
    sets: int = 200,
    set_size: int = 20,
    generator: Generator,
    progress: Progress | None = None,
) -> Inspection:
    """All analyses of a model, on sets of the sampler's classes.

    Args:
        model: a model on the device of the sampler.
        sampler: draws sets of the classes to measure on.
        sets: number of sets for the predictions by position.
        set_size: elements in a set; at most the size of the smallest class.
        generator: source of the sets, the noise and the toy observations; on the same device.
        progress: called as progress(done, total), in sets.
    """
    return Inspection(
        dimensions_by_correlation(model),
        correlation_and_dof(model),
        toy_comparison(toy_observations(generator=generator)),
        log_prob_by_position(
            model,
            sampler,
            sets=sets,
            set_size=min(set_size, sampler.min_count),
            generator=generator,
            progress=progress,
        ),
    )
