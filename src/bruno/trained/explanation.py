"""Explanations of the scores of elements by a trained model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bruno.model import Posterior
from bruno.tasks.explanation import Explanation, explain
from bruno.tasks.progress import Progress
from bruno.tasks.set_scores import Criterion
from bruno.tasks.stream_summary import StreamSummary
from bruno.trained.base import Source
from bruno.trained.calibration import CalibrationJobs


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
        known = self.read_set(given, name="given", invert=invert, skip_bad=skip_bad)
        x, names, _ = self.read(elements, invert=invert, skip_bad=skip_bad, impute=False, name="elements")
        kept = self.kept_calibration()
        return explain(
            self.model.condition(known.to(self.device)),
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
class OutlierExplainer:
    """Explains outliers, each given the evidence of its judgement.

    Attributes:
        columns: names of the columns.
        reference: log p(x) of a typical element, from the calibration.
        seed: seed of the orders and draws.
    """

    columns: Sequence[str]
    reference: float
    seed: int = 0

    def contributions(self, given: Posterior, x: Tensor) -> list[dict[str, float]]:
        """The contributions to the scores of elements (n, *shape), given a batch of n sets."""
        return self._explain(given, x).by_feature

    def explain(self, summary: StreamSummary) -> Explanation | None:
        """Explain the most unusual outliers of a summary; None if there are none."""
        known = [(one, one.given) for one in summary.most_unusual if one.given is not None]
        if not known:
            return None
        given, x = Posterior.stack([given for _, given in known]), torch.stack([one.x for one, _ in known])
        found = self._explain(given, x, [one.name for one, _ in known])
        return replace(found, outliers=summary.outliers)

    def _explain(self, given: Posterior, x: Tensor, names: Sequence[str] = ()) -> Explanation:
        x = x.to(given.model.device)
        return explain(given, x, reference=self.reference, features=self.columns, names=names, seed=self.seed)
