"""Explanations of the scores of elements by a trained model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bruno.data import Element
from bruno.model import Bruno, Posterior
from bruno.process import Evidence
from bruno.tasks.anomaly import Judgement
from bruno.tasks.explanation import Explanation, explain
from bruno.tasks.progress import Progress
from bruno.tasks.set_scores import Criterion
from bruno.tasks.stream_summary import StreamSummary
from bruno.trained.base import Source
from bruno.trained.calibration import CalibrationJobs

_MAX_EXPLAINED = 20  # outliers of a batch; those with the lowest scores are explained


class ExplanationJobs(CalibrationJobs):
    """Which columns or patches make an element an outlier."""

    def explain(
        self,
        elements: Source,
        given: Source,
        *,
        criterion: Criterion = "score",
        permutations: int = 128,
        patch: int | None = None,
        invert: bool | None = None,
        skip_bad: bool = False,
        seed: int = 0,
        progress: Progress | None = None,
    ) -> Explanation:
        """Contributions of columns, or of patches of images, to the scores of elements given a set.

        Args:
            elements: files, folders, frames or arrays.
            given: the set, without these elements.
            criterion: "score" for log p(x | set) − log p(x), minus how far log p(x) is below that of a
                typical element if the model keeps a calibration; "density" for log p(x | set).
            permutations: number of random orders, even; more make the standard errors smaller.
            patch: height and width of a patch of an image; by default a seventh of the image.
            invert: turn dark ink into bright ink; as in training by default.
            skip_bad: skip files that cannot be read.
            seed: seed of the orders and draws.
            progress: called as progress(done, total), in elements.
        """
        known = self.read(given, invert=invert, skip_bad=skip_bad, name="given")
        x, names, _ = self.read(elements, invert=invert, skip_bad=skip_bad, impute=False, name="elements")
        kept = self.kept_calibration()
        return explain(
            self.model.condition(known.x.to(self.device)),
            x.to(self.device),
            criterion=criterion,
            reference=-math.inf if kept is None else kept.reference,
            features=self.columns,
            names=names,
            permutations=permutations,
            patch=patch,
            seed=seed,
            progress=progress,
        )


@dataclass(frozen=True, eq=False)
class StreamExplainer:
    """Explains the outliers of a stream, each given its set before it.

    Attributes:
        columns: names of the columns.
        reference: log p(x) of a typical element, from the detector.
        seed: seed of the orders and draws.
    """

    columns: Sequence[str]
    reference: float
    seed: int = 0

    def contributions(self, given: Posterior, x: Tensor) -> list[dict[str, float]]:
        """The contributions to the scores of elements (n, *shape), given a batch of n sets."""
        return self._explain(given, x).by_feature

    def most_unusual(self, summary: StreamSummary) -> Explanation | None:
        """Explain the most unusual elements of a summary; None if there are none."""
        elements = [one for one in summary.most_unusual if one.given is not None][:_MAX_EXPLAINED]
        if not elements:
            return None
        given = Posterior.stack([one.given for one in elements if one.given is not None])
        x = torch.stack([one.x for one in elements])
        return self._explain(given, x, [one.name for one in elements])

    def _explain(self, given: Posterior, x: Tensor, names: Sequence[str] = ()) -> Explanation:
        x = x.to(given.model.device)
        return explain(given, x, reference=self.reference, features=self.columns, names=names, seed=self.seed)


def explain_outliers(
    model: Bruno,
    elements: Sequence[Element],
    judged: Mapping[int, Judgement],
    sets: Sequence[Sequence[int]],
    columns: Sequence[str],
    *,
    reference: float,
    seed: int,
) -> Explanation | None:
    """Explain the outliers of sets, each given the elements of its set that are not flagged.

    At most 20 are explained, those with the lowest scores; None if there are none.
    """
    own = {i: members for members in sets for i in members}
    flagged = lowest_outliers(judged)
    if not flagged:
        return None
    given = {id(own[i]): _evidence(model, elements, judged, own[i]) for i in flagged}
    posterior = Posterior(model, Evidence.stack([given[id(own[i])] for i in flagged]))
    x = torch.stack([elements[i].x for i in flagged]).to(model.device)
    names = [elements[i].name for i in flagged]
    return explain(posterior, x, reference=reference, features=columns, names=names, seed=seed)


def lowest_outliers(judged: Mapping[int, Judgement]) -> list[int]:
    """Positions of the outliers that `explain_outliers` explains, in its order."""
    flagged = (i for i, one in judged.items() if one.outlier)
    return sorted(flagged, key=lambda i: judged[i].score)[:_MAX_EXPLAINED]


def _evidence(
    model: Bruno, elements: Sequence[Element], judged: Mapping[int, Judgement], members: Sequence[int]
) -> Evidence:
    inliers = [elements[i].x for i in members if not judged[i].outlier]
    if not inliers:
        return Evidence.empty(model.dim, device=model.device)
    return Evidence.of(model.latents(torch.stack(inliers).to(model.device)))
