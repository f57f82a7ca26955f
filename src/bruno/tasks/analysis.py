"""The paper's analyses: what a process learnt, how Student-t and Gaussian differ, what upsets training."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from bruno.config import FlowConfig, ModelConfig, ProcessConfig, TrainConfig
from bruno.data import Examples
from bruno.evaluation import measure_bits_per_dim
from bruno.model import Bruno
from bruno.process import Evidence, ExchangeableProcess, GaussianProcess, StudentTProcess
from bruno.sequences import SetSampler
from bruno.training import Step, Trainer

Progress = Callable[[int, int], None]  # how much is done, of how much

_THRESHOLDS = tuple(10 ** (i / 20 - 4) for i in range(80))  # 1e-4 … 0.89, evenly on a logarithmic axis
_FINAL_SETS = 32  # that a trained model of the study is measured on

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

    v = 1 and r = 0.01 are the paper's, ten times too wide for its data (`toy_observations`): the Student-t
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
    length: int,
    generator: Generator,
    at_a_time: int = 16,
    progress: Progress | None = None,
) -> LogProbByPosition:
    """Predictive log-probability against position, for sets of the sampler's classes with fresh noise.

    Draws what `measure_bits_per_dim` draws from the same generator; the errors need each set by itself.
    """
    if sets < 2:
        raise ValueError(f"`sets` must be at least 2, for an error to be told; got {sets}.")
    log_probs, gains = [], []
    for begin in range(0, sets, at_a_time):
        count = min(at_a_time, sets - begin)
        z, log_det = model.encode(sampler.sets(count, length, generator), generator)
        steps = model.process.step_log_prob(z, validate=False)
        alone = model.process.step_log_prob(z.unsqueeze(-2), validate=False).squeeze(-1)
        log_probs.append((steps + log_det).double().cpu())
        gains.append((steps - alone).double().cpu())
        if progress is not None:
            progress(begin + count, sets)
    return LogProbByPosition(*_mean_and_error(torch.cat(log_probs)), *_mean_and_error(torch.cat(gains)), sets)


def _mean_and_error(values: Float[Tensor, "sets n"]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    deviation, mean = torch.std_mean(values, 0)
    return tuple(mean.tolist()), tuple((deviation / math.sqrt(len(values))).tolist())


# --- what upsets training --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """What a model of the study has of its own.

    Attributes:
        name: for people.
        weight_norm: normalise the weights of the flow's networks, and take their scale from data.
        rate: times that of the study.
        correlation: the initial one of each dimension is drawn uniformly from this range.
        white_every: at every so many steps the last image of every set is white; 0 for never.
    """

    name: str
    weight_norm: bool = True
    rate: float = 1.0
    correlation: tuple[float, float] = (0.1, 0.1)
    white_every: int = 0

    def __post_init__(self) -> None:
        low, high = self.correlation
        if not 0 < low <= high < 1:
            raise ValueError(f"`correlation` must be a range between 0 and 1; got {self.correlation}.")
        if self.white_every < 0:
            raise ValueError(f"`white_every` must be at least 0; got {self.white_every}.")


# The paper compares without and with weight norm at correlations from a range (its left plot), doubles the
# rate (middle) and starts highly correlated (right). How it fed outliers it tells in the text, but not to
# which of these plots: here they are a variant of their own.
VARIANTS = (
    Variant("ordinary"),
    Variant("weight norm, mixed correlations", correlation=(0.1, 0.95)),
    Variant("no weight norm, mixed correlations", weight_norm=False, correlation=(0.1, 0.95)),
    Variant("high rate", rate=2.0),
    Variant("high correlation", correlation=(0.95, 0.95)),
    Variant("white outliers", white_every=100),
)

# Convolutional as in the paper, but small: on one CPU core a step on 8 × 8 digits takes some 50 ms.
STUDY_FLOW = FlowConfig(filters=16, blocks=1, couplings=2, units=64)
# The paper's optimiser at its plain rate: warming up, decaying and clipping would hide what upsets training.
STUDY_TRAIN = TrainConfig(
    optimiser="rmsprop", process_rate=1.0, warmup=0.0, decay="none", batch=8, precision="float32"
)


@dataclass(frozen=True)
class Curve:
    """How one model of the study learnt.

    Attributes:
        process: "student-t" or "gaussian".
        variant: its name.
        seed: of weights, correlations and sets; the same sets for all variants and processes.
        bits_per_dim: of the batch of each step, NaN or infinite where training broke down.
        skipped: steps left out because their gradient was not finite.
        final: bits/dim of fresh sets of the same examples after the last step, never with outliers.
    """

    process: str
    variant: str
    seed: int
    bits_per_dim: tuple[float, ...]
    skipped: int
    final: float


def stability_study(
    examples: Examples,
    *,
    variants: Sequence[Variant] = VARIANTS,
    processes: Sequence[str] = ("student-t", "gaussian"),
    steps: int = 500,
    seeds: Sequence[int] = (0,),
    flow: FlowConfig = STUDY_FLOW,
    train: TrainConfig = STUDY_TRAIN,
    alpha: float = 1e-6,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> list[Curve]:
    """Learning curves of every variant, with each process and each seed, in this order: appendix G.

    A model that diverges is a result as any other. `flow`, `train` and `alpha` are what all models have in
    common, but for what a variant says; `progress` counts the steps of all of them.
    """
    if examples.levels == 0 and any(variant.white_every for variant in variants):
        raise ValueError("`examples` must be images for variants with white outliers; got real numbers.")
    sampler = _WhiteSampler(examples, device)
    runs = list(itertools.product(variants, processes, seeds))
    curves = []
    for number, (variant, process, seed) in enumerate(runs):
        own_flow = replace(flow, weight_norm=variant.weight_norm)
        settings = ModelConfig(examples.shape, examples.levels, alpha, own_flow, ProcessConfig(process))
        own_train = replace(train, steps=steps, rate=train.rate * variant.rate, seed=seed)
        trainer = Trainer(_fresh_model(settings, variant.correlation, seed).to(device), sampler, own_train)
        trained = []
        for index in range(1, steps + 1):
            sampler.white.fill_(variant.white_every > 0 and index % variant.white_every == 0)
            trained.append(trainer.step())
            if progress is not None:
                progress(number * steps + index, len(runs) * steps)
        sampler.white.fill_(False)
        curves.append(_curve(trainer, trained, process, variant.name))
    return curves


def _curve(trainer: Trainer, trained: Sequence[Step], process: str, variant: str) -> Curve:
    seed = trainer.config.seed
    final = measure_bits_per_dim(
        trainer.trained(),
        trainer.sampler,
        sets=_FINAL_SETS,
        length=trainer.config.length,
        generator=Generator(trainer.device).manual_seed(seed),
    )
    bits = tuple(step.bits_per_dim for step in trained)
    return Curve(process, variant, seed, bits, sum(step.skipped for step in trained), final.mean)


class _WhiteSampler(SetSampler):
    """Sets whose last image is white while `white` says so.

    It says so as a tensor, so that a step that was captured as a CUDA graph sees it change.
    """

    def __init__(self, examples: Examples, device: torch.device | str) -> None:
        super().__init__(examples, device=device)
        self.white = torch.zeros((), dtype=torch.bool, device=device)
        self._brightest = max(0, examples.levels - 1)

    def sets(self, batch: int, n: int, generator: Generator) -> Tensor:
        x = super().sets(batch, n, generator)
        return torch.cat([x[:, :-1], x[:, -1:].masked_fill(self.white, self._brightest)], 1)


def _fresh_model(settings: ModelConfig, correlation: tuple[float, float], seed: int) -> Bruno:
    """A model whose weights and initial correlations depend on the seed alone; no one else notices."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(seed)
        model = Bruno.from_config(settings)
        drawn = torch.empty(model.dim, dtype=torch.double).uniform_(*correlation)
        model.process.raw_correlation.copy_(drawn.logit())
    return model
