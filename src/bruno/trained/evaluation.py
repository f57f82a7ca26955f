"""Evaluation of a trained model on data: bits/dim, few-shot accuracy, and analyses of the process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bruno.arrays import NumpyResult
from bruno.checks import check_whole_numbers
from bruno.data import SetSampler
from bruno.data.sampling import seeded_generator
from bruno.tasks import Progress
from bruno.tasks.analysis import Inspection, inspect_model
from bruno.tasks.episodes import FewShotProtocol
from bruno.tasks.evaluation import BitsPerDim, default_sets_per_class, measure_bits_per_dim
from bruno.tasks.few_shot import FewShotComparison, compare_few_shot
from bruno.trained.data import Data, TrainedData, available_set_size

_SET_SIZE = 20  # elements in each set that is measured


@dataclass(frozen=True)
class Evaluation(NumpyResult):
    """Bits/dim, and the name of the data they were measured on."""

    data: str
    bits: BitsPerDim


@dataclass(frozen=True)
class FewShotEvaluation(NumpyResult):
    """Few-shot accuracy, and the name of the data it was measured on."""

    data: str
    comparison: FewShotComparison


class EvaluationJobs(TrainedData):
    """The evaluations of a trained model; see `Trained` for `split`, `data` and `invert`."""

    def evaluate(
        self,
        *,
        sets: int | None = None,
        set_size: int = _SET_SIZE,
        split: str | None = None,
        data: Data | None = None,
        classes: Sequence[str] | None = None,
        invert: bool | None = None,
        seed: int = 0,
        progress: Progress | None = None,
    ) -> Evaluation:
        """Bits/dim on sets of one class each, without rotations.

        Args:
            sets: number of random sets; by default every class is measured equally often.
            set_size: elements in a set; fewer if the smallest class has fewer.
            split: split of the data; test by default.
            data: a dataset or the path of user data, instead of the model's own data.
            classes: use only these classes.
            invert: turn dark ink into bright ink in user images; as in training by default.
            seed: seed of the sets and the noise.
            progress: called as progress(done, total).
        """
        selected = self._select(split, data, classes, invert)
        bits = measure_bits_per_dim(
            self.model,
            SetSampler(selected.examples, device=self.device),
            sets=sets,
            sets_per_class=default_sets_per_class(len(selected.examples.names)),
            set_size=available_set_size(selected.examples, set_size),
            generator=self._generator(seed),
            progress=progress,
        )
        return Evaluation(selected.name, bits)

    def few_shot(
        self,
        *,
        ways: Sequence[int] | None = None,
        shots: Sequence[int] = (1, 5),
        trials: int = 20,
        rotations: bool | None = None,
        rotated_decoys: bool = False,
        noise: bool = True,
        views: bool = False,
        threshold: float | None = None,
        split: str | None = None,
        data: Data | None = None,
        classes: Sequence[str] | None = None,
        invert: bool | None = None,
        seed: int = 0,
        progress: Progress | None = None,
    ) -> FewShotEvaluation:
        """n-shot k-way accuracy, compared with nearest neighbours on the same episodes.

        Args:
            ways: numbers k of classes; 5 and 20 by default, or all classes if there are fewer.
            shots: numbers n of support elements of each class.
            trials: number of trials; each of them queries every class once.
            rotations: treat each rotation of a class as a separate class; as in training by default.
            rotated_decoys: the other classes of an episode may be rotations of the query's class, as in the
                episodes of Prototypical Networks.
            noise: add fresh dequantisation noise, as the standard protocol does; otherwise, add ½.
            views: average the scores over the eight rotations and reflections of an episode's images, which
                must be square.
            threshold: use only latent dimensions whose correlation exceeds this.
            split: split of the data; test by default.
            data: a dataset or the path of user data, instead of the model's own data.
            classes: use only these classes.
            invert: turn dark ink into bright ink in user images; as in training by default.
            seed: seed of the episodes and the noise.
            progress: called as progress(done, total).
        """
        for name, numbers in (("ways", ways or ()), ("shots", shots)):
            check_whole_numbers(name, numbers)
        selected = self._select(split, data, classes, invert, min_classes=2)
        most = len(selected.examples.names)
        protocol = FewShotProtocol(
            ways=tuple(sorted({min(5, most), min(20, most)})) if ways is None else tuple(ways),
            shots=tuple(shots),
            trials=trials,
            rotations=self.rotations if rotations is None else rotations,
            rotated_decoys=rotated_decoys,
            noise=noise,
            views=views,
            threshold=threshold,
        )
        found = compare_few_shot(
            self.model,
            selected.examples,
            protocol,
            generator=seeded_generator(seed),
            progress=progress,
        )
        return FewShotEvaluation(selected.name, found)

    def inspect(
        self,
        *,
        sets: int = 200,
        split: str | None = None,
        data: Data | None = None,
        classes: Sequence[str] | None = None,
        invert: bool | None = None,
        seed: int = 0,
        progress: Progress | None = None,
    ) -> Inspection:
        """Correlations, degrees of freedom, and gain from conditioning at each position of random sets."""
        sampler = SetSampler(self._select(split, data, classes, invert).examples, device=self.device)
        return inspect_model(
            self.model,
            sampler,
            sets=sets,
            set_size=min(_SET_SIZE, sampler.min_count),
            generator=self._generator(seed),
            progress=progress,
        )
