"""Detection of planted faults in rows, compared with a robust Mahalanobis distance."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor
from torch.nn import functional as F

from bruno.checks import check_rate
from bruno.data import Examples
from bruno.data.sampling import SetSampler
from bruno.model import Bruno
from bruno.tasks.anomaly import density_floor, reference_density
from bruno.tasks.calibration import fixed_cutoffs
from bruno.tasks.conformal import GroupScores
from bruno.tasks.groups import Groups
from bruno.tasks.metrics import area_gain, roc_auc
from bruno.tasks.robust_evidence import batch_scores, shortfall

FAULTS = ("row of another set", "one column of another set", "spike in one column")
_FAULTY_FRACTION = 0.1  # of the rows of a set
_SPIKE = (2.0, 6.0)  # standard deviations of the rows of a set
_CONSTANT = 0.01  # standard deviation of a standardised column that is constant within sets
_SET_SIZE = 30  # at most
_MAX_SETS = 400
_CUTOFF_CLASSES = 60  # training classes that set the cutoffs
_TRIMMED = 0.05  # fraction of the rows that the covariance of the baseline ignores
_RIDGE = 1e-12  # variance that is added to every column, as all may be constant within sets


@dataclass(frozen=True)
class DetectionRates:
    """Fractions of the rows that a method flags at its threshold.

    Attributes:
        false_alarms: fraction of the clean rows that are flagged.
        detections: fraction of the faulty rows that are flagged, by the kind of fault.
        area: area under the ROC curve, for all thresholds.
    """

    false_alarms: float
    detections: dict[str, float]
    area: float


@dataclass(frozen=True)
class PlantedFaults:
    """A model and a baseline on the same sets, in which a tenth of the rows are faulty.

    Attributes:
        rate: false-alarm rate that both are calibrated to, on clean sets of other classes.
        sets: number of sets.
        set_size: rows of a set.
        model: what the model flags.
        baseline: what the baseline flags: the Mahalanobis distance from the median of the set, with the
            covariance of the training rows around the medians of their sets.
        area_gain: area of the model minus that of the baseline.
        area_error: its standard error, from a bootstrap over classes; None for a single class.
        detection_errors: by the kind of fault, the standard error of the fraction that the model detects
            minus that of the baseline: between classes, but at least that of as many independent faults; None
            for a single class.
    """

    rate: float
    sets: int
    set_size: int
    model: DetectionRates
    baseline: DetectionRates
    area_gain: float
    area_error: float | None
    detection_errors: dict[str, float | None]


class _Planted(NamedTuple):
    """Sets with faults, and the kind of each row: 0 for clean, else 1 + the index in `FAULTS`."""

    x: Float[Tensor, "sets n dim"]
    fault: Int[Tensor, "sets n"]


@torch.no_grad()
def measure_planted_faults(
    model: Bruno,
    train: Examples,
    test: Examples,
    *,
    rows: int,
    generator: Generator,
    rate: float = 0.01,
) -> PlantedFaults:
    """Plant faults in the sets of `test`, and count what the model and a robust baseline flag.

    Both have thresholds for the same rate, estimated by `GroupScores` from clean sets: for each class of
    `test`, from sets of its other classes, or from sets of `train` if there are fewer than two of these. Each
    set is judged as a batch: the worst rows are removed from the evidence first.

    Args:
        model: a model of rows.
        train: classes that set the cutoffs and the baseline.
        test: classes to judge, preferably unseen in training.
        rows: number of rows to judge, at least one set of each class.
        generator: source of sets and faults, on the device of the model.
        rate: false-alarm rate.
    """
    check_rate("rate", rate)
    size = min(_SET_SIZE, *(int(part.counts.median()) for part in (train, test)))
    if size <= len(FAULTS):
        raise ValueError(
            f"`test` must have sets of at least {len(FAULTS) + 1} rows, one for each kind of fault and a "
            f"clean one; got {size}."
        )
    train, test = train.with_at_least(size), test.with_at_least(size)
    distance = RobustDistance.of(model, train)
    judges = {"model": _score_of(model, train, test, generator), "baseline": distance.scores}
    sets = max(len(test.names), min(_MAX_SETS, rows // size))
    classes = torch.arange(sets) % len(test.names)
    own = _draw(test, classes, size, generator).to(model.device)
    others = _rows_of_others(test, train, classes, size, generator).to(model.device)
    x, fault = _with_faults(model, own, others, distance, generator)
    scores = {name: judge(x).double().cpu() for name, judge in judges.items()}
    known, of_others = (test, True) if len(test.names) > 2 else (train, False)
    each = max(1, sets // len(known.names))
    clean = _draw(known, torch.arange(len(known.names)).repeat_interleave(each), size, generator)
    rates, flagged = {}, {}
    for name, judge in judges.items():
        limits = _limits(judge(clean.to(model.device)), known, rate, of_others)
        flagged[name] = scores[name] > limits[classes % len(limits)].unsqueeze(1)
        rates[name] = _rates(scores[name], flagged[name], fault)
    gain, error = area_gain(fault > 0, scores["model"], scores["baseline"], classes, generator)
    errors = {
        name: _detection_error(flagged["model"], flagged["baseline"], fault == kind, classes)
        for kind, name in enumerate(FAULTS, start=1)
    }
    return PlantedFaults(rate, sets, size, rates["model"], rates["baseline"], gain, error, errors)


@dataclass(frozen=True, eq=False)
class RobustDistance:
    """The squared Mahalanobis distance from the median of a set, in columns normalised as by the model.

    Attributes:
        model: the model that normalises the columns.
        covariance: covariance of rows around the medians of their sets.
    """

    model: Bruno
    covariance: Float[Tensor, "dim dim"]

    @classmethod
    def of(cls, model: Bruno, examples: Examples) -> RobustDistance:
        """The distance with the covariance of all classes together, without the furthest rows."""
        y, labels = model.normalised(examples.elements).double(), examples.labels
        medians = torch.stack([y[members].median(0).values for members in examples.by_class()])
        rows = y - medians[labels]
        ridge = (1e-6 * rows.square().mean() + _RIDGE) * torch.eye(rows.shape[1], dtype=torch.double)
        covariance = rows.T @ rows / len(rows) + ridge
        distance = (rows @ torch.linalg.inv(covariance) * rows).sum(1)
        near = rows[distance <= distance.quantile(1 - _TRIMMED)] if len(rows) < 2**20 else rows
        return cls(model, near.T @ near / len(near) + ridge)

    @property
    def spread(self) -> Float[Tensor, " dim"]:
        """Standard deviation of each column within a set."""
        spread: Tensor = self.covariance.diagonal().sqrt()
        return spread

    def scores(self, x: Float[Tensor, "sets n dim"]) -> Float[Tensor, "sets n"]:
        """The distance of each row; higher for outliers."""
        y = self.model.normalised(x).double().cpu()
        rows = y - y.median(1, keepdim=True).values
        distance: Tensor = (rows @ torch.linalg.inv(self.covariance) * rows).sum(-1)
        return distance


def _score_of(
    model: Bruno, train: Examples, test: Examples, generator: Generator
) -> Callable[[Tensor], Tensor]:
    """A function from sets (sets, n, dim) to −score of each row, +∞ for rows that are out-of-distribution."""
    some = train.of_classes(range(min(_CUTOFF_CLASSES, len(train.names))))
    sampler = SetSampler(some, device=model.device)
    clean = SetSampler(test, device=model.device)
    floor = density_floor(model, sampler, generator=generator, clean=clean)
    reference = reference_density(model, sampler, generator=generator)
    groups = Groups.of(model, some, floor=floor, reference=reference, generator=generator)
    cutoffs = fixed_cutoffs(model, groups)

    def scores(x: Tensor) -> Tensor:
        z, log_det = model.encode(x, on_scales=True)
        log_prob = model.process.log_prob(z) + log_det
        usable = log_prob >= floor
        scores = batch_scores(model, z, cutoffs, usable, shortfall(log_prob, reference))[0]
        return (-scores).masked_fill(~usable, math.inf)

    return scores


def _draw(
    examples: Examples, classes: Int[Tensor, " sets"], size: int, generator: Generator
) -> Float[Tensor, "sets n dim"]:
    sampler = SetSampler(examples, device=generator.device)
    return sampler.sets_of(classes.to(generator.device), size, generator)


def _rows_of_others(
    test: Examples, train: Examples, classes: Int[Tensor, " sets"], size: int, generator: Generator
) -> Float[Tensor, "sets n dim"]:
    """Rows of other classes than those given: of test, or of train if test has a single class."""
    if (number := len(test.names)) > 1:
        step = torch.randint(1, number, classes.shape, generator=generator, device=generator.device)
        return _draw(test, (classes + step.cpu()) % number, size, generator)
    others = train.of_classes(i for i, name in enumerate(train.names) if name not in test.names)
    return _draw(others, torch.arange(len(classes)) % len(others.names), size, generator)


def _with_faults(
    model: Bruno,
    x: Float[Tensor, "sets n dim"],
    others: Float[Tensor, "sets n dim"],
    distance: RobustDistance,
    generator: Generator,
) -> _Planted:
    """Plant faults in a tenth of the rows of each set, at least three, with equal numbers of each kind."""

    def random(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device=x.device, dtype=x.dtype)

    sets, size, dim = x.shape
    order = random(sets, size).argsort(1).argsort(1)
    faults = max(len(FAULTS), round(_FAULTY_FRACTION * size))
    fault = torch.where(order < faults, 1 + order % len(FAULTS), 0)
    amount = _SPIKE[0] + (_SPIKE[1] - _SPIKE[0]) * random(sets, size, 1)
    sign = torch.where(random(sets, size, 1) < 0.5, -1.0, 1.0)
    varying = (distance.spread > _CONSTANT).nonzero().flatten().to(x.device)
    varying = varying if len(varying) else torch.arange(dim, device=x.device)
    column = varying[(len(varying) * random(sets, size)).long().clamp(max=len(varying) - 1)]
    chosen, kind = F.one_hot(column, dim).bool(), fault.unsqueeze(-1)
    y = model.normalised(x) + amount * sign * distance.spread.to(x)
    spiked = model.preprocessing.inverse(y.flatten(0, 1))[0].view_as(x)
    planted = torch.where((kind == 1) | ((kind == 2) & chosen), others, x)
    return _Planted(torch.where((kind == 3) & chosen, spiked, planted), fault.cpu())


def _limits(
    score: Float[Tensor, "sets n"], known: Examples, rate: float, of_others: bool
) -> Float[Tensor, " classes_or_one"]:
    """The estimated score that a fraction `rate` of clean rows exceeds: of all classes, or of all but one."""
    groups, position = len(known.names), score.shape[1] - 1
    by_group = -score.double().cpu().view(1, groups, -1)
    every, limits = torch.arange(groups), []
    for some in [every[every != group] for group in range(groups)] if of_others else [every]:
        elements = int(known.counts[some].sum())
        found = GroupScores.of(torch.tensor([position]), by_group[:, some], elements, unseen=False)
        limits.append(-found.threshold(position, rate))
    return torch.tensor(limits, dtype=torch.double)


def _rates(
    score: Float[Tensor, "sets n"], flagged: Bool[Tensor, "sets n"], fault: Int[Tensor, "sets n"]
) -> DetectionRates:
    share = flagged.double()
    return DetectionRates(
        share[fault == 0].mean().item(),
        {name: share[fault == kind].mean().item() for kind, name in enumerate(FAULTS, start=1)},
        roc_auc((fault > 0).flatten(), score.flatten()).item(),
    )


def _detection_error(
    model: Bool[Tensor, "sets n"],
    baseline: Bool[Tensor, "sets n"],
    faulty: Bool[Tensor, "sets n"],
    classes: Int[Tensor, " sets"],
) -> float | None:
    """The standard error of the fraction of faults that the model flags minus that of the baseline.

    It is the larger one of two: of a mean over n faults in C classes, √(C/(C − 1)·Σ_c (Σ_i (d_i − d̄))²)/n,
    and of two fractions of n faults each with the same expectation p, √(2p(1 − p)/n). The first may be zero
    by chance if faults are few.
    """
    owner = classes.unsqueeze(1).expand_as(faulty)[faulty].unique(return_inverse=True)[1]
    number = int(owner.max()) + 1
    if number < 2:
        return None
    ours, other = model[faulty].double(), baseline[faulty].double()
    difference = ours - other
    sums = torch.zeros(number, dtype=torch.double).index_add_(0, owner, difference - difference.mean())
    between = math.sqrt(number / (number - 1) * sums.square().sum().item()) / len(ours)
    p = torch.cat([ours, other]).mean().item()
    return max(between, math.sqrt(2 * p * (1 - p) / len(ours)))
