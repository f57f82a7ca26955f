"""How well outliers are found, beside methods that do without a model of sets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor
from torch.nn.functional import pad

from bruno.data import Examples
from bruno.data.sampling import SetSampler
from bruno.model import Bruno
from bruno.tasks import Progress
from bruno.tasks.anomaly import SETS_AT_A_TIME, leave_one_out_from_latents, online_from_latents

# scikit-learn's two, and the distance to the 5th nearest neighbour.
BASELINES = ("IsolationForest", "LocalOutlierFactor", "k-NN distance")

_RESAMPLES = 200  # of the sets, for a standard error
_NEAREST = 5  # whose distance is the k-NN score; measured better than 1, 10 and half of the set
_NEIGHBOURS = 10  # of LocalOutlierFactor, whose own default of 20 is all of a small set


@dataclass(frozen=True)
class Quality:
    """How well a score tells outliers from the rest; errors are standard errors, over resamples of the sets.

    Attributes:
        area: under the ROC, all elements of all sets together: one threshold for all, as an alarm has.
        area_error: of that.
        area_within: the share of (outlier, other) pairs of one set that are in the right order.
        average_precision: the mean precision over the outliers found, all sets together.
        average_precision_error: of that.
    """

    area: float
    area_error: float
    area_within: float
    average_precision: float
    average_precision_error: float


@dataclass(frozen=True)
class Contamination:
    """All methods on the same sets, each element of which had a chance of `rate` to be of another class.

    `outliers` of the `elements` that were judged were; `qualities` go by the method's name.
    """

    rate: float
    sets: int
    set_size: int
    elements: int
    outliers: int
    qualities: dict[str, Quality]


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
) -> tuple[Contamination, ...]:
    """How well outliers are found in sets of one class with elements of others among them.

    The online and the leave-one-out score stand beside methods fitted to the set they judge, on its pixels
    and on its latents. All judge the same elements, those from position `warm_up` on: the online score knows
    nothing of the first.

    Scores of all sets are pooled as they are: at few outliers most sets have none, and so no area of their
    own, and whoever raises an alarm has one threshold. That favours scores that mean the same in every set,
    as a ratio of densities does and a distance does not; `area_within` is free of it.

    Args:
        model: on the device where the work is to be done.
        examples: classes of images or rows, best such as the model has not been trained on.
        rates: of outliers.
        set_size: elements in a set.
        sets: how many there are for each rate.
        generator: of the sets and the resamples; on the model's device.
        warm_up: elements at the beginning of a set that are not judged.
        rotations: every class counts four times: all of a set, its outliers too, is rotated alike.
        baselines: those of `BASELINES` to stand beside the scores; the sets are the same without them. The
            first two take most of the time.
        progress: called as progress(done, total), in sets, all through the work.
    """
    _check(model, examples, rates, set_size, sets, warm_up, baselines)
    sampler = SetSampler(examples, rotations=rotations, device=model.process.mean.device)
    results = []
    for place, rate in enumerate(rates):
        x, outlier = sampler.contaminated(sets, set_size, rate, generator)
        judged = outlier.cpu()[:, warm_up:]
        picks = torch.randint(sets, (_RESAMPLES, sets), generator=generator, device=generator.device).cpu()
        seed = int(torch.randint(2**31 - 1, (1,), generator=generator, device=generator.device))
        parts, done = [], place * sets
        for some in x.split(SETS_AT_A_TIME):
            parts.append(_suspicions(model, some, baselines, seed))
            done += len(some)
            if progress is not None:
                progress(done, len(rates) * sets)
        qualities = {
            method: _quality(torch.cat([part[method] for part in parts])[:, warm_up:], judged, picks)
            for method in parts[0]
        }
        results.append(Contamination(rate, sets, set_size, judged.numel(), int(judged.sum()), qualities))
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
        if not 0 < rate < 1:
            raise ValueError(f"`rates` must be between 0 and 1, as 0.05 for one in twenty; got {rate}.")
    if not 1 <= warm_up < set_size:
        raise ValueError(f"`warm_up` must be from 1 to below the `set_size` of {set_size}; got {warm_up}.")
    if sets < 2:
        raise ValueError(f"`sets` must be at least 2, for an error to be told; got {sets}.")
    if examples.shape != model.shape:
        raise ValueError(
            f"`examples` must be of shape {model.shape}, as the model's elements; got {examples.shape}."
        )
    for name in baselines:
        if name not in BASELINES:
            raise ValueError(f"`baselines` must be among {', '.join(map(repr, BASELINES))}; got {name!r}.")


def _suspicions(
    model: Bruno, x: Tensor, baselines: Sequence[str], seed: int
) -> dict[str, Float[Tensor, "sets n"]]:
    """By method, a number for each element of sets (sets, n, *shape): the larger, the odder."""
    z = model.encode(x).z
    found = {
        "BRUNO, online": -online_from_latents(model, z).cpu(),
        "BRUNO, leave one out": -leave_one_out_from_latents(model, z).cpu(),
    }
    # Columns of a table are brought to one scale, which pixels have.
    values = x.float() / model.levels if model.levels else model.preprocessing(x.flatten(0, 1))[0]
    raw = "pixels" if model.levels else "columns"
    for space, points in {raw: values.reshape(*x.shape[:2], -1), "latents": z}.items():
        for method in baselines:
            found[f"{method}, {space}"] = _baseline(method, points.double().cpu(), seed)
    return found


def _baseline(method: str, points: Float[Tensor, "sets n dim"], seed: int) -> Float[Tensor, "sets n"]:
    """What does without a model of sets: fitted to one set, it judges that set's elements."""
    last = points.shape[1] - 1
    if method == "k-NN distance":
        return torch.cdist(points, points).sort(-1).values[..., min(_NEAREST, last)]
    from sklearn.ensemble import IsolationForest  # type: ignore[import-untyped]  # a second's import
    from sklearn.neighbors import LocalOutlierFactor  # type: ignore[import-untyped]

    if method == "IsolationForest":
        judged = [IsolationForest(random_state=seed).fit(s).score_samples(s) for s in points.numpy()]
    else:
        local = LocalOutlierFactor(n_neighbors=min(_NEIGHBOURS, last))
        judged = [local.fit(s).negative_outlier_factor_ for s in points.numpy()]
    return -torch.from_numpy(np.stack(judged))


