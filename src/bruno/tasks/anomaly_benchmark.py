"""Benchmark of outlier detection against methods without a model of sets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Generator, Tensor

from bruno import limits
from bruno.arrays import NumpyResult
from bruno.checks import check_count, check_rate
from bruno.data import Examples
from bruno.data.sampling import SetSampler
from bruno.extras import imports_of
from bruno.model import Bruno
from bruno.tasks.anomaly import leave_one_out_from_latents, online_from_latents
from bruno.tasks.metrics import RESAMPLES, average_precision, bootstrap_weights, roc_auc
from bruno.tasks.progress import Progress

# Two of scikit-learn, the distance to the 5th nearest neighbour, and the Mahalanobis distance of a Gaussian.
BASELINES = ("IsolationForest", "LocalOutlierFactor", "k-NN distance", "Gaussian")

_NEAREST = 5  # the neighbour whose distance is the k-NN score; better than 1, 10 or half of the set
_OTHER_METHODS = "the other methods"  # what scikit-learn is needed for
_NEIGHBOURS = 10  # of LocalOutlierFactor; its default of 20 is as many as a small set has
_SETS_AT_A_TIME = 16  # that are scored, to limit memory


@dataclass(frozen=True)
class DetectionQuality(NumpyResult):
    """How well a score separates outliers from inliers; standard errors are from a bootstrap over sets.

    Attributes:
        area: area under the ROC curve of the pooled elements of all sets, as for one common threshold.
        area_error: its standard error.
        area_within: fraction of (outlier, inlier) pairs of one set in the right order.
        average_precision: average precision of the pooled elements of all sets.
        average_precision_error: its standard error.
    """

    area: float
    area_error: float
    area_within: float
    average_precision: float
    average_precision_error: float


@dataclass(frozen=True)
class DetectionComparison(NumpyResult):
    """All methods on the same sets, in which an element is of another class with probability `rate`.

    Attributes:
        rate: probability that an element is an outlier.
        sets: number of sets.
        set_size: elements in a set.
        elements: number of elements judged, in all sets.
        outliers: number of outliers among them.
        qualities: quality of each method.
    """

    rate: float
    sets: int
    set_size: int
    elements: int
    outliers: int
    qualities: dict[str, DetectionQuality]


@torch.no_grad()
def measure_anomaly(
    model: Bruno,
    examples: Examples,
    *,
    rates: Sequence[float] = (0.01, 0.05, 0.2),
    set_size: int,
    sets: int,
    generator: Generator,
    warm_up: int = 1,
    rotations: bool = False,
    baselines: Sequence[str] = BASELINES,
    progress: Progress | None = None,
) -> tuple[DetectionComparison, ...]:
    """Quality of outlier detection in sets of one class that contain elements of other classes.

    The online and the leave-one-out score are compared with methods fitted to the set they judge, on its
    pixels and on its latents. All judge the same elements, those after the first `warm_up`: the online score
    of the first is always 0.

    Scores of all sets are pooled, for two reasons: at a low rate, most sets have no outlier, so their area is
    undefined; and in practice, one threshold serves all sets. Pooling favours scores that are comparable
    between sets, such as ratios of densities, over distances; `area_within` does not.

    Args:
        model: a model, on the device to compute on.
        examples: classes of images or rows, preferably unseen in training.
        rates: probabilities that an element is an outlier.
        set_size: elements in a set.
        sets: number of sets for each rate.
        generator: source of the sets and the resamples; on the model's device.
        warm_up: elements at the beginning of a set that are not judged.
        rotations: every class counts four times; all elements of a set, outliers included, are rotated by the
            same angle.
        baselines: which of `BASELINES` to compare with; they do not change the sets. The first two take most
            of the time.
        progress: called as progress(done, total), in sets.
    """
    _check(model, examples, rates, set_size, sets, warm_up, baselines)
    sampler = SetSampler(examples, rotations=rotations, device=model.device)
    results = []
    for place, rate in enumerate(rates):
        x, outlier = sampler.contaminated(sets, set_size, rate, generator)
        judged = outlier.cpu()[:, warm_up:]
        weights = bootstrap_weights(sets, generator)
        seed = int(torch.randint(2**31 - 1, (1,), generator=generator, device=generator.device))
        parts, done = [], place * sets
        for some in x.split(_SETS_AT_A_TIME):
            parts.append(_outlier_scores(model, some, baselines, seed))
            done += len(some)
            if progress is not None:
                progress(done, len(rates) * sets)
        qualities = {
            method: _quality(torch.cat([part[method] for part in parts])[:, warm_up:], judged, weights)
            for method in parts[0]
        }
        results.append(
            DetectionComparison(rate, sets, set_size, judged.numel(), int(judged.sum()), qualities)
        )
    return tuple(results)


def _check(
    model: Bruno,
    examples: Examples,
    rates: Sequence[float],
    set_size: int,
    sets: int,
    warm_up: int,
    baselines: Sequence[str],
) -> None:
    for rate in rates:
        check_rate("rates", rate)
    if not 1 <= warm_up < set_size:
        raise ValueError(f"`warm_up` must be from 1 to {set_size - 1}, below `set_size`; got {warm_up}.")
    check_count("sets", sets, 2)  # to estimate a standard error
    limits.MEMORY.check_argument("sets", sets, 8 * RESAMPLES * sets)
    if examples.shape != model.shape:
        raise ValueError(
            f"`examples` must have the shape of the model's elements, {model.shape}; got {examples.shape}."
        )
    for name in baselines:
        if name not in BASELINES:
            raise ValueError(f"`baselines` must be among {', '.join(map(repr, BASELINES))}; got {name!r}.")


def _outlier_scores(
    model: Bruno, x: Tensor, baselines: Sequence[str], seed: int
) -> dict[str, Float[Tensor, "sets n"]]:
    """Scores of the elements of sets (sets, n, *shape) by method, higher for outliers."""
    z = model.encode(x).z
    found = {
        "BRUNO, online": -online_from_latents(model, z).cpu(),
        "BRUNO, leave one out": -leave_one_out_from_latents(model, z).cpu(),
    }
    spaces = {model.kind.features: model.normalised(x).flatten(2), "latents": z}
    for space, points in spaces.items():
        for method in baselines:
            found[f"{method}, {space}"] = _baseline(method, points.double().cpu(), seed)
    return found


def _baseline(method: str, points: Float[Tensor, "sets n dim"], seed: int) -> Float[Tensor, "sets n"]:
    """Scores of a method fitted to each set alone, higher for outliers."""
    last = points.shape[1] - 1
    if method == "k-NN distance":
        return torch.cdist(points, points).sort(-1).values[..., min(_NEAREST, last)]
    if method == "Gaussian":
        return torch.stack([_mahalanobis(s) for s in points])
    with imports_of("data", _OTHER_METHODS):
        from sklearn.ensemble import IsolationForest  # type: ignore[import-untyped]  # slow import
        from sklearn.neighbors import LocalOutlierFactor  # type: ignore[import-untyped]

    if method == "IsolationForest":
        judged = [IsolationForest(random_state=seed).fit(s).score_samples(s) for s in points.numpy()]
    else:
        local = LocalOutlierFactor(n_neighbors=min(_NEIGHBOURS, last))
        judged = [local.fit(s).negative_outlier_factor_ for s in points.numpy()]
    return -torch.from_numpy(np.stack(judged))


def _mahalanobis(points: Float[Tensor, "n dim"]) -> Float[Tensor, " n"]:
    """Squared Mahalanobis distances from the mean, with the shrunk covariance of Ledoit and Wolf.

    With centred points X = U·S·Vᵀ, shrinkage δ and mean variance m, the covariance is
    (1 − δ)·XᵀX/n + δ·m·I, and the distance of point i is Σ_k U_ik²·S_k²/((1 − δ)·S_k²/n + δ·m): the
    covariance of `dim` × `dim` numbers is never inverted.
    """
    with imports_of("data", _OTHER_METHODS):
        from sklearn.covariance import ledoit_wolf_shrinkage  # type: ignore[import-untyped]  # slow import

    x = points - points.mean(0)
    shrinkage = float(ledoit_wolf_shrinkage(x.numpy(), assume_centered=True))
    u, singular, _ = torch.linalg.svd(x, full_matrices=False)
    square = singular.square()
    variance = (1 - shrinkage) * square / len(x) + shrinkage * square.sum() / x.numel()
    distance: Tensor = u.square() @ (square / variance.clamp(min=torch.finfo(x.dtype).tiny))
    return distance


def _quality(
    score: Float[Tensor, "sets n"], outlier: Bool[Tensor, "sets n"], weights: Float[Tensor, "resamples sets"]
) -> DetectionQuality:
    """Quality of a score, with the weights of the sets in each resample; the first has all of them."""
    pairs = outlier.unsqueeze(2) & ~outlier.unsqueeze(1)
    gap = (score.unsqueeze(2) - score.unsqueeze(1))[pairs]
    if not len(gap):
        raise ValueError(
            f"`sets` must be so large that a set has both outliers and inliers; got {len(outlier)}, none of "
            "which has both."
        )
    weight = weights.repeat_interleave(outlier.shape[1], 1)
    area = roc_auc(outlier.flatten(), score.flatten(), weight)
    precision = average_precision(outlier.flatten(), score.flatten(), weight)
    valid = area[1:].isfinite()  # a resample may have no outlier
    return DetectionQuality(
        area[0].item(),
        area[1:][valid].std().item(),
        ((gap > 0).double() + (gap >= 0).double()).mean().item() / 2,
        precision[0].item(),
        precision[1:][valid].std().item(),
    )
