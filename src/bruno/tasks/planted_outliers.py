"""Detection of outliers planted in sets of images, by the model and by distances between patches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor

from bruno.data import Examples
from bruno.data.sampling import SetSampler
from bruno.model import Bruno
from bruno.tasks.batch_criteria import BatchCriterion, SetScale, patch_scores
from bruno.tasks.metrics import area_gain, roc_auc
from bruno.tasks.robust_evidence import Cutoffs, batch_scores

OUTLIERS = ("image of another class", "patch of another class")
_SET_SIZE = 20  # at most
_MAX_SETS = 100
_SIDE = (0.15, 0.35)  # of a patch, as a fraction of that of the image
_TRIES = 4  # candidate places of a patch; the one where it changes the image most is used
_SETS_AT_A_TIME = 16


@dataclass(frozen=True)
class PlantedOutliers:
    """Areas under ROC on sets of images with one outlier of each kind.

    Attributes:
        sets: number of sets.
        set_size: images of a set.
        model: area of the standardised scores of the model, by the kind of outlier.
        baseline: area of the distances between patches of pixels.
        area_gain: area of the model minus that of the baseline, all kinds together.
        area_error: its standard error, from a bootstrap over classes; None for a single class.
        kind_errors: standard error of the gain of each kind, model − baseline, from the same bootstrap.
    """

    sets: int
    set_size: int
    model: dict[str, float]
    baseline: dict[str, float]
    area_gain: float
    area_error: float | None
    kind_errors: dict[str, float | None]

    @property
    def criterion(self) -> BatchCriterion:
        """The criterion that finds these outliers better."""
        return "patches" if self.area_gain < 0 else "score"


@torch.no_grad()
def measure_planted_outliers(
    model: Bruno, cutoffs: Cutoffs, examples: Examples, *, images: int, generator: Generator
) -> PlantedOutliers:
    """Plant an image, and a patch of an image, of another class in sets, and judge them as batches.

    Scores are pooled over sets, as for one threshold.

    Args:
        model: a model of images.
        cutoffs: score below which an image is excluded from the evidence; set on other data.
        examples: at least two classes.
        images: number of images to judge, at least one set of each of two classes.
        generator: source of sets and outliers.
    """
    size = min(_SET_SIZE, int(examples.counts.median()))
    examples = examples.with_at_least(size)
    if (number := len(examples.names)) < 2 or size < 2 * len(OUTLIERS):
        raise ValueError(
            f"`examples` must have at least two classes of {2 * len(OUTLIERS)} images; got {number} "
            f"of {size}."
        )
    sampler = SetSampler(examples, device=generator.device)
    sets = max(2, min(_MAX_SETS, images // size))
    classes = torch.randperm(number, generator=generator, device=generator.device)[:sets]
    classes = classes[torch.arange(sets, device=classes.device) % len(classes)]
    step = torch.randint(1, number, classes.shape, generator=generator, device=generator.device)
    x = sampler.sets_of(classes, size, generator).clone()
    others = sampler.sets_of((classes + step) % number, len(OUTLIERS), generator)
    x[:, 0] = others[:, 0]
    x[:, 1] = _with_patch(x[:, 1], others[:, 1], generator)
    kind = torch.zeros(sets, size, dtype=torch.long)
    kind[:, : len(OUTLIERS)] = torch.arange(1, len(OUTLIERS) + 1)
    scores = torch.cat(
        [
            batch_scores(model, model.latents(some.to(model.device)), cutoffs)[0].cpu()
            for some in x.split(_SETS_AT_A_TIME)
        ]
    )
    ours, other = -SetScale.of(scores).standardised(scores), -patch_scores(x).cpu()
    places = classes.cpu().unique(return_inverse=True)[1]
    gain, error = area_gain(kind > 0, ours, other, places, generator)
    errors = {}
    for own, name in enumerate(OUTLIERS):  # the outlier of this kind and the clean images of each set
        judged = [own, *range(len(OUTLIERS), size)]
        kinds, ours_of, other_of = (part[:, judged] for part in (kind, ours, other))
        errors[name] = area_gain(kinds > 0, ours_of, other_of, places, generator)[1]
    return PlantedOutliers(sets, size, _areas(ours, kind), _areas(other, kind), gain, error, errors)


def _with_patch(x: Tensor, others: Tensor, generator: Generator) -> Tensor:
    """Images (n, c, h, w), each with a patch of the other image at the same place."""
    pasted = x.clone()
    for image, other in zip(pasted, others, strict=True):
        change = (image.float() - other.float()).abs()
        boxes = [_box(x.shape[-2], x.shape[-1], generator) for _ in range(_TRIES)]
        rows, columns = max(boxes, key=lambda box: change[:, box[0], box[1]].mean().item())
        image[:, rows, columns] = other[:, rows, columns]
    return pasted


def _box(height: int, width: int, generator: Generator) -> tuple[slice, slice]:
    """Rows and columns of a random patch."""
    random = torch.rand(4, generator=generator, device=generator.device).tolist()
    sides = []
    for side, length, start in zip((height, width), random[:2], random[2:], strict=True):
        extent = max(1, round(side * (_SIDE[0] + (_SIDE[1] - _SIDE[0]) * length)))
        first = int(start * (side - extent + 1))
        sides.append(slice(first, first + extent))
    return sides[0], sides[1]


def _areas(score: Float[Tensor, "sets n"], kind: Int[Tensor, "sets n"]) -> dict[str, float]:
    """Area under ROC of each kind of outlier against the clean images."""
    areas = {}
    for place, name in enumerate(OUTLIERS, start=1):
        judged = (kind == 0) | (kind == place)
        areas[name] = roc_auc(kind[judged] > 0, score[judged].double()).item()
    return areas