def _quality(
    suspicion: Float[Tensor, "sets n"], outlier: Bool[Tensor, "sets n"], picks: Int[Tensor, "resamples sets"]
) -> Quality:
    """`picks` are the sets of each resample."""
    pairs = outlier.unsqueeze(2) & ~outlier.unsqueeze(1)
    gap = (suspicion.unsqueeze(2) - suspicion.unsqueeze(1))[pairs]
    if not len(gap):
        raise ValueError(
            f"`sets` must be so many that one has both outliers and others; none of {len(outlier)} has."
        )
    times = torch.stack([torch.bincount(pick, minlength=len(outlier)) for pick in picks])
    weight = torch.cat([torch.ones_like(times[:1]), times]).double().repeat_interleave(outlier.shape[1], 1)
    area, precision = area_and_precision(suspicion.flatten(), outlier.flatten(), weight)
    told = area.isfinite()  # a resample may happen to have no outlier
    return Quality(
        area[0].item(),
        area[1:][told[1:]].std().item(),
        ((gap > 0).double() + (gap >= 0).double()).mean().item() / 2,
        precision[0].item(),
        precision[1:][told[1:]].std().item(),
    )


class AreaAndPrecision(NamedTuple):
    """Of a ranking: the area under its ROC and its average precision."""

    area: Float[Tensor, "*batch"]
    precision: Float[Tensor, "*batch"]


def area_and_precision(
    suspicion: Float[Tensor, " n"], outlier: Bool[Tensor, " n"], weight: Float[Tensor, "*batch n"]
) -> AreaAndPrecision:
    """Area under the ROC and average precision, for many weightings of the elements at once.

    With TP_k outliers and FP_k others at or above the k-th of the distinct values, from the top::

        area = Σ (FP_k − FP_{k−1})·(TP_k + TP_{k−1})/2 / (TP·FP)
        precision = Σ (TP_k − TP_{k−1})·TP_k/(TP_k + FP_k) / TP
    """
    suspicion, order = suspicion.sort(descending=True)
    weight, outlier = weight[..., order], outlier[order]
    ends = torch.cat([suspicion[1:] != suspicion[:-1], outlier.new_ones(1)])
    hits = pad((weight * outlier).cumsum(-1)[..., ends], (1, 0))
    alarms = pad((weight * ~outlier).cumsum(-1)[..., ends], (1, 0))
    area = torch.trapezoid(hits, alarms) / (hits[..., -1] * alarms[..., -1])
    share = hits / (hits + alarms).clamp(min=1e-12)
    return AreaAndPrecision(area, (hits.diff() * share[..., 1:]).sum(-1) / hits[..., -1])
